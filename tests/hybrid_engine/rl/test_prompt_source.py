"""Prompts of steps: the order of a list, the place in a stream, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.errors import ArgumentError, FileError
from hybrid_engine.rl.prompt_source import is_stream, source_of
from tests.harness.errors import has_violation, violated


class Stream:
    """A stream with a place. Like an IterableDataset, it begins each pass at the place that it
    loaded last.
    """

    def __init__(self, size: int, has_passes: bool = False) -> None:
        self._size = size
        self._start = 0
        self._position = 0
        self._epoch = 0
        if has_passes:
            self.set_epoch = self._set_epoch

    def _set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[str]:
        begin = self._start
        if not hasattr(self, "set_epoch"):
            # Like a StatefulDataLoader: only the next pass begins at the place.
            self._start = 0
        for position in range(begin + 1, self._size + 1):
            self._position = position
            yield f"{self._epoch}/{position}"

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position, "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._start = state["position"]
        self._epoch = state["epoch"]


@pytest.mark.parametrize("has_passes", [False, True])
def test_a_stream_goes_on_from_each_saved_place(tmp_path: Path, has_passes: bool) -> None:
    source = source_of(Stream(5, has_passes), 3, seed=0)
    taken = {}
    for number in range(1, 7):
        _, taken[number] = source.take(number)
        directory = tmp_path / str(number)
        directory.mkdir()
        source.save(directory, number)
    epochs = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3] if has_passes else [0] * 18
    in_order = [f"{epoch}/{index % 5 + 1}" for index, epoch in enumerate(epochs)]
    assert [prompt for part in taken.values() for prompt in part] == in_order
    for number in range(1, 6):
        resumed = source_of(Stream(5, has_passes), 3, seed=0)
        resumed.load(tmp_path / str(number), number)
        for later in range(number + 1, 7):
            assert resumed.take(later)[1] == taken[later]


def test_the_place_of_a_step_is_saved_after_later_steps_were_taken(tmp_path: Path) -> None:
    source = source_of(Stream(9), 2, seed=0, max_staleness=1)
    for number in (1, 2, 3):
        source.take(number)
    source.save(tmp_path, 1)
    resumed = source_of(Stream(9), 2, seed=0)
    resumed.load(tmp_path, 1)
    resumed.save(tmp_path, 1)  # a run that stops at once
    assert resumed.take(2)[1] == ["0/3", "0/4"]


def test_an_empty_stream_is_refused() -> None:
    with violated(ArgumentError, ("prompts", "no-prompts")):
        source_of(Stream(0), 1, seed=0).take(1)


def test_errors_of_a_stream_name_the_prompts() -> None:
    class Broken(Stream):
        def __iter__(self) -> Iterator[str]:
            raise ConnectionError("no network")

    with pytest.raises(
        ArgumentError, check=has_violation("prompts", "stream-failed", "no network")
    ):
        source_of(Broken(3), 1, seed=0).take(1)


@pytest.mark.parametrize("max_staleness", [0, 3, 200])
def test_places_are_kept_while_their_step_may_be_saved(tmp_path: Path, max_staleness: int) -> None:
    """If step n fails, step n - 1 is saved, and those up to n + max_staleness have been taken."""
    source = source_of(Stream(3), 1, seed=0, max_staleness=max_staleness)
    for number in range(1, 401):
        source.take(number)
    source.save(tmp_path, 400 - max_staleness - 1)
    with pytest.raises(KeyError):
        source.save(tmp_path, 400 - max_staleness - 2)


def test_a_place_that_cannot_be_read_again_is_refused_in_the_first_step() -> None:
    class Opaque(Stream):
        def state_dict(self) -> Any:
            return {"position": Stream(1)}

    with violated(ArgumentError, ("prompts", "unsavable-place")):
        source_of(Opaque(3), 1, seed=0).take(1)


@pytest.mark.parametrize(
    "content", [b"", b"text", None, {"pass": 1}, {"pass": 0, "state": {"offset": 7}}]
)
def test_a_damaged_place_is_named(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "prompts.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises((FileError, ArgumentError)) as caught:
        source_of(Stream(3), 1, seed=0).load(tmp_path, 1)
    assert str(path) in str(caught.value)


def test_each_pass_over_a_list_has_another_order() -> None:
    source = source_of("abcde", 2, seed=0)
    taken = [source.take(step) for step in range(1, 11)]
    assert all(
        "abcde"[index] == prompt for step in taken for index, prompt in zip(*step, strict=True)
    )
    drawn = "".join(prompt for _, prompts in taken for prompt in prompts)
    passes = {drawn[start : start + 5] for start in range(0, 20, 5)}
    assert {"".join(sorted(prompts)) for prompts in passes} == {"abcde"}
    assert len(passes) > 1
    assert source_of("abcde", 2, seed=0).take(7) == taken[6]


def test_a_prompt_function_must_return_one_step_of_prompts() -> None:
    source = source_of(lambda step: [step] * min(step, 2), 2, seed=0)
    assert source.take(7) == (range(2), [7, 7])
    with pytest.raises(
        ArgumentError, check=has_violation("prompts", "wrong-length", "1 for step 1", "Return 2")
    ):
        source.take(1)


def test_only_objects_with_a_place_are_streams() -> None:
    assert is_stream(Stream(1))
    assert not is_stream([1])
    assert not is_stream(torch.nn.Linear(1, 1)), "it cannot be iterated"

"""The directory of a checkpoint on one rank: kills at every step, damage, and foreign files.

The tests of both trainers have several ranks.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import ConfigError, FileError, StateError
from hybrid_engine.files.checksums import CHECKSUMS, checksum_of, read_checksums, write_checksums
from hybrid_engine.trainer import checkpoint_directory
from hybrid_engine.trainer.canonical_state import boxes_between
from hybrid_engine.trainer.checkpoint_directory import LATEST, METADATA, SavedCheckpoint
from tests.harness.errors import refused, violated
from tests.harness.kills import accepted_flips, kill_at_every_step
from tests.harness.small_disks import file_size_limit

AGREEMENT = SimpleNamespace(
    phase=lambda name: nullcontext(), gather=lambda value, kind, phase, limit=0: [value]
)
ALONE: Any = SimpleNamespace(rank=0, world_size=1, agreement=AGREEMENT)
DATA = "__0_0.distcp"


def save(directory: Any, value: Any = 1) -> None:
    checkpoint_directory.save(directory, {"tensor": torch.full((300,), 7.0), "value": value}, ALONE)


def load(directory: Path) -> Any:
    saved = SavedCheckpoint(directory, ALONE)
    state = saved.read_all("")
    assert state["tensor"].tolist() == [7.0] * 300
    return state["value"]


def newest(directory: Path) -> Path:
    return directory / (directory / LATEST).read_text().strip()


def read_contents(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")
    }


def test_loaded_values_and_tensors_are_bit_identical(tmp_path: Path) -> None:
    tensors = {
        "bfloat16": torch.randn(3, 2).bfloat16(),
        "part": torch.arange(10.0)[3:5],
        "number": torch.tensor(5, dtype=torch.int64),
        "nothing": torch.zeros(0),
        "state": torch.get_rng_state(),
    }
    value = {
        "betas": (0.9, 0.95),
        "groups": [{"lr": 0.1, "step": 3}],
        "scaler": {"scale": torch.ones(1)},
        "none": None,
    }
    checkpoint_directory.save(tmp_path, {**tensors, "value": value}, ALONE)
    saved = SavedCheckpoint(tmp_path, ALONE)
    assert saved.value("value") == value
    loaded = saved.read_all("")
    for name, tensor in tensors.items():
        assert torch.equal(tensor, loaded[name])
        assert tensor.dtype == loaded[name].dtype


def test_a_killed_save_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    """Kill before every call that changes a file, then load, and save again."""
    directory = tmp_path / "saved"
    values = []

    def prepare() -> None:
        save(directory, "old")
        # Also removes the files that the previous kill left.
        assert [path.name for path in directory.glob("save-*")] == [newest(directory).name]

    for _ in kill_at_every_step(lambda: save(directory, "new"), prepare):
        values.append(load(directory))
    assert values == ["old"] * values.count("old") + ["new"] * values.count("new")
    assert [values[0], values[-1]] == ["old", "new"]


def test_a_killed_first_save_leaves_nothing_to_load(tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    for _ in kill_at_every_step(
        lambda: save(directory), lambda: shutil.rmtree(directory, ignore_errors=True)
    ):
        if (directory / LATEST).exists():
            assert load(directory) == 1
        else:
            with refused(StateError, "no-checkpoint"):
                load(directory)


def test_a_failed_save_leaves_only_the_old_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "saved", "old")
    before = read_contents(tmp_path)
    # The data has 1,200 bytes.
    with file_size_limit(500), refused(FileError, "file-failed", "too large"):
        save(tmp_path / "saved", "new")
    assert read_contents(tmp_path) == before


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def link_to_a_copy(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    replace(path, lambda path: path.symlink_to("copy"))


def omit_data(directory: Path) -> None:
    write_checksums(directory, {METADATA: checksum_of(directory / METADATA)})


# name -> (file that the error names, damage to it)
DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{
        f"{kind} {name}": (name, damage)
        for name in (DATA, METADATA, CHECKSUMS)
        for kind, damage in {"cut": lambda path: os.truncate(path, 9), "no": Path.unlink}.items()
    },
    "a link": (DATA, link_to_a_copy),
    "a pipe": (DATA, lambda path: replace(path, os.mkfifo)),
    "a device": (METADATA, lambda path: replace(path, lambda path: path.symlink_to("/dev/zero"))),
    "a directory": (DATA, lambda path: replace(path, Path.mkdir)),
    "a list of nothing": (CHECKSUMS, lambda path: path.write_text("{}")),
    "a list without the data": (CHECKSUMS, lambda path: omit_data(path.parent)),
    "a list of files elsewhere": (CHECKSUMS, lambda path: path.write_text('{"../x": "0"}')),
    "no list": (CHECKSUMS, lambda path: path.write_text("[" * 100_000)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused_by_name(tmp_path: Path, name: str) -> None:
    file, damage = DAMAGE[name]
    save(tmp_path)
    damage(newest(tmp_path) / file)
    with pytest.raises(FileError) as caught:
        SavedCheckpoint(tmp_path, ALONE)
    assert str(newest(tmp_path) / file) in str(caught.value)
    assert "Resume from an older checkpoint" in str(caught.value) or "no such file" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    paths = [tmp_path / LATEST, *newest(tmp_path).iterdir()]
    assert accepted_flips(paths, lambda: SavedCheckpoint(tmp_path, ALONE), every=71) == []


@pytest.mark.parametrize("place", ["../elsewhere", METADATA])
def test_entries_outside_of_the_files_are_refused(tmp_path: Path, place: str) -> None:
    save(tmp_path)
    path = newest(tmp_path) / METADATA
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = place
    path.write_bytes(pickle.dumps(metadata))
    write_checksums(path.parent, read_checksums(path.parent, "") | {METADATA: checksum_of(path)})
    with refused(FileError, "file-failed", METADATA, "ValueError"):
        SavedCheckpoint(tmp_path, ALONE)


class Code:
    def __reduce__(self) -> Any:  # pickle then calls `os.mkdir`
        return os.mkdir, ("was run",)


@pytest.mark.parametrize("place", ["metadata", "value"])
def test_no_code_of_a_checkpoint_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Checksums are correct, but they do not protect against an attacker."""
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "saved", Code() if place == "value" else 1)
    if place == "metadata":
        new = newest(tmp_path / "saved")
        (new / METADATA).write_bytes(pickle.dumps(Code()))
        write_checksums(new, read_checksums(new, "") | {METADATA: checksum_of(new / METADATA)})
    with refused(FileError, "file-failed", "UnpicklingError"):
        load(tmp_path / "saved")
    assert not Path("was run").exists()


@pytest.mark.parametrize("text", ["save-000009\n", "../elsewhere", "", "global_step10"])
def test_an_invalid_pointer_is_refused(tmp_path: Path, text: str) -> None:
    save(tmp_path)
    (tmp_path / LATEST).write_text(text)
    with refused(FileError, "damaged-checkpoint", LATEST):
        load(tmp_path)


def test_foreign_files_stay(tmp_path: Path) -> None:
    """A `latest` of another program is refused before any write."""
    (tmp_path / LATEST).write_text("global_step10")
    with violated(ConfigError, ("directory", "not-a-checkpoint")):
        save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LATEST]
    (tmp_path / LATEST).unlink()
    (tmp_path / "save-000007").symlink_to(tmp_path.parent)  # must not be followed or removed
    (tmp_path / "rank0000.pt").write_text("of another version")
    for value in (1, 2):
        save(tmp_path, value)
        assert load(tmp_path) == value
    assert {path.name for path in tmp_path.iterdir()} == {
        LATEST,
        "save-000002",
        "save-000007",
        "rank0000.pt",
    }


def test_a_linked_or_relative_directory_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path / "disk")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/link", ".", tmp_path / "link"):
        save(path)
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "disk") == 1


@pytest.mark.parametrize("path", [None, 5, b"saved", "", "a\0b", "~nobody-of-that-name/saved"])
def test_an_invalid_path_is_refused(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for act in (save, load):
        with violated(ConfigError, ("directory", "not-a-path")):
            act(path)
    assert list(tmp_path.iterdir()) == []


def test_generators_of_host_and_device_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.Generator()
    for name, function in (("get", device.get_state), ("set", device.set_state)):
        monkeypatch.setattr(f"torch.cuda.{name}_rng_state", function)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    states = checkpoint_directory.generator_states()
    expected = torch.rand(2), torch.rand(2, generator=device)
    checkpoint_directory.restore_generators(states)
    assert all(map(torch.equal, expected, (torch.rand(2), torch.rand(2, generator=device))))


# -- boxes of canonical tensors in flat parts of parameters
# -----------------------------------------


@given(st.data())
def test_boxes_of_a_flat_part_are_its_elements(data: st.DataObject) -> None:
    """Few boxes, apart from each other, of a box in a dense tensor with its dims in any order."""
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    numel = math.prod(shape)
    strides = [1] * len(shape)
    step = 1
    for dim in data.draw(st.permutations(range(len(shape)))):
        strides[dim] = step
        step *= shape[dim]
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    lengths = tuple(
        data.draw(st.integers(1, size - offset))
        for size, offset in zip(shape, offsets, strict=True)
    )
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, numel)] * 2)))

    def elements(lengths: tuple[int, ...], first: int) -> dict[tuple[int, ...], int]:
        return {
            index: first + sum(map(math.prod, zip(index, strides, strict=True)))
            for index in itertools.product(*map(range, lengths))
        }

    first = sum(map(math.prod, zip(offsets, strides, strict=True)))
    inside = {
        index: place for index, place in elements(lengths, first).items() if start <= place < stop
    }
    boxes = list(boxes_between(lengths, tuple(strides), first, start, stop))
    assert len(boxes) <= max(1, 2 * len(shape))
    cut = [
        (tuple(map(sum, zip(index, offset, strict=True))), place)
        for offset, size, box_first in boxes
        for index, place in elements(size, box_first).items()
    ]
    assert dict(cut) == inside
    assert len(cut) == len(inside)

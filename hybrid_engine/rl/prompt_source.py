"""Prompts of each step: from a list, a function of the step, or a stream with a place.

A list is shuffled anew in each pass. A stream is an object that is iterated and has `state_dict`
and `load_state_dict`, such as an IterableDataset of datasets or a StatefulDataLoader of torchdata
without batches. Its place is a file of each checkpoint:

    OUT/checkpoints/step-000050/prompts.pt
"""

from __future__ import annotations

import functools
import io
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch

from hybrid_engine.errors import ArgumentError, ConfigError, clipped, shortened
from hybrid_engine.files.durable import naming, write_bytes
from hybrid_engine.files.reading import read_regular
from hybrid_engine.rl.user_callbacks import naming_failure

_FILE = "prompts.pt"
_MAX_PLACE_NBYTES = 1 << 28

StepPrompts = tuple[Sequence[int], list[Any]]
"""Numbers that name the prompts of a step in messages, and the prompts."""


@dataclass(frozen=True)
class PromptSource:
    """Prompts of each step that follow from its number; the same on all ranks.

    Attributes:
        take: returns the prompts of a step, and the numbers that name them in messages. Raises
            ArgumentError if the caller's prompts fail.
    """

    take: Callable[[int], StepPrompts]

    def save(self, directory: Path, step: int) -> None:
        """Write nothing: there is no place."""

    def load(self, directory: Path, step: int) -> None:
        """Read nothing."""


def _of_list(prompts: Sequence[Any], count: int, seed: int, number: int) -> StepPrompts:
    """Return the prompts of a step and their indices in a list, in another order in each pass.

    A step may span two passes.
    """
    # Positions in the sequence of all passes.
    # Step 3 of 4 prompts each has positions 8 to 11: of a list of 10 the last two, then the first
    # two of the next pass.
    positions = range((number - 1) * count, number * count)
    places = [divmod(position, len(prompts)) for position in positions]
    indices = [_order(seed, len(prompts), epoch)[offset] for epoch, offset in places]
    return indices, [prompts[index] for index in indices]


def _of_function(function: Callable[[int], Sequence[Any]], count: int, number: int) -> StepPrompts:
    """Return the prompts of a step. Raises ArgumentError for another number of prompts."""
    prompts = list(function(number))
    if len(prompts) != count:
        raise ArgumentError.of(
            "prompts",
            f"{len(prompts)} for step {number}",
            f"Return {count}, which is prompts_per_step",
            code="wrong-length",
        )
    return range(count), prompts


class StreamedPrompts:
    """A stream, read again from its beginning when it ends. Steps are taken in ascending order.

    A stream with `set_epoch` gets the number of each pass, from 0, and its first place: an
    IterableDataset that has loaded a place begins each later pass there, too.
    """

    def __init__(self, stream: Any, count: int, max_staleness: int) -> None:
        self._stream = stream
        self._count = count
        # A step is saved before more than this many later ones are taken.
        self._most_later = max_staleness + 1
        self._pass = 0
        self._has_passes = hasattr(stream, "set_epoch")
        self._beginning = stream.state_dict() if self._has_passes else None
        self._iterator = self._elements()
        # Step -> place after it. Prompts of later steps may be taken before a step is saved.
        self._places: dict[int, bytes] = {}

    def take(self, number: int) -> StepPrompts:
        """Return the next prompts of the stream.

        Raises ArgumentError if the stream is empty, or if its place cannot be saved.
        """
        try:
            prompts = list(itertools.islice(self._iterator, self._count))
        except Exception as error:  # of the stream, which may read a network
            raise ArgumentError.of(
                "prompts",
                f"the stream failed: {type(error).__name__}: {clipped(str(error))}",
                "Resume the run when it can be read",
                code="stream-failed",
            ) from error
        if len(prompts) < self._count:
            raise ArgumentError.of(
                "prompts",
                "the stream has no prompts",
                "Pass a stream of prompts",
                code="no-prompts",
            )
        self._places[number] = self._place()
        # With `max_staleness` 0 taking step 5 forgets the place of
        # step 3: step 4 may still be saved.
        self._places.pop(number - self._most_later - 1, None)
        return range(self._count), prompts

    def save(self, directory: Path, step: int) -> None:
        """Write the place after a step. Raises FileError."""
        write_bytes(directory / _FILE, self._places[step])

    def load(self, directory: Path, step: int) -> None:
        """Go on from the place in the checkpoint of a step.

        Raises FileError, or ArgumentError if the file has no place that the stream takes.
        """
        path = directory / _FILE
        remedy = "Resume from the checkpoint before it, or begin a new run"
        with naming("reading the place in the prompts from", path, remedy):
            content = read_regular(path, _MAX_PLACE_NBYTES)
        self._places[step] = content
        # The stream may be another one, whose places have other keys.
        with naming_failure("prompts", f"the place in {path}", Exception):
            place = _decoded(content)
            self._pass = int(place["pass"])
            self._stream.load_state_dict(place["state"])
            self._iterator = self._elements()

    def _elements(self) -> Iterator[Any]:
        """Yield the elements from the present place on, pass by pass; end after an empty pass."""
        num_empty = 0
        # The present place may be the end of its pass.
        while num_empty < 2:
            if self._has_passes:
                # After the place, which can have the number of another pass.
                self._stream.set_epoch(self._pass)
            num_empty += 1
            for element in self._stream:
                num_empty = 0
                yield element
            self._pass += 1
            if self._beginning is not None:
                self._stream.load_state_dict(self._beginning)

    def _place(self) -> bytes:
        """Return the place as bytes. Raises ArgumentError if it could not be read again."""
        buffer = io.BytesIO()
        try:
            torch.save({"pass": self._pass, "state": self._stream.state_dict()}, buffer)
            if not self._places:
                # Fail in the first step, not when the run is resumed.
                _decoded(buffer.getvalue())
        except Exception as error:  # of pickle, of torch or of the stream's objects
            raise ArgumentError.of(
                "prompts",
                f"the stream's state_dict cannot be saved: {clipped(str(error))}",
                "Let it return numbers, texts, lists, mappings and tensors",
                code="unsavable-place",
            ) from error
        return buffer.getvalue()


def is_stream(prompts: Any) -> bool:
    """Return whether prompts are a stream that has a place."""
    names = ("__iter__", "state_dict", "load_state_dict")
    return all(hasattr(prompts, name) for name in names)


def are_listed(prompts: Any) -> TypeGuard[Sequence[Any]]:
    """Return whether prompts are all there, not drawn step by step from a function or a stream."""
    return not callable(prompts) and not is_stream(prompts)


def listed(prompts: Any) -> list[Any]:
    """Return prompts as a list. Raises ConfigError for texts, mappings and tables of columns."""
    is_table = hasattr(prompts, "columns") and hasattr(prompts, "iloc")
    if not is_table and not isinstance(prompts, str | bytes | Mapping):
        with suppress(TypeError):
            return list(prompts)
    raise ConfigError.of(
        "prompts",
        f"got {type(prompts).__name__}: {shortened(prompts)}",
        'Pass a list of prompts, a split such as dataset["train"], or a function of the step',
        code="not-a-list",
    )


def source_of(
    prompts: Any,
    count: int,
    seed: int,
    max_staleness: int = 0,
) -> PromptSource | StreamedPrompts:
    """Return the source of prompts: a list, a function of the step, or a stream.

    `max_staleness`: steps whose prompts are taken before a step ends.
    """
    if is_stream(prompts):
        return StreamedPrompts(prompts, count, max_staleness)
    if callable(prompts):
        return PromptSource(partial(_of_function, prompts, count))
    return PromptSource(partial(_of_list, prompts, count, seed))


def _decoded(content: bytes) -> Any:
    # No pickled objects: files are untrusted.
    return torch.load(io.BytesIO(content), weights_only=True)


@functools.lru_cache(maxsize=2)  # a step may begin in one pass and end in the next
def _order(seed: int, size: int, epoch: int) -> list[int]:
    """Return the order of the prompts in a pass over all of them."""
    order = list(range(size))
    random.Random(f"{seed}/{epoch}/prompts").shuffle(order)
    return order

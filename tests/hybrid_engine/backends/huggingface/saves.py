"""Small checkpoints, saved as `hf_checkpoint` does it."""

from __future__ import annotations

from pathlib import Path

import torch

from hybrid_engine.backends.huggingface import publishing
from hybrid_engine.records.layout import BufferId, Place
from hybrid_engine.records.regions import contiguous_strides

WANTED = {"a": ((3,), "bfloat16"), "b": ((2, 3), "float32"), "c": ((), "float32"), "d": ((5,), "uint8")}
ONE_FILE, SEVERAL_FILES = 10**9, 30


def place(shape: tuple[int, ...], offset: int = 0) -> Place:
    return Place(BufferId(0, "file"), offset, contiguous_strides(shape))


def begun(directory: Path, file_nbytes: int = ONE_FILE, value: float = 1) -> publishing.Publication:
    """A save of WANTED that is filled with `value` and sealed, and not published."""
    stored = publishing.plan_files(WANTED, file_nbytes)
    publication = publishing.Publication(directory, stored)
    publication.abandon()
    publication.begin()
    with publishing.BoxWriter(directory) as writer:
        for tensor in stored.values():
            writer.write(tensor, place(tensor.shape), torch.full(tensor.shape, value))
        writer.flush()
    for file in publishing.by_file(stored):
        publishing.seal(directory / (file + publishing.SUFFIX))
    return publication


def save(directory: Path, file_nbytes: int = ONE_FILE, value: float = 1) -> None:
    begun(directory, file_nbytes, value).publish()

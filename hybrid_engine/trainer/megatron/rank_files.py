"""The files of a checkpoint, one per rank: rank0000.pt, rank0001.pt, ... (see trainer/checkpoint_directory.py).

A checksum is computed while a file is written. Reading computes it in a pass before the load, which then finds the file
in the page cache if it fits there.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from hybrid_engine.errors import StateError
from hybrid_engine.files.durable import naming
from hybrid_engine.trainer.checkpoint_directory import REMEDY, Contents, require_as_written


def file_name(rank: int) -> str:
    return f"rank{rank:04d}.pt"


def write_rank_file(path: Path, state: Any) -> Contents:
    """Save `state`, which is on the disk when this returns. Raises FileError."""
    with naming("writing the checkpoint", path), path.open("wb") as file:
        counting = _CountingFile(file)
        torch.save(state, cast(BinaryIO, counting))
        file.flush()
        os.fsync(file.fileno())
    return Contents(counting.nbytes, f"{counting.crc32:08x}")


class _CountingFile:
    """What torch.save needs of a file; computes the checksum on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.nbytes = self.crc32 = 0

    def write(self, data: memoryview | bytes) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.nbytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def read_rank_file(directory: Path, rank: int) -> Any:
    """What `write_rank_file` was given, on the CPU, mapped from the file; only tensors and plain Python are loaded.

    Raises:
        StateError: if there is no such file.
        FileError: naming the file, if it is not what was written.
    """
    path = directory / file_name(rank)
    if not path.exists():
        raise StateError(f"no checkpoint of rank {rank}: {path} does not exist")
    require_as_written(path)
    with naming("reading the checkpoint", path, REMEDY):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)

"""Safetensors files: which tensor lies where in which file, slices out of them, and whether they are what was saved.

Format: 8 bytes little-endian length of the header, the header as JSON (per tensor: dtype, shape, byte offsets from the
end of the header), then the data without gaps. Source: github.com/huggingface/safetensors, "Format". It has no
checksum; ours is an entry of the header's metadata, so that a file and its checksum are replaced in one step.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hybrid_engine.errors import ConfigError, FileError, Violation
from hybrid_engine.files.durable import crc32_of, naming
from hybrid_engine.files.model_files import DOWNLOAD_AGAIN, weight_files
from hybrid_engine.records.layout import DTYPE_NBYTES

CHECKSUM = "hybrid_engine.crc32"
"""Entry of a file's metadata: CRC-32 of the whole file, in hex, taken while these digits were NO_CHECKSUM.

CRC-32 detects flipped bits and torn writes, at 1.9 GB/s on one core (sha256: 0.8)."""

NO_CHECKSUM = b"00000000"

MAX_HEADER_NBYTES = 100_000_000
"""The limit of safetensors, which keeps a damaged length from being allocated."""

DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: name of the file in the checkpoint's directory.
        shape: elements per dim.
        dtype: torch's name without the prefix.
        start: first byte of the data, from the beginning of the file.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


def stored_tensors(directory: Path, key: str = "path") -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, from the index and the headers alone; no weights are read.

    Raises, under `key`:
        ConfigError: without safetensors files, for an index that is invalid or names missing files, and for a tensor
            that is in two files.
        FileError: for a file whose length is not what its header says, or whose header is damaged.
    """
    stored: dict[str, StoredTensor] = {}
    for file in weight_files(directory, key):
        found = stored_in(directory / file, key)
        if twice := sorted(stored.keys() & found.keys()):
            problem = f"{directory} has {twice[0]} in both {stored[twice[0]].file} and {file}"
            raise ConfigError([Violation(key, problem, "Download the checkpoint again")])
        stored |= found
    return stored


def stored_in(path: Path, key: str = "path") -> dict[str, StoredTensor]:
    """The tensors of one file, checked against its length. Raises ConfigError, FileError."""
    with naming("reading", path, DOWNLOAD_AGAIN):
        with path.open("rb") as file:
            encoded, nbytes = read_header(file), os.fstat(file.fileno()).st_size
        entries = _entries(json.loads(encoded))
        if strange := {entry.dtype for entry in entries} - _DTYPES.keys():
            problem = f"{path} has unsupported dtypes {sorted(strange)}"
            raise ConfigError([Violation(key, problem, f"Use one of {list(_DTYPES)}")])
        return _without_gaps(path.name, entries, 8 + len(encoded), nbytes)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor in a header; `start` and `stop` count from the header's end."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def _entries(header: object) -> list[_Entry]:
    """The tensors of a header in the order of their data. Raises ValueError for a malformed header."""
    entries = []
    for name, values in _mapping(header).items():
        if name == "__metadata__":
            continue
        match values:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]}:
                entries.append(_Entry(name, dtype, tuple(shape), start, stop))
            case _:
                raise ValueError(f"{name} has no dtype, shape or offsets")
        if any(type(value) is not int or value < 0 for value in (*shape, start, stop)):
            raise ValueError(f"{name} has invalid shape {shape} or offsets {[start, stop]}")
    return sorted(entries, key=lambda entry: (entry.start, entry.stop))


def _without_gaps(file: str, entries: Iterable[_Entry], start: int, nbytes: int) -> dict[str, StoredTensor]:
    """Raises ValueError unless the tensors fill the file to its end; the data begins at `start`."""
    stored, position = {}, start
    for entry in entries:
        stored[entry.name] = tensor = StoredTensor(file, entry.shape, _DTYPES[entry.dtype], position)
        if (start + entry.start, start + entry.stop) != (position, position + tensor.nbytes):
            expected = [position - start, position - start + tensor.nbytes]
            raise ValueError(f"{entry.name} is at {[entry.start, entry.stop]}, expected at {expected}")
        position += tensor.nbytes
    if position != nbytes:
        raise ValueError(f"{nbytes:,} bytes, expected {position:,} by its header")
    return stored


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"the header is a {type(value).__name__}, not a mapping")
    return value


def read_header(file: BinaryIO) -> bytes:
    """The header of a file opened at its beginning. Raises ValueError for an implausible length, EOFError."""
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MAX_HEADER_NBYTES:
        raise ValueError(f"a header of {length:,} bytes, over the limit of {MAX_HEADER_NBYTES:,}")
    encoded = file.read(length)
    if len(encoded) < length:
        raise EOFError(f"a header of {len(encoded):,} bytes, expected {length:,}")
    return encoded


def verify_checksum(path: Path) -> bool:
    """Read a whole file and raise FileError unless it is what was saved; False for one without a checksum.

    Files of other programs have no checksum. It detects damage, not forgery.
    """
    with naming("verifying", path, DOWNLOAD_AGAIN), path.open("rb") as file:
        header = read_header(file)
        written = _mapping(_mapping(json.loads(header)).get("__metadata__", {})).get(CHECKSUM)
        if written is None:
            return False
        found = checksum(file, header.replace(str(written).encode(), NO_CHECKSUM, 1))
    if found != written:
        raise FileError(
            f"verifying {path}: checksum {found}, expected {written}: the contents have changed since it was saved. "
            f"Restore it from a copy; if another program rewrote it, have that drop {CHECKSUM!r} from its metadata"
        )
    return True


def checksum(file: BufferedIOBase, header: bytes) -> str:
    """CRC-32 in hex of a file whose header has just been read, with `header` in place of its own."""
    found, _ = crc32_of(file, zlib.crc32(struct.pack("<Q", len(header)) + header))
    return f"{found:08x}"


class SliceReader:
    """Reads boxes of stored tensors, one by one; only the bytes of the box are touched. A context manager.

    Args:
        directory: of the checkpoint.
        names: of the files that will be read. All are opened here, which raises FileError.
    """

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        from safetensors import SafetensorError, safe_open

        self._paths = {name: directory / name for name in names}
        self._files: dict[str, Any] = {}
        with ExitStack() as stack:
            for name, path in self._paths.items():
                try:
                    with naming("opening", path, DOWNLOAD_AGAIN):
                        self._files[name] = stack.enter_context(safe_open(path, framework="pt"))
                except SafetensorError as error:
                    raise FileError(f"opening {path}: {error}. {DOWNLOAD_AGAIN}") from error
            self._stack = stack.pop_all()

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str, stored: StoredTensor, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
        """The box [offsets, offsets + lengths) of a tensor."""
        with naming("reading", self._paths[stored.file], DOWNLOAD_AGAIN):
            if not lengths:
                return self._files[stored.file].get_tensor(name)
            box = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
            return self._files[stored.file].get_slice(name)[box]

"""Safetensors files: which tensor lies where in which file, slices out of them, and new files to be filled in place.

Format: 8 bytes little-endian length of the header, the header as JSON (per tensor: dtype, shape, byte offsets from the
end of the header), then the data without gaps. Source: github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.planning.layout import DTYPE_NBYTES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_NAMES = {
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
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


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


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, from the index and the headers alone; no weights are read.

    Raises ConfigError without safetensors files, or naming every file that the index speaks of and that is not there.
    """
    index = directory / INDEX
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    elif (directory / SINGLE).is_file():
        files = [SINGLE]
    else:
        problem = f"{directory} has neither {INDEX} nor {SINGLE}"
        raise ConfigError([Violation("path", problem, "Name the directory of a safetensors checkpoint")])
    if missing := [name for name in files if not (directory / name).is_file()]:
        problem = f"{index} speaks of files that are not there: {', '.join(missing)}"
        raise ConfigError([Violation("path", problem, "Complete the download")])
    return {name: tensor for file in files for name, tensor in _header(directory / file).items()}


def _header(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    if strange := {entry["dtype"] for entry in header.values()} - _DTYPES.keys():
        raise ConfigError([Violation("path", f"{path} holds dtypes {sorted(strange)}", f"Use one of {list(_DTYPES)}")])
    return {
        name: StoredTensor(
            path.name, tuple(entry["shape"]), _DTYPES[entry["dtype"]], 8 + length + entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }


class SliceReader:
    """Boxes of stored tensors, read one by one; only the bytes of the box are touched. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str, stored: StoredTensor, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
        """The box [offsets, offsets + lengths) of a tensor."""
        if stored.file not in self._files:
            from safetensors import safe_open

            opened = safe_open(self._directory / stored.file, framework="pt")
            self._files[stored.file] = self._stack.enter_context(opened)
        if not lengths:
            return self._files[stored.file].get_tensor(name)
        box = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
        return self._files[stored.file].get_slice(name)[box]


def plan_files(tensors: Mapping[str, tuple[tuple[int, ...], str]], max_file_nbytes: int) -> dict[str, StoredTensor]:
    """Spread tensors, name -> (shape, dtype), over files of at most `max_file_nbytes` of data (one tensor at least)."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, (shape, dtype) in tensors.items():
        nbytes = math.prod(shape) * DTYPE_NBYTES[dtype]
        if groups[-1] and filled + nbytes > max_file_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    stored: dict[str, StoredTensor] = {}
    for number, names in enumerate(groups, start=1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        # wide elements first, so that every tensor starts at a multiple of its element size
        ordered = sorted(names, key=lambda name: -DTYPE_NBYTES[tensors[name][1]])
        start = 8 + len(_header_bytes({name: tensors[name] for name in ordered}))
        for name in ordered:
            shape, dtype = tensors[name]
            stored[name] = StoredTensor(file, shape, dtype, start)
            start += stored[name].nbytes
    return stored


def _header_bytes(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (shape, dtype) in tensors.items():
        stop = start + math.prod(shape) * DTYPE_NBYTES[dtype]
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return encoded + b" " * (-len(encoded) % 8)


def create_files(directory: Path, stored: Mapping[str, StoredTensor], suffix: str) -> None:
    """Write the headers and reserve the space, under the files' names with `suffix`; the data is zero."""
    for file, names in _by_file(stored).items():
        header = _header_bytes({name: (stored[name].shape, stored[name].dtype) for name in names})
        with (directory / (file + suffix)).open("wb") as opened:
            opened.write(struct.pack("<Q", len(header)) + header)
            opened.truncate(8 + len(header) + sum(stored[name].nbytes for name in names))


def open_for_writing(directory: Path, stored: Mapping[str, StoredTensor], suffix: str) -> dict[str, torch.Tensor]:
    """Flat tensors by name, mapped to the files that `create_files` made: what is written to them is in the file."""
    mapped: dict[str, torch.Tensor] = {}
    for file, names in _by_file(stored).items():
        path = directory / (file + suffix)
        whole = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
        for name in names:
            tensor = stored[name]
            mapped[name] = whole[tensor.start : tensor.start + tensor.nbytes].view(getattr(torch, tensor.dtype))
    return mapped


def publish_files(directory: Path, stored: Mapping[str, StoredTensor], suffix: str) -> None:
    """Give the filled files their names; write the index, if there is more than one; drop weights of a save before."""
    files = _by_file(stored)
    for file in files:
        (directory / (file + suffix)).replace(directory / file)
    if SINGLE in files:
        (directory / INDEX).unlink(missing_ok=True)
    else:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in stored.values())},
            "weight_map": {name: tensor.file for name, tensor in stored.items()},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for path in directory.glob("model*.safetensors"):
        if path.name not in files:
            path.unlink()


def _by_file(stored: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
    """File -> names in the order of their data."""
    files: dict[str, list[str]] = {}
    for name, tensor in sorted(stored.items(), key=lambda item: item[1].start):
        files.setdefault(tensor.file, []).append(name)
    return files


def remove_unpublished(directory: Path, files: Iterable[str], suffix: str) -> None:
    """Forget files that were created and not published."""
    for file in files:
        (directory / (file + suffix)).unlink(missing_ok=True)

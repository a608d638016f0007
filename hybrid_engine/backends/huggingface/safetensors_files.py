"""Safetensors files, through safetensors' own reader and writer: which tensor is in which file, slices, whole files."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.files.durable import naming, sync
from hybrid_engine.files.model_files import DOWNLOAD_AGAIN, weight_files
from hybrid_engine.records.layout import DTYPE_NBYTES

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: name of the file in the checkpoint's directory.
        shape: elements per dim.
        dtype: torch's name without the prefix.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


def stored_tensors(directory: Path, key: str = "path") -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, from the index and the headers alone; no weights are read.

    Raises, under `key`:
        ConfigError: without safetensors files, for an index that is invalid or names missing files, for a tensor that
            is in two files, and for dtypes that torch does not have.
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
    """The tensors of one file. Raises ConfigError, FileError."""
    with ExitStack() as stack:
        file = _opened(path, stack)
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
        if strange := {one.get_dtype() for one in slices.values()} - _DTYPES.keys():
            problem = f"{path} has unsupported dtypes {sorted(strange)}"
            raise ConfigError([Violation(key, problem, f"Use one of {list(_DTYPES)}")])
        return {
            name: StoredTensor(path.name, tuple(one.get_shape()), _DTYPES[one.get_dtype()])
            for name, one in slices.items()
        }


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file of whole tensors, which is on the disk when this returns. Raises FileError."""
    with naming("writing", path), _as_python_says_it():
        save_file(dict(tensors), path, metadata={"format": "pt"})  # the metadata is for transformers
        sync(path)


class SliceReader:
    """Reads boxes of stored tensors, one by one; only the bytes of the box are touched. A context manager.

    Args:
        directory: of the checkpoint.
        names: of the files that will be read. All are opened here, which raises FileError.
    """

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        with ExitStack() as stack:
            self._files = {name: _opened(directory / name, stack) for name in names}
            self._stack = stack.pop_all()
        self._directory = directory

    def __enter__(self) -> SliceReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str, stored: StoredTensor, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
        """The box [offsets, offsets + lengths) of a tensor."""
        with naming("reading", self._directory / stored.file, DOWNLOAD_AGAIN), _as_python_says_it():
            if not lengths:
                return self._files[stored.file].get_tensor(name)
            box = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
            return self._files[stored.file].get_slice(name)[box]


def _opened(path: Path, stack: ExitStack) -> Any:
    with naming("reading", path, DOWNLOAD_AGAIN), _as_python_says_it():
        return stack.enter_context(safe_open(path, framework="pt"))


@contextmanager
def _as_python_says_it() -> Iterator[None]:
    """Raise OSError or ValueError where safetensors raises an error of its own."""
    try:
        yield
    except SafetensorError as error:
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
        raise ValueError(str(error)) from error

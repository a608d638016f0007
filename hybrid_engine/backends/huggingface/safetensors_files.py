"""Safetensors files: headers, reads of slices and writes of whole files.

All bytes go through safetensors' own reader and writer.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hybrid_engine.errors import ConfigError
from hybrid_engine.files.durable import naming, sync
from hybrid_engine.files.model_files import DOWNLOAD_AGAIN, weight_files
from hybrid_engine.ranks.torch_internals import Tensors
from hybrid_engine.records.layout import DTYPE_NBYTES
from hybrid_engine.records.regions import Offsets, Shape

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
"""Name in safetensors -> name in torch."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: name of the file in the checkpoint's directory.
        shape: elements per dim.
        dtype: torch's name without the prefix.
    """

    file: str
    shape: Shape
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


StoredTensors = Mapping[str, StoredTensor]
"""Name in the checkpoint -> tensor."""


def stored_tensors(directory: Path, key: str = "path") -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint, by name. Reads the index and the headers, no weights.

    Args:
        directory: directory of the checkpoint.
        key: configuration key of `directory`, for errors.

    Raises:
        ConfigError: there are no safetensors files, the index is invalid or lists missing files, a
            tensor is in two files, or a dtype is not one of torch's.
        FileError: the length of a file contradicts its header, or a header is damaged.
    """
    stored: dict[str, StoredTensor] = {}
    for file in weight_files(directory, key):
        tensors = _tensors_of(directory / file, key)
        # Two sets of weights are mixed, and either value may be the right one.
        if repeated := sorted(stored.keys() & tensors.keys()):
            name = repeated[0]
            raise ConfigError.of(
                key,
                f"{directory} has {name} in both {stored[name].file} and {file}",
                "Download the checkpoint again",
                code="tensor-in-two-files",
            )
        stored |= tensors
    return stored


def _tensors_of(path: Path, key: str) -> dict[str, StoredTensor]:
    tensors = {}
    with ExitStack() as stack:
        file = _open(path, stack)
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
        unsupported = {view.get_dtype() for view in slices.values()} - _DTYPES.keys()
        if unsupported:
            raise ConfigError.of(
                key,
                f"{path} has unsupported dtypes {sorted(unsupported)}",
                f"Use one of {list(_DTYPES)}",
                code="unsupported-dtype",
            )
        for name, view in slices.items():
            shape = tuple(view.get_shape())
            tensors[name] = StoredTensor(path.name, shape, _DTYPES[view.get_dtype()])
    return tensors


def write_file(path: Path, tensors: Tensors) -> None:
    """Write a file of whole tensors, and flush it to the disk.

    Raises:
        FileError: the file cannot be written.
    """
    with naming("writing", path), _builtin_errors():
        # transformers expects this metadata.
        save_file(dict(tensors), path, metadata={"format": "pt"})
        # safetensors leaves it to its owner alone; servers of other users read it, too.
        with suppress(PermissionError):  # of a mount that has one mode for all files
            path.chmod(path.parent.stat().st_mode & 0o666)
        sync(path)


ReadBox = Callable[[str, StoredTensor, Offsets, Shape], torch.Tensor]
"""Function that returns the box [offsets, offsets + lengths) of a tensor, in elements per dim.

It takes the tensor's name and record first, and reads only the bytes of the box. It raises
FileError if a file cannot be read, or is damaged.
"""


@contextmanager
def boxes_of_files(directory: Path, names: Iterable[str]) -> Iterator[ReadBox]:
    """Open files in this context, and yield a function that reads boxes of their tensors.

    Args:
        directory: directory of the checkpoint.
        names: names of the files.

    Raises:
        FileError: a file cannot be opened.
    """
    with ExitStack() as stack:
        files = {name: _open(directory / name, stack) for name in names}

        def read(name: str, stored: StoredTensor, offsets: Offsets, lengths: Shape) -> torch.Tensor:
            path = directory / stored.file
            with naming("reading", path, DOWNLOAD_AGAIN), _builtin_errors():
                file = files[stored.file]
                if not lengths:  # a scalar
                    return file.get_tensor(name)
                starts_and_lengths = zip(offsets, lengths, strict=True)
                box = tuple(slice(start, start + length) for start, length in starts_and_lengths)
                return file.get_slice(name)[box]

        yield read


def _open(path: Path, stack: ExitStack) -> Any:
    with naming("reading", path, DOWNLOAD_AGAIN), _builtin_errors():
        return stack.enter_context(safe_open(path, framework="pt"))


@contextmanager
def _builtin_errors() -> Iterator[None]:
    """Convert SafetensorError to OSError or ValueError, from which `naming` makes a FileError."""
    try:
        yield
    except SafetensorError as error:
        # safetensors has the number of an operating system's error only in the message.
        if match := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(match[1])
            raise OSError(number, os.strerror(number)) from error
        raise ValueError(str(error)) from error

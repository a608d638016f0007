"""New safetensors files: planned, filled by all ranks, and swapped for an older set so that readers never see a mix.

Only renames within the directory are used: every shared file system has them (NFS and Lustre cannot exchange two
directories), files without weights are not touched, and the directory may be a mount point. Readers load different
files: transformers prefers model.safetensors to the index; vLLM and we prefer the index, and without one vLLM loads
every *.safetensors. So the index is always written, new files get names that are free, and

    the index names the old set -> new files appear -> the index names the new set -> the old set is removed

A kill leaves the old set or the new one for every reader; in an empty directory it leaves an index without its files,
which all of them refuse. RECORD says what to remove then, and the next save does so.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import count, product
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.backends.huggingface.safetensors_files import (
    CHECKSUM,
    DTYPE_NAMES,
    NO_CHECKSUM,
    StoredTensor,
    checksum,
    read_header,
    stored_tensors,
)
from hybrid_engine.files.durable import naming, reserve, sync, write_text
from hybrid_engine.files.model_files import INDEX, SINGLE, indexed_files, is_plain_name
from hybrid_engine.records.layout import DTYPE_NBYTES, Place

RECORD = "model.safetensors.saving.json"
"""Exists while a save is under way: {"made": names of its files, "replaced": names of the older set}."""

SUFFIX = ".incomplete"
"""Of files that are being filled."""


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
    header: dict[str, Any] = {"__metadata__": {"format": "pt", CHECKSUM: NO_CHECKSUM.decode()}}
    start = 0
    for name, (shape, dtype) in tensors.items():
        stop = start + math.prod(shape) * DTYPE_NBYTES[dtype]
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return encoded + b" " * (-len(encoded) % 8)


class BoxWriter:
    """Fills files that `Publication.begin` created, on any rank; what was written is on the disk after `flush`.

    Uses pwrite, not a mapping: on a network file system, stores of two hosts into one page overwrite each other, and a
    store that finds no space kills the process.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> BoxWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write(self, stored: StoredTensor, place: Place, box: torch.Tensor) -> None:
        """Put `box` at `place` (elements) of a tensor, cast to its dtype. Raises FileError."""
        # a copy: numpy() ties a storage to its memory for good, and that of weights must leave the device again
        flat = box.detach().to(device="cpu", dtype=getattr(torch, stored.dtype), copy=True).contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().data
        width = DTYPE_NBYTES[stored.dtype]
        with naming("writing", self._directory / (stored.file + SUFFIX)):
            descriptor = self._open(stored.file)
            for start, nbytes in _runs(box.shape, place, width):
                run, data = data[:nbytes], data[nbytes:]
                position = stored.start + start
                while run:
                    written = os.pwrite(descriptor, run, position)
                    run, position = run[written:], position + written

    def flush(self) -> None:
        """Wait until it is on the disk. Raises FileError."""
        for file, descriptor in self._files.items():
            with naming("writing", self._directory / (file + SUFFIX)):
                os.fsync(descriptor)

    def _open(self, file: str) -> int:
        if file not in self._files:
            self._files[file] = os.open(self._directory / (file + SUFFIX), os.O_WRONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, self._files[file])
        return self._files[file]


def _runs(lengths: tuple[int, ...], place: Place, width: int) -> Iterator[tuple[int, int]]:
    """(first byte, number of bytes) of every contiguous run of a box, in the box's own order."""
    if 0 in lengths:
        return
    # inner dims that follow each other without gaps form one run; the others are counted through
    numel, dims = 1, len(lengths)
    while dims and (lengths[dims - 1] == 1 or place.strides[dims - 1] == numel):
        dims -= 1
        numel *= lengths[dims]
    strides = place.strides[:dims]
    for index in product(*map(range, lengths[:dims])):
        offset = place.offset + sum(i * stride for i, stride in zip(index, strides, strict=True))
        yield offset * width, numel * width


def seal(path: Path) -> None:
    """Write a filled file's checksum into it, and both to the disk. Raises FileError."""
    with naming("writing", path), path.open("r+b") as file:
        header = read_header(file)
        found = checksum(file, header)
        file.seek(8 + header.index(NO_CHECKSUM))
        file.write(found.encode())
        file.flush()
        os.fsync(file.fileno())


class Publication:
    """Replaces the set of files in a directory by a new one. On one rank; the others only write.

    abandon() what a killed save left -> begin() -> all ranks write and `seal` -> publish(), or abandon() on failure
    """

    def __init__(self, directory: Path, stored: Mapping[str, StoredTensor]) -> None:
        self._directory = directory
        self._stored = stored
        self._final: dict[str, str] = {}

    def begin(self) -> None:
        """Create directory and files, with headers and all space reserved. Raises FileError, ConfigError."""
        with naming("creating", self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            replaced = _files_in_use(self._directory)
            self._final = self._free_names(replaced)
            made = [name + SUFFIX for name in self._final] + sorted(self._final.values())
            write_text(self._directory / RECORD, json.dumps({"made": made, "replaced": sorted(replaced)}) + "\n")
        for file, names in by_file(self._stored).items():
            path = self._directory / (file + SUFFIX)
            header = _header_bytes({name: (self._stored[name].shape, self._stored[name].dtype) for name in names})
            with naming("creating", path):
                path.unlink(missing_ok=True)  # a new file: an old link would lead to somebody else's
            with naming("creating", path), path.open("x+b") as opened:
                data_nbytes = sum(self._stored[name].nbytes for name in names)
                reserve(opened.fileno(), 8 + len(header) + data_nbytes)
                opened.write(struct.pack("<Q", len(header)) + header)

    def publish(self) -> None:
        """Replace the old set by the new one, which is filled and flushed. Raises FileError."""
        directory, new = self._directory, set(self._final.values())
        with naming("publishing", directory):
            replaced = _files_in_use(directory)
            if not (directory / INDEX).is_file():  # without one vLLM would load files of both sets
                self._write_index(stored_tensors(directory) if replaced else self._under_final_names())
            for file, final in self._final.items():
                (directory / (file + SUFFIX)).replace(directory / final)
            sync(directory)
            self._write_index(self._under_final_names())
            for file in sorted(replaced - new):
                (directory / file).unlink(missing_ok=True)
            (directory / RECORD).unlink()
            sync(directory)

    def abandon(self) -> None:
        """Remove what this save, or an earlier one that was killed, left behind. Raises FileError, ConfigError."""
        directory, record = self._directory, self._directory / RECORD
        with naming("looking for an incomplete save in", directory):
            if not record.is_file():
                return
        with naming("reading", record, f"Remove it, and *{SUFFIX}"):
            match json.loads(record.read_text(encoding="utf-8")):
                case {"made": [*made], "replaced": [*replaced]} if all(map(is_plain_name, made + replaced)):
                    pass
                case found:
                    raise ValueError(f"it says {str(found)[:100]}")
        indexed = indexed_files(directory)
        with naming("removing an incomplete save from", directory):
            is_first = False
            if indexed is None:  # no file of ours has its final name yet: one that has belongs to somebody else
                unused = {name for name in made if name.endswith(SUFFIX)}
            else:
                # in the first save to a directory the index comes before the files it names
                is_first = not replaced and not all((directory / name).is_file() for name in indexed)
                unused = {*made, *replaced} - set(() if is_first else indexed)
            for name in sorted(unused):
                (directory / name).unlink(missing_ok=True)
            if is_first:
                (directory / INDEX).unlink()  # last: it is what tells that the files are ours
            record.unlink()
            sync(directory)

    def _free_names(self, replaced: set[str]) -> dict[str, str]:
        """Name while being filled -> final name. Only a single model.safetensors may take the name of the old one."""
        files = list(by_file(self._stored))
        if files == [SINGLE]:
            if replaced <= {SINGLE}:
                return {SINGLE: SINGLE}
            stems = {SINGLE: "model-00001-of-00001"}
        else:
            stems = {file: Path(file).stem for file in files}
        tried = ({file: f"{stem}{ending}.safetensors" for file, stem in stems.items()} for ending in _endings())
        return next(names for names in tried if not any((self._directory / name).exists() for name in names.values()))

    def _under_final_names(self) -> dict[str, StoredTensor]:
        return {
            name: dataclasses.replace(tensor, file=self._final[tensor.file]) for name, tensor in self._stored.items()
        }

    def _write_index(self, stored: Mapping[str, StoredTensor]) -> None:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in stored.values())},
            "weight_map": {name: tensor.file for name, tensor in stored.items()},
        }
        write_text(self._directory / INDEX, json.dumps(index, indent=2) + "\n")


def by_file(stored: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
    """File -> its tensors' names, in the order of their data."""
    files: dict[str, list[str]] = {}
    for name, tensor in sorted(stored.items(), key=lambda item: item[1].start):
        files.setdefault(tensor.file, []).append(name)
    return files


def _endings() -> Iterator[str]:
    yield ""
    for number in count(2):
        yield f"-{number}"


def _files_in_use(directory: Path) -> set[str]:
    """The files that any reader loads: those of the index, and model.safetensors."""
    return {*(indexed_files(directory) or ()), *(name for name in (SINGLE,) if (directory / name).is_file())}

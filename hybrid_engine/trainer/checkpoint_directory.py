"""Checkpoints of both trainers: torch.distributed.checkpoint in a new directory per save, and a pointer to the latest.

    directory/latest                       the name of the save that counts
    directory/save-000003/__0_0.distcp     what rank 0 wrote: tensors, or its parts of them, and values
    directory/save-000003/.metadata        which entry is where
    directory/save-000003/checksums.json   of all these

A kill or a power cut leaves `latest` naming the old save or the new one, both complete. What it left is removed by the
next save, and so is the old one, once `latest` names the new. Other files in `directory` are left alone.

torch's planner and storage are called one after the other as `torch.distributed.checkpoint.save` and `load` do. These
raise what is no Exception, about files they do not name; here all ranks agree after every step.

No code is loaded from a checkpoint. torch would unpickle `.metadata` and values without limits, so both are restricted
here: to torch's own records (checkpoint_metadata.py), and to what `torch.load(weights_only=True)` takes.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from hybrid_engine.errors import ConfigError, FileError, StateError, Violation, first_of
from hybrid_engine.files.checksums import CHECKSUMS, checksum_of, read_checksums, require_as_written, write_checksums
from hybrid_engine.files.documents import given_path
from hybrid_engine.files.durable import naming, sync, write_text
from hybrid_engine.files.reading import open_regular, read_regular
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.checkpoint_metadata import METADATA, REMEDY, naming_damage, read_metadata

LATEST = "latest"

_SAVE = re.compile(r"save-(\d{6,})")
_MOST_NAMED = 5
_MOST_POINTER_NBYTES = 1000


def save(directory: str | Path, state: Mapping[str, Any], job: Job) -> None:
    """Write a checkpoint and point to it. Collective.

    Args:
        directory: on a file system that all ranks share.
        state: this rank's tensors and plain values, by key. A plain tensor has a key that no other rank has; a DTensor
            has the same key on all ranks, each of which writes its part.

    A save that fails leaves the checkpoint before it. Each tensor is copied to the host when it is written.

    Raises:
        FileError: naming what could not be written.
        ConfigError: before anything is written, for a `latest` that is not a checkpoint's.
    """
    new = None
    try:
        with job.agreement.phase("preparing the checkpoint"), naming("preparing the checkpoint", str(directory)):
            place = given_path(directory, "directory")
            if job.rank == 0:
                new = _make_save(place)
        name = job.agreement.gather(None if new is None else new.name, str | None, "preparing the checkpoint")[0]
        checksums = _write(place / name, state, job)
        with job.agreement.phase("completing the checkpoint"), naming("completing the checkpoint", place):
            if new is not None:
                write_checksums(new, checksums | {METADATA: checksum_of(new / METADATA)})
                sync(new)
                write_text(place / LATEST, new.name + "\n")
                _remove(path for path in _saves(place) if path != new)
    except BaseException as error:
        if new is not None and _named(place / LATEST) != new.name:
            try:
                _remove([new])
            except OSError as failure:
                error.add_note(f"{new} could not be removed: {failure}")
        raise


def _make_save(directory: Path) -> Path:
    """Make the directory of the next save, and room for it: what killed saves left goes."""
    if os.path.lexists(directory / LATEST) and _named(directory / LATEST) is None:
        problem = f"{directory / LATEST} is not the pointer of a checkpoint"
        raise ConfigError([Violation("directory", problem, "Save to another directory, or move that file away")])
    directory.mkdir(parents=True, exist_ok=True)
    saves = _saves(directory)
    _remove(path for path in saves if not (path / CHECKSUMS).exists())
    number = 1 + max((int(path.name.rpartition("-")[2]) for path in saves), default=0)
    new = directory / f"save-{number:06d}"
    new.mkdir()
    return new


def _named(latest: Path) -> str | None:
    """Return the save that the pointer names; None where it names none, or is not there. Raises FileError."""
    if not os.path.lexists(latest):
        return None
    with naming("reading", latest, REMEDY):
        text = read_regular(latest, _MOST_POINTER_NBYTES, follow_links=False).decode(errors="replace").strip()
    return text if _SAVE.fullmatch(text) else None


def _saves(directory: Path) -> list[Path]:
    paths = [path for path in directory.iterdir() if _SAVE.fullmatch(path.name)]
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _remove(saves: Iterable[Path]) -> None:
    for path in saves:
        shutil.rmtree(path)


def _write(new: Path, state: Mapping[str, Any], job: Job) -> dict[str, str]:
    """Write this rank's part; return the checksums of all ranks' files."""
    planner, writer = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False), FileSystemWriter(new)
    with job.agreement.phase("planning the checkpoint"):
        planner.set_up_planner(dict(state), writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(is_coordinator=True)
        own = writer.prepare_local_plan(planner.create_local_plan())
    plans = _gather_objects(job, own, "planning the checkpoint")
    with job.agreement.phase("writing the checkpoint"), naming("writing the checkpoint", new):
        plans, metadata = planner.create_global_plan(plans)  # the same on every rank
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[job.rank])
        results = writer.write_data(plan, planner).wait()
        files = {result.storage_data.relative_path for result in results}
        written = results, {name: checksum_of(new / name) for name in files}
    by_rank = _gather_objects(job, written, "writing the checkpoint")
    with job.agreement.phase("writing the checkpoint"), naming("writing the checkpoint", new):
        if job.rank == 0:
            writer.finish(metadata, [results for results, _ in by_rank])
    return {name: checksum for _, checksums in by_rank for name, checksum in checksums.items()}


def _gather_objects(job: Job, value: Any, phase: str) -> list[Any]:
    """What torch's planner and writer hand to those of other ranks, which they would pickle themselves."""
    return [pickle.loads(each) for each in job.agreement.gather(pickle.dumps(value), bytes, phase, sys.maxsize)]


class SavedCheckpoint:
    """The latest checkpoint in a directory, its files compared with their checksums.

    Args:
        directory: as given to `save`.
        job: of all ranks. They share the reading of all files; collective.

    Attributes:
        path: of the save.

    Raises StateError where there is no checkpoint, FileError naming what cannot be read or is not what was written.
    """

    def __init__(self, directory: str | Path, job: Job) -> None:
        with job.agreement.phase("verifying the checkpoint"), naming("reading the checkpoint", str(directory)):
            self.path = _latest_save(given_path(directory, "directory"))
            checksums = read_checksums(self.path, REMEDY)
            for name in sorted(checksums)[job.rank :: job.world_size]:
                require_as_written(self.path / name, checksums[name], REMEDY)
        with job.agreement.phase("reading the checkpoint"), naming("reading", self.path, REMEDY):
            data = [path.name for path in self.path.iterdir() if path.suffix == DEFAULT_SUFFIX]
            if unlisted := sorted({METADATA, *data} - checksums.keys()):
                raise FileError(f"reading {self.path / CHECKSUMS}: it has no entry for {unlisted[0]}. {REMEDY}")
            self._metadata = read_metadata(self.path, {name: (self.path / name).stat().st_size for name in checksums})

    def entries(self, prefix: str) -> dict[str, TensorStorageMetadata | None]:
        """Return size and dtype of tensors, None for values, by key without `prefix`, which all of them have."""
        found = below(self._metadata.state_dict_metadata, prefix)
        return {key: entry if isinstance(entry, TensorStorageMetadata) else None for key, entry in found.items()}

    def read(self, state: dict[str, Any]) -> dict[str, Any]:
        """Fill tensors in host memory, put the saved values for None, and return `state`. Raises FileError."""
        with naming_damage(self.path):
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner(state, self._metadata, is_coordinator=True)
            by_file: dict[str, list[ReadItem]] = {}
            for item in planner.create_local_plan().items:
                by_file.setdefault(self._metadata.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with naming_damage(self.path / name), open_regular(self.path / name, follow_links=False) as file:
                for item in items:
                    stored = self._metadata.storage_data[item.storage_index]
                    part = cast(IO[bytes], _Slice(file, stored.offset, stored.length))
                    value = torch.load(part, map_location="cpu", weights_only=True)
                    if item.type is LoadItemType.BYTE_IO:
                        state[item.dest_index.fqn] = value
                    else:
                        self._require_recorded(item.storage_index, value)
                        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                            value = value.narrow(dim, offset, length)
                        planner.resolve_tensor(item).detach().copy_(value)
        return state

    def _require_recorded(self, index: MetadataIndex, value: object) -> None:
        """Raise ValueError unless a stored part has the size and dtype that the metadata says."""
        entry = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata), "only tensors have parts"
        sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
        expected = (sizes, entry.properties.dtype)
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != expected:
            raise ValueError(f"{index.fqn} is not stored as {tuple(sizes)} of {entry.properties.dtype}")

    def read_all(self, prefix: str) -> dict[str, Any]:
        """Read whole tensors and values, those whose keys begin with `prefix`, into new memory. Raises FileError."""
        room = {
            prefix + key: None if entry is None else torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in self.entries(prefix).items()
        }
        return self.read(room)

    def value(self, key: str) -> Any:
        """Read one value. Raises FileError."""
        return self.read({key: None})[key]

    def require_fit(self, problems: Iterable[str]) -> None:
        """Raise StateError, naming what cannot be restored, if there is anything."""
        if found := sorted(problems):
            named = first_of(found, _MOST_NAMED, "; ")
            raise StateError(f"{self.path} belongs to another model: {named}. Load it into the model that saved it")


def below(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return what has a key that begins with `prefix`, by the rest of the key."""
    return {key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)}


def differences(saved: Mapping[str, TensorStorageMetadata | None], live: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of the saved entries cannot be restored into those that are live, tensors and values."""
    yield from (f"{key} is missing" for key in live.keys() - saved.keys())
    yield from (f"{key} is unknown to this model" for key in saved.keys() - live.keys())
    for key in live.keys() & saved.keys():
        now, then = live[key], saved[key]
        if isinstance(now, torch.Tensor) != (then is not None):
            yield f"{key} is {'not ' if then is None else ''}a tensor in the checkpoint"
        elif then is not None and (tuple(now.shape), now.dtype) != (tuple(then.size), then.properties.dtype):
            yield f"{key}: {tuple(then.size)} of {then.properties.dtype}, expected {tuple(now.shape)} of {now.dtype}"


def _latest_save(directory: Path) -> Path:
    latest = directory / LATEST
    if not os.path.lexists(latest):
        raise StateError(f"no checkpoint: {latest} does not exist")
    if (name := _named(latest)) is None or directory / name not in _saves(directory):
        raise FileError(f"reading {latest}: it does not name a save beside it. {REMEDY}")
    return directory / name


class _Slice(io.RawIOBase):
    """`length` bytes of an open file from `offset` on, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._descriptor = file.fileno()
        self._start = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._length - self._position)
        total = 0
        with memoryview(buffer) as view, view.cast("B") as octets, octets[:left] as room:
            # torch asks once for a whole tensor and takes fewer bytes for damage; Linux reads at most 2 GiB at once
            while total < len(room):
                with room[total:] as rest:
                    count = os.preadv(self._descriptor, [rest], self._start + self._position + total)
                if count == 0:
                    break
                total += count
        self._position += total
        return total

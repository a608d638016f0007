"""Checkpoints of both trainers, in a new directory per save, with a pointer to the latest save.

    directory/latest                       name of the current save
    directory/save-000003/__0_0.distcp     by rank 0: tensors, or its parts of them, and values
    directory/save-000003/.metadata        location of every entry
    directory/save-000003/checksums.json   checksums of all these files

If a save is killed or power fails, `latest` names either the old save or the new one, both
complete. The next save removes the remains, and after `latest` names a new save the old one is
removed. Other files in `directory` are not touched.

The planner and storage of torch.distributed.checkpoint are called one after the other as its `save`
and `load` do. Those functions raise errors that are not Exceptions and do not name files; here all
ranks agree after every step.

No code of a checkpoint is run: `.metadata` may contain only torch's own records, and values only
what `torch.load(weights_only=True)` accepts; torch would unpickle both without restrictions. In a
save it checks that the parts of a tensor cover it once; checksums show that all files are as saved.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from hybrid_engine.errors import (
    ConfigError,
    FileError,
    HybridEngineError,
    StateError,
    clipped,
    first_of,
)
from hybrid_engine.files.checksums import (
    CHECKSUMS,
    checksum_of,
    read_checksums,
    require_as_written,
    write_checksums,
)
from hybrid_engine.files.documents import given_path
from hybrid_engine.files.durable import naming, sync, write_text
from hybrid_engine.files.reading import open_regular, read_regular
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict, Tensors
from hybrid_engine.trainer.canonical_state import Boxes

LATEST = "latest"
METADATA = ".metadata"
REMEDY = "Resume from an older checkpoint, or restore the file from a copy"

# bytes; a file of any size could exhaust the host memory
_MAX_NBYTES = 1 << 32
_ALLOWED_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"Path", "PosixPath"},
}
"""Module -> names that `.metadata` may refer to, in addition to dtypes."""

_SAVE_NAME = re.compile(r"save-(\d{6,})")
_MAX_PROBLEMS = 5
_MAX_POINTER_NBYTES = 1000


# -- random generators of a rank -------------------------------------------------------------------


def generator_states() -> TensorDict:
    """Return the states of torch's default generators: `cpu`, and `cuda` with a GPU."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(states: Tensors) -> None:
    """Set torch's default generators to states of `generator_states`; other keys are ignored."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


# -- planners of torch, for boxes of canonical tensors ---------------------------------------------


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.view(index) if isinstance(value, Boxes) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        # torch's would drop values of other types than its own.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        value = self.state_dict[index.fqn]
        return value.view(index) if isinstance(value, Boxes) else super().lookup_tensor(index)


# -- saving ----------------------------------------------------------------------------------------


def save(directory: str | Path, state: Mapping[str, Any], job: Job) -> None:
    """Write a checkpoint, and make it the latest. Collective.

    A save that fails leaves the previous checkpoint. Each tensor is copied to the host when it is
    written.

    Args:
        directory: on a file system that all ranks share.
        state: this rank's `Boxes`, tensors and plain values, by key. Boxes of a tensor on several
            ranks are equal or apart; a tensor or value of several ranks is written once, by one of
            them.
        job: of all ranks.

    Raises:
        FileError: names the file that could not be written.
        ConfigError: before anything is written, if `latest` is a file of another program.
    """
    new_save = None
    try:
        with (
            job.agreement.phase("preparing the checkpoint"),
            naming("preparing the checkpoint", str(directory)),
        ):
            path = given_path(directory, "directory")
            if job.rank == 0:
                new_save = _make_save(path)
        # rank 0 alone knows the number of the save
        own_name = None if new_save is None else new_save.name
        name = job.agreement.gather(own_name, str | None, "preparing the checkpoint")[0]
        checksums = _write(path / name, state, job)
        with (
            job.agreement.phase("completing the checkpoint"),
            naming("completing the checkpoint", path),
        ):
            if new_save is not None:
                checksums[METADATA] = checksum_of(new_save / METADATA)
                write_checksums(new_save, checksums)
                sync(new_save)
                # from here on the new save counts
                write_text(path / LATEST, new_save.name + "\n")
                _remove(other for other in _saves(path) if other != new_save)
    except BaseException as error:
        # if the pointer names the new save already, that save is complete
        if new_save is not None and _pointed_name(path / LATEST) != new_save.name:
            try:
                _remove([new_save])
            except OSError as failure:
                error.add_note(f"{new_save} could not be removed: {failure}")
        raise


def _make_save(directory: Path) -> Path:
    """Create the directory of the next save, and remove the remains of killed saves."""
    if os.path.lexists(directory / LATEST) and _pointed_name(directory / LATEST) is None:
        raise ConfigError.of(
            "directory",
            f"{directory / LATEST} is not the pointer of a checkpoint",
            "Save to another directory, or move that file away",
            code="not-a-checkpoint",
        )
    directory.mkdir(parents=True, exist_ok=True)
    saves = _saves(directory)
    # checksums are written last
    _remove(path for path in saves if not (path / CHECKSUMS).exists())
    # Above all, killed ones too: a number never stands for two saves.
    number = 1 + max((int(path.name.rpartition("-")[2]) for path in saves), default=0)
    new_save = directory / f"save-{number:06d}"
    new_save.mkdir()
    return new_save


def _write(new_save: Path, state: Mapping[str, Any], job: Job) -> dict[str, str]:
    """Write this rank's part; return the checksums of all ranks' files."""
    # keys are flat already, and DTensors keep one key
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = FileSystemWriter(new_save)
    with job.agreement.phase("planning the checkpoint"):
        # A coordinator on each rank, because each computes the global plan.
        planner.set_up_planner(dict(state), writer.storage_meta(), is_coordinator=True)
        writer.set_up_storage_writer(is_coordinator=True)
        local_plan = writer.prepare_local_plan(planner.create_local_plan())
    plans = _gather_objects(job, local_plan, "planning the checkpoint")
    with job.agreement.phase("writing the checkpoint"), naming("writing the checkpoint", new_save):
        # every rank computes the same global plan, so none has to be sent
        plans, metadata = planner.create_global_plan(plans)
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[job.rank])
        results = writer.write_data(plan, planner).wait()
        files = {result.storage_data.relative_path for result in results}
        checksums = {name: checksum_of(new_save / name) for name in files}
    by_rank = _gather_objects(job, (results, checksums), "writing the checkpoint")
    with job.agreement.phase("writing the checkpoint"), naming("writing the checkpoint", new_save):
        if job.rank == 0:
            writer.finish(metadata, [results for results, _ in by_rank])
    return {name: checksum for _, checksums in by_rank for name, checksum in checksums.items()}


def _gather_objects(job: Job, value: Any, phase: str) -> list[Any]:
    """Gather plans or results of torch's planner and writer, which themselves would pickle them."""
    # plans may be longer than other messages
    by_rank = job.agreement.gather(pickle.dumps(value), bytes, phase, sys.maxsize)
    return [pickle.loads(pickled) for pickled in by_rank]


# -- saves of a directory --------------------------------------------------------------------------


def _pointed_name(latest: Path) -> str | None:
    """Return the name of the save that the pointer `latest` contains.

    Returns None if the file does not exist or contains something else. Raises FileError.
    """
    if not os.path.lexists(latest):
        return None
    with naming("reading", latest, REMEDY):
        contents = read_regular(latest, _MAX_POINTER_NBYTES, follow_links=False)
        # Exactly: a flipped bit turns "\n" into another blank.
        name = contents.decode(errors="replace").removesuffix("\n")
    return name if _SAVE_NAME.fullmatch(name) else None


def _saves(directory: Path) -> list[Path]:
    paths = [path for path in directory.iterdir() if _SAVE_NAME.fullmatch(path.name)]
    # a link may lead to the files of another program
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _remove(saves: Iterable[Path]) -> None:
    for path in saves:
        shutil.rmtree(path)


def _latest_save(directory: Path) -> Path:
    latest = directory / LATEST
    if not os.path.lexists(latest):
        raise StateError(
            f"no checkpoint: {latest} does not exist. Pass the directory of an earlier "
            "save_checkpoint",
            code="no-checkpoint",
        )
    name = _pointed_name(latest)
    if name is None or directory / name not in _saves(directory):
        raise FileError(
            f"reading {latest}: it does not contain the name of a save in {directory}. {REMEDY}",
            code="damaged-checkpoint",
        )
    return directory / name


# -- torch's records of what is stored where ------------------------------------------------------


@contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Turn any exception that damaged contents cause into a FileError that names `path`.

    torch's readers raise exceptions of any type for these.
    """
    try:
        with naming("reading", path, REMEDY):
            yield
    except HybridEngineError:
        raise
    except Exception as error:
        first_line = str(error).splitlines()[:1]
        reason = clipped(": ".join([type(error).__name__, *first_line]))
        raise FileError(
            f"reading {path}: damaged ({reason}). {REMEDY}", code="damaged-checkpoint"
        ) from error


def read_metadata(directory: Path, files_with_checksums: Set[str]) -> Metadata:
    """Return the metadata of a checkpoint, in which all entries are in these files.

    Raises FileError.
    """
    with naming_damage(directory / METADATA):
        contents = read_regular(directory / METADATA, _MAX_NBYTES, follow_links=False)
        metadata = _RestrictedUnpickler(io.BytesIO(contents)).load()
        if type(metadata) is not Metadata:
            raise ValueError(f"it is a {type(metadata).__name__}")
        files = {info.relative_path for info in metadata.storage_data.values()}
        if not files <= files_with_checksums - {METADATA}:
            raise ValueError("entries are stored outside of the checkpoint's files")
        return metadata


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickler of `_ALLOWED_NAMES` and dtypes only: pickles may otherwise call any function."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint's metadata")
        return super().find_class(module, name)


# -- loading ---------------------------------------------------------------------------------------


class SavedCheckpoint:
    """The latest checkpoint in a directory, verified by checksums.

    Args:
        directory: argument of `save`.
        job: of all ranks, which share the verification of the files. Collective.

    Attributes:
        path: directory of the save.

    Raises StateError if there is no checkpoint, and FileError naming a file that cannot be read or
    differs from the file that was written.
    """

    def __init__(self, directory: str | Path, job: Job) -> None:
        with (
            job.agreement.phase("verifying the checkpoint"),
            naming("reading the checkpoint", str(directory)),
        ):
            self.path = _latest_save(given_path(directory, "directory"))
            checksums = read_checksums(self.path, REMEDY)
            # every rank verifies its share of the files
            # Of 10 files on 4 ranks, rank 1 verifies numbers 1, 5 and 9.
            for name in sorted(checksums)[job.rank :: job.world_size]:
                require_as_written(self.path / name, checksums[name], REMEDY)
        with job.agreement.phase("reading the checkpoint"), naming("reading", self.path, REMEDY):
            data_files = {
                path.name for path in self.path.iterdir() if path.suffix == DEFAULT_SUFFIX
            }
            # a file without a checksum would be read unverified
            unlisted = sorted({METADATA, *data_files} - checksums.keys())
            if unlisted:
                raise FileError(
                    f"reading {self.path / CHECKSUMS}: it has no entry for {unlisted[0]}. {REMEDY}",
                    code="damaged-checkpoint",
                )
            self._metadata = read_metadata(self.path, checksums.keys())

    def entries(self, prefix: str) -> dict[str, TensorStorageMetadata | None]:
        """Return the entries whose keys start with `prefix`, by the rest of the key.

        Tensors are represented by their size and dtype, values by None.
        """
        entries = below(self._metadata.state_dict_metadata, prefix)
        return {
            key: entry if isinstance(entry, TensorStorageMetadata) else None
            for key, entry in entries.items()
        }

    def read(self, state: dict[str, Any]) -> dict[str, Any]:
        """Fill the tensors of `state`, replace None by the saved value, and return `state`.

        Tensors and boxes are in host memory. Raises FileError.
        """
        stored_parts = self._metadata.storage_data
        with naming_damage(self.path):
            planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            planner.set_up_planner(state, self._metadata, is_coordinator=True)
            items_of_files: dict[str, list[ReadItem]] = {}
            for item in planner.create_local_plan().items:
                file_name = stored_parts[item.storage_index].relative_path
                items_of_files.setdefault(file_name, []).append(item)
        for file_name, items in items_of_files.items():
            path = self.path / file_name
            with naming_damage(path), open_regular(path, follow_links=False) as file:
                for item in items:
                    stored = stored_parts[item.storage_index]
                    file.seek(stored.offset)
                    # A copy of the part, which ends where it ends.
                    part = io.BytesIO(file.read(stored.length))
                    value = torch.load(part, map_location="cpu", weights_only=True)
                    # a value
                    if item.type is LoadItemType.BYTE_IO:
                        state[item.dest_index.fqn] = value
                        continue
                    bounds = zip(item.storage_offsets, item.lengths, strict=True)
                    for dim, (offset, length) in enumerate(bounds):
                        value = value.narrow(dim, offset, length)
                    planner.resolve_tensor(item).detach().copy_(value)
        return state

    def read_all(self, prefix: str) -> dict[str, Any]:
        """Read the whole tensors and values whose keys start with `prefix`, into new host memory.

        Returns them by full key. Raises FileError.
        """
        state: dict[str, Any] = {}
        for key, entry in self.entries(prefix).items():
            state[prefix + key] = None
            if entry is not None:
                state[prefix + key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        return self.read(state)

    def value(self, key: str) -> Any:
        """Read one value. Raises FileError."""
        return self.read({key: None})[key]

    def require_fit(self, problems: Iterable[str]) -> None:
        """Raise StateError with the first of `problems`, if there are any."""
        sorted_problems = sorted(problems)
        if sorted_problems:
            raise StateError(
                f"{self.path} belongs to another model: "
                f"{first_of(sorted_problems, _MAX_PROBLEMS, '; ')}. "
                "Load it into the model that saved it",
                code="checkpoint-of-another-model",
            )


def below(entries: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries whose keys start with `prefix`, by the rest of the key."""
    return {
        key.removeprefix(prefix): entry for key, entry in entries.items() if key.startswith(prefix)
    }

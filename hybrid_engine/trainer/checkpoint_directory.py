"""The directory of a checkpoint: written beside its place, put there whole, and compared when it is read.

    with new_checkpoint(directory, job) as new:        # on every rank
        ...                                            # write files into new.path
        new.contents[name] = Contents(nbytes, crc32)   # of this rank's
    # here the directory has all ranks' files, and a manifest of their lengths and checksums

    require_as_written(current_directory(directory) / name)    # before a file is believed

What is in a directory belongs to us if the manifest there lists it; nothing else is ever replaced or removed. So the
manifest is the first file of a directory, says that it is being written until all others are, and goes last.

CRC-32 detects flipped bits and torn writes at 1.9 GB/s on one core (sha256: 0.8).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hybrid_engine.errors import ConfigError, FileError, Violation, first_of
from hybrid_engine.files.documents import given_path
from hybrid_engine.files.durable import (
    crc32_of,
    current_directory,
    leftovers,
    naming,
    recover_directory,
    remove_directory,
    replace_directory,
    write_text,
)
from hybrid_engine.ranks.job import Job

MANIFEST = "manifest.json"
REMEDY = "Resume from an older checkpoint, or restore the file from a copy"
MOST_NAMED = 5
"""Differences, or files, that an error names."""

_MOUNTS = Path("/proc/self/mountinfo")
_BEING_WRITTEN = json.dumps({"files": None}) + "\n"
"""The manifest until all files are there: all of them are ours."""


@dataclass(frozen=True)
class Contents:
    """Length and checksum (hex) of a file when it was written."""

    nbytes: int
    crc32: str


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        path: where to.
        contents: this rank's files in it, by name.
    """

    path: Path
    contents: dict[str, Contents] = field(default_factory=dict)


@contextmanager
def new_checkpoint(directory: str | Path, job: Job) -> Iterator[NewCheckpoint]:
    """Write a checkpoint in the block, and put it in place afterwards. Collective.

    It is renamed at the end: a kill or a power cut at any moment leaves the old checkpoint or the new one, for readers
    and for the next save. On file systems that cannot exchange two names the old one is called `<directory>.replaced`
    between two renames. A block that fails leaves nothing behind. A symbolic link stays one: what it points to is
    replaced. All ranks see one file system.

    Raises:
        FileError: naming what could not be written.
        ConfigError: before anything is written, if the directory holds anything but a checkpoint or must stay.
    """
    with job.agreement.phase("looking into the checkpoint's directory"), naming("preparing the checkpoint", directory):
        directory = given_path(directory, "directory").resolve()
        _require(*_fixed(directory))
        new = NewCheckpoint(directory.with_name(f"{directory.name}.incomplete"))
        if job.rank == 0:
            _require(*_foreign(directory, new.path, *leftovers(directory)))
    try:
        with job.agreement.phase("preparing the checkpoint's directory"):
            if job.rank == 0:
                _make_room(directory, new.path)
        yield new
        written = job.agreement.gather(new.contents, "writing the checkpoint")
        with job.agreement.phase("putting the checkpoint in place"):
            if job.rank == 0:
                write_manifest(new.path, {name: each[name] for each in written for name in each})
                with naming("replacing the checkpoint", directory):
                    _require(*_foreign(directory))  # writing takes its time
                    replace_directory(new.path, directory, last=MANIFEST)
    except BaseException as error:
        if job.rank == 0:
            _remove(new.path, error)
        raise


def present_checkpoint(directory: str | Path) -> Path:
    """Find the checkpoint last saved to `directory`. Raises FileError, or ArgumentError if that is not a path."""
    with naming("reading the checkpoint", directory):
        return current_directory(given_path(directory, "directory").resolve())


def foreign_names(directory: Path) -> list[str]:
    """List the names in a directory that none of our manifests lists, sorted. Raises OSError."""
    names = {path.name for path in directory.iterdir()}
    files = {name for name in names if _is_file(directory / name)}
    ours = {f"{MANIFEST}.incomplete"}  # of a write of the manifest that was killed
    if MANIFEST in files and (directory / MANIFEST).read_bytes() == _BEING_WRITTEN.encode():
        ours = files
    else:
        with suppress(FileError):
            ours |= {MANIFEST, *names_in_manifest(directory)}
    return sorted(names - (files & ours))


def write_manifest(directory: Path, contents: Mapping[str, Contents]) -> None:
    """Write the manifest of files, by name, once all are written. Raises FileError."""
    files = {name: asdict(contents[name]) for name in sorted(contents)}
    write_text(directory / MANIFEST, json.dumps({"files": files}, indent=2) + "\n")


def contents_of(path: Path) -> Contents:
    """Length and checksum of a file as it is now. Raises OSError, and ValueError for a link, a pipe or a device."""
    if not _is_file(path):  # before it is opened: a pipe would be waited for, a device read without end
        raise ValueError("it is not a regular file")
    with path.open("rb", buffering=0) as file:
        crc32, nbytes = crc32_of(file)
    return Contents(nbytes, f"{crc32:08x}")


def require_as_written(path: Path) -> None:
    """Raise FileError, naming the file, unless it is what the manifest beside it says."""
    written = _contents_in(_manifest(path.parent), path.name)
    with naming("reading the checkpoint", path, REMEDY):
        found = contents_of(path)
        if found != written:
            now, then = (f"{contents.nbytes:,} bytes with checksum {contents.crc32}" for contents in (found, written))
            raise FileError(f"reading the checkpoint {path}: {now}, expected {then}. {REMEDY}")


def names_in_manifest(directory: Path) -> list[str]:
    """The files that a checkpoint consists of. Raises FileError."""
    manifest = _manifest(directory)
    with naming("reading", manifest, REMEDY):
        match json.loads(manifest.read_text(encoding="utf-8")):
            case {"files": {**files}}:
                names = sorted(map(str, files))
                if outside := [name for name in names if Path(name).name != name]:
                    raise ValueError(f"it names {outside[0]!r}, which is not a file of the checkpoint")
                return names
        raise ValueError("it has no list of files")


def _manifest(directory: Path) -> Path:
    manifest = directory / MANIFEST
    if not (os.path.lexists(manifest) and _is_file(manifest)):
        raise FileError(
            f"reading the checkpoint {directory}: it has no {MANIFEST}, so it is incomplete, or older than "
            "checksums. Resume from another one, or with the version that wrote it"
        )
    return manifest


def _contents_in(manifest: Path, name: str) -> Contents:
    with naming("reading", manifest, REMEDY):
        match json.loads(manifest.read_text(encoding="utf-8")):
            case {"files": {**files}}:
                match files.get(name):
                    case {"nbytes": int(nbytes), "crc32": str(crc32)}:
                        return Contents(nbytes, crc32)
        raise ValueError(f"it has no entry for {name}")


def _is_file(path: Path) -> bool:
    """Whether it is a regular file itself, not what a link leads to. Raises OSError."""
    return stat.S_ISREG(path.lstat().st_mode)


def _require(*violations: Violation) -> None:
    if violations:
        raise ConfigError(violations)


def _fixed(directory: Path) -> Iterator[Violation]:
    """Why no other directory can take this one's place, under which this process works or a file system is mounted."""
    working = Path(os.readlink("/proc/self/cwd"))  # os.getcwd() raises where it was removed
    if directory in (working, *working.parents):
        yield Violation("directory", f"{directory} is the working directory, or above it", "Name one below it")
    if directory in _mount_points():
        yield Violation("directory", f"{directory} is a mount point, which stays", "Name a directory below it")


def _mount_points() -> set[Path]:
    """Also those within one file system, which os.path.ismount does not tell. Spaces are written \\040."""
    lines = _MOUNTS.read_bytes().splitlines()
    places = (line.split()[4].decode("unicode_escape").encode("latin-1") for line in lines)
    return {Path(os.fsdecode(place)) for place in places}


def _foreign(*directories: Path) -> Iterator[Violation]:
    """Report files that are not a checkpoint's in directories that will be replaced or removed."""
    for directory in directories:
        if directory.exists() and (names := foreign_names(directory)):
            problem = f"{directory} holds files that are not a checkpoint's: {first_of(names, MOST_NAMED)}"
            yield Violation("directory", problem, "Save to another directory, or move these away")


def _make_room(directory: Path, incomplete: Path) -> None:
    with naming("preparing the checkpoint", directory):
        recover_directory(directory, last=MANIFEST)
        remove_directory(incomplete, last=MANIFEST)  # of a save that was killed
        incomplete.mkdir(parents=True)
        write_text(incomplete / MANIFEST, _BEING_WRITTEN)


def _remove(incomplete: Path, error: BaseException) -> None:
    """Clean up after `error`, to which a failure to do so is added as a note."""
    try:
        remove_directory(incomplete, last=MANIFEST)
    except OSError as failure:
        error.add_note(f"{incomplete} could not be removed: {failure}")

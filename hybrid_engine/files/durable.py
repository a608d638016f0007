"""Files that survive a kill, a power cut and a full disk, or whose error says why they do not.

    with naming("reading the settings", path, "Write them again"):  # what is wrong with the file becomes a FileError
        settings = json.loads(path.read_text())
    write_text(path, text)                          # the old contents or the new ones, on the disk when it returns

A directory of several files is written under another name, file by file flushed, and put in place by
`replace_directory`.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybrid_engine.errors import FileError, HybridEngineError

logger = logging.getLogger(__name__)

_DAMAGE = (EOFError, struct.error, ValueError, pickle.PickleError, zipfile.BadZipFile, zlib.error, RecursionError)
"""Errors of readers about contents; JSON, UTF-8 and a NUL in a path raise ValueError too."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.EOPNOTSUPP)


@contextmanager
def naming(doing: str, path: str | Path, remedy: str | None = None) -> Iterator[None]:
    """Turn errors about a file into a FileError: "<doing> <path>: <problem>. <remedy>".

    Args:
        doing: e.g. "writing the checkpoint".
        path: of the file or directory.
        remedy: for damaged contents, where a file is read. Without one, errors that are not about the file system
            pass: a writer's contents come from memory, and an error there (CUDA out of memory in torch.save) is not
            about the file.

    The original error is the cause. If it was caused by an OSError, that one is reported: torch.save to a file that
    Python opened reports a full disk as "[enforce fail at inline_container.cc] unexpected pos". Errors of this project
    pass unchanged, and so do those that are not about files (KeyError, TypeError, KeyboardInterrupt).
    """
    try:
        yield
    except HybridEngineError:
        raise
    except (OSError, RuntimeError, *_DAMAGE) as error:
        if (system := _system_error_behind(error)) is not None:
            problem = _system_problem(system, Path(path))
        elif remedy is None:
            raise
        else:
            kind = "damaged or cut short" if isinstance(error, _DAMAGE) else "not usable"
            reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])[:200]
            problem = f"{kind} ({reason}). {remedy}"
        raise FileError(f"{doing} {path}: {problem}") from error


def is_disk_full(error: FileError) -> bool:
    """Return whether space, a quota or a limit on file sizes ran out; there may be room again later."""
    system = _system_error_behind(error.__cause__)
    return system is not None and system.errno in (*_FULL, errno.EFBIG)


def _system_error_behind(error: BaseException | None) -> OSError | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        seen.add(id(error))
        error = error.__cause__ if error.__suppress_context__ else error.__context__  # as a traceback shows them
    return None


def _system_problem(error: OSError, path: Path) -> str:
    assert error.errno is not None, "see _system_error_behind"
    problem, remedy = os.strerror(error.errno), "Check the path, and what its file system allows"
    problem = problem[0].lower() + problem[1:]
    if error.errno in _FULL:
        problem, remedy = f"{problem} ({_free_space(path)})", "Free some space there"
    if error.filename is not None and Path(os.fsdecode(error.filename)) != path:
        problem += f" ({os.fsdecode(error.filename)})"
    return f"{problem}. {remedy}"


def _free_space(path: Path) -> str:
    """Say how much is free on the file system of `path`, which need not exist."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    found = os.statvfs(place)
    while not place.is_mount() and place != place.parent:
        place = place.parent
    return f"{found.f_bavail * found.f_frsize / 1e6:,.1f} MB free on {place}"


def write_text(path: str | Path, text: str) -> None:
    """Write text as UTF-8 with `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, contents: bytes) -> None:
    """Write a file in one step: whatever happens, it has the old contents or the new ones. Raises FileError.

    On the disk when this returns. A failure leaves no temporary file; a kill may leave `<name>.incomplete`, which the
    next call overwrites.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.incomplete")
    with naming("writing", path):
        try:
            temporary.unlink(missing_ok=True)  # a new file: an old link would lead to somebody else's
            with temporary.open("xb") as file:
                file.write(contents)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):  # the first error is the one to report
                temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def append_text(path: str | Path, text: str) -> None:
    """Append whole lines to a file, all of them or none. Raises FileError.

    A last line that a kill cut short is removed first, with a warning; one of complete JSON lacks only its newline,
    which is added. Not flushed to the disk: a power cut may lose the newest lines.
    """
    path = Path(path)
    with naming("appending to", path), path.open("ab+", buffering=0) as file:
        end, size = _end_of_last_line(file.fileno()), os.fstat(file.fileno()).st_size
        if _is_whole(os.pread(file.fileno(), size - end, end)):
            end, text = size, "\n" + text
        elif size > end:
            logger.warning("%s: removed the last %d bytes, a line that was cut short", path, size - end)
            os.ftruncate(file.fileno(), end)
        try:
            rest = memoryview(text.encode())
            while rest:
                rest = rest[os.write(file.fileno(), rest) :]
        except BaseException:
            os.ftruncate(file.fileno(), end)
            raise


def _is_whole(line: bytes) -> bool:
    """Return whether this is a complete JSON object or array. Other JSON may be part of a longer value: 1 of 12."""
    try:
        return isinstance(json.loads(line), dict | list)
    except (ValueError, RecursionError):
        return False


def _end_of_last_line(descriptor: int, step: int = 1 << 16) -> int:
    stop = os.fstat(descriptor).st_size
    while stop > 0:
        start = max(0, stop - step)
        found = os.pread(descriptor, stop - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        stop = start
    return 0


def sync(path: str | Path) -> None:
    """Wait until a file's contents, or a directory's names, are on the disk.

    Includes what this host stored through a mapping; other hosts that wrote to the file must do the same for theirs.
    File systems that cannot flush directories are accepted as they are.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC or not Path(path).is_dir():
            raise
    finally:
        os.close(descriptor)


def replace_directory(new: Path, target: Path) -> None:
    """Move directory `new`, complete and flushed, to `target`, and remove what was there. Raises OSError.

    Both have the same parent. A kill between the two renames leaves no `target`, and the old one beside it as
    `<target>.replaced`: never a mixture.
    """
    replaced = replaced_by(target)
    if target.exists():
        target.rename(replaced)
    new.rename(target)
    sync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def recover_directory(target: Path) -> None:
    """Undo a `replace_directory` that a kill interrupted, or finish its removal. Raises OSError."""
    replaced = replaced_by(target)
    if replaced.exists() and not target.exists():
        replaced.rename(target)
    elif replaced.exists():
        shutil.rmtree(replaced)


def replaced_by(target: Path) -> Path:
    """Return where an old directory is while a new one takes its place."""
    return target.with_name(f"{target.name}.replaced")

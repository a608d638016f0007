"""Writing that survives a kill, a power cut and a full disk, and errors that name the file.

    # Convert errors about the file to a FileError.
    with naming("reading the settings", path, "Write them again"):
        settings = json.loads(path.read_text())
    # The file has the old contents or the new ones, which are on the disk on return.
    write_text(path, text)

A directory is written under a temporary name, with every file flushed, and moved into place by
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

_DAMAGE = (
    EOFError,
    struct.error,
    ValueError,
    pickle.PickleError,
    zipfile.BadZipFile,
    zlib.error,
    RecursionError,
)
"""Errors of readers about contents. ValueError includes JSON, UTF-8 and a NUL in a path."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.EOPNOTSUPP)


@contextmanager
def naming(doing: str, path: str | Path, remedy: str | None = None) -> Iterator[None]:
    """Convert errors about a file to a FileError: "<doing> <path>: <problem>. <remedy>".

    Args:
        doing: the operation, e.g. "writing the checkpoint".
        path: the file or directory.
        remedy: advice for damaged contents, for a block that reads a file. Without it, only errors
            of the file system are converted: a writer's contents come from memory, and an error
            there (CUDA out of memory in torch.save) is not about the file.

    Raises:
        FileError: the original error is its cause. If an OSError caused the original error, the
            message reports the OSError: for a full disk, torch.save to a file that Python opened
            reports "[enforce fail at inline_container.cc] unexpected pos".

    Errors of this project pass unchanged, and so do errors that are not about files (KeyError,
    TypeError, KeyboardInterrupt).
    """
    try:
        yield
    except HybridEngineError:
        raise
    except (OSError, RuntimeError, *_DAMAGE) as error:
        system_error = system_error_behind(error)
        if system_error is not None:
            problem = _system_problem(system_error, Path(path))
        elif remedy is None:
            raise
        else:
            kind = "damaged or cut short" if isinstance(error, _DAMAGE) else "not usable"
            first_line = str(error).splitlines()[:1]
            reason = ": ".join([type(error).__name__, *first_line])
            problem = f"{kind} ({reason[:200]}). {remedy}"
        raise FileError(f"{doing} {path}: {problem}", code="file-failed") from error


def is_disk_full(error: FileError) -> bool:
    """Return whether the error is a lack of space, a quota or a limit on file sizes.

    Such a write may succeed later.
    """
    system_error = system_error_behind(error.__cause__)
    return system_error is not None and system_error.errno in (*_FULL, errno.EFBIG)


def system_error_behind(error: BaseException | None) -> OSError | None:
    """Return the nearest OSError in a chain of errors."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        seen.add(id(error))
        # Follow the chain that a traceback shows.
        error = error.__cause__ if error.__suppress_context__ else error.__context__
    return None


def _system_problem(error: OSError, path: Path) -> str:
    assert error.errno is not None, "see system_error_behind"
    text = os.strerror(error.errno)
    problem = text[0].lower() + text[1:]
    remedy = "Check the path, and what its file system allows"
    if error.errno in _FULL:
        problem += f" ({_free_space(path)})"
        remedy = "Free some space there"
    if error.filename is not None:
        filename = os.fsdecode(error.filename)
        if Path(filename) != path:
            problem += f" ({filename})"
    return f"{problem}. {remedy}"


def _free_space(path: Path) -> str:
    """Describe the free space on the file system of `path`, which need not exist."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    stats = os.statvfs(place)
    while not place.is_mount() and place != place.parent:
        place = place.parent
    nbytes = stats.f_bavail * stats.f_frsize
    return f"{nbytes / 1e6:,.1f} MB free on {place}"


def write_text(path: str | Path, text: str) -> None:
    """Write text as UTF-8 with `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, contents: bytes) -> None:
    """Write a file atomically: it has the old contents or the new ones at any time.

    The contents are on the disk on return. A failure leaves no temporary file. A kill may leave
    `<name>.incomplete`, which the next call overwrites.

    Raises:
        FileError: the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.incomplete")
    with naming("writing", path):
        try:
            # Create a new file: an old link could lead to a file of another user.
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:
                file.write(contents)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            # Report the first error, not a failure to clean up.
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


def append_text(path: str | Path, text: str) -> None:
    """Append whole lines to a file, all of them or none.

    A last line that a kill truncated is removed first, with a warning. If it is complete JSON and
    lacks only its newline, the newline is added. The lines are not flushed to the disk: a power cut
    may lose the newest.

    Raises:
        FileError: the file cannot be written.
    """
    path = Path(path)
    with naming("appending to", path), path.open("ab+", buffering=0) as file:
        descriptor = file.fileno()
        end = _end_of_last_line(descriptor)
        size = os.fstat(descriptor).st_size
        if _is_whole(os.pread(descriptor, size - end, end)):
            end = size
            text = "\n" + text
        elif size > end:
            logger.warning("%s: removed the last %d bytes of a truncated line", path, size - end)
            os.ftruncate(descriptor, end)
        try:
            # A failure cuts the file at `end`: behind the whole line, or
            # where the truncated one began.
            rest = memoryview(text.encode())
            while rest:
                # A write may accept only a part of the bytes.
                num_written = os.write(descriptor, rest)
                rest = rest[num_written:]
        except BaseException:
            os.ftruncate(descriptor, end)
            raise


def _is_whole(line: bytes) -> bool:
    """Return whether a line is a complete JSON object or array.

    Other JSON may be part of a longer value, as 1 is of 12.
    """
    try:
        return isinstance(json.loads(line), dict | list)
    except (ValueError, RecursionError):
        return False


def _end_of_last_line(descriptor: int, step: int = 1 << 16) -> int:
    """Return the position after the last newline of a file, reading `step` bytes at a time."""
    stop = os.fstat(descriptor).st_size
    while stop > 0:
        start = max(0, stop - step)
        newline = os.pread(descriptor, stop - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        stop = start
    return 0


def sync(path: str | Path) -> None:
    """Wait until the contents of a file, or the names in a directory, are on the disk.

    This includes bytes that this host stored through a mapping. Other hosts that wrote to the file
    have to call it as well. File systems that cannot flush directories are accepted.
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
    """Move a complete and flushed directory to `target`, and remove the old `target`.

    Both have the same parent. A kill between the two renames leaves the old directory as
    `<target>.replaced` and no `target`, but never a mixture.

    Raises:
        OSError: a directory cannot be moved or removed.
    """
    if target.exists():
        target.rename(replaced_path(target))
    new.rename(target)
    sync(target.parent)
    recover_directory(target)


def recover_directory(target: Path) -> None:
    """Undo a `replace_directory` that a kill interrupted, or complete its removal of the old one.

    Raises:
        OSError: a directory cannot be moved or removed.
    """
    replaced = replaced_path(target)
    if not replaced.exists():
        return
    if target.exists():
        shutil.rmtree(replaced)
    else:
        replaced.rename(target)


def replaced_path(target: Path) -> Path:
    """Return the temporary path of an old directory during its replacement."""
    return target.with_name(f"{target.name}.replaced")

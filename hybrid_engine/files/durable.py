"""Files that survive a kill, a power cut and a full disk, or whose error says why they do not.

    with naming("reading the settings", path, "Write them again"):  # what is wrong with the file becomes a FileError
        settings = json.loads(path.read_text())
    write_text(path, text)                          # the old contents or the new ones, on the disk when it returns

A directory of several files is written under another name, file by file flushed, and put in place by
`replace_directory`; readers call `current_directory` first, writers `recover_directory`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import pickle
import resource
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from hybrid_engine.errors import FileError, HybridEngineError

logger = logging.getLogger(__name__)

_DAMAGE = (EOFError, struct.error, ValueError, pickle.PickleError, zipfile.BadZipFile, zlib.error, RecursionError)
"""What readers raise about contents; JSON, UTF-8 and a NUL in a path raise ValueError too."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    errno.ENOSPC: "Free some space there, or use another disk",
    errno.EDQUOT: "Free some space there, or ask for a larger quota",
    errno.EFBIG: "Raise the limit with `ulimit -f`",
    errno.EMFILE: "Raise the limit with `ulimit -n`",
    errno.EROFS: "Name a place that is not mounted read-only",
    errno.EACCES: "Name another path, or give this user the right to it",
    errno.EPERM: "Name another path, or give this user the right to it",
    errno.ENAMETOOLONG: "Use a shorter name",
    errno.ENOENT: "Check the path",
    errno.ENOTDIR: "A part of the path is a file: name another path",
    errno.EISDIR: "It is a directory: name a file",
    errno.EIO: "The disk is failing: look into the kernel's log",
    errno.ESTALE: "The network file system lost the file: mount it again",
}
_LIMITS = {errno.EFBIG: resource.RLIMIT_FSIZE, errno.EMFILE: resource.RLIMIT_NOFILE}

_CHUNK_NBYTES = 1 << 22  # read at once
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
"""renameat2 where the kernel or the file system cannot exchange: NFS and Lustre among them."""
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.EOPNOTSUPP)


@contextmanager
def naming(doing: str, path: str | Path, remedy: str | None = None) -> Iterator[None]:
    """Turn errors about a file into a FileError: "<doing> <path>: <problem>. <remedy>".

    Args:
        doing: e.g. "writing the checkpoint".
        path: of the file or directory.
        remedy: for damaged contents, where a file is read; the operating system's errors have remedies of their own.
            Without one, errors that are not about the file system pass: a writer's contents come from memory, and an
            error there (CUDA out of memory in torch.save) is not about the file.

    The original error is the cause. If it was caused by an OSError, that one is reported: torch.save to a file that
    Python opened reports a full disk as "[enforce fail at inline_container.cc] unexpected pos". Errors of this project
    pass unchanged, and so do those that are not about files (KeyError, TypeError, KeyboardInterrupt).
    """
    try:
        yield
    except HybridEngineError:
        raise
    except (OSError, RuntimeError, *_DAMAGE) as error:
        if (problem := _problem(error, Path(path), remedy)) is None:
            raise
        raise FileError(f"{doing} {path}: {problem}".replace("\0", "\\0")) from error


def _problem(error: Exception, path: Path, remedy: str | None) -> str | None:
    """Return problem and remedy; None if the error is not about the file."""
    if (system := _system_error_behind(error)) is not None:
        return _system_problem(system, path)
    if "\0" in str(path):
        return "a path cannot contain a NUL. Name another path"
    if remedy is None and not isinstance(error, OSError):
        return None
    reason = (str(error).splitlines() or [""])[0][:200]
    kind = "damaged or cut short" if isinstance(error, _DAMAGE) else "not usable"
    return f"{kind} ({type(error).__name__}{': ' * bool(reason)}{reason}). {remedy or 'Name another path'}"


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
    code = error.errno
    assert code is not None, "see _system_error_behind"
    problem = os.strerror(code)
    problem = problem[0].lower() + problem[1:]
    if code in _FULL:
        problem += f" ({_free_space(path)})"
    elif code in _LIMITS:
        problem += f" (limit {resource.getrlimit(_LIMITS[code])[0]:,})"
    if error.filename is not None and Path(os.fsdecode(error.filename)) != path:
        problem += f" ({os.fsdecode(error.filename)})"
    return f"{problem}. {_REMEDIES.get(code, 'Name another path')}"


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


class _Readable(Protocol):
    """A binary file, as `open` returns it."""

    def readinto(self, buffer: memoryview, /) -> int: ...


def crc32_of(file: _Readable, start: int = 0) -> tuple[int, int]:
    """Return the CRC-32 of the rest of a file, continuing from `start`, and the number of its bytes."""
    crc32, nbytes = start, 0
    chunk = memoryview(bytearray(_CHUNK_NBYTES))
    while count := file.readinto(chunk):
        crc32 = zlib.crc32(chunk[:count], crc32)
        nbytes += count
    return crc32, nbytes


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


def reserve(descriptor: int, nbytes: int) -> None:
    """Make a file `nbytes` long with all of its space allocated, or raise OSError with the file as it was.

    A full disk is thus reported before the file is filled. Where the file system cannot allocate, the C library writes
    to every block instead. Without effect on file systems that never overwrite in place (ZFS, compressed btrfs),
    which may need space again.
    """
    before = os.fstat(descriptor).st_size
    try:
        if nbytes > 0:
            os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.ftruncate(descriptor, before)
        raise


def replace_directory(new: str | Path, target: str | Path, last: str | None = None) -> None:
    """Move directory `new`, complete and flushed, to `target`, and remove what was there. Raises OSError.

    `last` as in `remove_directory`. Both have the same parent directory. Atomic where kernel and file system can
    exchange two names; elsewhere (NFS, Lustre) the old directory is called `<target>.replaced` between two renames,
    where `current_directory` finds it.
    """
    new, target = Path(new), Path(target)
    if not target.exists():
        _rename(new, target)
    elif _exchange(new, target):
        remove_directory(new, last)
    else:
        replaced = _replaced(target)
        _rename(target, replaced)
        _rename(new, target)
        _remove_replaced(replaced, last)


def current_directory(target: str | Path) -> Path:
    """Return where the directory last moved to `target` is: there, or beside it after a kill between two renames."""
    target = Path(target)
    replaced = _replaced(target)
    return replaced if replaced.exists() and not target.exists() else target


def leftovers(target: str | Path) -> list[Path]:
    """Return what a killed `replace_directory` left beside `target`; `recover_directory` removes it."""
    replaced = _replaced(Path(target))
    return [path for path in (replaced, _removed(replaced)) if path.exists()]


def recover_directory(target: str | Path, last: str | None = None) -> None:
    """Before the next write: undo a `replace_directory` that a kill interrupted, or finish its removal.

    `last` as in `remove_directory`. Raises OSError.
    """
    target = Path(target)
    replaced = _replaced(target)
    if replaced.exists():
        if target.exists():
            _remove_replaced(replaced, last)
        else:
            _rename(replaced, target)
    remove_directory(_removed(replaced), last)


def remove_directory(directory: Path, last: str | None = None) -> None:
    """Remove a directory of files alone, if there is one. Raises OSError, with directories in it untouched.

    `last`: the name of the file that says what the others are; a kill leaves it as long as any of them is there.
    """
    if not directory.exists():
        return
    for path in sorted(directory.iterdir(), key=lambda path: path.name == last):
        path.unlink()
    directory.rmdir()


def _replaced(target: Path) -> Path:
    return target.with_name(f"{target.name}.replaced")


def _removed(replaced: Path) -> Path:
    return replaced.with_name(f"{replaced.name}.removed")


def _remove_replaced(replaced: Path, last: str | None) -> None:
    """Remove it under another name, since what is called .replaced must be complete."""
    removed = _removed(replaced)
    remove_directory(removed, last)
    _rename(replaced, removed)
    remove_directory(removed, last)


def _rename(source: Path, target: Path) -> None:
    source.rename(target)
    sync(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically; return False where the system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    at_cwd = -100
    if library.renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        sync(second.parent)
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(second))

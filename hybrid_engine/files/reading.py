"""Reading of files from untrusted sources: opened once, regular, and of bounded size.

with open_regular(path) as file: ...    rejects pipes, devices and directories without waiting
read_regular(path, most_nbytes)         the whole file; ValueError if it is larger
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_regular(path: str | Path, *, follow_links: bool = True) -> Iterator[BinaryIO]:
    """Open a regular file for reading.

    The check examines the open file, so the file cannot be replaced between check and read.

    Args:
        path: path of the file.
        follow_links: True if `path` may be a symbolic link. Links among its directories are always
            followed.

    Raises:
        OSError: as `open`.
        ValueError: the path is not a regular file.
    """
    # O_NONBLOCK: opening a pipe would wait for a writer, and reading /proc/kmsg for the next
    # message of the kernel.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if not follow_links:
        # Only for a clear message. O_NOFOLLOW catches a link that appears afterwards.
        if os.path.islink(path):
            raise ValueError("it is a symbolic link, not a regular file")
        flags |= os.O_NOFOLLOW
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_regular(path: str | Path, most_nbytes: int, *, follow_links: bool = True) -> bytes:
    """Return the contents of a regular file.

    Raises:
        OSError: as `open`.
        ValueError: the path is not a regular file, or is larger than `most_nbytes`.
    """
    with open_regular(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most_nbytes:
            # `read` allocates the number of bytes it is called with. Call it with the limit only if
            # the reported size is too small: for a growing file, or a file of /proc. It returns
            # None if there is nothing to read yet, as in /proc/kmsg.
            contents = file.read(size + 1) or b""
            if len(contents) > size:
                contents += file.read(most_nbytes + 1 - len(contents)) or b""
            if len(contents) <= most_nbytes:
                return contents
    raise ValueError(f"it is larger than {most_nbytes} bytes")

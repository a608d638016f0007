"""Reading files that somebody else may have put there: opened once, regular, and no larger than expected.

with open_regular(path) as file: ...    pipes, devices and directories are refused, and never waited for
read_regular(path, most_nbytes)         the whole file, or ValueError where it is larger
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

    What is looked at is the open file, so nothing can take its place between the look and the read.

    Args:
        path: of the file.
        follow_links: whether `path` may be a symbolic link. Links among its directories are followed in any case.

    Raises OSError as `open`, and ValueError for what is not a regular file.
    """
    # O_NONBLOCK: opening a pipe would wait for a writer, and reading /proc/kmsg for the next message of the kernel
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    if not follow_links and os.path.islink(path):
        raise ValueError("it is a symbolic link, not a regular file")
    descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_regular(path: str | Path, most_nbytes: int, *, follow_links: bool = True) -> bytes:
    """Return the contents of a regular file.

    Raises OSError, and ValueError for what is not a regular file or is larger than `most_nbytes`.
    """
    with open_regular(path, follow_links=follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most_nbytes:
            # read() allocates what it is asked for, so it is asked for the limit only where the size is not the truth:
            # the file grows, or is one of /proc, and None where nothing is there yet, as in /proc/kmsg
            contents = file.read(size + 1) or b""
            if len(contents) > size:
                contents += file.read(most_nbytes + 1 - len(contents)) or b""
            if len(contents) <= most_nbytes:
                return contents
    raise ValueError(f"it is larger than {most_nbytes} bytes")

"""Places where writing soon fails: small file systems, and a limit on the size of files."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """What `ulimit -f` does; Python ignores its signal, so writes fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def mounted_disk(place: Path, mebibytes: int) -> Iterator[Path]:
    """A file system of that size at `place`; skips the test where mounting is refused."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(place)]
    try:
        result = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if result.returncode != 0:
        pytest.skip(f"mounting is refused here: {result.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # a rank that hangs has files there

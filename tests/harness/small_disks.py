"""Limits that make writes fail: small file systems, and a maximum size of files."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Limit the size of files, as `ulimit -f` does. Python ignores SIGXFSZ, so that writes fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def mounted_disk(path: Path, mebibytes: int) -> Iterator[Path]:
    """Mount a file system of `mebibytes` MiB at `path`; skip the test if that is not permitted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)]
    try:
        result = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("requires the command mount")
    if result.returncode != 0:
        pytest.skip(f"cannot mount: {result.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(
            ["umount", "--lazy", str(path)], check=True
        )  # A hanging rank holds files open.

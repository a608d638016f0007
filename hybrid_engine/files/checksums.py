"""Checksums of a directory's files, in a separate file that is written last.

CRC-32 detects flipped bits and torn writes, not forgery, at 1.9 GB/s on one core (sha256: 0.8).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

from hybrid_engine.errors import FileError
from hybrid_engine.files.durable import naming, write_text
from hybrid_engine.files.model_files import is_plain_name
from hybrid_engine.files.reading import open_regular, read_regular

CHECKSUMS = "checksums.json"
"""{file name: CRC-32 in hex}"""

_CHUNK_NBYTES = 1 << 22
_MAX_NBYTES = 1 << 26
"""Limit of the file of checksums. Those of 10,000 ranks take 400 kB."""


def checksum_of(path: Path) -> str:
    """Return the CRC-32 of a file as 8 hexadecimal digits.

    Raises:
        OSError: as `open`.
        ValueError: the path is a link, a pipe or a device.
    """
    crc32 = 0
    with open_regular(path, follow_links=False) as file:
        while chunk := file.read(_CHUNK_NBYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return f"{crc32:08x}"


def write_checksums(directory: Path, checksums: Mapping[str, str]) -> None:
    """Write the checksums of a directory's files, by name.

    Raises:
        FileError: the file cannot be written.
    """
    by_name = dict(sorted(checksums.items()))
    write_text(directory / CHECKSUMS, json.dumps(by_name, indent=2) + "\n")


def read_checksums(directory: Path, remedy: str, *, follow_links: bool = False) -> dict[str, str]:
    """Return the checksums of a directory's files, by name.

    Args:
        directory: the directory.
        remedy: advice for the error's message.
        follow_links: True if the file of checksums may be a link, as all files in the Hub's cache
            are.

    Raises:
        FileError: the file cannot be read or is invalid.
    """
    path = directory / CHECKSUMS
    with naming("reading", path, remedy):
        checksums = json.loads(read_regular(path, _MAX_NBYTES, follow_links=follow_links))
        if not isinstance(checksums, dict) or not all(
            isinstance(value, str) for value in checksums.values()
        ):
            raise ValueError("it has no checksums by name")
        for name in checksums:
            # A name with a directory could make the engine read any file.
            if not is_plain_name(name):
                raise ValueError(f"{name!r} is not a file beside it")
    return checksums


def require_as_written(path: Path, expected: str, remedy: str) -> None:
    """Verify the contents of a file.

    Raises:
        FileError: the file cannot be read or has another checksum.
    """
    with naming("verifying", path, remedy):
        checksum = checksum_of(path)
        if checksum != expected:
            raise FileError(
                f"verifying {path}: checksum {checksum}, expected {expected}: "
                f"it changed since it was saved. {remedy}",
                code="different-checksum",
            )

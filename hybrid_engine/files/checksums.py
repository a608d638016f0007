"""The checksums of a directory's files, in a file of their own beside them that is written last.

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
_MOST_NBYTES = 1 << 26
"""Of the file of checksums: those of 10,000 ranks take 400 kB."""


def checksum_of(path: Path) -> str:
    """Checksum of a file as it is now. Raises OSError, and ValueError for a link, a pipe or a device."""
    crc32 = 0
    with open_regular(path, follow_links=False) as file:
        while chunk := file.read(_CHUNK_NBYTES):
            crc32 = zlib.crc32(chunk, crc32)
    return f"{crc32:08x}"


def write_checksums(directory: Path, checksums: Mapping[str, str]) -> None:
    """Write those of a directory's files, by name. Raises FileError."""
    write_text(directory / CHECKSUMS, json.dumps(dict(sorted(checksums.items())), indent=2) + "\n")


def read_checksums(directory: Path, remedy: str, *, follow_links: bool = False) -> dict[str, str]:
    """Return the checksums by file name. Raises FileError.

    `follow_links`: whether the file of checksums may be a link, as all files are in the Hub's cache.
    """
    path = directory / CHECKSUMS
    with naming("reading", path, remedy):
        found = json.loads(read_regular(path, _MOST_NBYTES, follow_links=follow_links))
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise ValueError("it has no checksums by name")
        if outside := [name for name in found if not is_plain_name(name)]:
            raise ValueError(f"{outside[0]!r} is not a file beside it")
    return found


def require_as_written(path: Path, expected: str, remedy: str) -> None:
    """Raise FileError, naming the file, unless its contents have this checksum."""
    with naming("verifying", path, remedy):
        if (found := checksum_of(path)) != expected:
            raise FileError(
                f"verifying {path}: checksum {found}, expected {expected}: it changed since it was saved. {remedy}"
            )

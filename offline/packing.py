"""Everything as files of a known size and hash, in folders that are small enough to be carried one by one.

    DIRECTORY/1/manifest.json, run.py, files      a folder has the manifest of all
    DIRECTORY/2/manifest.json, run.py, files

A file that is larger than a folder may be is cut into parts.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

FOLDER_NBYTES = 56 * 2**20
"""With this checkout, of which a copy may travel along, no more than 64 MiB."""
_KEPT_FREE = 2**19
"""Bytes of a folder for the manifest and run.py."""
_PRESET = 3
"""Of xz: 6 takes twice the time and saves a twentieth."""

Kind = Literal["wheel", "tar.xz", "xz"]


@dataclass(frozen=True)
class Item:
    """Something to unpack.

    Attributes:
        name: of its file.
        kind: a wheel or a compressed archive, unpacked below `place`; or one compressed file, which becomes `place`.
        place: below the folder that it is unpacked to.
        stage: the first that needs it.
        contents: of its file.
    """

    name: str
    kind: Kind
    place: str
    stage: int
    contents: bytes


@dataclass(frozen=True)
class Part:
    """A piece of an item's file: where it is, and what it must be."""

    folder: int
    file: str
    nbytes: int
    sha256: str


def archive(name: str, place: str, stage: int, files: Iterable[tuple[str, bytes]]) -> Item:
    """The same bytes for the same files."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path, contents in files:
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(contents), 0o644
            tar.addfile(info, io.BytesIO(contents))
    return Item(name, "tar.xz", place, stage, lzma.compress(stream.getvalue(), preset=_PRESET))


def compressed(name: str, place: str, stage: int, contents: bytes) -> Item:
    """One file."""
    return Item(name, "xz", place, stage, lzma.compress(contents, preset=_PRESET))


def write_folders(
    directory: Path, items: Sequence[Item], facts: dict[str, Any], run: Path, limit: int = FOLDER_NBYTES
) -> list[int]:
    """Write the folders 1, 2, … below `directory`; returns their sizes in bytes.

    Items go where there is room first, those of the first stage before all others.

    Args:
        directory: is made; what an earlier bundle left in it is removed.
        items: names differ.
        facts: for the manifest.
        run: the script that goes along.
        limit: bytes of a folder.
    """
    for old in directory.glob("[0-9]*"):
        if (old / "manifest.json").is_file():
            shutil.rmtree(old)
    room: list[int] = []
    listed = []
    for item in sorted(items, key=lambda item: item.stage):
        parts = []
        for number, contents in enumerate(_pieces(item.contents, limit - _KEPT_FREE)):
            folder = next((index for index, left in enumerate(room) if left >= len(contents)), len(room))
            if folder == len(room):
                room.append(limit - _KEPT_FREE)
            room[folder] -= len(contents)
            file = item.name if len(contents) == len(item.contents) else f"{item.name}.{number:03}"
            path = directory / str(folder + 1) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
            parts.append(Part(folder + 1, file, len(contents), hashlib.sha256(contents).hexdigest()))
        listed.append(
            {
                "name": item.name,
                "kind": item.kind,
                "place": item.place,
                "stage": item.stage,
                "parts": list(map(asdict, parts)),
            }
        )
    manifest = json.dumps({**facts, "num_folders": len(room), "items": listed}, indent=1)
    sizes = []
    for folder in range(1, len(room) + 1):
        own = directory / str(folder)
        (own / "manifest.json").write_text(manifest)
        shutil.copyfile(run, own / run.name)
        sizes.append(sum(path.stat().st_size for path in own.iterdir()))
        if sizes[-1] > limit:
            raise ValueError(f"{own} has {sizes[-1]} bytes, more than {limit}: the manifest is larger than expected")
    return sizes


def _pieces(contents: bytes, largest: int) -> list[bytes]:
    return [contents[start : start + largest] for start in range(0, len(contents), largest)] or [b""]

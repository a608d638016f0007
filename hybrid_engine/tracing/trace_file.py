"""A file of Chrome's trace events, which Perfetto opens: one JSON array, whose end is overwritten by what is added.

(docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, "Trace Event Format".) It is valid JSON
whenever nothing is being written; readers of the format accept an array without its end, too, so a kill costs nothing
that was there. A file that has grown to its bound becomes FILE.1, in place of the one before, and so does a trace that
is there at the start. What does not begin as ours do is neither moved nor replaced.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybrid_engine.tracing.recording import Event

MOST_NBYTES = 64 * 1024**2
"""Of the file; FILE.1 has at most as much, and one switch more."""

_START, _END = b"[", b"\n]\n"
FIRST: dict[str, Any] = {"ph": "M", "name": "process_name", "pid": 0}
"""Beginning of the first event of a header, by which a trace is known as ours."""


class TraceFile:
    """Appends events.

    Args:
        path: of the file.
        header: events that every file begins with, the first as `FIRST` does.
        most_nbytes: of a file.

    Raises OSError, here and when it is written.
    """

    def __init__(self, path: Path, header: Iterable[Event], most_nbytes: int = MOST_NBYTES) -> None:
        self.path, self._header, self._most_nbytes = path, list(header), most_nbytes
        if path.exists() and not (path.is_file() and path.stat().st_size == 0):
            self._put_aside()
        self._begin()

    def append(self, events: Iterable[Event]) -> None:
        """Add events; they are in the file when this returns."""
        if self.path.stat().st_size >= self._most_nbytes:
            self._put_aside()
            self._begin()
        if lines := _lines(events):
            with self.path.open("r+b") as file:
                file.seek(-len(_END), os.SEEK_END)
                file.write(b"," + lines + _END)

    def _begin(self) -> None:
        self.path.write_bytes(_START + _lines(self._header) + _END)

    def _put_aside(self) -> None:
        aside = self.path.with_name(f"{self.path.name}.1")
        for path in (self.path, aside):
            if path.exists() and not _is_ours(path):
                raise FileExistsError(errno.EEXIST, f"{path.name} is there, and is not a trace of ours", str(path))
        self.path.replace(aside)


def _lines(events: Iterable[Event]) -> bytes:
    return ",".join("\n" + json.dumps(event, separators=(",", ":")) for event in events).encode()


def _is_ours(path: Path) -> bool:
    begin = _START + _lines([FIRST]).removesuffix(b"}")
    if not path.is_file():  # a pipe, say, which would be waited for
        return False
    with path.open("rb") as file:
        return file.read(len(begin)) == begin

"""How far the reading of weights has come: a bar on a terminal, lines of the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("hybrid_engine")

SECONDS_BETWEEN_LINES = 30.0

Advance = Callable[[int], None]
"""Called with the bytes that were read since the last call."""


@contextmanager
def progress(what: str, nbytes: int, *, is_shown: bool) -> Iterator[Advance]:
    """Show how many of `nbytes` are read; nothing unless `is_shown`, for one rank of many.

    The bar is on stderr, and goes at the end of the block.
    """
    if not is_shown:
        yield lambda _: None
    elif sys.stderr.isatty():
        with _bar(what, nbytes) as advance:
            yield advance
    else:
        with _lines(what, nbytes) as advance:
            yield advance


@contextmanager
def _bar(what: str, nbytes: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as shown:
        task = shown.add_task(what, total=nbytes)
        yield lambda count: shown.advance(task, count)


@contextmanager
def _lines(what: str, nbytes: int) -> Iterator[Advance]:
    start = last = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            logger.info("%s: %.1f of %.1f GB", what, done / 1e9, nbytes / 1e9)

    logger.info("%s: %.1f GB on this rank", what, nbytes / 1e9)
    yield advance
    logger.info("%s: done in %.1f s", what, time.monotonic() - start)

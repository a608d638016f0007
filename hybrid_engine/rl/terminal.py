"""Terminal of a run, on rank 0: lines, a table that grows by a line per step, and a progress bar.

      step  reward  length  logp diff  switch s  seconds     left
      3/20  0.0469    30.6    2.1e-06     1.230     74.2  0:20:58

The bar is below the lines, if stdout is a terminal. Elsewhere lines say what the run does, until
the row of a step that is done shows how far it is; that of an evaluation before step 1 does not.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import rich.console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        heading: its heading.
        name: name of the figure in a row; a dash stands for one that is missing.
        style: format specification.
        width: width in characters.
        factor: factor of the figure; 1 for a text.
    """

    heading: str
    name: str
    style: str
    width: int
    factor: float = 1

    def text(self, row: Mapping[str, Any]) -> str:
        """Return the cell of a row."""
        value = row.get(self.name)
        text = "-" if value is None else format(value * self.factor, self.style)
        return f"{text:>{self.width}}"


class SteadyConsole(rich.console.Console):
    """A console that never hides the cursor, which a killed process could not restore."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        return False


class Terminal:
    """Lines, table and bar of a run. The bar is shown within its context.

    Args:
        columns: columns of the table.
        console: default: stdout, and what the program prints meanwhile comes above the bar.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        console: rich.console.Console | None = None,
    ) -> None:
        self._columns = columns
        self._console = console or SteadyConsole()
        self._has_rows = False
        self._next_line = 0.0
        is_stdout = console is None
        self._bar = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=self._console.quiet or not self._console.is_terminal,
            redirect_stdout=is_stdout,
            redirect_stderr=is_stdout,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def print(self, content: Any) -> None:
        """Print a text as it is, or what rich can print."""
        is_text = isinstance(content, str)
        self._console.print(content, highlight=False, soft_wrap=is_text, markup=False)

    def begins(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Show on the bar what the run does, of which `done` of `total` parts are complete."""
        self._bar.update(self._task, description=what, completed=done, total=total)
        if not (
            self._console.is_terminal
            or (done and self._has_rows)
            or time.monotonic() < self._next_line
        ):
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            self.print(f"{what} ...")

    def add(self, row: Mapping[str, Any], more: str = "") -> None:
        """Print a line of the table, below the headings if it is the first, and `more` after it."""
        if not self._has_rows:
            self.print("  ".join(f"{column.heading:>{column.width}}" for column in self._columns))
        self._has_rows = True
        self.print("  ".join(column.text(row) for column in self._columns) + more)


def _leave_the_bar() -> None:
    """Let a forked child print directly: the bar's lock may be held by a thread that it lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        setattr(sys, name, getattr(stream, "rich_proxied_file", stream))


os.register_at_fork(after_in_child=_leave_the_bar)

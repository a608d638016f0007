"""What rank 0 shows and writes: the bar and rows on the terminal, metrics.jsonl, the final summary."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.gpt_rl.curves import plot
from examples.gpt_rl.loggers import Logger
from examples.gpt_rl.run_state import Row, RunDirectory
from hybrid_engine.files.durable import naming


class Column(NamedTuple):
    """How a row shows one of its values. `rank`: on a narrow terminal the columns of highest rank are left out."""

    heading: str
    width: int
    key: str
    style: str
    rank: int = 0


_COLUMNS: tuple[Column, ...] = (
    Column("iter", 4, "iteration", "d"),
    Column("reward", 6, "reward", ".3f"),
    Column("kl", 6, "kl", ".3f"),
    Column("accuracy", 8, "accuracy", ".3f"),
    Column("loss", 7, "loss", ".3f", rank=1),
    Column("logp diff", 9, "logprob_diff", ".1e", rank=2),
    Column("reshard s", 9, "reshard_seconds", ".3f"),
    Column("share", 6, "reshard_share", ".1%", rank=3),
    Column("MB recv", 8, "bytes_received", "MB"),
    Column("MB least", 8, "bytes_least", "MB", rank=5),
    Column("peak MB", 8, "peak_bytes", "MB", rank=4),
    Column("seconds", 7, "iteration_seconds", ".1f"),
)
_GAP = "  "
_WIDTH_OF_A_FILE = 100
_SECONDS_BETWEEN_LINES = 10.0


class Report:
    """Rank 0's view of a run, as a context manager.

    Args:
        console: where to show; need not be a terminal (then there is no bar, only rows).
        directory: of the run.
        title: of the curves.
    """

    def __init__(self, console: Console, directory: RunDirectory, title: str = "") -> None:
        self.console = console
        self.directory = directory
        self.title = title
        self._loggers: Sequence[Logger] = ()
        self.columns = columns_for(console.width if console.is_terminal else _WIDTH_OF_A_FILE)
        self.progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TextColumn("{task.fields[count]:>9}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,  # rank 0 has other things to do
            disable=not console.is_terminal,
            # the streams go to the log by then, and rich would bring them back to the terminal
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None
        self._next_line = 0.0
        self._is_headed = False

    def __enter__(self) -> Report:
        self.progress.start()
        self._task = self.progress.add_task("starting engines", total=None, count="")
        if not self.console.is_terminal:
            self._say("starting engines ...")
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()
        for logger in self._loggers:
            logger.close()

    def show_progress(self, what: str, done: int, total: int) -> None:
        """Move the bar; where there is none, say so now and then, until the first row is there."""
        assert self._task is not None
        self.progress.update(self._task, description=what, completed=done, total=total, count=f"{done}/{total}")
        if not self.console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            self._say(f"{what}, {done}/{total}")

    def begin(self, rows: Sequence[Row], loggers: Sequence[Logger] = ()) -> None:
        """The engines are ready: show the rows that an earlier start of this run has written.

        `loggers` are told of each row from now on, and closed with this.
        """
        self._loggers = loggers
        for row in rows:
            self._show(row, style="dim")

    def add(self, row: Row) -> None:
        """An iteration has ended: show and write its row."""
        self.directory.append_row(row)
        self._show(row)
        self._next_line = math.inf
        for logger in self._loggers:
            logger.log(row)

    def finish(self) -> None:
        """Draw reward.png and print the summary of all rows."""
        rows, picture = self.directory.rows(), self.directory.path / "reward.png"
        if not rows:
            return
        with naming("writing", picture):
            plot(rows, picture, self.title)
        self.console.print(summary_table(rows, self.directory.path))

    def _show(self, row: Row, style: str | None = None) -> None:
        """A row, below the headings."""
        if not self._is_headed:
            self._say(header_line(self.columns), style="bold")
            self._is_headed = True
        self._say(row_line(row, self.columns), style)

    def _say(self, line: str, style: str | None = None) -> None:
        self.console.print(line, style=style, highlight=False, soft_wrap=True)


def columns_for(width: int) -> tuple[Column, ...]:
    """Those that fit into so many characters; all that cannot be left out, at least."""
    chosen = _COLUMNS
    while _width_of(chosen) > width and (least := max(column.rank for column in chosen)):
        chosen = tuple(column for column in chosen if column.rank != least)
    return chosen


def header_line(columns: Sequence[Column]) -> str:
    """The headings over the rows."""
    return _GAP.join(f"{column.heading:>{column.width}}" for column in columns)


def row_line(row: Row, columns: Sequence[Column]) -> str:
    """One iteration in fixed columns; what was not measured is a dash."""
    return _GAP.join(f"{_shown(row.get(column.key), column.style):>{column.width}}" for column in columns)


def _width_of(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """What came out of a run: accuracies, their difference, and totals; None for what no row has.

    metrics.jsonl may have lost rows, the first ones too.
    """
    accuracies = _values(rows, "accuracy")
    after_warm_up = rows[0].get("accuracy") if rows[0]["iteration"] == 0 else None
    accuracy = accuracies[-1] if accuracies else None
    total_seconds = sum(_values(rows, "iteration_seconds"))
    reshard_seconds = sum(_values(rows, "reshard_seconds"))
    return {
        "iterations": rows[-1]["iteration"],
        "accuracy_after_warm_up": after_warm_up,
        "accuracy": accuracy,
        "gain": None if after_warm_up is None else accuracy - after_warm_up,
        "reward": rows[-1].get("reward"),
        "kl": rows[-1].get("kl"),
        "seconds": total_seconds,
        "reshard_seconds": reshard_seconds,
        "reshard_share": reshard_seconds / total_seconds if total_seconds else None,
        "bytes_received": sum(_values(rows, "bytes_received")),
        "bytes_least": sum(_values(rows, "bytes_least")),
        "peak_bytes": max(_values(rows, "peak_bytes"), default=None),
        "rss_bytes": max(_values(rows, "rss_bytes"), default=None),
        "logprob_diff": max(_values(rows, "logprob_diff"), default=None),
    }


def _values(rows: Sequence[Row], key: str) -> list[float]:
    """Of the rows that have one."""
    return [row[key] for row in rows if row.get(key) is not None]


def summary_table(rows: Sequence[Row], directory: Path) -> Table:
    """The summary for the terminal."""
    result = summary(rows)
    table = Table(title=f"{result['iterations']} iterations in {result['seconds']:.0f} s", show_header=False)
    lines = {
        "held-out accuracy after warm-up": _shown(result["accuracy_after_warm_up"], ".3f"),
        "held-out accuracy now": f"{_shown(result['accuracy'], '.3f')} ({_shown(result['gain'], '+.3f')})",
        "reward, KL to the reference": f"{_shown(result['reward'], '.3f')}, {_shown(result['kl'], '.3f')}",
        "resharding": f"{result['reshard_seconds']:.2f} s, {_shown(result['reshard_share'], '.1%')} of the time",
        "bytes received / least possible": f"{result['bytes_received']:,} / {result['bytes_least']:,}",
        "peak of weights and training state": f"{_shown(result['peak_bytes'], 'MB')} MB a rank",
        "memory of the largest process": f"{_shown(result['rss_bytes'], 'MB')} MB",
        "largest log-prob difference": f"{_shown(result['logprob_diff'], '.1e')} (vLLM against the trainer)",
        "written to": str(directory),
    }
    for name, value in lines.items():
        table.add_row(name, value)
    return table


def _shown(value: float | None, style: str) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.2f}" if style == "MB" else format(value, style)

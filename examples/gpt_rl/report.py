"""Output of rank 0: terminal, metrics.jsonl, TensorBoard events, reward.png, a summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hybrid_engine.rl.run_files import Row, RunFiles
from hybrid_engine.rl.trackers import Events, SafeTracker

# Heading, key of the row, format, width. A line has at most 80 characters.
_COLUMNS = (
    ("iter", "iteration", "d", 4),
    ("reward", "reward", ".3f", 6),
    ("kl", "kl", ".3f", 6),
    ("accuracy", "accuracy", ".3f", 8),
    ("loss", "loss", ".3f", 6),
    ("logp diff", "logprob_diff", ".1e", 9),
    ("reshard s", "reshard_seconds", ".3f", 9),
    ("MB recv", "bytes_received", "MB", 8),
    ("seconds", "iteration_seconds", ".1f", 7),
)
_HEADINGS = " ".join(f"{heading:>{width}}" for heading, _, _, width in _COLUMNS)
_PHASES = ("generate", "score", "update", "evaluate", "reshard")
_SECONDS_BETWEEN_LINES = 10.0


class Report:
    """Report of a run on rank 0, with a progress bar if `console` is a terminal.

    A context manager.
    """

    def __init__(self, console: Console, files: RunFiles, title: str = "") -> None:
        self._console = console
        self._files = files
        self._title = title
        self._bar = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            # stdout and stderr go to the log by then; rich would redirect them to the terminal
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("starting engines", total=None)
        self._next_line = 0.0
        left_out = ("iteration", "unix_time")
        opening = partial(Events, files.out, {"accuracy": "eval"}, left_out)
        self._events = SafeTracker("tensorboard", opening)

    def __enter__(self) -> Report:
        self._bar.start()
        self.show_progress("starting engines ...")
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()
        self._events.close()

    def show_progress(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Move the bar; without a terminal, print a line every few seconds until the first row."""
        self._bar.update(self._task, description=what, completed=done, total=total)
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            self._print(what if total is None else f"{what}, {done}/{total}")

    def begin(self) -> None:
        """Show the rows of a resumed run so far. Call it when the engines are ready."""
        for number, row in enumerate(self._files.metrics.rows()):
            self._show(row, headed=number == 0)

    def add(self, row: Row) -> None:
        """Write and show the row of an iteration."""
        is_first = not self._files.metrics.rows()
        self._files.metrics.append(row)
        self._show(row, headed=is_first)
        self._next_line = float("inf")
        self._events.add(row["iteration"], row)

    def finish(self) -> None:
        """Draw reward.png and print the summary of all rows."""
        rows = self._files.metrics.rows()
        if not rows:
            return
        plot(rows, self._files.out / "reward.png", self._title)
        figures = summary(rows)
        self._print(
            f"\nheld-out accuracy now {_text(figures['accuracy'], '.3f')}, "
            f"{_text(figures['accuracy_after_warm_up'], '.3f')} after the warm-up\n"
            f"resharding {figures['reshard_seconds']:.2f} s of {figures['seconds']:.0f} s\n"
            f"{figures['bytes_received']:,} bytes received, "
            f"{figures['bytes_least']:,} the least possible\n"
            "largest log-prob difference, vLLM against the trainer: "
            f"{_text(figures['logprob_diff'], '.1e')}\n"
            f"written to {self._files.out}"
        )

    def _show(self, row: Row, headed: bool) -> None:
        if headed:
            self._print(_HEADINGS)
        self._print(row_line(row))

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


def row_line(row: Row) -> str:
    """Format an iteration in fixed columns, with a dash for a missing value."""
    return " ".join(f"{_text(row.get(key), style):>{width}}" for _, key, style, width in _COLUMNS)


def summary(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return the results of a run; None for a value that no row has."""
    return {
        "accuracy_after_warm_up": rows[0].get("accuracy") if rows[0]["iteration"] == 0 else None,
        "accuracy": next(iter(_values(rows[::-1], "accuracy")), None),
        "logprob_diff": max(_values(rows, "logprob_diff"), default=None),
        "seconds": sum(_values(rows, "iteration_seconds")),
        "reshard_seconds": sum(_values(rows, "reshard_seconds")),
        "bytes_received": sum(_values(rows, "bytes_received")),
        "bytes_least": sum(_values(rows, "bytes_least")),
    }


def plot(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Plot accuracy and reward, KL, and the time of each phase over iterations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, middle, bottom) = pyplot.subplots(
        3, 1, figsize=(9, 9), sharex=True, layout="constrained"
    )
    figure.suptitle(title)
    for axes, key, label, colour in (
        (top, "accuracy", "held-out accuracy (greedy)", "tab:blue"),
        (top, "reward", "reward (mean of samples)", "tab:orange"),
        (middle, "kl", "KL to the reference", "tab:green"),
    ):
        points = [(row["iteration"], row[key]) for row in rows if row.get(key) is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, color=colour)
    after_warm_up = summary(rows)["accuracy_after_warm_up"]
    if after_warm_up is not None:
        top.axhline(after_warm_up, color="tab:blue", linestyle=":", label="after warm-up")
    top.set(ylim=(0, 1), ylabel="share right, reward")
    middle.set(ylabel="nats per token")
    timed = [row for row in rows if row["iteration"] > 0]
    seconds = [[row.get(f"{phase}_seconds") or 0.0 for row in timed] for phase in _PHASES]
    bottom.stackplot([row["iteration"] for row in timed], seconds, labels=_PHASES)
    bottom.set(ylabel="seconds per iteration", xlabel="iteration")
    for axes in (top, middle, bottom):  # legends next to the panels hide no data
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _values(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _text(value: float | None, style: str) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.2f}" if style == "MB" else format(value, style)

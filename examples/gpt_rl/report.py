"""What rank 0 shows and writes: terminal, metrics.jsonl, TensorBoard events, reward.png, the final summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.gpt_rl.run_state import Row, RunDirectory
from hybrid_engine.files.durable import naming

# heading, width, how a row shows it
_COLUMNS: tuple[tuple[str, int, str, str], ...] = (
    ("iter", 4, "iteration", "d"),
    ("reward", 6, "reward", ".3f"),
    ("kl", 6, "kl", ".3f"),
    ("accuracy", 8, "accuracy", ".3f"),
    ("loss", 7, "loss", ".3f"),
    ("logp diff", 9, "logprob_diff", ".1e"),
    ("reshard s", 9, "reshard_seconds", ".3f"),
    ("share", 6, "reshard_share", ".1%"),
    ("MB recv", 8, "bytes_received", "MB"),
    ("MB least", 8, "bytes_least", "MB"),
    ("peak MB", 8, "peak_bytes", "MB"),
    ("seconds", 7, "iteration_seconds", ".1f"),
)

_PHASES = ("generate", "score", "update", "evaluate", "reshard")


class Report:
    """Rank 0's view of a run, as a context manager.

    Args:
        console: where to show; need not be a terminal (then there is no bar, only rows).
        directory: of the run.
        num_iterations: at the end of the bar.
    """

    def __init__(self, console: Console, directory: RunDirectory, num_iterations: int) -> None:
        self.console = console
        self.directory = directory
        self.num_iterations = num_iterations
        self.progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,  # rank 0 has other things to do
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._events: Any = None

    def __enter__(self) -> Report:
        self.progress.start()
        self._task = self.progress.add_task("starting engines", total=None)
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()
        if self._events is not None:
            self._events.close()

    def show_progress(self, what: str, done: int, total: int) -> None:
        """Move the bar."""
        assert self._task is not None
        self.progress.update(self._task, description=what, completed=done, total=total)

    def begin(self, rows: Sequence[Row]) -> None:
        """The engines are ready: show the headings and the rows that an earlier start of this run has written."""
        self.console.print(header_line(), style="bold", highlight=False, soft_wrap=True)
        for row in rows:
            self.console.print(row_line(row), style="dim", highlight=False, soft_wrap=True)

    def add(self, row: Row) -> None:
        """An iteration has ended: show and write its row."""
        self.directory.append_row(row)
        self.console.print(row_line(row), highlight=False, soft_wrap=True)
        self._write_events(row)

    def finish(self) -> None:
        """Draw reward.png and print the summary of all rows."""
        rows, picture = self.directory.rows(), self.directory.path / "reward.png"
        if not rows:
            return
        with naming("writing", picture):
            plot(rows, picture)
        self.console.print(summary_table(rows, self.directory.path))

    def _write_events(self, row: Row) -> None:
        with naming("writing TensorBoard events to", self.directory.path):
            if self._events is None:
                from torch.utils.tensorboard import SummaryWriter

                # what an interrupted run wrote for this iteration and later ones is hidden
                self._events = SummaryWriter(str(self.directory.path), purge_step=row["iteration"])
            for name, value in row.items():
                if isinstance(value, int | float) and name != "iteration":
                    self._events.add_scalar(name, value, row["iteration"])
            self._events.flush()


def header_line() -> str:
    """The headings over the rows."""
    return "  ".join(f"{heading:>{width}}" for heading, width, _, _ in _COLUMNS)


def row_line(row: Row) -> str:
    """One iteration in fixed columns; what was not measured is a dash."""
    return "  ".join(f"{_shown(row.get(key), style):>{width}}" for _, width, key, style in _COLUMNS)


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


def plot(rows: Sequence[Row], path: Path) -> None:
    """Over iterations: accuracy and reward; KL; where the time goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(7, 8), sharex=True, layout="constrained")
    _draw(top, rows, "accuracy", "held-out accuracy (greedy)", "tab:blue", marker="o")
    _draw(top, rows, "reward", "reward (mean of samples)", "tab:orange")
    if (after_warm_up := summary(rows)["accuracy_after_warm_up"]) is not None:
        top.axhline(after_warm_up, color="tab:blue", linestyle=":", label="after warm-up")
    top.set_ylim(0, 1)
    top.legend(loc="lower right")
    _draw(middle, rows, "kl", "KL to the reference", "tab:green")
    middle.set_ylabel("nats per token")
    middle.legend(loc="upper left")
    timed = [row for row in rows if row["iteration"] > 0]
    seconds = [[row.get(f"{phase}_seconds") or 0.0 for row in timed] for phase in _PHASES]
    bottom.stackplot([row["iteration"] for row in timed], seconds, labels=_PHASES)
    bottom.set_ylabel("seconds")
    bottom.set_xlabel("iteration")
    bottom.legend(loc="upper left", ncols=len(_PHASES))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(axes: Any, rows: Sequence[Row], key: str, label: str, colour: str, marker: str = "") -> None:
    points = [(row["iteration"], row[key]) for row in rows if row.get(key) is not None]
    axes.plot([x for x, _ in points], [y for _, y in points], label=label, color=colour, marker=marker, markersize=3)


def _shown(value: float | None, style: str) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.2f}" if style == "MB" else format(value, style)

"""Output of rank 0: terminal, metrics.jsonl, TensorBoard events, reward.png, a summary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from hybrid_engine.rl.run_files import Row, RunFiles
from hybrid_engine.rl.terminal import Column, Terminal
from hybrid_engine.rl.trackers import Events, SafeTracker

# A line has at most 80 characters.
_COLUMNS = (
    Column("iter", "iteration", "d", 4),
    Column("reward", "reward", ".3f", 6),
    Column("kl", "kl", ".3f", 6),
    Column("accuracy", "accuracy", ".3f", 8),
    Column("loss", "loss", ".3f", 6),
    Column("logp diff", "logprob_diff", ".1e", 9),
    Column("switch s", "reshard_seconds", ".3f", 8),
    Column("MB", "bytes_received", ".2f", 7, 1e-6),
    Column("seconds", "iteration_seconds", ".1f", 7),
)
_PHASES = ("generate", "score", "update", "evaluate", "reshard")


class Report:
    """Report of a run on rank 0, with a progress bar if `console` is a terminal.

    A context manager.
    """

    def __init__(self, console: Console, files: RunFiles, title: str = "") -> None:
        self._terminal = Terminal(_COLUMNS, console)
        self._files = files
        self._title = title
        left_out = ("iteration", "unix_time")
        opening = partial(Events, files.out, {"accuracy": "eval"}, left_out)
        self._events = SafeTracker("tensorboard", opening)

    def __enter__(self) -> Report:
        self._terminal.__enter__()
        self.show_progress("starting engines")
        return self

    def __exit__(self, *exception: object) -> None:
        self._terminal.__exit__(*exception)
        self._events.close()

    def show_progress(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Move the bar; without a terminal, print a line every few seconds until the first row."""
        self._terminal.begins(what, done, total)

    def begin(self) -> None:
        """Show the rows of a resumed run so far. Call it when the engines are ready."""
        for row in self._files.metrics.rows():
            self._terminal.add(row)

    def add(self, row: Row) -> None:
        """Write and show the row of an iteration."""
        self._files.metrics.append(row)
        self._terminal.add(row)
        self._events.add(row["iteration"], row)

    def finish(self) -> None:
        """Draw reward.png and print the summary of all rows."""
        rows = self._files.metrics.rows()
        if not rows:
            return
        plot(rows, self._files.out / "reward.png", self._title)
        figures = summary(rows)
        self._terminal.print(
            f"\nheld-out accuracy now {_text(figures['accuracy'], '.3f')}, "
            f"{_text(figures['accuracy_after_warm_up'], '.3f')} after the warm-up\n"
            f"resharding {figures['reshard_seconds']:.2f} s of {figures['seconds']:.0f} s\n"
            f"{figures['bytes_received']:,} bytes received, "
            f"{figures['bytes_least']:,} the least possible\n"
            "largest log-prob difference, vLLM against the trainer: "
            f"{_text(figures['logprob_diff'], '.1e')}\n"
            f"written to {self._files.out}"
        )


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
    return "-" if value is None else format(value, style)

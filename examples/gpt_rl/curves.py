"""`reward.png`: the rows of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.gpt_rl.run_state import Row

_PHASES = ("generate", "score", "update", "evaluate", "reshard")


def plot(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Over iterations: accuracy and reward; KL; where the time goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(9, 9), sharex=True, layout="constrained")
    figure.suptitle(title)
    _draw(top, rows, "accuracy", "held-out accuracy (greedy)", "tab:blue", marker="o")
    _draw(top, rows, "reward", "reward (mean of samples)", "tab:orange")
    after_warm_up = rows[0].get("accuracy") if rows[0]["iteration"] == 0 else None
    if after_warm_up is not None:
        top.axhline(after_warm_up, color="tab:blue", linestyle=":", label="after warm-up")
    top.set_ylim(0, 1)
    top.set_ylabel("share right, reward")
    _draw(middle, rows, "kl", "KL to the reference", "tab:green")
    middle.set_ylabel("nats per token")
    timed = [row for row in rows if row["iteration"] > 0]
    seconds = [[row.get(f"{phase}_seconds") or 0.0 for row in timed] for phase in _PHASES]
    bottom.stackplot([row["iteration"] for row in timed], seconds, labels=_PHASES)
    bottom.set_ylabel("seconds per iteration")
    bottom.set_xlabel("iteration")
    for axes in (top, middle, bottom):  # beside the panel: inside, a legend hides data of some run
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw(axes: Any, rows: Sequence[Row], key: str, label: str, colour: str, marker: str = "") -> None:
    points = [(row["iteration"], row[key]) for row in rows if row.get(key) is not None]
    axes.plot([x for x, _ in points], [y for _, y in points], label=label, color=colour, marker=marker, markersize=3)

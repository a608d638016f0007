"""Plots of the figures for docs/plots. They need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

_LABELS = {
    "ours": "ours",
    "ours_copies": "ours, copies alone",
    "floor": "floor",
    "mbridge": "mbridge",
    "megatron_bridge": "Megatron-Bridge",
    "gather_broadcast": "gather + broadcast",
    "ours_to_megatron": "ours, to Megatron",
    "megatron_resharding": "megatron-core",
}


def title_of(row: Row) -> str:
    """Return model, number of ranks and both layouts of a case."""
    return f"{row['model']}, {row['ranks']} ranks, {row['train']} → {row['infer']}"


def plot_phases(rows: Sequence[Row], path: Path) -> None:
    """Draw a panel per case with a bar per contender. Raises ValueError without timings."""
    timed = [row for row in rows if row["phases"]]
    if not timed:
        raise ValueError("no case has phases to plot")
    plt = _pyplot()
    names: dict[str, None] = {}  # an ordered set
    for row in timed:
        for phases in row["phases"].values():
            names.update(dict.fromkeys(phases))
    colours = dict(zip(names, plt.get_cmap("tab20").colors, strict=False))
    figure, panels = plt.subplots(len(timed), 1, figsize=(9, 2.4 * len(timed) + 0.8), squeeze=False)
    for row, axes in zip(timed, panels[:, 0], strict=True):
        _bars(axes, row, colours)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    figure.legend(handles, names, loc="lower center", ncols=min(len(names), 6), frameon=False)
    figure.tight_layout(rect=(0, 0.6 / figure.get_figheight(), 1, 1))
    figure.savefig(path)
    plt.close(figure)


def _bars(axes: Any, row: Row, colours: Mapping[str, Any]) -> None:
    contenders = [name for name in _LABELS if name in row["phases"]]
    for place, contender in enumerate(contenders):
        left = 0.0
        for name, seconds in row["phases"][contender].items():
            axes.barh(place, seconds, left=left, color=colours[name])
            left += seconds
        axes.text(left, place, f" {left:.3g} s", va="center", fontsize=8)
    axes.set_yticks(range(len(contenders)), [_LABELS[name] for name in contenders])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds, slowest rank of the median run")
    axes.set_title(title_of(row), fontsize=10, loc="left")


def plot_memory(rows: Sequence[Row], path: Path) -> None:
    """Draw the device bytes of rank 0 over a cycle. Raises ValueError without a trace."""
    traced = [row for row in rows if row.get("timeline")]
    if not traced:
        raise ValueError("no case has a timeline to plot")
    plt = _pyplot()
    figure, panels = plt.subplots(len(traced), 1, figsize=(9, 3 * len(traced)), squeeze=False)
    for row, axes in zip(traced, panels[:, 0], strict=True):
        timeline = row["timeline"]
        training = [nbytes / 1e6 for nbytes in timeline["training_bytes"]]
        inference = [nbytes / 1e6 for nbytes in timeline["inference_bytes"]]
        labels = ["training", "inference"]
        axes.stackplot(timeline["seconds"], training, inference, labels=labels, step="post")
        larger = max(*training, *inference)
        label = "larger of the two layouts"
        axes.axhline(larger, color="black", linestyle="--", linewidth=1, label=label)
        for event in timeline["events"]:
            axes.axvspan(event["start"], event["stop"], color="black", alpha=0.07)
            axes.text(event["start"], larger * 1.02, event["name"], fontsize=8)
        highest = max(map(sum, zip(training, inference, strict=True)))
        axes.set(xlabel="seconds", ylabel="MB on the device of rank 0", ylim=(0, 1.12 * highest))
        axes.set_title(title_of(row), fontsize=10, loc="left")
        axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "hybrid-engine"  # equal figures give equal files
    import matplotlib.pyplot as plt

    return plt

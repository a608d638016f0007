"""Draws docs/plots/reward.svg from reward.csv, and layouts.svg and switch.svg of README.md.

reward.csv is of `make rl` with seed 0. Run `make docs` after a change; the same figures give the
same files.
"""

from __future__ import annotations

import csv
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

PLOTS = Path(__file__).resolve().parent / "plots"
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")  # of the ranks, and of kinds of memory
NUM_LAYERS, NUM_PARTS = 4, 2

Box = tuple[int, int]
"""A layer, and a part of it along the dimension that tensor parallelism cuts."""


def reward_picture() -> Figure:
    """Accuracy and reward of the example, by iteration."""
    with (PLOTS / "reward.csv").open() as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for name, label in (
        ("accuracy", "held-out accuracy (greedy)"),
        ("reward", "reward (mean of samples)"),
    ):
        points = [(int(row["iteration"]), float(row[name])) for row in rows if row[name]]
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set(
        xlabel="iteration",
        ylim=(0, 1),
        title="GRPO on addition: 2 ranks, TP=2 → TP=1 × DP=2, seed 0, on CPU",
    )
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    return figure


def layouts_picture() -> Figure:
    """The same four layers on four ranks in both layouts.

    A colour is the rank that holds a part in training.
    """
    training = {box: 2 * (box[0] * 2 // NUM_LAYERS) + box[1] for box in _boxes()}
    figure, panels = plt.subplots(2, 4, figsize=(7.5, 4.4), layout="constrained")
    for rank in range(4):
        _draw_rank(
            panels[0, rank], rank, {box: rank for box, owner in training.items() if owner == rank}
        )
        # Rank r generates with the part that it trains, so that half of what it needs is already
        # there.
        needed = {box: owner for box, owner in training.items() if box[1] == rank % 2}
        received = {box: rank if training[box] == rank else owner for box, owner in needed.items()}
        _draw_rank(panels[1, rank], rank, received)
    panels[0, 0].set_ylabel("training\nTP=2 × PP=2", fontsize=10)
    panels[1, 0].set_ylabel("generation\nTP=2 × DP=2", fontsize=10)
    return figure


def _boxes() -> list[Box]:
    return [(layer, part) for layer in range(NUM_LAYERS) for part in range(NUM_PARTS)]


def _draw_rank(axes: Axes, rank: int, held: dict[Box, int]) -> None:
    for layer, part in _boxes():
        owner = held.get((layer, part))
        fill = "none" if owner is None else COLOURS[owner]
        axes.add_patch(
            Rectangle((part, NUM_LAYERS - 1 - layer), 1, 1, facecolor=fill, edgecolor="grey")
        )
        if owner is not None and owner != rank:
            centre = (part + 0.5, NUM_LAYERS - 0.5 - layer)
            axes.text(*centre, f"from {owner}", ha="center", va="center", color="white", fontsize=9)
    axes.set(
        xlim=(-0.05, NUM_PARTS + 0.05),
        ylim=(-0.05, NUM_LAYERS + 0.05),
        xticks=[],
        title=f"rank {rank}",
    )
    axes.set_yticks([NUM_LAYERS - 0.5 - layer for layer in range(NUM_LAYERS)])
    axes.set_yticklabels([f"layer {layer}" if rank == 0 else "" for layer in range(NUM_LAYERS)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def switch_picture() -> Figure:
    """Memory of one device over a switch and back.

    A sketch: only the order and what bounds the peak are meant.
    """
    ends = [0, 2, 3, 7, 10, 11, 13]  # training, offload, fill, generation, way back, training
    parameters, others, weights, caches = (np.zeros(131) for _ in range(4))
    time = np.linspace(0, 13, 131)
    parameters[:] = np.interp(time, [0, 3, 7, 10, 11, 13], [2, 2, 0, 0, 2, 2])
    others[:] = np.interp(time, [0, 2, 3, 10, 11, 13], [3, 3, 0, 0, 3, 3])
    weights[:] = np.interp(time, [0, 3, 3.05, 7, 10, 10.05, 13], [0, 0, 0.35, 2, 2, 0, 0])
    caches[:] = np.interp(time, [0, 7, 7.05, 10, 10.05, 13], [0, 0, 2.5, 2.5, 0, 0])
    figure, axes = plt.subplots(figsize=(7.5, 3), layout="constrained")
    names = ["training parameters", "gradients, optimizer state", "vLLM's weights", "KV cache"]
    axes.stackplot(
        time, parameters, others, weights, caches, labels=names, colors=COLOURS, alpha=0.85
    )
    for left, right, name in zip(
        ends,
        ends[1:],
        ["train", "offload", "fill, bucket by bucket", "generate", "back", "train"],
        strict=False,
    ):
        axes.axvline(right, color="grey", linewidth=0.5)
        axes.text((left + right) / 2, 5.3, name, ha="center", fontsize=9)
    axes.set(
        xlim=(0, 13),
        ylim=(0, 5.8),
        xticks=[],
        yticks=[],
        xlabel="time",
        ylabel="memory of one device",
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=4, fontsize=8, frameon=False)
    return figure


def main() -> None:
    """Write all pictures."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "hybrid-engine"  # equal figures give equal files
    pictures = {"reward": reward_picture, "layouts": layouts_picture, "switch": switch_picture}
    for name, picture in pictures.items():
        figure = picture()
        figure.savefig(PLOTS / f"{name}.svg", facecolor="white", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()

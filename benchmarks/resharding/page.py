"""The figures as tables in Markdown, for docs/benchmarks.md, and as pictures, which need matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

_INTO_VLLM = (
    ("ours", "ours_seconds"),
    ("ours, copies alone", "ours_copies_seconds"),
    ("floor", "floor_seconds"),
    ("mbridge", "mbridge_seconds"),
    ("gather + broadcast", "gather_broadcast_seconds"),
    ("ours: of it allocation", "ours_allocate_seconds"),
    ("apart: vLLM's repacking", "ours_commit_seconds"),
)
_BRIDGE = ("Megatron-Bridge", "megatron_bridge_seconds")
"""A column where it was asked for."""
_INTO_MEGATRON = (
    ("ours", "ours_to_megatron_seconds"),
    ("megatron-core", "megatron_resharding_seconds"),
)
_GROWTH = (
    ("memory, MiB", "rss_bytes"),
    ("memory files, MiB", "memfd_bytes"),
    ("descriptors", "fds"),
    ("threads", "threads"),
)


def page(rows: Sequence[Row]) -> str:
    """All tables: seconds into vLLM, into Megatron, bytes and memory, phases, growth, reasons."""
    parts = [
        _section("Into vLLM, seconds", _seconds_table(rows)),
        _section("Into a Megatron model in the inference layout, seconds", _megatron_table(rows)),
        _section("Bytes and memory", _bytes_table(rows)),
        _section("Phases, seconds", _phases_table(rows)),
    ]
    if any(row.get("growth") for row in rows):
        parts.append(_section("Growth", _growth_table(rows)))
    if reasons := [(row, key, text) for row in rows for key, text in row["reasons"].items()]:
        parts.append(
            "\n".join(
                [
                    "### Not measured",
                    *(f"- {name_of(row)}, {key}: {text}" for row, key, text in reasons),
                    "",
                ]
            )
        )
    return "\n".join(parts)


def _section(title: str, table: str) -> str:
    return f"### {title}\n\n{table}"


def name_of(row: Row) -> str:
    """Model, number of ranks and both layouts."""
    return f"{row['model']}, {row['ranks']} ranks, {row['train']} → {row['infer']}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    cells = [head, ["---", *("---:" for _ in head[1:])], *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}×"


def _ratio(row: Row, over: str, under: str) -> float | None:
    return row[over] / row[under] if row[over] is not None and row[under] else None


def _seconds_table(rows: Sequence[Row]) -> str:
    columns = [
        *_INTO_VLLM,
        *([_BRIDGE] if any(row.get(_BRIDGE[1]) is not None for row in rows) else []),
    ]
    head = [
        "case",
        *(title for title, _ in columns),
        "copies / floor",
        "mbridge / ours",
        "gather + broadcast / ours",
    ]
    lines = [
        [
            name_of(row),
            *(_seconds(row.get(key)) for _, key in columns),
            _times(_ratio(row, "ours_copies_seconds", "floor_seconds")),
            _times(row["times_ours"]["mbridge_seconds"]),
            _times(row["times_ours"]["gather_broadcast_seconds"]),
        ]
        for row in rows
    ]
    return _table(head, lines)


def _megatron_table(rows: Sequence[Row]) -> str:
    head = ["case", *(title for title, _ in _INTO_MEGATRON), "megatron-core / ours"]
    lines = [
        [
            name_of(row),
            *(_seconds(row[key]) for _, key in _INTO_MEGATRON),
            _times(row["times_ours"]["megatron_resharding_seconds"]),
        ]
        for row in rows
    ]
    return _table(head, lines)


def _bytes_table(rows: Sequence[Row]) -> str:
    head = [
        "case",
        "tensors",
        "received, MB",
        "least, MB",
        "peak, MB",
        "larger layout, MB",
        "over it, buckets",
    ]
    lines = [
        [
            name_of(row),
            "–" if row["num_tensors"] is None else str(row["num_tensors"]),
            *(
                _megabytes(row[key])
                for key in ("bytes_received", "bytes_least", "peak_bytes", "max_layout_bytes")
            ),
            _buckets(row),
        ]
        for row in rows
    ]
    return _table(head, lines)


def _megabytes(value: int | None) -> str:
    return "–" if value is None else f"{value / 1e6:.1f}"


def _buckets(row: Row) -> str:
    over = row["peak_over_max_layout_bytes"]
    return "–" if over is None else f"{over / row['bucket_bytes']:.2f}"


def _phases_table(rows: Sequence[Row]) -> str:
    lines = [
        [
            name_of(row),
            contender,
            ", ".join(
                f"{name} {seconds:.3f}" for name, seconds in phases.items() if seconds > 5e-4
            ),
        ]
        for row in rows
        for contender, phases in row["phases"].items()
    ]
    return _table(["case", "contender", "phases"], lines)


def _growth_table(rows: Sequence[Row]) -> str:
    grown = [row for row in rows if row.get("growth")]
    lines = [
        [
            name_of(row),
            str(row["growth"]["cycles"]),
            *(_change(row["growth"], key) for _, key in _GROWTH),
        ]
        for row in grown
    ]
    return _table(["case", "cycles", *(title for title, _ in _GROWTH)], lines)


def _change(growth: Mapping[str, Any], key: str) -> str:
    """First and last count of all ranks together."""
    show: Callable[[int], str] = (
        (lambda value: f"{value / 2**20:.1f}") if key.endswith("_bytes") else str
    )
    return f"{show(growth['first'][key])} → {show(growth['last'][key])}"


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


def plot_phases(rows: Sequence[Row], path: Path) -> None:
    """One panel a case, one bar a contender, one colour a phase. Raises ValueError when nothing was timed."""
    timed = [row for row in rows if row["phases"]]
    if not timed:
        raise ValueError("no case has phases to plot")
    plt = _pyplot()
    names = list(
        dict.fromkeys(name for row in timed for phases in row["phases"].values() for name in phases)
    )
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
    axes.set_title(name_of(row), fontsize=10, loc="left")


def plot_memory(rows: Sequence[Row], path: Path) -> None:
    """Device bytes of rank 0 over a switch to inference and back. Raises ValueError when no case was traced."""
    traced = [row for row in rows if row.get("timeline")]
    if not traced:
        raise ValueError("no case has a timeline to plot")
    plt = _pyplot()
    figure, panels = plt.subplots(len(traced), 1, figsize=(9, 3 * len(traced)), squeeze=False)
    for row, axes in zip(traced, panels[:, 0], strict=True):
        line = row["timeline"]
        training, inference = (
            [value / 1e6 for value in line[f"{side}_bytes"]] for side in ("training", "inference")
        )
        axes.stackplot(
            line["seconds"], training, inference, labels=["training", "inference"], step="post"
        )
        larger = max(max(training), max(inference))
        axes.axhline(
            larger, color="black", linestyle="--", linewidth=1, label="larger of the two layouts"
        )
        for event in line["events"]:
            axes.axvspan(event["start"], event["stop"], color="black", alpha=0.07)
            axes.text(event["start"], larger * 1.02, event["name"], fontsize=8)
        highest = max(map(sum, zip(training, inference, strict=True)))
        axes.set(xlabel="seconds", ylabel="MB on the device of rank 0", ylim=(0, 1.12 * highest))
        axes.set_title(name_of(row), fontsize=10, loc="left")
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

"""The figures as tables in Markdown, for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
_INTO_MEGATRON = (("ours", "ours_to_megatron_seconds"), ("megatron-core", "megatron_resharding_seconds"))
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
            "\n".join(["### Not measured", *(f"- {name_of(row)}, {key}: {text}" for row, key, text in reasons), ""])
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
    columns = [*_INTO_VLLM, *([_BRIDGE] if any(row.get(_BRIDGE[1]) is not None for row in rows) else [])]
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
    head = ["case", "tensors", "received, MB", "least, MB", "peak, MB", "larger layout, MB", "over it, buckets"]
    lines = [
        [
            name_of(row),
            "–" if row["num_tensors"] is None else str(row["num_tensors"]),
            *(_megabytes(row[key]) for key in ("bytes_received", "bytes_least", "peak_bytes", "max_layout_bytes")),
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
            ", ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items() if seconds > 5e-4),
        ]
        for row in rows
        for contender, phases in row["phases"].items()
    ]
    return _table(["case", "contender", "phases"], lines)


def _growth_table(rows: Sequence[Row]) -> str:
    grown = [row for row in rows if row.get("growth")]
    lines = [
        [name_of(row), str(row["growth"]["cycles"]), *(_change(row["growth"], key) for _, key in _GROWTH)]
        for row in grown
    ]
    return _table(["case", "cycles", *(title for title, _ in _GROWTH)], lines)


def _change(growth: Mapping[str, Any], key: str) -> str:
    """First and last count of all ranks together."""
    show: Callable[[int], str] = (lambda value: f"{value / 2**20:.1f}") if key.endswith("_bytes") else str
    return f"{show(growth['first'][key])} → {show(growth['last'][key])}"

"""One self-contained HTML page of a job plan: the picture of who holds what, and the numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from hybrid_engine.advisor.cluster_plan import GIB, JobPlan
from hybrid_engine.advisor.facts import (
    MinMeanMax,
    assumptions,
    bytes_across_hosts,
    device_memory,
    host_memory,
    moved_bytes,
    range_of,
)
from hybrid_engine.advisor.picture import Bar, Column, Picture, picture_of

COLORS = {"train": "#4c78a8", "infer": "#f58518", "both": "#54a24b"}
_ROW, _LABEL, _HEAD = 12, 96, 22  # pixels: height of a row, width of its label, height of the column heads
_WIDTH, _NARROWEST, _NARROW, _WIDEST = 1500, 8, 24, 120  # of all columns together, of one

_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 24px; color: #222; }
table { border-collapse: collapse; margin: 12px 0 24px; }
td, th { padding: 3px 12px; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child, th:first-child { text-align: left; }
.scroll { overflow-x: auto; }
.key span { display: inline-block; width: 12px; height: 12px; margin: 0 4px 0 16px; }
#tip { position: fixed; display: none; background: #fff; border: 1px solid #888; padding: 6px 10px; max-width: 60em;
       white-space: pre-wrap; font: 12px ui-monospace, monospace; pointer-events: none; z-index: 1; }
"""

# Bars carry the number of their text and what they cover; the tooltip puts them together.
_SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const sides = {train: "training", infer: "inference", both: "needed by inference and held by training"};
document.querySelectorAll("g[data-bar]").forEach(bar => {
  bar.addEventListener("mousemove", event => {
    const [column, row, rows, side, text] = bar.dataset.bar.split(",");
    const last = data.rows[+row + +rows - 1];
    const where = rows === "1" ? data.rows[row] : data.rows[row] + " to " + last;
    tip.textContent = data.columns[column] + " · " + where + "\\n" + sides[side] + ":\\n" + data.texts[text];
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8) + "px";
  });
  bar.addEventListener("mouseleave", () => { tip.style.display = "none"; });
});
"""


def page_of(plan: JobPlan, title: str) -> str:
    """The page; it loads nothing."""
    picture = picture_of(plan.table, plan.source.holdings, plan.destination.holdings)
    data = {
        "columns": [_ranks(column) for column in picture.columns],
        "rows": [row.label for row in picture.rows],
        "texts": picture.texts,
    }
    hidden = f"<p>{picture.num_hidden} more classes of ranks are not drawn.</p>" if picture.num_hidden else ""
    key = "".join(
        f'<span style="background:{COLORS[side]}"></span>{meaning}'
        for side, meaning in (
            ("train", "held in training (left half)"),
            ("infer", "needed in inference (right half)"),
            ("both", "of that, there already"),
        )
    )
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            _numbers(plan),
            "<h2>Who holds what</h2>",
            "<p>One column for each class of ranks that hold the same; its bars show which slice of a layer's largest "
            "tensor, or which experts, from left to right (in narrow columns: paler for less). Point at a bar for the "
            "exact regions.</p>",
            f'<p class="key">{key}</p>{hidden}',
            f'<div class="scroll">{svg_of(picture)}</div><div id="tip"></div>',
            f'<script type="application/json" id="data">{_json(data)}</script>',
            f"<script>{_SCRIPT}</script></body></html>",
        ]
    )


def svg_of(picture: Picture) -> str:
    """The drawing alone, one SVG element."""
    width = min(max(_WIDTH // len(picture.columns), _NARROWEST), _WIDEST)
    height = _HEAD + _ROW * len(picture.rows)
    size = f'width="{_LABEL + width * len(picture.columns) + 8}" height="{height + 8}"'
    font = 'font-family="sans-serif" font-size="9" fill="#444"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>']
    step = -(-34 // width)  # columns from one head to the next, so that heads do not touch
    for number, column in enumerate(picture.columns):
        x = _LABEL + number * width
        for offset, color in ((0.5, COLORS["train"]), (width / 2, COLORS["infer"])):
            area = f'x="{x + offset}" y="{_HEAD}" width="{width / 2 - 1}" height="{height - _HEAD}"'
            parts.append(f'<rect {area} fill="{color}" fill-opacity="0.08"/>')
        if number % step == 0:
            parts.append(f'<text x="{x + 1}" y="{_HEAD - 8}">{column.ranks[0]}</text>')
    for number, row in enumerate(picture.rows):
        parts.append(f'<text x="2" y="{_HEAD + _ROW * number + 9}">{escape(row.label)}</text>')
    draw = _Drawing(picture, width)
    parts.extend(draw.bar(bar) for bar in picture.bars)
    return "".join((*parts, "</svg>"))


class _Drawing:
    """Bars in columns of some width: training in the left half, inference and what is there already in the right half.

    In narrow columns a slice would be thinner than a line. There a bar is as wide as its half and the paler the less
    it stands for; what is there already takes its part of the width.
    """

    def __init__(self, picture: Picture, width: int) -> None:
        self._width = width
        self._is_narrow = width < _NARROW
        self._needed = {
            (bar.column, row): _part(bar)
            for bar in picture.bars
            if bar.side == "infer"
            for row in range(bar.first_row, bar.first_row + bar.num_rows)
        }

    def bar(self, bar: Bar) -> str:
        """One SVG group, with the data that its tooltip needs."""
        left = _LABEL + bar.column * self._width + (0.5 if bar.side == "train" else self._width / 2)
        half = self._width / 2 - 1
        y, height = _HEAD + _ROW * bar.first_row + 1, _ROW * bar.num_rows - 2
        extents, opacity = bar.extents, 0.35 + 0.65 * bar.share
        if self._is_narrow:
            is_common = bar.side == "both"
            end = _part(bar) / self._needed[bar.column, bar.first_row] if is_common else 1.0
            extents, opacity = ((0.0, min(end, 1.0)),), 1.0 if is_common else 0.35 + 0.65 * _part(bar)
        rects = "".join(
            f'<rect x="{left + low * half:.2f}" y="{y}" width="{max((high - low) * half, 0.6):.2f}" height="{height}"/>'
            for low, high in extents
        )
        data = f"{bar.column},{bar.first_row},{bar.num_rows},{bar.side},{bar.text}"
        return f'<g data-bar="{data}" fill="{COLORS[bar.side]}" fill-opacity="{opacity:.2f}">{rects}</g>'


def _part(bar: Bar) -> float:
    """How much of a row's elements a bar stands for, from 0 to 1."""
    return bar.share * sum(high - low for low, high in bar.extents)


def _ranks(column: Column) -> str:
    """At most eight of the ranks, and how many there are."""
    first = ", ".join(map(str, column.ranks[:8]))
    return (
        f"rank {first}"
        if len(column.ranks) == 1
        else f"{len(column.ranks)} ranks: {first}" + (", …" if len(column.ranks) > 8 else "")
    )


def _json(value: object) -> str:
    """JSON that can stand in a script element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


def _numbers(plan: JobPlan) -> str:
    rows = [(name.replace("_", " "), numbers) for name, numbers in moved_bytes(plan.bytes).items()]
    rows += [(f"across hosts, by host: {name}", numbers) for name, numbers in bytes_across_hosts(plan).items()]
    rows.append(("sequential order: received", range_of(plan.sequential.received)))
    for where, memory in (("device", device_memory(plan)), ("host", host_memory(plan))):
        rows += [(f"{where}: {name.replace('_', ' ')}", numbers) for name, numbers in memory.items()]
    others = [
        (f"{peer.system}: {peer.formula}", peer.reason if peer.nbytes is None else f"{peer.nbytes / GIB:.3f}")
        for peer in plan.peers
    ]
    fits = "fits" if plan.fits_device else "does not fit"
    return "\n".join(
        [
            _table(("GiB by rank", "min", "mean", "max"), _scaled(rows, GIB)),
            _table(("time", "min", "mean", "max"), _scaled([("estimated seconds", range_of(plan.seconds))], 1)),
            _table(("GiB received by each rank, by others' formulas", "mean"), others),
            f"<p>The peak {fits} a device of {plan.cluster.device_gib:g} GiB. {escape(assumptions(plan))}</p>",
        ]
    )


def _scaled(rows: Sequence[tuple[str, MinMeanMax]], unit: float) -> Iterator[tuple[str, ...]]:
    for name, numbers in rows:
        yield name, *(f"{number / unit:.3f}" for number in (numbers["min"], numbers["mean"], numbers["max"]))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"

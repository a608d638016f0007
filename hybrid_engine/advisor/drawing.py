"""A picture as SVG: row labels, which stay where they are, and the columns, which may be wider than the window.

Training is the left half of a column, inference the right half, with what is there already in front. In narrow columns
a slice would be thinner than a line: there a bar is as wide as its half, and the paler the less it stands for; what is
there already takes its part of the width. Colours and fonts are the page's (page_files/page.css).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from hybrid_engine.advisor.picture import SIDES, Bar, Column, Group, Picture

ROW, HEAD = 20, 40
"""Pixels: height of a row, and of the heads above the columns."""
_LETTER, _LABEL_GAP = 7.2, 12
_WIDTH, _NARROWEST, _NARROW, _WIDEST = 1340, 10, 24, 240  # of the whole picture, of one column


@dataclass(frozen=True)
class Drawing:
    """A group of a picture.

    Attributes:
        labels, columns: an SVG element each.
        data: for the page's script: where rows and columns begin, who they are, and the bars as [column, first row,
            number of rows, side, text].
    """

    labels: str
    columns: str
    data: dict[str, Any]


def draw(picture: Picture, group: Group, texts: dict[str, int]) -> Drawing:
    """Draw some columns, with all rows.

    `texts`: the number of each text of the page; those of these bars are added.
    """
    count = len(group.columns)
    labels = _width_of_labels(picture)
    width = min(max(int(_WIDTH - labels) // count, _NARROWEST), _WIDEST)
    bars = [bar for bar in picture.bars if bar.column in group.columns]
    columns = picture.columns[group.columns.start : group.columns.stop]
    data = {
        "width": width,
        "row": ROW,
        "head": HEAD,
        "columns": [ranks_text(column) for column in columns],
        "bars": [
            [
                bar.column - group.columns.start,
                bar.first_row,
                bar.num_rows,
                SIDES.index(bar.side),
                texts.setdefault(picture.texts[bar.text], len(texts)),
            ]
            for bar in bars
        ],
    }
    return Drawing(_labels(picture, labels), _columns(columns, bars, group, width, len(picture.rows)), data)


def ranks_text(column: Column) -> str:
    """At most eight of the ranks, and how many there are."""
    ranks = column.ranks
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{len(ranks):,} ranks: {ranks[0]}-{ranks[-1]}"
    return f"{len(ranks):,} ranks: {', '.join(map(str, ranks[:8]))}" + ", …" * (len(ranks) > 8)


def _width_of_labels(picture: Picture) -> float:
    return max(len(row.label) for row in picture.rows) * _LETTER + _LABEL_GAP


def _labels(picture: Picture, width: float) -> str:
    texts = [row.label for row in picture.rows]
    parts = ['<text x="0" y="12" class="axis">rows: the model</text>']
    parts += (f'<text x="0" y="{HEAD + ROW * number + 14}">{escape(text)}</text>' for number, text in enumerate(texts))
    return _svg(max(width, 110), len(texts), parts)


def _columns(columns: tuple[Column, ...], bars: list[Bar], group: Group, width: int, num_rows: int) -> str:
    height, first = ROW * num_rows, group.columns.start
    parts = ['<text x="0" y="12" class="axis">columns: ranks, by the first of each</text>']
    heads = [_head(column, width) for column in columns]
    step = -(-max(map(len, heads)) * _LETTER // width) or 1  # columns from one head to the next, so that none touch
    for number, head in enumerate(heads):
        x = number * width
        half = width / 2 - 1
        parts += (
            f'<rect class="{side} ground" x="{x + offset}" y="{HEAD}" width="{half}" height="{height}"/>'
            for side, offset in (("train", 0.5), ("infer", width / 2))
        )
        if number % int(step) == 0:
            parts.append(f'<text x="{x + 1}" y="{HEAD - 8}">{head}</text>')
    parts += (f'<path class="line" d="M0 {HEAD + ROW * row}h{width * len(columns)}"/>' for row in range(num_rows + 1))
    paths: dict[tuple[str, float], list[str]] = {}
    draw = _Bars(bars, width)
    for bar in bars:
        paths.setdefault((bar.side, draw.opacity(bar)), []).extend(draw.rects(bar, bar.column - first))
    parts += (
        f'<path class="{side}" fill-opacity="{opacity:.2f}" d="{"".join(found)}"/>'
        for (side, opacity), found in sorted(paths.items(), key=lambda item: SIDES.index(item[0][0]))
    )
    parts.append(f'<rect class="cursor" width="{width}" height="{ROW}" visibility="hidden"/>')
    return _svg(width * len(columns) + 1, num_rows, parts)


def _head(column: Column, width: int) -> str:
    """The ranks where there is room for them, else the first."""
    ranks = column.ranks
    whole = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1 else str(ranks[0])
    return whole if len(whole) * _LETTER < width else str(ranks[0])


def _svg(width: float, num_rows: int, parts: list[str]) -> str:
    size = f'width="{width:.0f}" height="{HEAD + ROW * num_rows + 2}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" aria-hidden="true" {size}>{"".join(parts)}</svg>'


class _Bars:
    """Where bars are in columns of some width, and how strong."""

    def __init__(self, bars: list[Bar], width: int) -> None:
        self._width = width
        self._is_narrow = width < _NARROW
        self._needed = {(bar.column, row): bar.part for bar in bars if bar.side == "infer" for row in bar.rows}

    def opacity(self, bar: Bar) -> float:
        if not self._is_narrow:
            return round(0.35 + 0.65 * bar.share, 2)
        return 1.0 if bar.side == "both" else round(0.3 + 0.7 * bar.part, 1)

    def rects(self, bar: Bar, column: int) -> Iterator[str]:
        """Of one bar, as parts of a path."""
        left = column * self._width + (0.5 if bar.side == "train" else self._width / 2)
        half = self._width / 2 - 1
        y, height = HEAD + ROW * bar.first_row + 1, ROW * bar.num_rows - 2
        extents = bar.extents
        if self._is_narrow:
            end = bar.part / self._needed[bar.column, bar.first_row] if bar.side == "both" else 1.0
            extents = ((0.0, min(end, 1.0)),)
        for low, high in extents:
            width = max((high - low) * half, 1)
            yield f"M{left + low * half:.1f} {y}h{width:.1f}v{height}h-{width:.1f}z"

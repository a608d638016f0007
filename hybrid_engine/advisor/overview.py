"""A picture of groups in place of columns: how much of each row a rank of the group holds, whichever slice that is."""

from __future__ import annotations

import numpy as np

from hybrid_engine.advisor.picture import SIDES, Bar, Column, Group, Picture


def overview_of(picture: Picture) -> Picture:
    """One column for each group; a bar is as long as the part of its rows that a rank of the group holds on average."""
    texts: dict[str, int] = {}
    bars: list[Bar] = []
    for number, group in enumerate(picture.groups):
        parts = np.zeros((len(SIDES), len(picture.rows), len(group.columns)))
        for bar in picture.bars:
            if bar.column in group.columns:
                parts[SIDES.index(bar.side), bar.rows, bar.column - group.columns.start] = bar.part
        for side, by_row in zip(SIDES, parts, strict=True):
            bars += _bars(number, side, by_row, texts)
    columns = tuple(_joined(picture, group) for group in picture.groups)
    return Picture(columns, (Group(range(len(columns)), 0),), picture.rows, tuple(bars), tuple(texts))


def _joined(picture: Picture, group: Group) -> Column:
    ranks = (rank for column in picture.columns[group.columns.start : group.columns.stop] for rank in column.ranks)
    return Column(tuple(sorted(ranks)))


def _bars(column: int, side: str, by_row: np.ndarray, texts: dict[str, int]) -> list[Bar]:
    """One bar for each run of rows of which the group's ranks, [row, rank], hold as much."""
    bars: list[Bar] = []
    start = 0
    for row in range(1, len(by_row) + 1):
        if row < len(by_row) and np.allclose(by_row[row], by_row[start]):
            continue
        if by_row[start].any():
            text = texts.setdefault(_text(by_row[start]), len(texts))
            mean = min(float(by_row[start].mean()), 1.0)
            bars.append(Bar(column, start, row - start, side, ((0.0, mean),), 1.0, text))
        start = row
    return bars


def _text(parts: np.ndarray) -> str:
    low, high = f"{parts.min():.3g}", f"{parts.max():.3g}"
    percent = [f"{100 * part:.3g} %" for part in (parts.min(), parts.max())]
    return f"{percent[0]} by each rank" if low == high else f"{percent[0]} to {percent[1]} by a rank"

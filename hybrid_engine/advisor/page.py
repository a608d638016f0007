"""One self-contained HTML page of an answer: the verdict, who holds what, and the numbers.

    row       the embedding, each layer (its experts apart), the final norm and head; neighbouring layers that all ranks
              hold in the same way are one
    column    ranks that hold the same on both sides; where these are many, ranks that hold as much of every row
    cell      which part of the row's elements each of these ranks holds in training, needs in generation, and of that
              has already

page_files/page.html has what is on the page, in order; it is filled in by jinja2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

import numpy as np

from hybrid_engine.advisor.answer import UNITS, Answer, JobVerdict, assumptions, sections_of
from hybrid_engine.layouts.memory import NOT_COUNTED
from hybrid_engine.layouts.parameters import Location, parameters_of
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.summary import missing_by_rank
from hybrid_engine.records.holdings import Holdings, first_members, rank_classes

MOST_COLUMNS = 64
_WIDEST_HEAD = 10  # letters
_NUMBERED = re.compile(r"^.*\.\d+\.")


def page_of(answer: Answer, title: str) -> str:
    """The page; it loads nothing."""
    from jinja2 import Environment, StrictUndefined

    job = answer.job
    picture = picture_of(job.table, job.source.holdings, job.destination.holdings)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = (files("hybrid_engine.advisor") / "page_files" / "page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        title=title,
        verdict=JobVerdict(job),
        picture=picture,
        sections=list(sections_of(answer)),
        notes=[*answer.remarks, assumptions(job), NOT_COUNTED, UNITS],
    )


@dataclass
class Row:
    """One part of the model, or neighbouring ones that all ranks hold in the same way.

    Attributes:
        tensors: of the first part.
        layers: numbers of the layers that it stands for.
    """

    name: str
    tensors: list[str] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)

    @property
    def label(self) -> str:
        """`layers 0-3, experts`."""
        number = f"layer{'s' * (len(self.layers) > 1)} {ranges(self.layers)}" if self.layers else ""
        return number + self.name


@dataclass(frozen=True)
class Picture:
    """A table of which ranks hold which part of each row.

    Attributes:
        columns: the ranks of each. num_hidden: how many more columns there would be.
        rows: of the model.
        parts: [training, generation, there already; row, column], from 0 to 1.
    """

    columns: list[list[int]]
    num_hidden: int
    rows: list[Row]
    parts: np.ndarray

    @property
    def heads(self) -> list[tuple[str, str]]:
        """The ranks of every column: a short text, and most of them."""
        texts = [(ranges(ranks), ranks) for ranks in self.columns]
        return [(text if len(text) < _WIDEST_HEAD else f"{ranks[0]}, …", text) for text, ranks in texts]

    def cells(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Yield the label of each row, with the style and text of its cells."""
        for number, row in enumerate(self.rows):
            cells = []
            for train, infer, both in self.parts[:, number].T:
                says = f"training {train:.3%}, generation {infer:.3%}, there already {both:.3%}"
                cells.append((f"--t:{train:.3f};--g:{infer:.3f};--b:{both:.3f}", f"{row.label}: {says}"))
            yield row.label, cells


def picture_of(table: ModelTable, source: Holdings, destination: Holdings, most_columns: int = MOST_COLUMNS) -> Picture:
    """Draw both sides."""
    rows = _rows(table, source, destination)
    parts = np.stack([_parts(row, source, destination) for row in rows], axis=1)
    classes = rank_classes(source) * source.num_ranks + rank_classes(destination)
    if len(np.unique(classes)) > most_columns:
        _, classes = np.unique(parts.reshape(-1, source.num_ranks).round(2), axis=1, return_inverse=True)
    _, classes = np.unique(classes, return_inverse=True)
    firsts = np.sort(first_members(classes))
    shown = firsts[np.arange(min(most_columns, len(firsts))) * len(firsts) // min(most_columns, len(firsts))]
    columns = [np.flatnonzero(classes == classes[rank]).tolist() for rank in shown]
    return Picture(columns, len(firsts) - len(shown), rows, parts[:, :, shown])


def _rows(table: ModelTable, source: Holdings, destination: Holdings) -> list[Row]:
    """The model's parts in order, experts after all others; a tensor is in one of them."""
    last = table.dims.num_layers + table.dims.num_mtp_layers
    places = {Location.EMBEDDING: -1, Location.FINAL_NORM: last}
    found: dict[tuple[bool, int], Row] = {}
    seen: set[str] = set()
    for parameter in parameters_of(table):
        number = parameter.indices.get("layer", places.get(parameter.location, last))
        kind = " (MTP)" * (number >= table.dims.num_layers) + ", experts" * parameter.is_expert
        name = {-1: "embedding", last: "norm and head"}.get(number, kind)
        row = found.setdefault((parameter.is_expert, number), Row(name, layers=[number] if 0 <= number < last else []))
        for tensor in (each for each in parameter.tensors if each in table.shapes and each not in seen):
            seen.add(tensor)
            row.tensors.append(tensor)
    rows: list[Row] = []
    before: object = None
    for _, row in sorted(found.items(), key=lambda item: item[0]):
        sides = [
            [_NUMBERED.sub("", each), *(id(side.owners.get(each)) for side in (source, destination))]
            for each in row.tensors
        ]
        if row.layers and rows and sides == before and row.name == rows[-1].name:
            rows[-1].layers += row.layers
        else:
            rows.append(row)
        before = sides
    return rows


def _parts(row: Row, source: Holdings, destination: Holdings) -> np.ndarray:
    """Return the share of a row's elements on each rank: [training, generation, there already; rank], from 0 to 1."""
    found = np.zeros((3, source.num_ranks))
    alike: dict[tuple[int, int], list[str]] = {}
    for tensor in row.tensors:
        alike.setdefault((id(source.owners.get(tensor)), id(destination.owners.get(tensor))), []).append(tensor)
    for names in alike.values():
        held, needed = (side.owners.get(names[0], ()) for side in (source, destination))
        for number, owners in enumerate((held, needed, needed)):
            for box in owners:
                found[number, np.unique(box.ranks)] += len(names) * box.region.numel
        for ranks, numel in missing_by_rank(held, needed, source.num_ranks):
            found[2, ranks] -= len(names) * numel
    return np.clip(found / sum(math.prod(source.shapes[name]) for name in row.tensors), 0, 1)


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 8, 10-11`; at most eight runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs[:8]) + ", …" * (len(runs) > 8)

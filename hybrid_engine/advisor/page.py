"""One self-contained HTML page of an answer: the verdict, who holds what, memory, who sends to whom, and the numbers.

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

from hybrid_engine.advisor.cluster_plan import JobPlan
from hybrid_engine.advisor.facts import Answer, assumptions
from hybrid_engine.advisor.job_verdict import JobVerdict
from hybrid_engine.advisor.sections import UNITS, Unit, sections_of
from hybrid_engine.layouts.memory_peaks import NOT_COUNTED
from hybrid_engine.layouts.memory_plan import GIB, gib
from hybrid_engine.layouts.parameters import Location, parameters_of
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.lower_bound import missing_by_rank
from hybrid_engine.planning.summary import group_traffic
from hybrid_engine.records.holdings import Holdings, first_members, rank_classes
from hybrid_engine.records.owners import contains
from hybrid_engine.records.regions import Region, joined

MOST_COLUMNS = 64
_MOST_IN_A_MATRIX = 16
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
        memory=list(_memory_bars(job)),
        device=f"{job.cluster.device_gib:g} GiB",
        traffic=_traffic(job),
        sections=list(sections_of(answer)),
        unit=Unit.of(job),
        notes=[*answer.remarks, assumptions(job), NOT_COUNTED, UNITS],
    )


# -- who holds what ----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One part of the model, or neighbouring ones that all ranks hold in the same way.

    Attributes:
        tensors: of the first part.
        experts: number of each expert -> one of its tensors; empty for a part that is not experts.
        layers: numbers of the layers that it stands for.
    """

    name: str
    tensors: list[str] = field(default_factory=list)
    experts: dict[int, str] = field(default_factory=dict)
    layers: list[int] = field(default_factory=list)

    @property
    def label(self) -> str:
        """`layers 0-3, experts`."""
        number = f"layer{'s' * (len(self.layers) > 1)} {ranges(self.layers)}" if self.layers else ""
        return number + self.name


@dataclass(frozen=True)
class Picture:
    """Who holds what.

    Attributes:
        columns: the ranks of each. num_hidden: how many more columns there would be.
        rows: of the model.
        parts: [training, generation, there already; row, column], from 0 to 1.
        texts: [row][column], which slices or experts the first rank of the column has.
    """

    columns: list[list[int]]
    num_hidden: int
    rows: list[Row]
    parts: np.ndarray
    texts: list[list[str]]

    @property
    def heads(self) -> list[tuple[str, str]]:
        """The ranks of every column: a short text, and most of them."""
        texts = [(ranges(ranks), ranks) for ranks in self.columns]
        return [(text if len(text) < _WIDEST_HEAD else f"{ranks[0]}, …", text) for text, ranks in texts]

    def cells(self) -> Iterator[tuple[str, list[tuple[str, str]]]]:
        """Of each row the label, and the style and text of its cells."""
        for number, row in enumerate(self.rows):
            cells = []
            for column, text in enumerate(self.texts[number]):
                train, infer, both = self.parts[:, number, column]
                says = f"training {train:.3%}, generation {infer:.3%}, there already {both:.3%}"
                cells.append((f"--t:{train:.3f};--g:{infer:.3f};--b:{both:.3f}", f"{row.label}: {says}{text}"))
            yield row.label, cells


def picture_of(table: ModelTable, source: Holdings, destination: Holdings, most_columns: int = MOST_COLUMNS) -> Picture:
    """Draw both sides."""
    rows = _rows(table, source, destination)
    parts = np.stack([_parts(row, source, destination) for row in rows], axis=1)
    classes = rank_classes(source) * source.num_ranks + rank_classes(destination)
    if is_joined := len(np.unique(classes)) > most_columns:
        _, classes = np.unique(parts.reshape(-1, source.num_ranks).round(2), axis=1, return_inverse=True)
    _, classes = np.unique(classes, return_inverse=True)
    firsts = np.sort(first_members(classes))
    shown = firsts[np.arange(min(most_columns, len(firsts))) * len(firsts) // min(most_columns, len(firsts))]
    columns = [np.flatnonzero(classes == classes[rank]).tolist() for rank in shown]
    texts = [["" if is_joined else _text(row, source, destination, rank) for rank in shown.tolist()] for row in rows]
    return Picture(columns, len(firsts) - len(shown), rows, parts[:, :, shown], texts)


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
            if parameter.is_expert:
                row.experts.setdefault(parameter.indices["expert"], tensor)
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
    """Of a row's elements, [training, generation, there already; rank]."""
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


def _text(row: Row, source: Holdings, destination: Holdings, rank: int) -> str:
    """Which slices of its largest tensor, or which experts."""
    lines = ""
    for side, holdings in (("training", source), ("generation", destination)):
        if row.experts:
            held = ranges([number for number, tensor in row.experts.items() if _boxes(holdings, tensor, rank)])
            lines += f"\n{side}: experts {held}" * bool(held)
            continue
        largest = max(row.tensors, key=lambda tensor: math.prod(source.shapes[tensor]))
        if boxes := _boxes(holdings, largest, rank):
            slices = " ".join(_slices(box, source.shapes[largest]) for box in joined(boxes))
            lines += f"\n{side}: {_NUMBERED.sub('', largest)} {slices}"
    return lines


def _boxes(holdings: Holdings, tensor: str, rank: int) -> list[Region]:
    return [box.region for box in holdings.owners.get(tensor, ()) if contains(box.ranks, rank)]


def _slices(box: Region, shape: Sequence[int]) -> str:
    """`[0:4, :]`."""
    bounds = zip(box.offsets, box.ends, shape, strict=True)
    return "[" + ", ".join(":" if high - low == size else f"{low}:{high}" for low, high, size in bounds) + "]"


def ranges(numbers: Sequence[int]) -> str:
    """`0-3, 8, 10-11`; at most eight runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs[:8]) + ", …" * (len(runs) > 8)


# -- memory and traffic ------------------------------------------------------------------------------------------------


def _memory_bars(job: JobPlan) -> Iterator[tuple[str, str, list[tuple[str, str, float]]]]:
    """(phase, GiB, parts) of the rank with the highest peak; a part is (model, GiB, percent of the device or peak)."""
    rank = int(job.peak.argmax())
    full = max(float(job.peak[rank]), job.cluster.device_gib * GIB) / 100
    for phase in job.phases.values():
        parts = {"weights of both": phase.total} if phase.peak is not None else phase.by_model
        yield (
            phase.name,
            gib(phase.total[rank]),
            [(name, gib(each[rank]), each[rank] / full) for name, each in parts.items()],
        )


def _traffic(job: JobPlan) -> tuple[str, list[str], list[list[tuple[str, float]]]]:
    """Who sends to whom, by host, or by rank on a single one: (what they are, their numbers, rows of cells)."""
    hosts = np.array(job.cluster.hosts(job.world_size))
    what, members = ("host", hosts) if hosts.max() else ("rank", np.arange(job.world_size))
    each = -(-(int(members.max()) + 1) // _MOST_IN_A_MATRIX)
    relaying = job.cluster.relaying_hosts(job.world_size)
    (nbytes,) = group_traffic(
        job.source.holdings, job.destination.holdings, hosts.tolist(), relaying, [members // each]
    )
    names = [ranges(np.unique(members[members // each == group]).tolist()) for group in range(len(nbytes))]
    unit, largest = Unit.of(job).nbytes, max(int(nbytes.max()), 1)
    return what, names, [[(f"{cell / unit:.3g}", cell / largest) for cell in row] for row in nbytes.tolist()]

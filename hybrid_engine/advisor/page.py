"""One self-contained HTML page of an answer: the verdict, who holds what, who sends to whom, and the numbers.

    page_files/page.html    what is on it, in order; filled in by jinja2
    page_files/page.css     colours of both schemes, layout down to narrow windows
    page_files/page.js      what a place of the picture holds, by mouse, touch and keys

The pictures are SVG of our own (drawing.py): a charting library that draws as much, plotly say, is 4 MB on every page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_engine.advisor.cluster_plan import GIB, JobPlan
from hybrid_engine.advisor.drawing import draw, ranks_text
from hybrid_engine.advisor.facts import Answer, assumptions
from hybrid_engine.advisor.job_verdict import JobVerdict
from hybrid_engine.advisor.other_systems import SYMBOLS
from hybrid_engine.advisor.overview import overview_of
from hybrid_engine.advisor.picture import Column, Group, Picture, picture_of
from hybrid_engine.advisor.sections import UNITS, Unit, how_many, sections_of
from hybrid_engine.layouts.memory_peaks import NOT_COUNTED
from hybrid_engine.layouts.memory_plan import gib
from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.summary import group_traffic

if TYPE_CHECKING:
    from jinja2 import Template

_MOST_IN_ONE = 48
"""Columns of a picture that needs no overview."""
_MOST_IN_A_MATRIX = 16


@dataclass(frozen=True)
class Matrix:
    """Who sends to whom, in the unit of the page.

    Attributes:
        title: what rows and columns are.
        names: of rows and columns.
        rows: a cell is its text, and its part of the largest from 0 to 1.
    """

    title: str
    names: list[str]
    rows: list[list[tuple[str, float]]]


@dataclass(frozen=True)
class MemoryPart:
    """Some bytes of a device; `kind` is that of page.css, `percent` of the whole width."""

    name: str
    kind: str
    size: str
    percent: float


@dataclass(frozen=True)
class MemoryBar:
    """What is on a device at one time."""

    name: str
    parts: list[MemoryPart]
    total: str


def page_of(answer: Answer, title: str) -> str:
    """The page; it loads nothing."""
    job = answer.job
    picture = picture_of(job.table, job.source.holdings, job.destination.holdings)
    pictures = list(_pictures(picture))
    texts: dict[str, int] = {}
    drawings = [draw(each, group, texts) for _, each, group in pictures]
    data = {
        "rows": [row.label for row in picture.rows],
        "texts": list(texts),
        "pictures": [drawing.data for drawing in drawings],
    }
    return _template().render(
        title=title,
        verdict=JobVerdict(job),
        drawings=[(heading, drawing) for (heading, _, _), drawing in zip(pictures, drawings, strict=True)],
        memory=list(_memory_bars(job)),
        device=_device_mark(job),
        matrices=list(_matrices(job, picture)),
        received=_received(job),
        links=_links(job),
        sections=list(sections_of(answer)),
        peers=[asdict(peer) for peer in job.peers],
        unit=Unit.of(job),
        notes=[SYMBOLS, assumptions(job), NOT_COUNTED, UNITS],
        css=_file("page.css"),
        script=_file("page.js"),
        data=json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/"),
    )


def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_file("page.html"))


def _file(name: str) -> str:
    return (files("hybrid_engine.advisor") / "page_files" / name).read_text(encoding="utf-8")


def _pictures(picture: Picture) -> Iterator[tuple[str, Picture, Group]]:
    """(heading, picture, what of it to draw); where there are many columns an overview comes first."""
    num_hidden = sum(group.num_hidden for group in picture.groups)
    if len(picture.columns) <= _MOST_IN_ONE and not num_hidden:
        yield "", picture, Group(range(len(picture.columns)), 0)
        return
    overview = overview_of(picture)
    yield "", overview, overview.groups[0]
    for group, column in zip(picture.groups, overview.columns, strict=True):
        hidden = f", {group.num_hidden:,} more like them" if group.num_hidden else ""
        yield f"{ranks_text(column)} ({how_many(len(group.columns), 'column')}{hidden})", picture, group


def _memory_bars(job: JobPlan) -> Iterator[MemoryBar]:
    """Of the rank with the highest peak."""
    memory, state = job.memory, job.memory.state
    rank = int(memory.device.argmax())
    kept = {("vLLM's weights", "inference"): memory.inference}
    training = {
        ("parameters", "params"): state.params,
        ("gradients", "grads"): state.grads,
        ("optimizer state", "optimizer"): state.optimizer,
        **(kept if memory.keeps_inference else {}),
    }
    by_bucket = ", bucket by bucket" * (not memory.keeps_inference)
    switch = {(f"parameters and vLLM's weights{by_bucket}", "switch"): memory.interleaved_switch}
    full = max(float(memory.device[rank]), job.cluster.device_gib * GIB)
    for name, parts in (("Training", training), ("Switch", switch), ("Generating", kept)):
        nbytes = {names: int(by_rank[rank]) for names, by_rank in parts.items()}
        drawn = [MemoryPart(*names, gib(each), 100 * each / full) for names, each in nbytes.items()]
        yield MemoryBar(name, drawn, gib(sum(nbytes.values())))


def _device_mark(job: JobPlan) -> dict[str, Any]:
    """Where the bars of memory have the end of the device."""
    size = job.cluster.device_gib * GIB
    return {"gib": f"{job.cluster.device_gib:g}", "percent": 100 * size / max(float(job.memory.device.max()), size)}


def _received(job: JobPlan) -> list[tuple[str, str, float]]:
    """(name, mean GiB, part of the largest in percent) of this plan, the least, and others."""
    found = {"this plan": float(job.bytes.received.mean()), "least possible": float(job.bytes.lower_bound.mean())}
    found |= {peer.system: peer.nbytes for peer in job.peers if peer.nbytes is not None}
    largest = max(*found.values(), 1.0)
    return [(name, gib(nbytes), 100 * nbytes / largest) for name, nbytes in found.items()]


def _links(job: JobPlan) -> list[tuple[str, str, str, str]]:
    """(link, most of a rank, assumed speed, seconds)."""
    moved = job.bytes
    names = {Link.SELF: "within a rank", Link.HOST: "within a host", Link.NETWORK: "between hosts"}
    nbytes = {
        Link.SELF: moved.own,
        Link.HOST: np.maximum(moved.host, moved.sent_host),
        Link.NETWORK: np.maximum(moved.network, moved.sent_network),
    }
    return [
        (names[link], Unit.of(job).number(float(each.max())), f"{rate:g}", f"{float(each.max()) / rate / 1e9:.3g}")
        for link, rate in job.cluster.link_gbps.items()
        for each in (nbytes[link],)
    ]


def _matrices(job: JobPlan, picture: Picture) -> Iterator[Matrix]:
    """By host, and by the groups of the picture, where there are several."""
    hosts = np.array(job.cluster.hosts(job.world_size))
    per_host = -(-(int(hosts.max()) + 1) // _MOST_IN_A_MATRIX)
    group_of = np.zeros(job.world_size, dtype=np.int64)
    per_group = -(-len(picture.groups) // _MOST_IN_A_MATRIX)
    for number, group in enumerate(picture.groups):
        for column in picture.columns[group.columns.start : group.columns.stop]:
            group_of[list(column.ranks)] = number // per_group
    relaying = job.cluster.relaying_hosts(job.world_size)
    by_host, by_group = group_traffic(
        job.source.holdings, job.destination.holdings, hosts.tolist(), relaying, [hosts // per_host, group_of]
    )
    if len(by_host) > 1:
        starts, num_hosts = range(0, len(by_host) * per_host, per_host), int(hosts.max()) + 1
        names = [_span("host", start, min(start + per_host, num_hosts)) for start in starts]
        yield _matrix("By host", names, by_host, Unit.of(job))
    if len(by_group) > 1:
        names = [_ranks_of(np.flatnonzero(group_of == number)) for number in range(len(by_group))]
        yield _matrix("By ranks that hold the same layers", names, by_group, Unit.of(job))


def _span(what: str, start: int, stop: int) -> str:
    return f"{what} {start}" if stop == start + 1 else f"{what}s {start}-{stop - 1}"


def _ranks_of(ranks: np.ndarray) -> str:
    return ranks_text(Column(tuple(ranks.tolist()))).partition(": ")[2] or str(ranks[0])


def _matrix(title: str, names: list[str], nbytes: np.ndarray, unit: Unit) -> Matrix:
    largest = max(int(nbytes.max()), 1)
    rows = [[(f"{each / unit.nbytes:.3g}", each / largest) for each in row] for row in nbytes.tolist()]
    return Matrix(title, names, rows)

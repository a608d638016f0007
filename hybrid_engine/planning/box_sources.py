"""What of a box comes out of which source box, as geometry: nothing here knows ranks or hosts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybrid_engine.planning.plan import Link
from hybrid_engine.records.owners import touching
from hybrid_engine.records.regions import Region, subtract_all


@dataclass(frozen=True, slots=True)
class BoxSource:
    """A part of the box that a class of receivers needs, and the source box (by index) it comes out of."""

    region: Region
    source: int
    link: Link


def nearest_first(
    _needed: Region, by_link: Mapping[Link, Sequence[int]], common: Mapping[int, Region]
) -> Iterator[BoxSource]:
    """What each source has of a box, nearest first and of these the largest."""
    for link, numbers in by_link.items():
        for number in sorted(numbers, key=lambda number: (-common[number].numel, common[number])):
            yield BoxSource(common[number], number, link)


def are_slices(needed: Region, parts: Collection[Region]) -> bool:
    """Whether boxes that cover another one lie in it side by side, along one dim: as ranks shard a tensor."""
    whole = tuple(zip(needed.offsets, needed.lengths, strict=True))
    cut = {
        dim
        for part in parts
        for dim, bounds in enumerate(zip(part.offsets, part.lengths, strict=True))
        if bounds != whole[dim]
    }
    return len(cut) <= 1 and sum(part.numel for part in parts) == needed.numel


@dataclass(frozen=True, slots=True)
class CommonBox:
    """A box that the same classes of receivers (by index) need."""

    region: Region
    source: int
    classes: tuple[int, ...]


def common_boxes(needed: Mapping[int, Sequence[BoxSource]]) -> list[CommonBox]:
    """Cut what some classes of receivers need into disjoint boxes; `needed` is by class, the parts of one disjoint."""
    boxes: list[CommonBox] = []
    for number, parts in needed.items():
        near = touching([box.region for box in boxes], [part.region for part in parts])
        pieces = [[box] for box in boxes]
        new: list[CommonBox] = []
        for part, touched in zip(parts, near, strict=True):
            others = [piece.region for index in touched for piece in pieces[index]]
            new += (CommonBox(region, part.source, (number,)) for region in subtract_all([part.region], others))
            for index in touched:
                pieces[index] = [cut for piece in pieces[index] for cut in _cut(piece, part.region, number)]
        boxes = [piece for each in pieces for piece in each] + new
    return boxes


def _cut(box: CommonBox, region: Region, number: int) -> Iterator[CommonBox]:
    """What is outside `region`, then what is inside, which class `number` needs too."""
    for outside in box.region.subtract(region):
        yield CommonBox(outside, box.source, box.classes)
    if (inside := box.region.intersect(region)) is not None:
        yield CommonBox(inside, box.source, (*box.classes, number))

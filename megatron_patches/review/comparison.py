"""What a megatron-core has that the list of reviewed fields lacks: ``python -m megatron_patches review``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from megatron_patches.review.sources import SECTIONS, CoreSources, DeclaredField
from megatron_patches.review.verdicts import Review, review_of

_MOST_USES = 8


@dataclass(frozen=True)
class OtherDefault:
    """A reviewed field whose default is no longer the one that it was reviewed with."""

    field: DeclaredField
    reviewed: object


@dataclass(frozen=True)
class Comparison:
    """A version against the last review of it or of one before it.

    Attributes:
        version: that was read.
        review: that it is compared with.
        new: fields that were not reviewed.
        gone: ``section.field`` of those that the version no longer has.
        other_defaults: reviewed fields with another default.
    """

    version: str
    review: Review
    new: tuple[DeclaredField, ...]
    gone: tuple[str, ...]
    other_defaults: tuple[OtherDefault, ...]

    @property
    def is_reviewed(self) -> bool:
        """Whether the list says everything about this version."""
        return not (self.new or self.gone or self.other_defaults)


def compare(sources: CoreSources) -> Comparison:
    """The fields that `sources` declare against those that were reviewed."""
    review = review_of(sources.version)
    declared = sources.fields()
    reviews = [(field, review.of(field.section, field.name)) for field in declared]
    names = {(field.section, field.name) for field in declared}
    return Comparison(
        version=sources.version,
        review=review,
        new=tuple(field for field, found in reviews if found is None),
        gone=tuple(
            f"{section}.{name}"
            for section, fields in review.sections.items()
            for name in fields
            if (section, name) not in names
        ),
        other_defaults=tuple(
            OtherDefault(field, found.default)
            for field, found in reviews
            if found is not None and found.default != field.default
        ),
    )


def report(comparison: Comparison, sources: CoreSources) -> Iterator[str]:
    """The comparison in lines; for a new field what the sources say of it and where they use it."""
    head = f"megatron-core {comparison.version} against the review of {comparison.review.version}"
    if comparison.is_reviewed:
        yield f"{head}: nothing to review"
        return
    yield (
        f"{head}: {len(comparison.new)} fields are new, {len(comparison.gone)} are gone, "
        f"{len(comparison.other_defaults)} have another default"
    )
    for field in comparison.new:
        yield f"\nnew   {field.section}.{field.name}: {field.annotation} = {field.default}   ({field.place})"
        if field.text:
            yield f"      {field.text}"
        uses = sources.uses(field.name)
        more = f" and {len(uses) - _MOST_USES} more places" if len(uses) > _MOST_USES else ""
        yield f"      used in {', '.join(uses[:_MOST_USES]) or 'no other file'}{more}"
    if comparison.gone:
        yield ""
    for name in comparison.gone:
        yield f"gone  {name}"
    if comparison.other_defaults:
        yield ""
    for other in comparison.other_defaults:
        yield f"now   {other.field.section}.{other.field.name} = {other.field.default}, before {other.reviewed}"


def skeleton(comparison: Comparison) -> str:
    """What to add to reviewed.yaml, with every verdict still to be given: new fields are under ``unread``."""
    others = [other.field for other in comparison.other_defaults]
    sections = {}
    for section in SECTIONS:
        changes = {
            "unread": {field.name: field.default for field in comparison.new if field.section == section},
            "defaults": {field.name: field.default for field in others if field.section == section},
            "gone": [name.partition(".")[2] for name in comparison.gone if name.startswith(f"{section}.")],
        }
        sections[section] = {key: found for key, found in changes.items() if found}
    filled = {section: changes for section, changes in sections.items() if changes}
    return yaml.safe_dump({comparison.version: filled}, sort_keys=False, width=110)

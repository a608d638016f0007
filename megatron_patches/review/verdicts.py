"""What was found about each configuration field of each megatron-core that was reviewed: reads reviewed.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from packaging.version import Version

from megatron_patches.errors import ReviewError

LIST: Final = Path(__file__).with_name("reviewed.yaml")
REQUIRED: Final = "required"
"""Stands for the default of a field that has none."""

Verdict = Literal["harmless", "handled", "function", "refused"]


@dataclass(frozen=True)
class FieldReview:
    """What one field means for a switch.

    Attributes:
        verdict: only a refused field must not have every value; one of the "function" has to follow from config.json
            where there is one.
        reason: why.
        default: a literal, or source text, or `REQUIRED`.
        accepted: values that a refused field may have: its default when it was reviewed, and others.
    """

    verdict: Verdict
    reason: str
    default: object
    accepted: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """Whether the field may have this value; of a list, whether it may have each value in it."""
        if self.verdict != "refused" or value in self.accepted:
            return True
        return isinstance(value, list | tuple) and bool(value) and all(one in self.accepted for one in value)


Section = Mapping[str, FieldReview]
"""Reviews by field."""


@dataclass(frozen=True)
class Review:
    """All fields of one version.

    Attributes:
        version: that was reviewed.
        sections: by configuration class, see `sources.SECTIONS`.
    """

    version: str
    sections: Mapping[str, Section]

    def of(self, section: str, field: str) -> FieldReview | None:
        """None: the field was not reviewed."""
        return self.sections.get(section, {}).get(field)


@cache
def reviewed_versions() -> tuple[str, ...]:
    """Oldest first."""
    return tuple(sorted(_list(), key=Version))


@cache
def review_of(version: str) -> Review:
    """Of this version, or of the last one before it that was reviewed; of the first one for any that is older."""
    *earlier, reviewed = [one for one in reviewed_versions() if Version(one) <= Version(version)] or (
        reviewed_versions()[0],
    )
    sections: dict[str, dict[str, FieldReview]] = {}
    for one in (*earlier, reviewed):
        for name, changes in _list()[one].items():
            _change(sections.setdefault(name, {}), changes)
    return Review(reviewed, sections)


def _change(fields: dict[str, FieldReview], changes: Mapping[str, Any]) -> None:
    """Bring a section up to a later version.

    Raises:
        ReviewError: for another default of a refused field; what it may be follows from its default.
    """
    for field in changes.get("gone", ()):
        del fields[field]
    for field, default in changes.get("defaults", {}).items():
        if fields[field].verdict == "refused":
            raise ReviewError(f"{field} has another default, and is refused otherwise: give its verdict anew instead")
        fields[field] = replace(fields[field], default=default)
    for reason, defaults in changes.get("harmless", {}).items():
        fields.update({field: FieldReview("harmless", reason, default) for field, default in defaults.items()})
    for reason, defaults in changes.get("handled", {}).items():
        fields.update({field: FieldReview("handled", reason, default) for field, default in defaults.items()})
    reason = "it is part of what the model computes"
    fields.update({field: FieldReview("function", reason, at) for field, at in changes.get("function", {}).items()})
    fields.update({field: _refused(**found) for field, found in changes.get("refused", {}).items()})


def _refused(default: object, reason: str, accepted: Sequence[object] = ()) -> FieldReview:
    return FieldReview("refused", reason, default, (default, *accepted))


@cache
def _list() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    return yaml.safe_load(LIST.read_text(encoding="utf-8"))

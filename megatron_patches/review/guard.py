"""Refuses configurations of Megatron that were found not to go with a switch, or that nobody has looked at."""

from __future__ import annotations

import difflib
import importlib
import logging
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from megatron_patches.patch import release_of
from megatron_patches.review.settings import NO_DEFAULT, NOT_KEPT, Setting
from megatron_patches.review.sources import installed_sources
from megatron_patches.review.verdicts import FieldReview, Review, review_of

logger = logging.getLogger(__name__)

ALLOW = "allow_unreviewed"


@dataclass(frozen=True)
class Refusal:
    """A field that keeps a switch from being possible.

    Attributes:
        section: its configuration class, or `ALLOW` for a name that was allowed and does not exist.
        field: its name.
        problem: the value, and what is wrong with it.
        remedy: what to do.
    """

    section: str
    field: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.section}.{self.field}: {self.problem}. {self.remedy}"


def refusals(
    settings: Sequence[Setting], allow_unreviewed: Collection[str] = (), version: str | None = None
) -> list[Refusal]:
    """Everything that is refused, empty when a switch may go on. Logs what was allowed unreviewed.

    Args:
        settings: `live_settings` or `argument_settings`.
        allow_unreviewed: names of fields that were not reviewed and may have any value all the same.
        version: of megatron-core; default: of the one that is imported.
    """
    version = version or _imported()
    review = review_of(version)
    return [
        *_refused(settings, review, allow_unreviewed),
        *_unreviewed(settings, review, version, allow_unreviewed),
        *_unknown(settings, version, allow_unreviewed),
    ]


def function_fields(section: str, version: str | None = None) -> list[str]:
    """Fields of a configuration class that change what a model computes; `version` as in `refusals`."""
    found = review_of(version or _imported()).sections[section]
    return [field for field, review in found.items() if review.verdict == "function"]


def _imported() -> str:
    return release_of(importlib.import_module("megatron.core").__version__)


def _refused(settings: Sequence[Setting], review: Review, allowed: Collection[str]) -> Iterator[Refusal]:
    for setting in settings:
        found = review.of(setting.section, setting.field)
        if found is not None and not found.accepts(setting.value):
            value = "" if setting.value is True else f"{_shown(setting)}: "
            in_vain = f"; {ALLOW} does not help, since the field was reviewed" if setting.field in allowed else ""
            yield Refusal(setting.section, setting.field, f"{value}{found.reason}", _use(found) + in_vain)


def _use(found: FieldReview) -> str:
    if len(found.accepted) == 1:
        return f"Leave it at {found.default}"
    return f"Use {' or '.join(str(value) for value in found.accepted)}"


def _shown(setting: Setting) -> str:
    return setting.value.value if setting.value is NOT_KEPT else textwrap.shorten(str(setting.value), 80)


def _unreviewed(
    settings: Sequence[Setting], review: Review, version: str, allowed: Collection[str]
) -> Iterator[Refusal]:
    for setting in settings:
        if setting.is_default or review.of(setting.section, setting.field) is not None:
            continue
        problem = (
            f"{_shown(setting)}: what this field of megatron-core {version} means for a switch was not reviewed "
            f"(last reviewed: {review.version})"
        )
        if setting.field in allowed:
            logger.warning("%s.%s: %s. Continuing, since it is allowed", setting.section, setting.field, problem)
            continue
        leave = "If you know, " if setting.default is NO_DEFAULT else f"Leave it at {setting.default}, or "
        yield Refusal(setting.section, setting.field, problem, f"{leave}name it in {ALLOW}")


def _unknown(settings: Sequence[Setting], version: str, allowed: Collection[str]) -> Iterator[Refusal]:
    present = {setting.field for setting in settings}
    known = present | _declared() if set(allowed) - present else present
    for name in sorted(set(allowed) - known):
        close = difflib.get_close_matches(name, known, n=1)
        remedy = f"Did you mean {close[0]}" if close else "Remove it"
        yield Refusal(ALLOW, name, f"megatron-core {version} has no configuration field of this name", remedy)


@cache
def _declared() -> frozenset[str]:
    """Fields of the imported version, also of configurations that a model which is only read does not have."""
    sources = installed_sources()
    return frozenset() if sources is None else frozenset(field.name for field in sources.fields())

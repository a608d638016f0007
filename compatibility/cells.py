"""What is known of one combination of versions: what the code says of it, and the record that shows it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from compatibility.records import REPO_ROOT, RUNS, Extent, Record
from hybrid_engine.backends.vllm.version import READ_VERSIONS, TESTED_VERSION
from megatron_patches.patch import CORE_VERSIONS, PYTHON_3_12_SINCE

NONE = ""
"""Without that engine: FSDP2 in Megatron's place, or training, or planning, alone."""
OTHER = "others"
PYTHONS = ("3.11", "3.12", "3.13")
MEGATRONS = (NONE, *CORE_VERSIONS, OTHER)
TORCH_ENDS_WITH = Version("3.11")
VLLMS = (NONE, *sorted((TESTED_VERSION, *READ_VERSIONS), key=Version), OTHER)


class Status(StrEnum):
    """What a cell says."""

    PASSED = "passed"
    FAILED = "failed"
    IN_PART = "in part"
    READ = "read only"
    NOT_TRIED = "not tried"
    REFUSED = "refused"


class Remark(StrEnum):
    """What a cell says besides."""

    TORCH = (
        "torch 2.13.0+cpu, with which everything that needs torch is tested, could be had for Python 3.11 only where "
        "this was run."
    )
    PAST_CHECK = (
        "Wheels of megatron-core since 0.17 ask for Python 3.12. Here they were installed past that check, with "
        "`typing.override`, the one name of 3.12 that they miss, added (tests/harness/typing_override)."
    )
    UNTRIED = (
        "Nobody has run these yet. `make pure-tests` would tell without both engines, `make core-tests` with "
        "megatron-core, `make test PYTHON_ENV=…` with both."
    )


@dataclass(frozen=True)
class Cell:
    """One combination.

    Attributes:
        record: what shows it; None for what was refused or not tried.
    """

    status: Status
    record: Record | None = None
    remark: Remark | None = None


def cell_of(python: str, megatron: str, vllm: str, records: Sequence[Record]) -> Cell:
    """What is known of a version of Python, as 3.11, with `NONE`, `OTHER` or a version of each engine."""
    if python not in requires_python() or OTHER in (megatron, vllm):
        return Cell(Status.REFUSED)
    needs_torch = (megatron, vllm) != (NONE, NONE)
    past_check = (
        megatron not in (NONE, OTHER)
        and Version(python) < Version("3.12")
        and Version(megatron) >= Version(PYTHON_3_12_SINCE)
    )
    shown = [record for record in records if record.minor_python == python and _covers(record, megatron, vllm)]
    for extent, status in ((Extent.WHOLE, Status.PASSED), (Extent.PART, Status.IN_PART)):
        found = [record for record in shown if RUNS[record.run].extent == extent]
        if found:
            worst = min(found, key=lambda each: each.succeeded)
            status = status if worst.succeeded else Status.FAILED
            return Cell(status, worst, Remark.PAST_CHECK if past_check else None)
    if vllm in READ_VERSIONS:
        read = [each for each in records if each.run == "vllm-surface" and each.vllm == vllm]
        if read and read[-1].succeeded and not read[-1].skipped:
            return Cell(Status.READ, read[-1])
    return Cell(
        Status.NOT_TRIED, None, Remark.TORCH if needs_torch and Version(python) > TORCH_ENDS_WITH else Remark.UNTRIED
    )


@cache
def requires_python() -> SpecifierSet:
    """What pyproject.toml says."""
    project = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text())["project"]
    return SpecifierSet(project["requires-python"])


def _covers(record: Record, megatron: str, vllm: str) -> bool:
    """Whether a run was one of this combination; one of all tests was one of what it has less of, too."""
    run = RUNS[record.run]
    if run.extent == Extent.READ:
        return False
    if run.also_less:
        return megatron in (NONE, record.megatron) and vllm in (NONE, record.vllm)
    return (megatron, vllm) == (record.megatron, record.vllm)


def rows(records: Sequence[Record]) -> Iterable[tuple[str, str, list[Cell]]]:
    """Python, megatron-core, and a cell for each of `VLLMS`."""
    for python in PYTHONS:
        for megatron in MEGATRONS:
            yield python, megatron, [cell_of(python, megatron, vllm, records) for vllm in VLLMS]

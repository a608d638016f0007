"""Selection of test cases by version of megatron-core; the README lists the cases left out."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Final, TypeVar

from packaging.version import Version

T = TypeVar("T")

INSTALLED: Final = Version(importlib.metadata.version("megatron-core"))


def without(cases: Mapping[str, T], *later: str, since: str) -> dict[str, T]:
    """Return `cases`, without those named `later` if megatron-core is older than `since`."""
    assert cases.keys() >= set(later), f"no such cases: {sorted(set(later) - cases.keys())}"
    return {
        name: case
        for name, case in cases.items()
        if Version(since) <= INSTALLED or name not in later
    }

"""Cases that an older megatron-core cannot run are left out there; the README says what that leaves untested."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Final, TypeVar

from packaging.version import Version

T = TypeVar("T")

INSTALLED: Final = Version(importlib.metadata.version("megatron-core"))


def without(cases: Mapping[str, T], *later: str, since: str) -> dict[str, T]:
    """`cases` that this megatron-core can run; `later` names those that need one `since` then."""
    assert cases.keys() >= set(later), f"no such cases: {sorted(set(later) - cases.keys())}"
    return {name: case for name, case in cases.items() if Version(since) <= INSTALLED or name not in later}

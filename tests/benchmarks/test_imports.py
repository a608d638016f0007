"""Every benchmark can be imported: most of them run on no machine that tests run on."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = sorted(
    ".".join(path.relative_to(BENCHMARKS.parent).with_suffix("").parts) for path in BENCHMARKS.rglob("*.py")
)


@pytest.mark.slow  # some import both engines
@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_imported(name: str) -> None:
    importlib.import_module(name)

"""Marks that tell the truth: a test has them by what it takes, and what starts ranks in a test without them ends it.

A test that takes the fixture `ranks` or `engines` is marked so. One that starts programs (torchrun, `run_ranks`) says
it itself: `@pytest.mark.ranks`. `engines` implies `ranks`, so `-m "not ranks"` starts none at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

_IMPLIED = {"engines": ("engines", "ranks"), "ranks": ("ranks",)}

_test_without_ranks: str | None = None


def add_implied(item: pytest.Item) -> None:
    """Mark a test that was collected."""
    names = {*getattr(item, "fixturenames", ()), *(mark.name for mark in item.iter_markers())}
    for name in sorted({implied for given in names & set(_IMPLIED) for implied in _IMPLIED[given]}):
        item.add_marker(name)


def running(item: pytest.Item) -> None:
    """From here on, what is started is this test's."""
    global _test_without_ranks
    _test_without_ranks = item.nodeid if item.get_closest_marker("ranks") is None else None


def install_guard() -> None:
    """Have every start of a rank as a program fail in a test that is not marked `ranks`."""
    sys.addaudithook(_refuse_ranks)


def _refuse_ranks(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and _test_without_ranks is not None:
        _, arguments, _, environment = args
        if _starts_ranks(arguments, environment or {}):
            raise AssertionError(f"{_test_without_ranks} starts ranks and is not marked `ranks`")


def _starts_ranks(arguments: Sequence[Any], environment: Mapping[Any, Any]) -> bool:
    return "torch.distributed.run" in arguments or "TORCHELASTIC_RUN_ID" in environment

"""Thirty cycles with a failure at a random point of each switch; `python -m tests.faults.switching 200` for more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import switching
from tests.harness.launch import Ranks

pytestmark = [pytest.mark.faults, pytest.mark.engines]

NUM_CYCLES = 30
MOST_GROWN = {"resident bytes": 16 * 2**20, "descriptors": 4, "threads": 4}


def test_every_failed_switch_is_recovered(engines: Ranks, tmp_path: Path, record: Callable[..., None]) -> None:
    by_rank = engines.launch(switching.break_switches, 2, str(tmp_path), "tp2 -> dp2", NUM_CYCLES, 1, timeout=400)
    for findings in by_rank:
        record(
            fault=f"{findings.cycles} random failures on the way to another state",
            message=f"{findings.failed.total()} switches failed, worst difference {findings.worst:.1e}, "
            f"grown {findings.grown}",
            resumed=not findings.unrecovered,
        )
        assert findings.unrecovered == []
        assert findings.failed == by_rank[0].failed
        assert findings.failed.total() >= NUM_CYCLES // 6
        assert findings.worst < 1e-5
        assert all(findings.grown[name] <= most for name, most in MOST_GROWN.items()), findings.grown

"""The figures of benchmarks/prefetch.py; the runs themselves are the example's."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import prefetch


def rows(seconds: float, reward: float = 0.5) -> list[dict[str, Any]]:
    times = {"iteration_seconds": seconds, "reshard_seconds": seconds / 10, "generate_seconds": seconds / 2}
    return [
        {"iteration": number, "reward": reward, "reshard_share": seconds, "peak_bytes": 7, "rss_bytes": 9, **times}
        for number in range(4)
    ]


def test_seconds_and_memory_may_differ() -> None:
    prefetch.require_same([rows(1.0), rows(2.0)])


def test_a_reward_that_differs_is_named() -> None:
    with pytest.raises(SystemExit, match="iteration 0: reward differ"):
        prefetch.require_same([rows(1.0), rows(1.0, reward=0.25)])


def test_the_first_iteration_does_not_count() -> None:
    slow = rows(1.0)
    slow[1]["iteration_seconds"] = 100.0
    figures = prefetch.summary([slow, rows(3.0)])
    assert (figures["iteration_seconds"], figures["peak_bytes"]) == (2.0, 7)

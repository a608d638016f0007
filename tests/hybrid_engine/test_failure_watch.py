"""Ranks that part ways inside libraries: what each says, and that each ends."""

from __future__ import annotations

import re
import time

import pytest

from hybrid_engine.launching import run_ranks

CAUSES = {
    "raises": r"rank 1, generate: MemoryError: no memory for 3 GB",
    "killed": r"rank 1 has ended \(process \d+\)",
    "stopped": r"rank 1 is stopped \(process \d+\)",
}


@pytest.mark.parametrize("scenario", CAUSES)
def test_every_rank_says_the_cause_and_ends(scenario: str) -> None:
    """Rank 0 is in a call that has no timeout, rank 2 in a collective, rank 1 fails."""
    started = time.monotonic()
    ended = run_ranks(["-m", "tests.hybrid_engine.watch_ranks", scenario], 3, timeout=100)
    seconds, cause = time.monotonic() - started, CAUSES[scenario]
    assert re.search(rf"ERROR \[Reshard\] {cause} \(rank 0 is still in: generate\)", ended.output), ended.output
    assert re.search(
        rf"CRITICAL \[Reshard\] rank 0 ends: after \d+ s it still waits in 'generate'.*{cause}", ended.output
    )
    if scenario != "stopped":  # nothing tells a group that a member is stopped, so the watch ends rank 2, too
        assert re.search(rf"rank 2 raised LostRankError: generate: {cause}", ended.output), ended.output
    if scenario == "raises":
        assert "rank 1 raised LostRankError: generate: MemoryError: no memory for 3 GB\nThe other ranks" in ended.output
    assert "gloo" not in ended.output and "GLHF" not in ended.output
    assert ended.status is not None and seconds < 60, "a rank was left waiting"

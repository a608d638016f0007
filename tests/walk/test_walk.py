"""What users do with an engine, at random, with a fixed seed: right, or refused. See tests/walk/__init__.py.

More seeds, and for longer: tests/faults/test_random_walk.py.
"""

from __future__ import annotations

import pytest

from tests.harness.launch import Ranks
from tests.walk.runs import TRAINERS, launched, plans, report, story, walks

pytestmark = pytest.mark.engines  # Megatron trains; there is no vLLM


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_call_is_right_or_refused(engines: Ranks, trainer: str) -> None:
    found = launched(engines, 1, plans, trainer, timeout=200)
    print(report(found))
    assert [story(each) for each in found if each.wrong] == []
    assert sum(each.counts["rollouts compared"] for each in found) > 6 * len(found)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_random_walk(engines: Ranks, trainer: str, num_ranks: int) -> None:
    found = launched(engines, num_ranks, walks, trainer, range(SEEDS[num_ranks]), 25, 0.3, timeout=200)
    print(report(found))
    assert [story(each) for each in found if each.wrong] == []
    assert sum(each.counts["faults"] for each in found)
    assert sum(each.counts["bytes skipped"] for each in found)


SEEDS = {1: 6, 2: 3}

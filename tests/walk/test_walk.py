"""What users do with an engine, at random, with fixed seeds: right, or refused. See tests/walk/__init__.py.

Other seeds, other trainers, and for longer: tests/faults/test_random_walk.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.launch import Ranks
from tests.walk.runs import launched, plans, report, story, walks

pytestmark = pytest.mark.engines  # Megatron trains, and where it is said vLLM serves


def long(*values: object) -> Any:
    """A case of `make test-faults`."""
    return pytest.param(*values, marks=pytest.mark.faults)


@pytest.mark.parametrize("trainer", ["megatron-bf16", long("fsdp2")])
def test_every_call_is_right_or_refused(engines: Ranks, trainer: str) -> None:
    found = launched(engines, 1, plans, trainer, timeout=300)
    print(report(found))
    assert [story(each) for each in found if each.wrong] == []
    assert found[0].counts["plans"] > 40
    assert found[0].counts["rollouts compared"] >= 3 * found[0].counts["plans"]


@pytest.mark.parametrize(
    ("trainer", "num_ranks", "num_walks"),
    [("fsdp2", 1, 2), ("megatron-bf16", 2, 2), long("megatron-bf16", 1, 6), long("fsdp2", 2, 2)],
)
def test_a_random_walk(engines: Ranks, trainer: str, num_ranks: int, num_walks: int) -> None:
    found = launched(engines, num_ranks, walks, trainer, range(num_walks), 25, 0.3, timeout=300)
    print(report(found))
    assert [story(each) for each in found if each.wrong] == []
    assert sum(each.counts["faults"] for each in found)
    assert sum(each.counts["bytes skipped"] for each in found) or num_ranks > 1


@pytest.mark.parametrize("trainer", ["fsdp2-vllm", "megatron-vllm"])
def test_a_walk_with_vllm(engines: Ranks, trainer: str) -> None:
    """Log-probabilities of vLLM against the trainer's own, of the weights as they are."""
    found = launched(engines, 1, walks, trainer, range(1, 2), 20, 0.2, timeout=300)
    print(report(found))
    assert [story(each) for each in found if each.wrong] == []
    assert found[0].counts["rollouts compared"] > 3

"""Weights that are compared with Megatron's as they are committed."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.errors import WeightError
from hybrid_engine.megatron_script.checked_weights import NUM_SAMPLED, CheckedWeights
from hybrid_engine.switch.sharding_manager import ShardingManager, State
from tests.hybrid_engine.switch.fakes import Rig


def checked(rig: Rig) -> tuple[CheckedWeights, ShardingManager]:
    weights = CheckedWeights(rig.inference, rig.job.agreement)
    manager = ShardingManager(
        trainer=rig.training,
        inference=weights,
        caches=rig.inference,
        offloader=rig.offloader,
        config=rig.config,
        job=rig.job,
    )
    return weights, manager


def test_a_switch_that_brings_every_bit_is_clean(job: None) -> None:
    rig = Rig(build=False)
    weights, manager = checked(rig)
    for _ in range(3):
        rig.training.step()
        weights.expect(rig.training, sample=False)
        manager.enter(State.INFER)
        weights.require_same()
        assert weights.num_checked == 2
        manager.enter(State.TRAIN)


def test_one_bit_is_found_and_named(job: None) -> None:
    rig = Rig(build=False)
    weights, manager = checked(rig)
    weights.expect(rig.training, sample=False)
    rig.training.param[-1:].view(torch.int32).bitwise_xor_(1)  # what arrives is not what was expected
    manager.enter(State.INFER)
    with pytest.raises(WeightError, match="second: differs from Megatron's weights") as caught:
        weights.require_same()
    assert "first" not in str(caught.value)


def test_what_never_came_is_missed(job: None) -> None:
    rig = Rig(build=False)
    weights, _ = checked(rig)
    weights.expect(rig.training, sample=False)
    with pytest.raises(WeightError, match="2 of 2 shards were never committed"):
        weights.require_same()


def test_samples_go_round(job: None) -> None:
    rig = Rig(build=False)
    weights, _ = checked(rig)
    names = [f"tensor{number:02}" for number in range(NUM_SAMPLED + 3)]
    first, second = (weights._chosen(names, sample=True) for _ in range(2))
    assert first == names[:NUM_SAMPLED]
    assert second[:3] == names[NUM_SAMPLED:]
    assert len(second) == NUM_SAMPLED
    assert weights._chosen(names, sample=False) == names

"""Accepted learning rates, and FSDP2's schedule, which has the values of Megatron's."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_engine.config import OptimizerConfig
from hybrid_engine.errors import ConfigError
from hybrid_engine.trainer.fsdp.actor import _adam
from hybrid_engine.trainer.learning_rate import ScheduledOptimizer, param_scheduler
from tests.harness.errors import violated
from tests.harness.values import Values


@pytest.mark.parametrize(
    "rate", [math.nan, math.inf, -math.inf, 1e308, -1.0, True, False, "x", None, 1j, [1.0]]
)
def test_an_invalid_rate_is_refused_and_changes_nothing(rate: Any) -> None:
    groups = [{"lr": 0.5}, {"lr": 0.25}]
    with violated(ConfigError, ("learning_rate", "out-of-range")):
        ScheduledOptimizer(SimpleNamespace(param_groups=groups)).set_learning_rate(rate)
    assert groups == [{"lr": 0.5}, {"lr": 0.25}]


@pytest.mark.parametrize("rate", [0, 3e-4, 1e30, np.float32(0.5)])
def test_every_group_gets_the_rate(rate: Any) -> None:
    groups = [{"lr": 0.5}, {"lr": 0.25}]
    ScheduledOptimizer(SimpleNamespace(param_groups=groups)).set_learning_rate(rate)
    assert groups == [{"lr": rate}] * 2
    assert all(type(group["lr"]) is float for group in groups)


pytestmark = pytest.mark.slow  # imports Megatron

WSD = {
    "lr_decay_style": "WSD",
    "lr_decay_steps": 20,
    "lr_wsd_decay_steps": 7,
    "lr_wsd_decay_style": "minus_sqrt",
}
GROWING = {"start_weight_decay": 0.01, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"}
# schedule -> (keys, learning rate and weight decay after 16 updates)
SCHEDULES = {
    "constant": ({"lr_warmup_init": 1e-3, "lr_warmup_steps": 20}, [0.0082, 0.05]),
    "WSD": ({**WSD, **GROWING, "min_lr": 1e-4, "lr_warmup_fraction": 0.2}, [0.003519, 0.082]),
}


def resumed(config: OptimizerConfig, num_updates: int) -> ScheduledOptimizer:
    adam = _adam(torch.nn.Linear(1, 1), config)
    optimizer = ScheduledOptimizer(adam, param_scheduler(adam, config))
    optimizer.resume_schedule(num_updates)
    return optimizer


def values_of(optimizer: ScheduledOptimizer) -> list[float]:
    return [group[key] for group in optimizer.inner.param_groups for key in ("lr", "weight_decay")]


@pytest.mark.parametrize(("schedule", "expected"), SCHEDULES.values(), ids=SCHEDULES)
def test_trained_and_resumed_groups_have_megatrons_values(
    schedule: Values, expected: list[float]
) -> None:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.05, schedule=schedule)
    groups = SimpleNamespace(param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}])
    megatron = ScheduledOptimizer(groups, param_scheduler(groups, config))
    trained = resumed(config, 0)
    for num_updates in range(24):  # beyond lr_decay_steps
        assert values_of(trained) == values_of(resumed(config, num_updates)) == values_of(megatron)
        for optimizer in (trained, megatron):
            optimizer.conclude_step(successful=True)
    assert values_of(resumed(config, 16))[:2] == pytest.approx(expected, rel=1e-3)

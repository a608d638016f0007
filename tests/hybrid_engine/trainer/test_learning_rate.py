"""Accepted learning rates, and FSDP2's schedule, which equals megatron-core's."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_engine.config import OptimizerConfig
from hybrid_engine.errors import ConfigError
from hybrid_engine.trainer.learning_rate import ParamSchedule, ScheduledOptimizer
from tests.harness.errors import has_violations


@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf, 1e308, -1.0, True, False, "x", None, 1j, [1.0]])
def test_an_invalid_rate_is_refused_and_changes_nothing(rate: Any) -> None:
    groups = [{"lr": 0.5}, {"lr": 0.25}]
    with pytest.raises(ConfigError, check=has_violations(("learning_rate", "out-of-range"))):
        ScheduledOptimizer(SimpleNamespace(param_groups=groups)).set_learning_rate(rate)
    assert groups == [{"lr": 0.5}, {"lr": 0.25}]


@pytest.mark.parametrize("rate", [0, 3e-4, 1e30, np.float32(0.5)])
def test_every_group_gets_the_rate(rate: Any) -> None:
    groups = [{"lr": 0.5}, {"lr": 0.25}]
    ScheduledOptimizer(SimpleNamespace(param_groups=groups)).set_learning_rate(rate)
    assert groups == [{"lr": rate}] * 2
    assert all(type(group["lr"]) is float for group in groups)


pytestmark = pytest.mark.slow  # imports Megatron

DECAYING = {"lr_decay_steps": 20, "min_lr": 1e-4, "lr_warmup_init": 1e-5}
WSD = {**DECAYING, "lr_decay_style": "WSD", "lr_wsd_decay_steps": 7, "lr_warmup_steps": 3}
GROWING = {"start_weight_decay": 0.01, "end_weight_decay": 0.1}
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "constant, warm-up": {"lr_warmup_steps": 4},
    "linear": {**DECAYING, "lr_decay_style": "linear", "lr_warmup_fraction": 0.1},
    "cosine": {**DECAYING, "lr_decay_style": "cosine", "lr_warmup_steps": 5},
    "cosine, no warm-up": {**DECAYING, "lr_decay_style": "cosine"},
    "inverse square root": {**DECAYING, "lr_decay_style": "inverse-square-root", "lr_warmup_steps": 5},
    **{f"WSD, {style}": {**WSD, "lr_wsd_decay_style": style} for style in ("exponential", "linear", "cosine")},
    "WSD, minus_sqrt": {**WSD, "lr_wsd_decay_style": "minus_sqrt"},
    "weight decay, linear": {**GROWING, "weight_decay_incr_style": "linear", "weight_decay_incr_steps": 9},
    "weight decay, cosine": {**DECAYING, **GROWING, "lr_decay_style": "linear", "weight_decay_incr_style": "cosine"},
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_step_has_the_values_of_megatron(schedule: dict[str, Any]) -> None:
    from hybrid_engine.backends.megatron.megatron_config import param_scheduler

    config = OptimizerConfig(lr=1e-2, weight_decay=0.05, schedule=schedule)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    megatron_optimizer = SimpleNamespace(param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}])
    schedules = ParamSchedule(optimizer, config), param_scheduler(megatron_optimizer, config)
    for _ in range(24):  # beyond lr_decay_steps
        for group, expected in zip(optimizer.param_groups, megatron_optimizer.param_groups, strict=True):
            assert group["lr"] == pytest.approx(expected["lr"], rel=1e-12, abs=0)
            assert group["weight_decay"] == pytest.approx(expected["weight_decay"], rel=1e-12, abs=0)
        for scheduler in schedules:
            scheduler.step(1)

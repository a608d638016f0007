"""A learning rate is one with which a step can be taken."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.trainer.learning_rate import set_learning_rate


@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf, 1e308, -1.0, True, False, "x", None, 1j, [1.0]])
def test_what_is_none_is_refused_before_anything_changes(rate: Any) -> None:
    groups = [{"lr": 0.5}, {"lr": 0.25}]
    with pytest.raises(ConfigError, match=r"learning_rate: .* is not possible\. Use a number from 0 to 1e\+30"):
        set_learning_rate(groups, None, rate)
    assert groups == [{"lr": 0.5}, {"lr": 0.25}]


@pytest.mark.parametrize("rate", [0, 3e-4, 1e30, np.float32(0.5)])
def test_every_group_gets_it(rate: Any) -> None:
    groups = [{"lr": 0.5}, {"lr": 0.25}]
    set_learning_rate(groups, None, rate)
    assert groups == [{"lr": rate}] * 2
    assert all(type(group["lr"]) is float for group in groups)

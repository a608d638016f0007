"""rollout_config and train_config: what is wrong is said before a rank joins a job, by the keys that were given."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_engine.config.fsdp_rules import generate_values, read_train_config
from hybrid_engine.errors import ConfigError


def keys_of(error: ConfigError) -> set[str]:
    return {found.key for found in error.findings}


def test_every_wrong_value_is_said_by_the_key_that_was_given() -> None:
    wrong = {
        "tp_size": 0,
        "pp_size": 10**9,
        "timeout_seconds": float("inf"),
        "seed": 2**80,
        "dp_type": [1],
        "tp_sise": 2,
        "model": 5,
    }
    with pytest.raises(ConfigError) as caught:
        generate_values({**wrong, "infer_expert_parallel_size": "x"})
    assert keys_of(caught.value) == {f"rollout_config.{key}" for key in (*wrong, "infer_expert_parallel_size")}


@pytest.mark.parametrize("value", [5, "tp_size", [1], {5: 1}])
def test_what_is_no_mapping_of_keys_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="rollout_config"):
        generate_values(value)
    with pytest.raises(ConfigError, match="train_config"):
        read_train_config(value, 1)


def test_short_names_and_the_model_pass() -> None:
    values = generate_values({"tp_size": 2, "dp_type": "none", "model": "directory", "max_model_len": 64})
    assert values == {
        **{"infer_tensor_parallel_size": 2, "infer_data_parallel_size": 1},
        **{"model": "directory", "max_model_len": 64},
    }

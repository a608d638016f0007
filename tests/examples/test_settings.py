"""The committed configurations are valid, and all violations are reported at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.gpt_rl import settings
from hybrid_engine.errors import ConfigError

CONFIGS = Path(settings.__file__).parent / "configs"
TP2 = CONFIGS / "tp2_to_dp2.yaml"
WORLD_SIZES = {"tp2_to_dp2.yaml": 2, "tp2pp2_to_tp2dp2.yaml": 4, "fsdp2_to_dp.yaml": 2}


def wrong_keys(*overrides: str, config: Path = TP2) -> set[str]:
    with pytest.raises(ConfigError) as caught:
        settings.load_settings(config, 2, overrides)
    return {finding.key for finding in caught.value.findings}


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_committed_files_are_valid_and_share_their_task(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # Paths in a file are relative to it.
    loaded = settings.load_settings(CONFIGS / name, WORLD_SIZES[name])
    assert loaded.engine.actor_config.seed == loaded.engine.generate_config.seed == loaded.rl.seed
    assert loaded.rl == settings.load_settings(TP2, 2).rl


def test_overrides_replace_values_of_the_file() -> None:
    texts = [
        "actor_config.optimizer.clip_grad=0.5",
        "rl_config.warm_up.max_steps=7",
        "rl_config.seed=3",
    ]
    loaded = settings.load_settings(TP2, 2, [*texts, "generate_config.seed=5"])
    assert loaded.engine.actor_config.optimizer.clip_grad == 0.5
    assert (loaded.rl.warm_up.max_steps, loaded.rl.warm_up.batch_size) == (7, 128)
    assert (loaded.engine.actor_config.seed, loaded.engine.generate_config.seed) == (3, 5)
    assert loaded.title() == "Two-digit sums: Megatron TP=2 to vLLM DP=2, seed 3"


def test_a_key_in_the_wrong_section_is_refused_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown key. Use rl_config\.iterations$"):
        settings.load_settings(TP2, 2, ["rl_config.warm_up.iterations=3"])


def test_all_violations_are_reported_at_once() -> None:
    changes = {
        "rl_config.iteration": 3,
        "rl_config.samples_per_prompt": 1,
        "rl_config.temperature": "hot",
        "rl_config.warm_up.steps": 3,
        "actor_config.tensor_model_parallel_size": 3,
    }
    texts = [f"{key}={value}" for key, value in changes.items()]
    assert wrong_keys(*texts, "iterations", "model.path=x", "rl_config.seed=[") >= {
        *changes,
        "'iterations'",
        "model.path",
        "rl_config.seed",
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("rl_config.seed", value) for value in (2**80, -1, True, 1.5)),
        *(
            (f"rl_config.{key}", ".inf")
            for key in ("learning_rate", "kl_coefficient", "temperature")
        ),
        ("rl_config.temperature", 2.5),  # The limit of vLLM.
        ("rl_config.samples_per_prompt", 20_000),
        ("rl_config.max_tokens", 0),
        ("rl_config.data", "null"),
        ("rl_config", 3),
        # combinations
        ("actor_config.seq_length", 9),
        ("generate_config.max_model_len", 10),
        ("rl_config.minibatches", 3),
        ("rl_config.prompts_per_iteration", 8192),
        ("rl_config.warm_up.batch_size", 100),
        ("rl_config.algorithm", "ppo"),
    ],
)
def test_a_bad_value_is_refused(key: str, value: Any) -> None:
    assert key in wrong_keys(f"{key}={value}")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rl_config.max_tokens=12", "actor_config.seq_length"),
        ("rl_config.data=nowhere", "nowhere/train.jsonl"),
        (r'rl_config.data="a\0b"', "train.jsonl"),
    ],
)
def test_a_violation_of_a_dependent_value_is_reported(override: str, key: str) -> None:
    assert any(wrong.endswith(key) for wrong in wrong_keys(override))


def test_a_critic_requires_ppo() -> None:
    config = CONFIGS / "ppo_tp2_to_dp2.yaml"
    assert settings.load_settings(config, 2).engine.critic_config is not None
    assert wrong_keys("rl_config.algorithm=grpo", config=config) == {"rl_config.algorithm"}


def test_a_vocabulary_other_than_the_tasks_is_refused(tmp_path: Path) -> None:
    config = (CONFIGS.parent / "model" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"vocab_size": 14', '"vocab_size": 32'))
    assert wrong_keys(f"model={tmp_path}") == {"model"}


def test_a_resumed_run_may_change_its_length_and_with_fsdp_its_ranks() -> None:
    first = settings.load_settings(TP2, 2).fingerprint()
    longer = (
        "rl_config.iterations=99",
        "rl_config.checkpoint_every=1",
        "rl_config.evaluate_every=3",
    )
    assert settings.load_settings(TP2, 2, longer).fingerprint() == first
    assert settings.load_settings(TP2, 2, ["rl_config.seed=3"]).fingerprint() != first
    two, four = (
        settings.load_settings(CONFIGS / "fsdp2_to_dp.yaml", ranks).fingerprint()
        for ranks in (2, 4)
    )
    assert two == four

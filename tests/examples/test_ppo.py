"""The critic's half of an iteration: what does not need a model, and what configurations say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from examples.gpt_rl import grpo
from examples.gpt_rl.ppo import at_last_steps
from examples.gpt_rl.settings import load_settings
from hybrid_engine.errors import ConfigError
from hybrid_engine.trainer.batches import mean_weights
from tests.harness.launch import REPO_ROOT

CONFIG = REPO_ROOT / "examples" / "gpt_rl" / "configs" / "ppo_tp2_to_dp2.yaml"


def test_a_reward_belongs_to_the_last_step() -> None:
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    rewards = at_last_steps(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert rewards.tolist() == [[0.0, 0.0, 1.0, 0.0], [2.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0]]


def test_one_advantage_for_all_tokens_is_one_for_each() -> None:
    """So that GRPO's loss is PPO's where all tokens of a completion have the same advantage."""
    generator = torch.Generator().manual_seed(1)
    log_probs, old, ref = torch.randn(3, 4, 5, generator=generator)
    mask = torch.ones(4, 5)
    batch = {"weights": mean_weights(mask), "old_log_probs": old, "ref_log_probs": ref}
    advantages, loss = torch.randn(4, generator=generator), grpo.policy_loss(0.2, 0.01)
    by_completion = loss({**batch, "advantages": advantages}, log_probs)[0]
    by_token = loss({**batch, "advantages": advantages[:, None].expand(4, 5)}, log_probs)[0]
    assert torch.equal(by_completion, by_token)


def changed(directory: Path, **sections: object) -> Path:
    """The configuration with other values in its sections, at a place from where its paths lead to the same files."""
    values = yaml.safe_load(CONFIG.read_text())
    for name, section in sections.items():
        if section is None:
            del values[name]
        else:
            values[name] = {**(values.get(name) or {}), **section}  # type: ignore[dict-item]
    values["model"] = str(CONFIG.parent / values["model"])
    values["rl_config"]["data"] = str(CONFIG.parent / values["rl_config"]["data"])
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_ppo_and_a_critic_belong_together(tmp_path: Path) -> None:
    loaded = load_settings(CONFIG, 2).engine
    assert loaded.critic_config is not None
    with pytest.raises(ConfigError, match=r"rl_config.algorithm: ppo, and there is no critic_config"):
        load_settings(changed(tmp_path, critic_config=None), 2)
    with pytest.raises(ConfigError, match=r"rl_config.algorithm: grpo, and there is a critic_config"):
        load_settings(changed(tmp_path, rl_config={"algorithm": "grpo"}), 2)
    with pytest.raises(ConfigError, match=r"critic_config.micro_batch_size: 96, but 1024 completions"):
        load_settings(changed(tmp_path, critic_config={"micro_batch_size": 96}), 2)
    with pytest.raises(ConfigError, match=r"critic_config.model: this example's critic begins as the policy does"):
        load_settings(changed(tmp_path, critic_config={"model": str(loaded.model)}), 2)
    with pytest.raises(ConfigError, match=r"rl_config.ppo.gama: unknown key. Known keys: gamma, lam"):
        load_settings(changed(tmp_path, rl_config={"ppo": {"gama": 1.0}}), 2)

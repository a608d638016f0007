"""The critic of PPO: advantages, value losses, compared with a plain loop over tokens, and
settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine import build_batch
from hybrid_engine.errors import ConfigError
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.rl import GrpoConfig, Loop, PpoConfig, critic
from hybrid_engine.rl.critic import Critic, at_last_tokens
from hybrid_engine.trainer.batches import mean_weights
from hybrid_engine.trainer.reference_and_critic import generalized_advantages
from hybrid_engine.trainer.reference_and_critic.advantages import whitened
from tests.harness.errors import has_violation
from tests.hybrid_engine.rl.stand_ins import stand_in

NUM_ROWS = 6
LENGTH = 7
VALUE_CHANGE = 0.3  # between the values before the step and those at each optimizer step


class Model:
    """Stand-in for the critic's model: fixed values; records minibatches and learning rates."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.parts = list[Mapping[str, torch.Tensor]]()
        self.rates = list[float]()
        self.engine = mock.Mock(optimizer=mock.Mock(learning_rate=0.5))
        self.set_learning_rate = self.rates.append
        self.copy_actor = mock.Mock()

    def train_context(self) -> nullcontext[None]:
        return nullcontext()

    def values(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._values

    def update(self, part: Mapping[str, torch.Tensor], loss: Any) -> dict[str, float]:
        self.parts.append(part)
        return {
            name: float(value)
            for name, value in loss(part, part["old_values"] + VALUE_CHANGE)[1].items()
        }


def test_a_critic_that_cannot_compute_packed_rows_is_refused() -> None:
    model = Model(torch.zeros(1, 1))
    model.engine.limits.no_packing = "MambaLayer mixes tokens of different sequences"
    build_critic(model, PpoConfig())
    with pytest.raises(
        ConfigError, check=has_violation("PpoConfig.pack", "packing-unsupported", "MambaLayer")
    ):
        build_critic(model, PpoConfig(pack=True))


def build_critic(model: Model, config: PpoConfig, *, critic_model: str | None = None) -> Critic:
    worker = mock.MagicMock()
    worker.config.critic_config.model = critic_model
    with mock.patch.object(critic, "ValueModel", return_value=model) as value_model:
        built = Critic(worker, config)
    assert value_model.call_args.kwargs == {"load_weights": critic_model is not None}
    return built


def random_batch(seed: int) -> tuple[TensorDict, torch.Tensor, torch.Tensor]:
    """Return completions of 1 to 4 tokens, the critic's values and the rewards."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5, (NUM_ROWS,), generator=generator).tolist()
    batch = build_batch([[1, 2, 3]] * NUM_ROWS, [[4] * length for length in lengths], LENGTH)
    values = torch.randn((NUM_ROWS, LENGTH), generator=generator)
    rewards = torch.randn(NUM_ROWS, generator=generator)
    return batch, values, rewards


@given(st.integers(0, 2**32), st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.95, 1.0]))
def test_the_critic_gives_advantages_and_learns_returns(
    seed: int,
    gamma: float,
    lam: float,
) -> None:
    batch, values, rewards = random_batch(seed)
    mask = batch["mask"]
    earned = at_last_tokens(rewards, mask)
    estimate = generalized_advantages(earned, values, batch, gamma, lam)
    model = Model(values)
    config = PpoConfig(gamma=gamma, lam=lam, value_clip=0.2, critic_epochs=2, minibatches=3)
    report = build_critic(model, config).learn(batch, earned, 1, torch.Generator().manual_seed(0))
    assert batch["advantages"].equal(whitened(estimate.advantages, mask))
    assert batch["returns"].equal(estimate.returns)

    losses = []
    for part in model.parts:  # a third of the rows; the mean is over the tokens of the part
        old, target = (part[name][part["mask"] == 1] for name in ("old_values", "returns"))
        # The change exceeds the clip range of 0.2; the larger loss counts.
        squares = [(old + change - target) ** 2 for change in (VALUE_CHANGE, 0.2)]
        losses.append(torch.maximum(*squares).mean().item() / 2)
    assert len(losses) == 6  # 2 epochs x 3 minibatches
    assert report["value_loss"] == pytest.approx(sum(losses) / 6, rel=1e-4)
    assert report["value_clip_fraction"] == pytest.approx(1)  # every change exceeds the range


def test_the_critic_learning_rate_follows_the_schedule_of_the_run() -> None:
    batch, values, rewards = random_batch(0)
    weights = mean_weights(batch["mask"])
    for rate, start in ((None, 0.5), (0.1, 0.1)):
        model = Model(values)
        config = PpoConfig(critic_learning_rate=rate, schedule="linear", steps=4, warmup_steps=1)
        build_critic(model, config).learn(
            {**batch, "weights": weights},
            at_last_tokens(rewards, batch["mask"]),
            3,
            torch.Generator(),
        )
        assert model.rates == pytest.approx([start, start * config.learning_rate_factor(3)])


def test_a_separate_critic_model_keeps_its_weights() -> None:
    models = [Model(torch.zeros(1)) for _ in range(2)]
    build_critic(models[0], PpoConfig())
    build_critic(models[1], PpoConfig(), critic_model="org/critic")
    assert [model.copy_actor.called for model in models] == [True, False]


def test_rows_fit_the_micro_batches_of_the_critic_too() -> None:
    worker = stand_in(micro_batch_size=2, dp_size=2)
    worker.config.critic_config.micro_batch_size = 3
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 2}
    refused = has_violation(
        "PpoConfig.minibatches", "not-divisible", "critic_config.micro_batch_size", "8", "6"
    )
    with pytest.raises(ConfigError, check=refused):
        Loop(worker, ["a"], mock.Mock(), PpoConfig(**sizes))
    Loop(worker, ["a"], mock.Mock(), GrpoConfig(**sizes))

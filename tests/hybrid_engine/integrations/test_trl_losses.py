"""Gradients of the named algorithms, compared with those of TRL's own `_compute_loss`."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.rl import GrpoConfig, losses
from tests.harness.values import Values
from tests.hybrid_engine.integrations.test_trl import with_trl

LENGTHS = (12, 5, 7, 1, 12, 9, 3, 8)
NUM_TOKENS = 12
MAX_TOKENS = 20
CASES: dict[str, tuple[Values, Values]] = {
    "GRPO": (
        {"loss_type": "grpo", "beta": 0.04},
        {"kl_coefficient": 0.04, "aggregation": "sequence"},
    ),
    "Dr. GRPO": ({"loss_type": "dr_grpo"}, {"aggregation": "constant", "max_tokens": MAX_TOKENS}),
    "DAPO": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"clip_ratio_high": 0.28}),
    "GSPO": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
        {
            "ratio": "sequence",
            "aggregation": "sequence",
            "clip_ratio": 3e-4,
            "clip_ratio_high": 4e-4,
        },
    ),
    # TRL has no lower bound, and its epsilon_high is the upper bound itself.
    "CISPO": (
        {"loss_type": "cispo", "epsilon_high": 1.28},
        {"clipping": "cispo", "clip_ratio": 0.999, "clip_ratio_high": 0.28},
    ),
    "dual clip": ({"loss_type": "dapo", "delta": 1.3}, {"dual_clip": 1.3}),
    "importance sampling": ({"loss_type": "dapo", "cap": 2.0}, {"importance_cap": 2.0}),
    "importance by sequence": (
        {"loss_type": "dapo", "cap": 2.0, "mode": "sequence_mask"},
        {"importance_cap": 2.0, "importance_of": "sequence", "above_importance_cap": "mask"},
    ),
}


def drawn() -> TensorDict:
    """Return a batch in float64 with one row per length."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), NUM_TOKENS)

    def noise(scale: float, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator) * scale

    log_probs = -torch.rand(shape, dtype=torch.float64, generator=generator) * 3
    old = log_probs + noise(0.3, *shape)
    return {
        "log_probs": log_probs,
        "old_log_probs": old,
        "ref_log_probs": log_probs + noise(0.5, *shape),
        "sampled_log_probs": old + noise(0.3, *shape),
        "advantages": noise(1.0, len(LENGTHS)),
        "mask": (torch.arange(NUM_TOKENS) < torch.tensor(LENGTHS)[:, None]).float(),
        "labels": torch.zeros(shape, dtype=torch.long),
        "tokens": torch.arange(len(LENGTHS))[:, None].expand(shape),
    }


def gradient_of_trl(batch: TensorDict, settings: Values) -> tuple[float, torch.Tensor]:
    """Call TRL's loss with a stand-in for its trainer, which has the settings and the
    log-probabilities.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    values = {
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "importance_sampling_level": "token",
        **settings,
    }
    log_probs = batch["log_probs"].clone().requires_grad_()
    trainer = mock.MagicMock(
        **{name: value for name, value in values.items() if name not in ("delta", "cap", "mode")},
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        max_completion_length=MAX_TOKENS,
        args=SimpleNamespace(
            use_bias_correction_kl=False, delta=values.get("delta"), steps_per_generation=1
        ),
        use_vllm="cap" in values,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
            sync_gradients=True,
        ),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    trainer._get_per_token_logps_and_entropies.return_value = (
        log_probs,
        torch.zeros_like(log_probs),
        None,
    )
    log_ratio = (batch["old_log_probs"] - batch["sampled_log_probs"]) * batch["mask"]
    ratio = log_ratio.exp().clamp(max=values.get("cap", 1.0))
    if values.get("mode") == "sequence_mask":
        # as TRL computes it before its loss
        ratio = log_ratio.sum(dim=-1, keepdim=True).exp()
        ratio = ratio.masked_fill(ratio > values["cap"], 0.0)
    inputs = {
        "prompt_ids": batch["labels"][:, :1],
        "prompt_mask": batch["mask"][:, :1],
        "completion_ids": batch["labels"],
        "completion_mask": batch["mask"].double(),
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old_log_probs"],
        "ref_per_token_logps": batch["ref_log_probs"],
        "num_items_in_batch": batch["mask"].sum(),
        "importance_sampling_ratio": ratio,
    }
    loss = GRPOTrainer._compute_loss(trainer, SimpleNamespace(training=True), inputs)
    loss.backward()
    assert log_probs.grad is not None
    return loss.item(), log_probs.grad


def gradient_of_ours(batch: TensorDict, config: GrpoConfig) -> tuple[float, torch.Tensor]:
    log_probs = batch["log_probs"].clone().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    (part,) = losses.minibatches(batch, 1, generator, config.aggregation, config.max_tokens)
    # A minibatch has its rows in another order.
    loss, _ = config.policy_loss()(part, log_probs[part["tokens"][:, 0]])
    loss.backward()
    assert log_probs.grad is not None
    return loss.item(), log_probs.grad


@with_trl
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_trl(name: str) -> None:
    theirs, ours = CASES[name]
    batch = drawn()
    loss, gradient = gradient_of_trl(batch, theirs)
    # Weights of tokens are float32 here.
    assert gradient_of_ours(batch, GrpoConfig(**ours))[0] == pytest.approx(loss, abs=1e-7)
    torch.testing.assert_close(
        gradient_of_ours(batch, GrpoConfig(**ours))[1], gradient, atol=1e-8, rtol=0
    )
    without = gradient_of_ours(batch, GrpoConfig())[1]
    assert (without - gradient).abs().max() > 1e-4, "the settings matter in this batch"

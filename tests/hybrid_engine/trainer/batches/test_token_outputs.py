"""Entropy and top tokens, compared with torch on whole logits in double precision.

test_dense.py has logits that are split over ranks.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from hybrid_engine.trainer.batches.token_outputs import Outputs, token_outputs

BOTH = Outputs(entropy=True, top_k=4)


def logits(dtype: torch.dtype) -> torch.Tensor:
    """Return logits with a certain token, unlikely ones, and one of probability 0."""
    values = torch.randn(3, 2, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6
    values[0, 0, 3] = 200.0  # probability 1
    values[..., -1] = float("-inf")  # padding of the vocabulary
    return values.to(dtype)


def expected(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    log_probs = values[..., :-1].log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1), *log_probs.topk(4, dim=-1)


def test_outputs_equal_torch_on_whole_logits() -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        outputs = token_outputs(logits(dtype), BOTH)
        entropy, top_log_probs, top_token_ids = expected(logits(torch.float64))
        torch.testing.assert_close(outputs["entropy"].double(), entropy, atol=tolerance, rtol=0)
        torch.testing.assert_close(outputs["top_log_probs"].double(), top_log_probs, atol=tolerance * 10, rtol=0)
        assert torch.equal(outputs["top_token_ids"], top_token_ids)
        assert tuple(outputs) == BOTH.names


def test_gradients_are_those_of_the_logits_though_these_are_overwritten() -> None:
    def entropy(values: torch.Tensor) -> torch.Tensor:
        padded = pad(values, (0, 1), value=float("-inf"))
        result = token_outputs(padded, BOTH)["entropy"]
        padded.data.zero_()  # as Megatron's cross entropy does
        return result

    assert torch.autograd.gradcheck(entropy, logits(torch.float64)[..., :-1].requires_grad_())

"""Entropy and top tokens, of whole logits and in chunks, compared with torch in double precision.

test_dense.py has logits that are split over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from hybrid_engine.trainer.batches.chunked_scores import chunk_product, score_in_chunks
from hybrid_engine.trainer.batches.token_outputs import Outputs, token_outputs

BOTH = Outputs(entropy=True, top_k=4)


def logits(dtype: torch.dtype) -> torch.Tensor:
    """Return logits with a certain token, unlikely ones, and one of probability 0."""
    values = (
        torch.randn(3, 2, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 6
    )
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
        torch.testing.assert_close(
            outputs["top_log_probs"].double(), top_log_probs, atol=tolerance * 10, rtol=0
        )
        assert torch.equal(outputs["top_token_ids"], top_token_ids)
        assert tuple(outputs) == BOTH.names


def test_gradients_are_those_of_the_logits_though_these_are_overwritten() -> None:
    def entropy(values: torch.Tensor) -> torch.Tensor:
        padded = pad(values, (0, 1), value=float("-inf"))
        result = token_outputs(padded, BOTH)["entropy"]
        padded.data.zero_()  # as Megatron's cross entropy does
        return result

    assert torch.autograd.gradcheck(entropy, logits(torch.float64)[..., :-1].requires_grad_())


def scored(dtype: Any, length: int, calls: Any) -> Any:
    """Return entropy and its gradients; add the rows of which logits were computed to `calls`."""
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(size, 16).bfloat16().to(dtype).requires_grad_() for size in (990, 300)
    )
    product = chunk_product(990, length)

    def score(part: Any) -> Any:
        calls.append(len(part))
        return token_outputs(product(part, weight), Outputs(entropy=True)).values()

    (entropy,) = score_in_chunks(score, [hidden], length)
    entropy.square().mean().backward()
    return entropy, hidden.grad, weight.grad


def test_chunks_are_as_exact_as_whole_rows() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        calls = []
        results = scored(torch.float64, 990, []), scored(dtype, 990, []), scored(dtype, 90, calls)
        assert (
            calls == [90] * 22
        )  # the logits of 11 chunks, which are not kept for the backward pass
        for exact, whole, chunked in zip(*results, strict=True):
            assert (chunked - exact).norm() <= (whole - exact).norm() * 1.02

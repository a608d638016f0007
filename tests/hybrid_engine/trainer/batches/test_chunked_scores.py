"""Scores in chunks and of whole rows, both compared with float64. test_dense.py splits logits over ranks."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_engine.trainer.batches.chunked_scores import ChunkProduct, score_in_chunks
from hybrid_engine.trainer.batches.token_outputs import Outputs, token_outputs


def scored(dtype: Any, length: int, calls: Any) -> Any:
    """Return entropy and its gradients; add the rows of which logits were computed to `calls`."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, 16).bfloat16().to(dtype).requires_grad_() for size in (990, 300))
    sums = [0, 990 // length]

    def score(part: Any) -> Any:
        calls.append(len(part))
        return token_outputs(ChunkProduct.apply(part, weight, sums), Outputs(entropy=True)).values()

    (entropy,) = score_in_chunks(score, [hidden], length)
    entropy.square().mean().backward()
    return entropy, hidden.grad, weight.grad


def test_chunks_are_as_exact_as_whole_rows() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        calls: Any = []
        results = scored(torch.float64, 990, []), scored(dtype, 990, []), scored(dtype, 90, calls)
        assert calls == [90] * 22  # the logits of 11 chunks, which are not kept for the backward pass
        for exact, whole, chunked in zip(*results, strict=True):
            assert (chunked - exact).norm() <= (whole - exact).norm() * 1.02

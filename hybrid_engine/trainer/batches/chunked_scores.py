"""Scores of tokens in chunks, so that their logits in float32 never exist for a whole row.

    hidden [n, ...] --split--> chunk --output layer--> logits --score--> log-probabilities, entropy
                                         |
            torch's checkpoint computes the logits of a chunk again in its backward pass

A row of 32k tokens with a vocabulary of 152k has 20 GB of logits in float32, and its loss needs
several tensors of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from hybrid_engine.layouts.parallelism import MAX_LOGIT_NBYTES


def chunk_length(num_rows: int, num_logits: int) -> int:
    """Return the rows of a chunk, all of them if the logits of all rows are few enough."""
    # `num_logits` are those of all rows, in 4 bytes each.
    return max(num_rows * MAX_LOGIT_NBYTES // (4 * num_logits), 1)


def score_in_chunks(
    score: Callable[..., tuple[torch.Tensor, ...]],
    inputs: Sequence[torch.Tensor],
    length: int,
) -> tuple[torch.Tensor, ...]:
    """Return score(*inputs), computed in chunks of `length` rows.

    Args:
        score: function of tensors [n, ...] that returns results [n, ...]. It must not change its
            inputs, because the backward pass calls it again.
        inputs: split along dim 0. A single chunk is not computed twice.
    """
    if length >= len(inputs[0]):
        return score(*inputs)
    rerun = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
    results = starmap(rerun, zip(*(tensor.split(length) for tensor in inputs), strict=True))
    return tuple(map(torch.cat, zip(*results, strict=True)))


def chunk_product(num_rows: int, length: int) -> Callable[[Any, Any], torch.Tensor]:
    """Return a product of hidden states with a weight, called once for each chunk of `length`."""
    sums = [0, -(-num_rows // length)]
    return lambda hidden, weight: ChunkProduct.apply(hidden, weight, sums)


class ChunkProduct(torch.autograd.Function):
    """Product of hidden states [..., H] of a chunk with a weight [V, H].

    `sums` is a list of the weight's gradient so far, in float32, 0 at first, and of the number of
    chunks without a backward pass, the last of which returns the gradient. With autograd's sum, in
    bfloat16, the error would grow with the number of chunks.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, sums: Any) -> Any:
        ctx.save_for_backward(hidden, weight)
        ctx.sums = sums
        return linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        total = None
        if ctx.needs_input_grad[1]:
            # [V, n] @ [n, H], with all n tokens of the chunk.
            a = gradient.flatten(0, -2).t()
            b = hidden.flatten(0, -2)
            dtype = torch.promote_types(a.dtype, torch.float32)
            # CPUs have no kernel for bfloat16 -> float32
            product = torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)
            ctx.sums[0] = product.add_(ctx.sums[0])
            ctx.sums[1] -= 1
            # Taken out of the list, which would keep the whole sum alive as long as the graph.
            total = None if ctx.sums[1] else ctx.sums.pop(0)
        return gradient @ weight, total, None

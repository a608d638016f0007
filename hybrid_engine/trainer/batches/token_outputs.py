"""Entropy and most likely tokens, read from the logits in addition to log-probabilities.

Logits may be split over the ranks of a group by slices of the vocabulary; no rank gathers them. All
ranks of the group must compute the same loss: then each rank's gradient is that of its slice, as in
Megatron's cross entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid_engine.ranks.torch_internals import TensorDict

Group = dist.ProcessGroup | None
Scores = TensorDict
"""Name of an output -> its values [B, S, ...]."""

ENTROPY = "entropy"
TOP_LOG_PROBS = "top_log_probs"
TOP_TOKEN_IDS = "top_token_ids"


class OutputShape(NamedTuple):
    """Name, trailing dims and dtype of an output tensor [B, S, *further]."""

    name: str
    further: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Outputs:
    """Outputs requested in addition to log-probabilities.

    Attributes:
        entropy: `entropy` [b, S] fp32 in nats, of the distribution after each token;
            differentiable.
        top_k: `top_log_probs` and `top_token_ids` [b, S, top_k], the most likely tokens first;
            without gradient.
    """

    entropy: bool = False
    top_k: int = 0

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """Keys that are added to a loss function's micro batch."""
        return tuple(shape.name for shape in self.shapes[1:])

    @property
    def shapes(self) -> tuple[OutputShape, ...]:
        """Shapes of all results for a batch [B, S], log-probabilities first."""
        shapes = [OutputShape("log_probs", (), torch.float32)]
        if self.entropy:
            shapes.append(OutputShape(ENTROPY, (), torch.float32))
        if self.top_k:
            shapes.append(OutputShape(TOP_LOG_PROBS, (self.top_k,), torch.float32))
            shapes.append(OutputShape(TOP_TOKEN_IDS, (self.top_k,), torch.int64))
        return tuple(shapes)


NO_OUTPUTS = Outputs()
"""Log-probabilities alone."""


def token_outputs(logits: torch.Tensor, outputs: Outputs, group: Group = None) -> Scores:
    """Return the requested outputs by name. Collective over `group`.

    Args:
        logits: [..., vocabulary], or this rank's slice of the vocabulary.
        outputs: what to compute.
        group: ranks that share the vocabulary; None: this rank has all of it.
    """
    results: Scores = {}
    if outputs.entropy:
        results[ENTROPY] = _entropy(logits, group)
    if outputs.top_k:
        log_probs, ids = _most_likely(logits.detach(), outputs.top_k, group)
        results[TOP_LOG_PROBS] = log_probs
        results[TOP_TOKEN_IDS] = ids
    return results


def _entropy(logits: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the entropy -sum p log p [...] of the whole vocabulary.

    No tensor that autograd keeps is the logits, which Megatron's cross entropy overwrites.
    """
    # with z the shifted logits and Z = sum exp z: H = log Z - sum(z exp z) / Z
    shifted = _shifted(logits, group)
    weights = shifted.exp()
    sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
    # for autograd a constant is added to this rank's sums
    _reduce(sums.detach(), group)
    normalizer, weighted_sum = sums
    return normalizer.log() - weighted_sum / normalizer


def _most_likely(logits: torch.Tensor, k: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and ids [..., k] of the most likely tokens."""
    shifted = _shifted(logits, group)
    sums = shifted.exp().sum(-1, keepdim=True)
    _reduce(sums, group)
    size = logits.shape[-1]
    # a slice of a small vocabulary may have fewer than k tokens
    values, ids = shifted.topk(min(k, size), dim=-1)
    if group is not None and group.size() > 1:
        # the largest of all are among the largest of each slice
        all_values = _gather(values, group)
        all_ids = _gather(ids + group.rank() * size, group)
        values, order = all_values.topk(k, dim=-1)
        ids = all_ids.gather(-1, order)
    return values - sums.log(), ids


def _shifted(logits: torch.Tensor, group: Group) -> torch.Tensor:
    """Return a copy of the logits, minus the largest of the whole vocabulary."""
    values = logits if logits.dtype is torch.float64 else logits.float()
    largest = values.detach().amax(-1, keepdim=True)
    _reduce(largest, group, dist.ReduceOp.MAX)
    # padding of a vocabulary has -inf, and 0 * -inf would be NaN; exp(-1000) is 0 as well
    return (values - largest).clamp_(min=-1000.0)


def _reduce(
    values: torch.Tensor,
    group: Group,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduce over the ranks of the group, in place."""
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=op, group=group)


def _gather(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the values of all ranks along the last dim."""
    by_rank = list(values.new_empty(group.size(), *values.shape))
    dist.all_gather(by_rank, values.contiguous(), group=group)
    return torch.cat(by_rank, dim=-1)

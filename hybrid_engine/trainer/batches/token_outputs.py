"""What is read off a token's logits beside the log-probability of its label.

Logits may be split over the ranks of a group, each of which has a slice of the vocabulary; no rank gathers them. Where
all ranks of the group compute the same loss, each gets the gradient of its slice, as Megatron's cross entropy does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None

ENTROPY, TOP_LOG_PROBS, TOP_TOKEN_IDS = "entropy", "top_log_probs", "top_token_ids"


class OutputShape(NamedTuple):
    """A tensor [B, S, *further]."""

    name: str
    further: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Outputs:
    """What is asked for beside log-probabilities.

    Attributes:
        entropy: `entropy` [b, S] fp32 in nats, of the distribution after each token; differentiable.
        top_k: `top_log_probs` and `top_token_ids` [b, S, top_k], the most likely tokens first; without gradient.
    """

    entropy: bool = False
    top_k: int = 0

    def __bool__(self) -> bool:
        """Whether anything is."""
        return bool(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The keys that a loss function finds in its micro batch."""
        return tuple(name for name, _, _ in self.shapes[1:])

    @property
    def shapes(self) -> tuple[OutputShape, ...]:
        """All that is computed for a batch [B, S]."""
        found = [OutputShape("log_probs", (), torch.float32)]
        if self.entropy:
            found.append(OutputShape(ENTROPY, (), torch.float32))
        if self.top_k:
            found.append(OutputShape(TOP_LOG_PROBS, (self.top_k,), torch.float32))
            found.append(OutputShape(TOP_TOKEN_IDS, (self.top_k,), torch.int64))
        return tuple(found)


NO_OUTPUTS = Outputs()
"""Log-probabilities alone."""


def token_outputs(logits: torch.Tensor, outputs: Outputs, group: Group = None) -> dict[str, torch.Tensor]:
    """By name: what `outputs` asks for, of logits [..., vocabulary, or this rank's slice of it in `group`]."""
    found: dict[str, torch.Tensor] = {}
    if outputs.entropy:
        found[ENTROPY] = _Entropy.apply(logits, group)
    if outputs.top_k:
        found[TOP_LOG_PROBS], found[TOP_TOKEN_IDS] = _most_likely(logits.detach(), outputs.top_k, group)
    return found


class _Entropy(torch.autograd.Function):
    """-sum p log p over the vocabulary.

    Keeps the probabilities for the backward pass and not the logits, in whose memory Megatron's cross entropy writes.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: Group) -> torch.Tensor:
        shifted = _shifted(logits, group)
        weights = shifted.exp()
        sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
        _reduce(sums, group)
        entropy = sums[0].log() - sums[1] / sums[0]
        ctx.save_for_backward(weights.div_(sums[0].unsqueeze(-1)), entropy)
        ctx.dtype = logits.dtype
        return entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # dH/dz = -p (log p + H)
        probabilities, entropy = ctx.saved_tensors
        slope = torch.xlogy(probabilities, probabilities) + probabilities * entropy.unsqueeze(-1)
        return (slope * -gradient.unsqueeze(-1)).to(ctx.dtype), None


def _most_likely(logits: torch.Tensor, k: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and ids [..., k]."""
    shifted = _shifted(logits, group)
    sums = shifted.exp().sum(-1, keepdim=True)
    _reduce(sums, group)
    size = logits.shape[-1]
    values, ids = shifted.topk(min(k, size), dim=-1)
    if group is not None and group.size() > 1:
        values, ids = _joined(values, group), _joined(ids + group.rank() * size, group)
        values, order = values.topk(k, dim=-1)
        ids = ids.gather(-1, order)
    return values - sums.log(), ids


def _shifted(logits: torch.Tensor, group: Group) -> torch.Tensor:
    """Logits less the largest of the whole vocabulary, in a memory of their own."""
    values = logits if logits.dtype is torch.float64 else logits.float()
    largest = values.amax(-1, keepdim=True)
    _reduce(largest, group, dist.ReduceOp.MAX)
    # -inf hides the padding of a vocabulary; its exponential is 0, as is that of -1000, and 0 * -inf would be NaN
    return (values - largest).clamp_(min=-1000.0)


def _reduce(values: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Over the ranks of the group, in place."""
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=op, group=group)


def _joined(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Those of all ranks, along the last dim."""
    values = values.contiguous()
    everyone = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(everyone, values, group=group)
    return torch.cat(everyone, dim=-1)

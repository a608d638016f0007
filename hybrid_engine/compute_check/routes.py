"""Experts that each side selects for the tokens of a probe.

Rounding moves log-probabilities of a token by about a nat if it selects another expert of nearly
equal score. A router that ignores a bias does so, too, for tokens of any score. The scores tell
which: a token that vLLM gives to experts whose scores, by the trainer, are lower by more than
rounding, is misrouted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MAX_MISROUTED = 0.05
"""Share of the tokens of a layer that may be misrouted.

Rounding accumulates, and the scores of single tokens have a heavy tail.
"""


@dataclass(frozen=True, eq=False)
class LayerRoutes:
    """Experts of the tokens in one layer with experts, on the host.

    Attributes:
        experts: [T, k] selected experts.
        scores: [T, E] scores by which they were selected; None if unknown.
        tokens: [T] numbers of the tokens: position + L * sequence.
    """

    experts: torch.Tensor
    scores: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


class RouteWatch(TorchFunctionMode):
    """Records the experts that routers select: every `topk` of scores [T, E].

    Args:
        num_experts: experts of a layer; 0: nothing is recorded.

    Attributes:
        routes: one entry per call, in their order.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts
        self.routes: list[LayerRoutes] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk) and self._num_experts:
            scores = args[0] if args else (kwargs or {})["input"]
            # Scores of groups of experts have three dims.
            if scores.dim() == 2 and scores.shape[1] == self._num_experts:
                self.routes.append(LayerRoutes(output[1].cpu(), scores.float().cpu()))
        return output


def misrouted(
    trained: Sequence[LayerRoutes],
    served: Sequence[LayerRoutes],
    tolerance: float,
) -> list[float]:
    """Return the share of misrouted tokens of each layer; none if the layers do not correspond.

    A token counts in a layer if it had equal experts in all layers before.

    Args:
        trained: layers of the trainer, with scores; of all tokens, or of a part of them.
        served: layers of vLLM, of all tokens in order.
        tolerance: difference of scores that rounding explains, as a share of the standard deviation
            of the scores of a token.
    """
    if len(trained) != len(served):
        return []
    shares = []
    is_equal: torch.Tensor | None = None
    for layer, other in zip(trained, served, strict=True):
        assert layer.scores is not None, "routes of a trainer have scores"
        chosen = other.experts.long()
        if layer.tokens is not None:
            chosen = chosen[layer.tokens]
        if chosen.shape != layer.experts.shape:
            return []
        lowest = layer.scores.gather(1, layer.experts.long()).amin(1)
        # Routers limited to groups of experts have -inf for those of the
        # others, which makes no spread.
        spread = layer.scores.nan_to_num(neginf=0.0).std(1)
        is_lower = layer.scores.gather(1, chosen).amin(1) < lowest - tolerance * spread
        counts = torch.ones_like(is_lower) if is_equal is None else is_equal
        shares.append(float((is_lower & counts).sum() / counts.sum().clamp(min=1)))
        same = (chosen.sort(1).values == layer.experts.long().sort(1).values).all(1)
        is_equal = same & counts
    return shares

"""Experts of both sides: which differences rounding explains."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.compute_check.gap import Gap
from hybrid_engine.compute_check.probes import ProbeAnswer
from hybrid_engine.compute_check.routes import LayerRoutes, RouteWatch, misrouted

NUM_TOKENS = 40
TOKENS = torch.arange(NUM_TOKENS)[None]


def routes(
    scores: torch.Tensor, selected_by: torch.Tensor, tokens: torch.Tensor | None = None
) -> LayerRoutes:
    return LayerRoutes(selected_by.topk(2).indices, scores, tokens)


def scores_of(seed: int) -> torch.Tensor:
    return torch.rand(NUM_TOKENS, 8, generator=torch.Generator().manual_seed(seed))


SCORES = scores_of(0)
BIAS = torch.linspace(-0.3, 0.3, 8)
HALF = torch.arange(0, NUM_TOKENS, 2)


@pytest.mark.parametrize(
    ("trained", "served", "is_rounding"),
    [
        ([routes(SCORES, SCORES)], [routes(SCORES, SCORES)], True),
        ([routes(SCORES + BIAS, SCORES + BIAS)], [routes(SCORES, SCORES)], False),
        # A half of the tokens, as under sequence parallelism.
        (
            [routes((SCORES + BIAS)[HALF], (SCORES + BIAS)[HALF], HALF)],
            [routes(SCORES, SCORES)],
            False,
        ),
        ([routes(SCORES[HALF], SCORES[HALF], HALF)], [routes(SCORES, SCORES)], True),
        # Scores that differ by less than rounding.
        ([routes(SCORES, SCORES)], [routes(SCORES, SCORES + 1e-3 * scores_of(1))], True),
        # Other experts are a consequence of those in the layer before, which rounding has changed.
        (
            [routes(SCORES * 0 + 1, scores_of(1)), routes(SCORES, SCORES)],
            [routes(SCORES, SCORES)] * 2,
            True,
        ),
        (
            [routes(SCORES, SCORES), routes(SCORES + BIAS, SCORES + BIAS)],
            [routes(SCORES, SCORES)] * 2,
            False,
        ),
        # Unknown: a kernel selects the experts itself, or the layers do not correspond.
        ([routes(SCORES + BIAS, SCORES + BIAS)], [], True),
        ([routes(SCORES, SCORES)] * 2, [routes(SCORES, SCORES)], True),
    ],
)
def test_tokens_of_lower_scores_are_misrouted(
    trained: list[LayerRoutes], served: list[LayerRoutes], is_rounding: bool
) -> None:
    log_probs = torch.linspace(-4, -1, NUM_TOKENS - 1)[None]
    gap = Gap(
        TOKENS,
        ProbeAnswer(log_probs, torch.bfloat16, trained),
        ProbeAnswer(log_probs, torch.bfloat16, served),
    )
    assert gap.is_rounding is is_rounding
    assert ("misrouted" in str(gap)) == (len(trained) == len(served))


def test_shares_are_those_of_tokens_with_equal_experts_before() -> None:
    other = routes(SCORES, torch.cat([SCORES[:10], -SCORES[10:]]))
    assert misrouted([routes(SCORES, SCORES)] * 2, [other, other], 0.1) == [0.75, 0.0]


def test_selections_among_all_experts_are_recorded() -> None:
    with RouteWatch(8) as watch:
        torch.topk(SCORES, k=2, dim=-1, sorted=False)
        SCORES.view(-1, 1, 8).topk(2)  # of groups
        torch.topk(SCORES[:, :4], 2)
    (layer,) = watch.routes
    assert layer.scores is not None
    assert torch.equal(layer.scores, SCORES)
    assert torch.equal(layer.experts.sort(1).values, SCORES.topk(2).indices.sort(1).values)

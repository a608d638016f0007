"""Experts that vLLM's routers select for the tokens of a probe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.compute_check.routes import LayerRoutes


@contextmanager
def captured_routes(model: torch.nn.Module, num_tokens: int) -> Iterator[list[LayerRoutes]]:
    """Yield a list that has, after this context, the routes of each layer with experts.

    It stays empty if a layer's routes are unknown: its kernel selects the experts itself, a
    captured graph ran instead of the router, or the tokens were not computed in one step.

    Args:
        model: this rank's vLLM model.
        num_tokens: tokens that are computed inside.
    """
    base = internals.BASE_ROUTER.load()
    routers = [
        router
        for module in model.modules()
        if isinstance(router := getattr(module, "router", None), base)
    ]
    captured: list[list[torch.Tensor]] = [[] for _ in routers]
    before = [router.capture_fn for router in routers]

    def capture(index: int, experts: torch.Tensor) -> None:
        captured[index].append(experts.clone())
        if (others := before[index]) is not None:
            others(experts)

    routes: list[LayerRoutes] = []
    for index, router in enumerate(routers):
        router.set_capture_fn(partial(capture, index))
    try:
        yield routes
    finally:
        for router, others in zip(routers, before, strict=True):
            router.set_capture_fn(others)
    if all(len(steps) == 1 and len(steps[0]) == num_tokens for steps in captured):
        routes += [LayerRoutes(experts.cpu()) for (experts,) in captured]

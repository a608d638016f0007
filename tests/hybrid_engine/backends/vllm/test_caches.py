"""What a switch zeroes of vLLM's caches; that it matters is in test_serving.py, with real kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hybrid_engine.backends.vllm.caches import zero_caches


def nan_views(numel: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Views of one allocation, one after another; the end of it belongs to none."""
    raw, views, offset = torch.full((numel,), torch.nan), [], 0
    for shape in shapes:
        size = torch.Size(shape).numel()
        views.append(raw[offset : offset + size].view(shape))
        offset += size
    return views


def engine_with(runner_caches: list[torch.Tensor], **layers: Any) -> Any:
    """As far as `zero_caches` looks; a layer has what is given for it as its cache."""
    context = {name: SimpleNamespace(kv_cache=cache) for name, cache in layers.items()}
    context["without"] = SimpleNamespace()
    compilation_config = SimpleNamespace(static_forward_context=context)
    runner = SimpleNamespace(
        kv_caches=runner_caches, vllm_config=SimpleNamespace(compilation_config=compilation_config)
    )
    for name in ("model_runner", "worker", "driver_worker", "model_executor", "engine_core", "engine_core"):
        runner = SimpleNamespace(**{name: runner})
    return SimpleNamespace(llm_engine=runner)


def test_every_kind_of_cache_is_zero_to_its_last_byte() -> None:
    attention, latent = nan_views(64, (2, 3, 4), (5, 6))
    convolution, state = nan_views(40, (2, 5), (3, 8))
    draft = nan_views(8, (8,))[0].view(torch.int32)
    unused = torch.tensor([])
    llm = engine_with([attention], layer=attention, mla=latent, mamba=(convolution, [state]), draft=draft, none=unused)
    zero_caches(llm)
    for cache in (attention, convolution, draft):
        storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
        assert storage.numel() in (256, 160, 32)
        assert not storage.any()
    assert not latent.any()
    assert not state.any()


def test_what_only_the_runner_holds_is_zero_too() -> None:
    (cache,) = nan_views(6, (6,))
    zero_caches(engine_with([cache]))
    assert not cache.any()

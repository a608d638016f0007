"""Attention and routes of vLLM's live layers, for comparison with the trainer's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.compute_check.attention import POSITIONS, Attention, Attentions, Rotary
from hybrid_engine.compute_check.routes import LayerRoutes
from hybrid_engine.errors import ModelError, first_of

logger = logging.getLogger(__name__)


def require_positions(model: torch.nn.Module, max_model_len: int) -> None:
    """Raise ModelError for a rotary table with fewer positions than a sequence may have.

    vLLM's kernels do not check positions: beyond the table they read the memory behind it. The
    table's length follows from the scaling's keys (`original_max_position_embeddings` times
    `factor`), `max_model_len` from other keys. Weights and tables may be on the meta device.
    """
    lengths = {
        name.rpartition(".")[0]: len(table)
        for name, table in model.named_buffers()
        if name.endswith(".cos_sin_cache") and table.dim() == 2
    }
    short = [name for name, length in lengths.items() if length < max_model_len]
    if short:
        raise ModelError(
            f"vLLM's rotary table of {first_of(short, 2)} has {lengths[short[0]]} positions, and "
            f"max_model_len is {max_model_len}: vLLM's results beyond the table are undefined. Set "
            f"generate_config.max_model_len to at most {min(lengths.values())}, or correct the "
            "lengths in config.json",
            code="rotary-table-too-short",
        )


def live_attention(
    model: torch.nn.Module,
    layers: Mapping[str, Any],
    positions: Sequence[int] = POSITIONS,
) -> Attentions:
    """Return the attention of one pipeline stage, by layer number.

    A rotary module in a layer is taken for its rotation: whether the layer calls it is not read.

    Args:
        model: vLLM's model. Rotary tables need values, weights do not.
        layers: `static_forward_context` of its compilation configuration.
        positions: positions at which rotations are read.
    """
    number_of = internals.LAYER_NUMBER
    # With duplicates, because layers share rotary modules, and some layers have two names.
    modules = dict(model.named_modules(remove_duplicate=False))
    present = set(modules.values())
    by_name = {
        name: module
        for name, module in modules.items()
        if hasattr(module, "rotary_dim") and hasattr(module, "head_size")
    }
    rotaries = {module: _rotary_of(module, positions) for module in set(by_name.values())}
    default_rotary = _rotary_of_transformers(model, positions)
    attention = {}
    for prefix, layer in layers.items():
        impl = getattr(layer, "impl", None)
        scale = getattr(layer, "scale", None) or getattr(impl, "scale", None)
        # Layers without a scale compute no softmax attention.
        if scale is None or layer not in present:
            continue
        number = number_of(prefix)
        # The rotary module is a sibling of the attention, anywhere in its decoder layer.
        decoder_layer = "".join(prefix.partition(f".{number}.")[:2])
        inside = {
            rotaries[module] for name, module in by_name.items() if name.startswith(decoder_layer)
        }
        attention[number] = Attention(
            scale=float(scale),
            window=layer.sliding_window,
            softcap=getattr(layer.impl, "logits_soft_cap", None) or None,
            rotary=default_rotary if not inside else inside.pop() if len(inside) == 1 else None,
        )
    return attention


def _rotary_of(module: Any, positions: Sequence[int]) -> Rotary | None:
    """Return the rotation that a rotary embedding of vLLM computes; None if it cannot be read."""
    # Each pair of a head's elements is the vector (1, 0).
    pairs = module.rotary_dim // 2
    is_in_halves = getattr(module, "is_neox_style", True)
    first = slice(pairs) if is_in_halves else slice(0, 2 * pairs, 2)
    second = slice(pairs, 2 * pairs) if is_in_halves else slice(1, 2 * pairs, 2)
    # In torch: kernels write into their arguments, and take some shapes only.
    rotate = getattr(module, "forward_native", module.forward)
    rows = []
    try:
        table = next(module.buffers())
        for position in positions:  # alone, because classes order tokens and heads differently
            query = torch.zeros(1, module.head_size, dtype=table.dtype, device=table.device)
            query[:, first] = 1
            rotated, _ = rotate(torch.tensor([position], device=table.device), query, query.clone())
            rows.append(rotated.flatten())
    except Exception as error:
        logger.info("%s cannot be read: %s", type(module).__name__, error)
        return None
    heads = torch.stack(rows)
    return Rotary.of_rotated(heads[:, first], heads[:, second], positions)


def _rotary_of_transformers(model: torch.nn.Module, positions: Sequence[int]) -> Rotary | None:
    """Return the rotation of layers without a rotary module: transformers' decoder's, or none.

    None if it is ambiguous.
    """
    # Some have a buffer for each kind of layer, such as `sliding_attention_inv_freq`.
    embeddings = [
        module
        for module in model.modules()
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    ]
    if not embeddings:
        return Rotary()
    if len(embeddings) > 1:
        return None
    (embedding,) = embeddings
    frequencies = embedding.get_buffer("inv_freq")
    scaling = float(getattr(embedding, "attention_scaling", 1.0))
    return Rotary.of_frequencies(frequencies.cpu(), scaling, positions)


@contextmanager
def captured_routes(model: torch.nn.Module, num_tokens: int) -> Iterator[list[LayerRoutes]]:
    """Yield a list that has, after this context, the routes of each layer with experts.

    It stays empty if a layer's routes are unknown: its kernel selects the experts itself, a
    captured graph ran instead of the router, or the tokens were not computed in one step.

    Args:
        model: this rank's vLLM model.
        num_tokens: tokens that are computed inside.
    """
    base = internals.BASE_ROUTER
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

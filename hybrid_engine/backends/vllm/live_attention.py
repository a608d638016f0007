"""The attention of vLLM's live layers, to be compared with the trainer's (`probes.Attention`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.errors import ModelError, first_of
from hybrid_engine.probes import Attention, Rotary, rotary_of_table


def require_positions(model: torch.nn.Module, max_model_len: int) -> None:
    """Raise ModelError for a rotary table of vLLM's with fewer positions than a sequence may have.

    Its kernels look positions up without a question: beyond the table they read what lies behind it. The table's length
    follows the scaling's own keys (`original_max_position_embeddings` times `factor`), `max_model_len` other keys.
    Weights and tables need no values.
    """
    tables = {name: _rotary_table(module) for name, module in model.named_modules()}
    lengths = {name: len(table) for name, table in tables.items() if table is not None}
    short = [name for name, length in lengths.items() if length < max_model_len]
    if short:
        raise ModelError(
            f"vLLM's rotary table of {first_of(short, 2)} has {lengths[short[0]]} positions, and max_model_len is "
            f"{max_model_len}: what vLLM computes beyond is undefined. Set generate_config.max_model_len to at most "
            f"{min(lengths.values())}, or correct the lengths in config.json"
        )


def live_attention(model: torch.nn.Module, layers: Mapping[str, Any]) -> dict[int, Attention]:
    """Return the attention of one pipeline stage, by layer number.

    Args:
        model: vLLM's, built. Rotary tables need values, weights do not.
        layers: `static_forward_context` of the compilation configuration that it was built with.
    """
    number_of = internals.LAYER_NUMBER.load()
    # layers share rotary modules
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {module: name for name, module in modules.items()}
    tables = {name: table for name, module in modules.items() if (table := _rotary_table(module)) is not None}
    rotaries = {id(table): rotary_of_table(*table.chunk(2, dim=-1)) for table in tables.values()}
    elsewhere = _rotary_of_transformers(model)
    attention = {}
    for prefix, layer in layers.items():
        scale = getattr(layer, "scale", None) or getattr(getattr(layer, "impl", None), "scale", None)
        if scale is None or layer not in names:
            continue
        number = number_of(prefix)
        decoder_layer = f"{names[layer].partition(f'.{number}.')[0]}.{number}."
        own = [table for name, table in tables.items() if name.startswith(decoder_layer)]
        attention[number] = Attention(
            scale=float(scale),
            window=layer.sliding_window,
            softcap=getattr(layer.impl, "logits_soft_cap", None) or None,
            rotary=rotaries[id(own[0])] if own else elsewhere,
        )
    return attention


def _rotary_table(module: torch.nn.Module) -> torch.Tensor | None:
    """Cosines and sines [positions, pairs + pairs] of a rotary embedding of vLLM's own."""
    table = getattr(module, "cos_sin_cache", None)
    return table if isinstance(table, torch.Tensor) and table.dim() == 2 else None


def _rotary_of_transformers(model: torch.nn.Module) -> Rotary | None:
    """Rotation of layers without a module for it: that of transformers' decoder, or none."""
    found = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)]
    if not found:
        return Rotary()
    if len(found) > 1:
        return None
    frequencies = sorted(found[0].get_buffer("inv_freq").double().tolist(), reverse=True)
    return Rotary(tuple(frequencies), float(getattr(found[0], "attention_scaling", 1.0)))

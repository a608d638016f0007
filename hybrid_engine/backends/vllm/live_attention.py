"""The attention of vLLM's live layers, for comparison with the trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.compute_check.attention import Attention, Rotary, rotary_of_table
from hybrid_engine.errors import ModelError, first_of


def require_positions(model: torch.nn.Module, max_model_len: int) -> None:
    """Raise ModelError for a rotary table with fewer positions than a sequence may have.

    vLLM's kernels do not check positions: beyond the table they read the memory behind it. The
    table's length follows from the scaling's keys (`original_max_position_embeddings` times
    `factor`), `max_model_len` from other keys. Weights and tables may be on the meta device.
    """
    tables = {name: _rotary_table(module) for name, module in model.named_modules()}
    lengths = {name: len(table) for name, table in tables.items() if table is not None}
    short = [name for name, length in lengths.items() if length < max_model_len]
    if short:
        raise ModelError(
            f"vLLM's rotary table of {first_of(short, 2)} has {lengths[short[0]]} positions, and "
            f"max_model_len is {max_model_len}: vLLM's results beyond the table are undefined. Set "
            f"generate_config.max_model_len to at most {min(lengths.values())}, or correct the "
            "lengths in config.json",
            code="rotary-table-too-short",
        )


def live_attention(model: torch.nn.Module, layers: Mapping[str, Any]) -> dict[int, Attention]:
    """Return the attention of one pipeline stage, by layer number.

    Args:
        model: vLLM's model. Rotary tables need values, weights do not.
        layers: `static_forward_context` of its compilation configuration.
    """
    number_of = internals.LAYER_NUMBER.load()
    # With duplicates, because layers share rotary modules.
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {module: name for name, module in modules.items()}
    tables: dict[str, torch.Tensor] = {}
    for name, module in modules.items():
        table = _rotary_table(module)
        if table is not None:
            tables[name] = table
    rotaries = {id(table): rotary_of_table(*table.chunk(2, dim=-1)) for table in tables.values()}
    default_rotary = _rotary_of_transformers(model)
    attention = {}
    for prefix, layer in layers.items():
        impl = getattr(layer, "impl", None)
        scale = getattr(layer, "scale", None) or getattr(impl, "scale", None)
        # Layers without a scale compute no softmax attention.
        if scale is None or layer not in names:
            continue
        number = number_of(prefix)
        parent, _, _ = names[layer].partition(f".{number}.")
        decoder_layer = f"{parent}.{number}."
        # The rotary module is a sibling of the attention, anywhere in its decoder layer.
        inside = [table for name, table in tables.items() if name.startswith(decoder_layer)]
        attention[number] = Attention(
            scale=float(scale),
            window=layer.sliding_window,
            softcap=getattr(layer.impl, "logits_soft_cap", None) or None,
            rotary=rotaries[id(inside[0])] if inside else default_rotary,
        )
    return attention


def _rotary_table(module: torch.nn.Module) -> torch.Tensor | None:
    """Return cosines and sines [positions, pairs + pairs] of a vLLM rotary embedding; or None."""
    table = getattr(module, "cos_sin_cache", None)
    return table if isinstance(table, torch.Tensor) and table.dim() == 2 else None


def _rotary_of_transformers(model: torch.nn.Module) -> Rotary | None:
    """Return the rotation of layers without a rotary module: transformers' decoder's, or none.

    None if it is ambiguous.
    """
    # Some have a buffer for each kind of layer, such as `sliding_attention_inv_freq`.
    buffers = [
        (name, module)
        for module in model.modules()
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    ]
    if not buffers:
        return Rotary()
    if len(buffers) > 1:
        return None
    ((name, embedding),) = buffers
    frequencies = embedding.get_buffer(name).double().tolist()
    scaling = float(getattr(embedding, "attention_scaling", 1.0))
    # transformers' own code, which is the trainer's as well, decides for each layer.
    return Rotary(tuple(sorted(frequencies, reverse=True)), scaling, may_be_unused=True)

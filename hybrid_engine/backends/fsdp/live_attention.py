"""Attention of a transformers model's layers, for comparison with vLLM's.

No rule of any architecture is repeated here. A copy of the model without memory records what its
layers pass to attention (attention.py), and frequencies come from the live rotary modules.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from hybrid_engine.backends.fsdp.attention import RotaryCall, attention_calls
from hybrid_engine.backends.fsdp.names import plain_name, transformers_model
from hybrid_engine.compute_check.attention import Attention, Rotary, rotary_of_table
from hybrid_engine.models.derived import meta_copy_of


@torch.no_grad()
def live_attention(model: torch.nn.Module) -> dict[int, Attention]:
    """Return the attention of every decoder layer, by layer number.

    Allocates no memory for weights, and leaves the random number generators unchanged.
    """
    inner = transformers_model(model)
    live_modules = {plain_name(name): module for name, module in inner.named_modules()}
    with torch.random.fork_rng(devices=[]):
        reader = meta_copy_of(inner)
    for name, module in reader.named_modules():
        # A user may have changed settings since the model was built from its config.
        if (live := live_modules.get(name)) is not None:
            _copy_settings(live, module)
    reader.eval()
    attention: dict[int, Attention] = {}
    for number, call in attention_calls(reader).items():
        rotary = Rotary()
        if call.rotary is not None:
            rotary = _rotary_of(live_modules[call.rotary.module], call.rotary)
        scaling = float(call.settings["scaling"])
        attention[number] = Attention(scaling, call.window, call.settings.get("softcap"), rotary)
    return attention


def _copy_settings(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy the numbers, flags and strings of a live module to its counterpart."""
    for key, value in vars(source).items():
        if key.startswith("_") or key not in vars(target):
            continue
        if isinstance(value, bool | int | float | str | None):
            setattr(target, key, value)


def _rotary_of(module: torch.nn.Module, call: RotaryCall) -> Rotary:
    """Return the rotation of positions 0 and 1, computed by a copy of a live rotary module."""
    device = next(module.buffers()).device
    hidden = torch.zeros(1, 2, 1, device=device)
    positions = torch.arange(2, device=device)[None]

    def shortened(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return hidden if value.is_floating_point() else positions

    args = [shortened(value) for value in call.args]
    kwargs = {key: shortened(value) for key, value in call.kwargs.items()}
    # A copy, because some modules remember the longest sequence.
    output = copy.deepcopy(module)(*args, **kwargs)
    is_complex = isinstance(output, torch.Tensor)
    cos, sin = (output.real, output.imag) if is_complex else output
    # The batch has one sequence.
    rotary = rotary_of_table(cos[0], sin[0])
    # Most tables have an entry for both elements of a pair, so each frequency is there twice.
    first, second = rotary.frequencies[::2], rotary.frequencies[1::2]
    frequencies = first if first == second else rotary.frequencies
    return replace(rotary, frequencies=frequencies, angle_error=0.0)

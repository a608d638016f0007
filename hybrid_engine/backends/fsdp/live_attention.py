"""The attention of a transformers model's layers, to be compared with vLLM's (`probes.Attention`).

No rule of any architecture is repeated here: a copy of the model without memory records what its
layers pass to attention (attention.py), and live rotary modules are asked for their frequencies.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hybrid_engine.backends.fsdp.attention import AttentionCall, RotaryCall, attention_calls
from hybrid_engine.backends.fsdp.model_checks import config_of
from hybrid_engine.backends.fsdp.names import plain_name, transformers_model
from hybrid_engine.probes import Attention, Rotary, rotary_of_table


@torch.no_grad()
def live_attention(model: torch.nn.Module) -> dict[int, Attention]:
    """Return the attention of every decoder layer, by number.

    Takes no memory for weights, and no random number.
    """
    inner = transformers_model(model)
    live = {plain_name(name): module for name, module in inner.named_modules()}
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        reader: Any = AutoModelForCausalLM.from_config(config_of(inner))
    for name, module in reader.named_modules():
        _take_settings(module, live.get(name))
    reader.eval()
    return {number: _attention_of(call, live) for number, call in attention_calls(reader).items()}


def _attention_of(call: AttentionCall, live: Mapping[str, torch.nn.Module]) -> Attention:
    rotary = Rotary() if call.rotary is None else _rotary_of(live[call.rotary.module], call.rotary)
    return Attention(float(call.settings["scaling"]), call.window, call.settings.get("softcap"), rotary)


def _take_settings(module: torch.nn.Module, live: torch.nn.Module | None) -> None:
    """Give a module of the copy the numbers, flags and texts of the live one."""
    for key, value in vars(live).items() if live is not None else ():
        if key in vars(module) and not key.startswith("_") and isinstance(value, bool | int | float | str | None):
            setattr(module, key, value)


def _rotary_of(module: torch.nn.Module, call: RotaryCall) -> Rotary:
    """Rotation of positions 0 and 1 by a copy of a live module: some remember the longest sequence."""
    device = next(module.buffers()).device

    hidden = torch.zeros(1, 2, 1, device=device)
    positions = torch.arange(2, device=device)[None]

    def small(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return hidden if value.is_floating_point() else positions

    kwargs = {key: small(value) for key, value in call.kwargs.items()}
    output = copy.deepcopy(module)(*map(small, call.args), **kwargs)
    is_complex = isinstance(output, torch.Tensor)
    (cos,), (sin,) = (output.real, output.imag) if is_complex else output
    found = rotary_of_table(cos, sin)
    # both elements of a pair have their own entry, but in a complex table
    frequencies = found.frequencies if is_complex else found.frequencies[::2]
    return replace(found, frequencies=frequencies, angle_error=0.0)

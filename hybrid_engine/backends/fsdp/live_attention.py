"""The attention of a transformers model's layers, to be compared with vLLM's (`probes.Attention`).

No rule of any architecture is repeated here. transformers' own forward pass runs over a copy of
the model without memory, with an attention implementation that only reads what it is called with:

    mask function     transformers asks for the mask of a kind of layers    -> window
    attention call    a layer calls it with its scale, cap and mask         -> scale, softcap
    rotary module     a layer is given what such a module has returned      -> the live one is asked
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from hybrid_engine.backends.fsdp.model_checks import config_of
from hybrid_engine.backends.fsdp.names import plain_name, transformers_model
from hybrid_engine.probes import Attention, Rotary, rotary_of_table

_READING = "hybrid_engine_reading"
_POSITION = 2**20
"""Of the query whose keys are counted; longer than any window."""


@dataclass(frozen=True)
class _RotaryCall:
    """What a rotary module was called with, and what it returned."""

    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


class _Reached(Exception):
    """Ends a layer's forward pass where its attention is called."""

    def __init__(self, attention: Attention) -> None:
        super().__init__(attention)
        self.attention = attention


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
    reader.config._attn_implementation = _READING
    calls: list[_RotaryCall] = []
    for name, module in reader.named_modules():
        if _is_rotary(module):
            module.register_forward_hook(partial(_note, calls, name), with_kwargs=True)
    attention: dict[int, Attention] = {}
    kinds = reader._no_split_modules or ()
    layers = [module for module in reader.modules() if type(module).__name__ in kinds]
    for number, layer in enumerate(layers):
        layer.forward = _reading(layer.forward, number, attention, calls, live)
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    reader(tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    return attention


def _note(calls: list[_RotaryCall], name: str, _module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """A forward hook."""
    calls.append(_RotaryCall(name, args, kwargs, output))


def _reading(
    forward: Callable[..., Any],
    number: int,
    attention: dict[int, Attention],
    calls: list[_RotaryCall],
    live: dict[str, torch.nn.Module],
) -> Callable[..., Any]:
    """The forward pass of layer `number` up to its attention, which is noted. Returns its input."""

    def read(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            forward(hidden, *args, **kwargs)
        except _Reached as reached:
            given = {id(value) for value in (*args, *kwargs.values())}
            rotary = next((call for call in calls if id(call.output) in given), None)
            attention[number] = replace(
                reached.attention, rotary=Rotary() if rotary is None else _rotary_of(live[rotary.module], rotary)
            )
        return hidden

    return read


def _take_settings(module: torch.nn.Module, live: torch.nn.Module | None) -> None:
    """Give a module of the copy the numbers, flags and texts of the live one."""
    for key, value in vars(live).items() if live is not None else ():
        if key in vars(module) and not key.startswith("_") and isinstance(value, bool | int | float | str | None):
            setattr(module, key, value)


def _is_rotary(module: torch.nn.Module) -> bool:
    """Whether a module computes with buffers alone, as rotary embeddings do."""
    has_buffers = any(buffer.is_floating_point() for buffer in module.buffers(recurse=False))
    return has_buffers and not any(True for _ in module.parameters())


def _rotary_of(module: torch.nn.Module, call: _RotaryCall) -> Rotary:
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


def _read_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], **_unused: Any) -> Any:
    """A mask without values that knows how many keys a query sees."""
    nothing, keys = torch.tensor(0), torch.arange(_POSITION + 1)
    num_seen = int(mask_function(nothing, nothing, torch.tensor(_POSITION), keys).sum())
    mask: Any = torch.empty(1, 1, q_length, kv_length, device="meta")
    mask.window = None if num_seen == len(keys) else num_seen
    return mask


def _read_call(
    _layer: Any,
    _query: torch.Tensor,
    _key: torch.Tensor,
    _value: torch.Tensor,
    mask: Any,
    *,
    scaling: float,
    softcap: float | None = None,
    **_unused: Any,
) -> NoReturn:
    raise _Reached(Attention(float(scaling), mask.window, softcap))


AttentionInterface.register(_READING, _read_call)
AttentionMaskInterface.register(_READING, _read_mask)

"""What the layers of a transformers model pass to their attention, and what an implementation of it leaves out.

transformers' own forward pass runs over a model without memory, with an attention implementation
that records what it is called with and ends the layer's pass:

    mask function     transformers asks for the mask of a kind of layers    -> window
    attention call    a layer calls it with its settings and its mask       -> scaling, softcap, ...
    rotary module     a layer is given what such a module has returned      -> the module, its input

A model passes all its settings to whichever implementation is chosen, and one that has no parameter for a setting
ignores it: sdpa, the default, ignores Gemma-2's soft cap. The eager function beside the model has them all.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid_engine.probes import attributes_set

_RECORDER = "hybrid_engine_recorder"
_OF_EVERY_MODEL = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"}
"""Parameters that an implementation may take by other names."""
_POSITION = 2**20
"""Position of the query whose keys are counted; it is beyond any window."""


@dataclass(frozen=True)
class RotaryCall:
    """What a rotary module was called with, and what it returned."""

    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


@dataclass(frozen=True)
class AttentionCall:
    """What a layer passes to its attention.

    Attributes:
        window: number of tokens that its mask lets a query see, its own included; None: all.
        settings: that are not None, by transformers' names.
        rotary: the call whose output the layer was given, if it was given any.
    """

    window: int | None
    settings: Mapping[str, Any]
    rotary: RotaryCall | None


class _Reached(Exception):
    """Ends a layer's forward pass where its attention is called."""

    def __init__(self, window: int | None, settings: Mapping[str, Any]) -> None:
        super().__init__(window, settings)
        self.window = window
        self.settings = settings


@torch.no_grad()
def attention_calls(model: Any) -> dict[int, AttentionCall]:
    """Return what every decoder layer of a transformers model on the meta device passes to its attention, by number."""
    rotary_calls: list[RotaryCall] = []
    calls: dict[int, AttentionCall] = {}
    kinds = model._no_split_modules or ()
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if _is_rotary(module):
                note = partial(_note, rotary_calls, name)
                undo.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        for number, layer in enumerate(layers):
            layer.forward = _recording(layer.forward, number, calls, rotary_calls)
            undo.callback(delattr, layer, "forward")
        undo.enter_context(attributes_set([model.config], _attn_implementation=_RECORDER))
        model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    return calls


def settings_left_out(model: torch.nn.Module, implementation: str | None) -> dict[str, Any]:
    """Settings of attention that a model computes with and an implementation ignores, by transformers' names.

    Args:
        model: a transformers model on the meta device.
        implementation: its name, as `attn_implementation` takes it.
    """
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation or "eager", None)
    if function is None:  # eager
        return {}
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    own = [file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward")]
    settings = {name for each in own for name in inspect.signature(each).parameters} - _OF_EVERY_MODEL
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        settings.add("sliding_window")  # else it is in the mask
    ignored = settings - inspect.signature(function).parameters.keys()
    if not ignored:
        return {}
    passed = {name: value for call in attention_calls(model).values() for name, value in call.settings.items()}
    return {name: value for name, value in passed.items() if name in ignored}


def _is_rotary(module: torch.nn.Module) -> bool:
    """Whether a module computes with buffers alone, as rotary embeddings do."""
    has_buffers = any(buffer.is_floating_point() for buffer in module.buffers(recurse=False))
    return has_buffers and not any(True for _ in module.parameters())


def _note(calls: list[RotaryCall], name: str, _module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """A forward hook."""
    calls.append(RotaryCall(name, args, kwargs, output))


def _recording(
    forward: Callable[..., Any], number: int, calls: dict[int, AttentionCall], rotary_calls: list[RotaryCall]
) -> Callable[..., Any]:
    """The forward pass of layer `number` up to its attention, whose call is noted. Returns its input."""

    def record(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            forward(hidden, *args, **kwargs)
        except _Reached as reached:
            given = {id(value) for value in (*args, *kwargs.values())}
            rotary = next((call for call in rotary_calls if id(call.output) in given), None)
            calls[number] = AttentionCall(reached.window, reached.settings, rotary)
        return hidden

    return record


def _record_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], **_unused: Any) -> Any:
    """A mask without values that knows how many keys a query sees."""
    nothing, keys = torch.tensor(0), torch.arange(_POSITION + 1)
    num_seen = int(mask_function(nothing, nothing, torch.tensor(_POSITION), keys).sum())
    mask: Any = torch.empty(1, 1, q_length, kv_length, device="meta")
    mask.window = None if num_seen == len(keys) else num_seen
    return mask


def _record_call(
    _layer: Any, _query: torch.Tensor, _key: torch.Tensor, _value: torch.Tensor, mask: Any, **settings: Any
) -> NoReturn:
    raise _Reached(mask.window, {name: value for name, value in settings.items() if value is not None})


AttentionInterface.register(_RECORDER, _record_call)
AttentionMaskInterface.register(_RECORDER, _record_mask)

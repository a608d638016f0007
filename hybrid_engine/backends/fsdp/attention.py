"""Attention of a transformers model's layers, and the keys of its config that its code reads.

No rule of any architecture is repeated here. transformers' own forward pass runs over a copy of the
model without memory. The attention implementation `_RECORDER` records the call and ends the layer's
forward pass:

    mask function     called by transformers for the mask of a kind of layers   -> window
    attention call    called by a layer with its settings and its mask          -> scaling, ...
    rotary module     its output is an argument of a layer                      -> module, its input
    config            reads by transformers' modules                            -> keys

Rotations come from the live rotary modules. What cannot be recorded is unread, and no error:
log-probabilities tell whether both sides compute the same.

A model passes all its settings to any implementation that the user chooses. An implementation
without a parameter for a setting ignores it: sdpa, the default, ignores Gemma-2's soft cap. Only
the eager function in the model's own file has parameters for all settings.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid_engine.backends.fsdp.internals import OperationWatch, storages_in
from hybrid_engine.backends.fsdp.names import computing_modules, transformers_model
from hybrid_engine.compute_check.attention import POSITIONS, Attention, Attentions, Rotary
from hybrid_engine.compute_check.config_reads import ReadRecorder, Reads
from hybrid_engine.compute_check.fingerprint import settings_of
from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.errors import clipped
from hybrid_engine.models.derived import config_of, meta_model

logger = logging.getLogger(__name__)

_RECORDER = "hybrid_engine_recorder"
"""Name of the recording attention implementation."""
_NOT_SETTINGS = {
    "module",
    "query",
    "key",
    "value",
    "attention_mask",
    "scaling",
    "dropout",
    "kwargs",
}
"""Parameters that every implementation has, perhaps under other names."""
_POSITION = 2**20
"""Position of the query whose keys are counted. It is beyond any window."""


@dataclass(frozen=True)
class RotaryCall:
    """Arguments and output of one call of the rotary module named `module`."""

    module: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


@dataclass(frozen=True)
class AttentionCall:
    """Arguments that a layer passes to its attention.

    Attributes:
        window: number of tokens that a query attends to, including itself; None: all.
        settings: settings that are not None, by transformers' names.
        rotary: call whose output the layer computed with; None: it computed with none.
    """

    window: int | None
    settings: Mapping[str, Any]
    rotary: RotaryCall | None


class _AttentionReached(Exception):
    """Ends a layer's forward pass at the call of its attention; has its window and settings."""


@dataclass(frozen=True)
class Recorded:
    """Record of a forward pass without memory.

    Attributes:
        calls: attention call of every decoder layer that reaches one, by layer number.
        reads: keys of the config, with their first reads by transformers' modules.
    """

    calls: Mapping[int, AttentionCall]
    reads: Reads


@torch.no_grad()
def recorded(model: torch.nn.Module) -> Recorded:
    """Record a forward pass of a copy of a live model.

    Allocates no memory for weights, and leaves the random number generators unchanged.
    """
    inner = transformers_model(model)
    recorder = ReadRecorder(_is_of_model)
    config = config_of(inner)
    architecture = config.architectures[0]
    recorder.watch(config)
    with torch.random.fork_rng(devices=[]):
        reader = meta_model(config, architecture)
    modules = computing_modules(inner)
    for name, module in reader.named_modules():
        # A user may have changed settings since the model was built from its config.
        settings = settings_of(modules[name]) if name in modules else {}
        vars(module).update({key: settings[key] for key in settings.keys() & vars(module).keys()})
    recorder.scan(reader)
    calls = attention_calls(reader.eval())
    recorder.stop()
    return Recorded(calls, recorder.reads)


def _is_of_model(frame: FrameType) -> bool:
    """Return whether a frame is code of transformers' models, except rotary modules'.

    What these compute is compared by position.
    """
    module = frame.f_globals.get("__name__", "")
    is_of_model = module.startswith("transformers.") and ("modeling_" in module or "mask" in module)
    return is_of_model and "rope" not in module and "Rotary" not in frame.f_code.co_qualname


@torch.no_grad()
def live_attention(
    model: torch.nn.Module,
    calls: Mapping[int, AttentionCall],
    positions: Sequence[int] = POSITIONS,
) -> Attentions:
    """Return the attention of every decoder layer of a live model, by layer number.

    `calls`: recorded from a copy of it.
    """
    modules = computing_modules(transformers_model(model))
    # Layers share calls of rotary modules.
    # The key of None: a layer that used no rotary call has no rotation.
    rotaries: dict[int, Rotary | None] = {id(None): Rotary()}
    attention: dict[int, Attention] = {}
    for number, call in calls.items():
        rotary = call.rotary
        if rotary is not None and id(rotary) not in rotaries:
            rotaries[id(rotary)] = _rotary_of(modules[rotary.module], rotary, positions)
        scaling = float(call.settings["scaling"])
        softcap = call.settings.get("softcap")
        attention[number] = Attention(scaling, call.window, softcap, rotaries[id(rotary)])
    return attention


def _rotary_of(
    module: torch.nn.Module,
    call: RotaryCall,
    positions: Sequence[int],
) -> Rotary | None:
    """Return the rotations that a live rotary module computes; None if it cannot be read."""
    device = next(module.buffers()).device

    def placed(value: Any, position: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point():
            # Of hidden states a rotary module reads device and dtype only.
            return torch.zeros(1, 1, 1, device=device)
        # One token in place of the recorded number, with the dims before it.
        return torch.full((*value.shape[:-1], 1), position, device=device)

    rows = []
    try:
        for position in positions:
            args = [placed(value, position) for value in call.args]
            kwargs = {key: placed(value, position) for key, value in call.kwargs.items()}
            # A copy, because some modules remember the longest sequence in their buffers.
            output = copy.deepcopy(module)(*args, **kwargs)
            parts = (output.real, output.imag) if isinstance(output, torch.Tensor) else output
            # Positions in several dims are equal in a text.
            rows.append([part.reshape(-1, part.shape[-1])[0] for part in parts])
    except Exception as error:
        logger.info("%s cannot be read: %s", call.module, error)
        return None
    # [positions, elements], or [positions, pairs].
    cos, sin = (torch.stack(parts) for parts in zip(*rows, strict=True))
    size = cos.shape[1]
    # Most have an entry for both elements of a pair: in halves, or side by side.
    halves = (slice(size // 2), slice(size // 2, None))
    for first, second in (halves, (slice(0, None, 2), slice(1, None, 2))):
        if size % 2 == 0 and torch.equal(sin[:, first], sin[:, second]):
            return Rotary.of_rotated(cos[:, first], sin[:, first], positions)
    return Rotary.of_rotated(cos, sin, positions)


@torch.no_grad()
def attention_calls(model: Any) -> dict[int, AttentionCall]:
    """Return the attention call of every decoder layer that reaches one, by layer number.

    Empty if the model cannot be recorded: layers may compute what has no shape without values.

    `model`: a transformers model on the meta device.
    """
    for returned in (lambda hidden: hidden, lambda hidden: (hidden,)):
        # Some layers return a tensor, others a tuple.
        try:
            return _attention_calls(model, returned)
        except Exception as caught:
            error = caught
    name = type(model).__name__
    cause = clipped(f"{type(error).__name__}: {error}")
    logger.info("attention of %s cannot be recorded: %s", name, cause)
    return {}


def _attention_calls(
    model: Any,
    returned: Callable[[torch.Tensor], Any],
) -> dict[int, AttentionCall]:
    rotary_calls: list[RotaryCall] = []
    calls: dict[int, AttentionCall] = {}
    watch = OperationWatch()

    def note_rotary(name: str, _module: Any, args: Any, kwargs: Any, output: Any) -> None:
        rotary_calls.append(RotaryCall(name, args, kwargs, output))

    def recording(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
        """Return a forward pass of a layer that ends at its attention, and returns its input."""

        def record(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # Only what this layer's own operations read counts as used by it.
            watch.storages.clear()
            try:
                return forward(hidden, *args, **kwargs)
            except _AttentionReached as reached:
                # The layer's rotary module is identified by its output among the arguments. Some
                # layers get it and have no rotation.
                arguments = {id(value) for value in (*args, *kwargs.values())}
                used = (
                    call
                    for call in rotary_calls
                    if id(call.output) in arguments and watch.storages & storages_in(call.output)
                )
                window, settings = reached.args
                calls[number] = AttentionCall(window, settings, next(used, None))
                return returned(hidden)

        return record

    layer_classes = model._no_split_modules or ()
    # A vision tower has layers of its own, and comes first.
    has_tower = model.config.get_text_config() is not model.config
    decoder = model.get_decoder() if has_tower else model
    layers = [module for module in decoder.modules() if type(module).__name__ in layer_classes]
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with ExitStack() as undo:
        undo.enter_context(watch)
        for name, module in model.named_modules():
            # Rotary embeddings compute with buffers alone.
            buffers = module.buffers(recurse=False)
            has_floats = any(buffer.is_floating_point() for buffer in buffers)
            if has_floats and next(module.parameters(), None) is None:
                hook = partial(note_rotary, name)
                undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
                # Some forward methods have a decorator that chooses frequencies by the highest
                # position. Positions on the meta device have no value.
                module.forward = inspect.unwrap(type(module).forward).__get__(module)
                undo.callback(delattr, module, "forward")
        for number, layer in enumerate(layers):
            layer.forward = recording(layer.forward, number)
            undo.callback(delattr, layer, "forward")
        undo.enter_context(attributes_set([model.config], _attn_implementation=_RECORDER))
        # Without the head, which may compute losses from the layers' outputs.
        model.base_model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    return calls


def settings_left_out(model: torch.nn.Module, implementation: str | None) -> dict[str, Any]:
    """Return the attention settings that the model has and an implementation ignores.

    Args:
        model: a transformers model on the meta device.
        implementation: its name, as in `attn_implementation`; None: eager.

    Returns:
        values by transformers' names of the settings.
    """
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation or "eager", None)
    if function is None:  # eager, which the registry does not list
        return {}
    settings: set[str] = set()
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        if hasattr(file, "eager_attention_forward"):
            settings.update(inspect.signature(file.eager_attention_forward).parameters)
    settings -= _NOT_SETTINGS
    if implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        # For other implementations the mask contains the window.
        settings.add("sliding_window")
    ignored = settings - inspect.signature(function).parameters.keys()
    if not ignored:
        return {}
    values: dict[str, Any] = {}
    for call in attention_calls(model).values():
        values.update(call.settings)
    return {name: value for name, value in values.items() if name in ignored}


def _record_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    **_unused: Any,
) -> Any:
    """Return a mask without values, with the number of keys that a query attends to as `window`."""
    zero = torch.tensor(0)
    query = torch.tensor(_POSITION)
    keys = torch.arange(_POSITION + 1)
    # A query at 2**20 with a window of 4,096 sees 4,096 keys, itself included; without one all of
    # them.
    num_keys = int(mask_function(zero, zero, query, keys).sum())
    mask: Any = torch.empty(1, 1, q_length, kv_length, device="meta")
    mask.window = None if num_keys == len(keys) else num_keys
    return mask


def _record_call(
    _layer: Any,
    _query: torch.Tensor,
    _key: torch.Tensor,
    _value: torch.Tensor,
    attention_mask: Any,
    **settings: Any,
) -> NoReturn:
    present = {name: value for name, value in settings.items() if value is not None}
    raise _AttentionReached(attention_mask.window, present)


AttentionInterface.register(_RECORDER, _record_call)
AttentionMaskInterface.register(_RECORDER, _record_mask)

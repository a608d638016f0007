"""The config of a model that is there: vLLM is built from it, so it must say what the model computes.

    model.config  ->  transformers builds it once more, without memory  ->  compared, module by module, with the model

A config that was changed after the model was built says otherwise, and so does a model whose modules were changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from hybrid_engine.backends.fsdp.internals import initialize_module
from hybrid_engine.backends.fsdp.wrapped_names import plain_name
from hybrid_engine.errors import ModelError, clipped
from hybrid_engine.models.families import TABLES

_NOT_INFERENCE = frozenset(
    {"training", "gradient_checkpointing", "padding_idx", "vocab_size", "max_seq_len_cached", "original_max_seq_len"}
)
"""Attributes of modules that only gradients depend on, or that are compared by something else: sizes of vocabularies by
the shapes of tensors, lengths by rotary frequencies."""
_NOT_INFERENCE_PARTS = ("drop", "jitter", "loss")
"""Parts of the names of attributes that only training uses."""


class _Difference(NamedTuple):
    """An attribute in which the model and its config differ."""

    attribute: str
    live: str
    configured: str


def config_of(model: Any) -> Any:
    """A copy of the model's config that names its architecture, whatever `fully_shard` made of its class."""
    config = type(model.config).from_dict(model.config.to_dict())
    names = [each.__name__ for each in type(model).__mro__]
    config.architectures = [next((name for name in names if name in TABLES), names[0])]
    return config


def require_configured(model: torch.nn.Module) -> None:
    """Raise ModelError naming everything in which a transformers model is not what its config describes.

    Compared are numbers, flags and texts of its modules, its activations, and rotary frequencies and whatever else it
    keeps in buffers that no checkpoint has. Takes no memory for weights, and no random number.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        with torch.device("meta"):
            configured = AutoModelForCausalLM.from_config(config_of(model))
        modules = {plain_name(name): module for name, module in model.named_modules()}
        found: dict[_Difference, list[str]] = {}
        for name, module in configured.named_modules():
            if (live := modules.get(name)) is not None:
                for difference in (*_of_attributes(live, module), *_of_buffers(live, module, configured)):
                    found.setdefault(difference, []).append(name or "the model")
    if found:
        lines = [
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {difference.attribute} is "
            f"{difference.live}, by model.config {difference.configured}"
            for difference, names in found.items()
        ]
        raise ModelError(
            "the model computes otherwise than model.config says, from which vLLM is built. Set model.config to what "
            "the model computes, or build the model from it:\n  " + "\n  ".join(lines)
        )


def _of_attributes(live: torch.nn.Module, configured: torch.nn.Module) -> Iterator[_Difference]:
    own = vars(live)
    for key, value in vars(configured).items():
        if key.startswith("_") or key in _NOT_INFERENCE or any(part in key for part in _NOT_INFERENCE_PARTS):
            continue
        if key in own and isinstance(value, bool | int | float | str | None) and own[key] != value:
            yield _Difference(key, clipped(repr(own[key])), clipped(repr(value)))
    is_function = not any(configured.children()) and not any(True for _ in configured.parameters())
    if is_function and type(live) is not type(configured) and not isinstance(configured, torch.nn.Dropout):
        yield _Difference("its class", type(live).__name__, type(configured).__name__)


def _of_buffers(live: torch.nn.Module, configured: torch.nn.Module, model: torch.nn.Module) -> Iterator[_Difference]:
    """Compare floating-point buffers; those of a module with weights depend on the weights."""
    buffers = {name: each for name, each in configured.named_buffers(recurse=False) if each.is_floating_point()}
    if not buffers or any(True for _ in configured.parameters(recurse=False)):
        return
    configured.to_empty(device="cpu", recurse=False)
    for name in buffers:
        configured.get_buffer(name).fill_(torch.nan)  # what stays so is not known
    initialize_module(model, configured)
    there: Mapping[str, torch.Tensor] = dict(live.named_buffers(recurse=False))
    for name in buffers.keys() & there.keys():
        expected, found = configured.get_buffer(name), there[name]
        if expected.isnan().any() or found.is_meta:
            continue
        values = found.detach().to("cpu", expected.dtype)
        if values.shape != expected.shape or not torch.allclose(values, expected, rtol=1e-5, atol=0.0):
            dtype = "" if found.dtype is expected.dtype else f" in {found.dtype}, for .to() rounds it; loading does not"
            yield _Difference(name, f"{_shown(values)}{dtype}", _shown(expected))


def _shown(values: torch.Tensor) -> str:
    """The last few; rotary frequencies all begin with 1."""
    return f"[… {', '.join(f'{value:g}' for value in values.flatten()[-3:].tolist())}]"

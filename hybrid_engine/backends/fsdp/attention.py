"""Settings of a model that an implementation of attention leaves out.

A transformers model passes all its settings to whichever implementation is chosen, and one that has no parameter for a
setting ignores it: sdpa, the default, ignores Gemma-2's soft cap. The eager function beside the model has them all.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid_engine.probes import attributes_set

_RECORDER = "hybrid_engine_recorder"
_OF_EVERY_MODEL = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"}
"""Parameters that an implementation may take by other names. Windows are in the mask, whoever applies it."""


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
    ignored = settings - inspect.signature(function).parameters.keys()
    if not ignored:
        return {}
    return {name: value for name, value in _passed_to_attention(model).items() if name in ignored}


def _passed_to_attention(model: Any) -> dict[str, Any]:
    """Settings that a model on the meta device passes to attention in a forward pass."""
    passed: dict[str, Any] = {}

    def record(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **settings: Any
    ) -> tuple[torch.Tensor, None]:
        passed.update({name: setting for name, setting in settings.items() if setting is not None})
        batch, num_heads, length, _ = query.shape
        return query.new_empty(batch, length, num_heads, value.shape[-1]), None

    ALL_ATTENTION_FUNCTIONS[_RECORDER] = record
    try:
        with attributes_set([model.config], _attn_implementation=_RECORDER), torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long, device="meta"), use_cache=False)
    finally:
        del ALL_ATTENTION_FUNCTIONS[_RECORDER]
    return passed

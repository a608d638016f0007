"""Check that vLLM has quantised the layers of a model.

A method that has no implementation for a kind of layer leaves it as it is, without a word: on CPU,
for example, int8_per_channel_weight_only quantises experts only. The tensors show it.
"""

from __future__ import annotations

import logging

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.tracing import NamedModules
from hybrid_engine.errors import ConfigError, Violation, first_of

logger = logging.getLogger("hybrid_engine")

_MAX_NAMED = 5


def require_quantised(modules: NamedModules, method: str, *, logs: bool) -> None:
    """Raise ConfigError if no layer of a model has quantised weights; log which ones have none.

    Args:
        modules: name -> module, after vLLM's processing of the weights.
        method: name of the method.
        logs: whether this rank logs.
    """
    names = sorted(name for name, module in modules.items() if _may_be_quantised(module))
    plain = [name for name in names if not is_quantised(modules[name])]
    if plain and len(plain) == len(names):
        problem = f"{method!r} quantises none of the {len(names)} layers of this model here"
        remedy = "Use another method, or leave it out"
        raise ConfigError([Violation("quantization", problem, remedy, code="quantises-nothing")])
    if plain and logs:
        logger.warning(
            "quantization %s leaves %d of %d layers as they are: %s",
            method,
            len(plain),
            len(names),
            first_of(plain, _MAX_NAMED),
        )


def _may_be_quantised(module: torch.nn.Module) -> bool:
    """Return whether a module is a linear layer or the experts of a layer."""
    # Methods leave embeddings and the output layer out by design; attention has a cache, no
    # weights.
    method = getattr(module, "quant_method", None)
    is_of_layer = isinstance(method, internals.QUANTIZE_METHOD.load())
    is_of_cache = isinstance(method, internals.CACHE_METHOD.load())
    is_embedding = isinstance(module, internals.VOCABULARY_EMBEDDING.load())
    return is_of_layer and not is_of_cache and not is_embedding


def is_quantised(module: torch.nn.Module) -> bool:
    """Return whether a module has a tensor with elements of one byte, each a weight or a pair."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(tensor.dim() >= 2 and tensor.element_size() == 1 for tensor in tensors)

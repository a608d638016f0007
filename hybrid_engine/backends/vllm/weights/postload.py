"""What of vLLM processes a module's weights after loading, and how to run it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, cast

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.held import held_by_all
from hybrid_engine.backends.vllm.weights.storages import WeightStorage
from hybrid_engine.backends.vllm.weights.tracing import storage_key
from hybrid_engine.records.layout import Extent


def post_load_method(module: torch.nn.Module) -> Any | None:
    """The object whose `process_weights_after_loading(module)` vLLM calls, if the module has one."""
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, internals.QUANTIZE_METHOD.load()) else None


def is_processed(module: torch.nn.Module) -> bool:
    """Whether vLLM processes a module after loading."""
    return post_load_method(module) is not None or _is_deferred_attention(module)


def is_dense_method(method: object) -> bool:
    """Whether the method computes with the values that were loaded, in any form."""
    return any(kind.is_type_of(method) for kind in internals.DENSE_METHODS)


def is_linear_method(method: object) -> bool:
    """Whether the method's `apply` multiplies by one matrix."""
    return is_dense_method(method) or isinstance(method, internals.LINEAR_METHOD.load())


def described(module: torch.nn.Module) -> tuple[str, str]:
    """What processes a module after loading, its kernel where that has a name, and how to get another."""
    method = post_load_method(module)
    if method is None:
        if _is_deferred_attention(module):
            kind = type(getattr(module, "impl", module)).__name__
            return kind, "Set generate_config.vllm.attention_backend to another"
        return type(module).__name__, "Serve this model with another kernel, by arguments in generate_config.vllm"
    kernels = [value.name for value in vars(method).values() if isinstance(value, Enum)]
    kind = ", ".join([type(method).__name__, *kernels])
    if isinstance(method, internals.EXPERTS_METHOD.load()):
        remedy = "Set generate_config.vllm.moe_backend to another; triton computes with the loader's own layout"
    else:
        remedy = "Set generate_config.vllm.linear_backend to another"
    is_quantised = getattr(method, "uses_meta_device", False)
    return kind, remedy + (", or leave generate_config.quantization out" if is_quantised else "")


def process(module: torch.nn.Module) -> None:
    """Run a module's post-load processing on the weights it holds now, in loader layout."""
    method = post_load_method(module)
    assert method is not None
    method.process_weights_after_loading(module)
    if (update := getattr(module, "update_param_tp_status", None)) is not None:
        update()


def process_attention(layer: torch.nn.Module, dtype: torch.dtype) -> None:
    """Derive again what an attention layer makes of the weights inside it; `dtype`: of the model's activations."""
    cast(Callable[[torch.dtype], None], layer.process_weights_after_loading)(dtype)


def deriving_attention(model: torch.nn.Module, storages: Sequence[WeightStorage]) -> dict[str, list[str]]:
    """Attention layers that reach weights, in modules inside them or by a reference: name -> modules of the weights."""
    owners = {storage.key: [binding.module for binding in storage.bindings] for storage in storages}
    modules, found = dict(model.named_modules()), {}
    for name in (name for name, module in modules.items() if _is_deferred_attention(module)):
        tensors = held_by_all(modules, modules_processed(modules, name)).tensors.values()
        reached = [owner for key in map(storage_key, tensors) for owner in owners.get(key, ())]
        if reached:
            found[name] = sorted(set(reached))
    return found


def modules_processed(modules: Mapping[str, torch.nn.Module], name: str) -> tuple[str, ...]:
    """The modules whose contents a module's post-load processing may change: its own name first.

    Of attention also those inside it, which may have their names from elsewhere (MLA's `kv_b_proj`); of others their
    method, which may be a module too.
    """
    names, module = {id(module): each for each, module in modules.items()}, modules[name]
    if _is_deferred_attention(module):
        return tuple(names[id(child)] for child in module.modules())
    method = post_load_method(module)
    parts = method.modules() if isinstance(method, torch.nn.Module) else ()
    return (name, *(names[id(part)] for part in parts))


def _is_deferred_attention(module: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    return bool(is_deferred_attention_layer(module))


def vocabulary_padding(model: torch.nn.Module) -> Mapping[str, tuple[Extent, ...]]:
    """Parameter name -> rows of it beyond the vocabulary, as element intervals of its (row-major) storage."""
    embedding = internals.VOCABULARY_EMBEDDING.load()
    padding = {}
    for module_name, module in model.named_modules():
        if not isinstance(module, embedding):
            continue
        shard = module.shard_indices
        rows = (
            Extent(shard.num_org_elements, shard.num_org_elements_padded),
            Extent(shard.num_org_elements_padded + shard.num_added_elements, shard.num_elements_padded),
        )
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.shape[0] != shard.num_elements_padded:
                continue
            width = parameter.numel() // parameter.shape[0]
            start = parameter.storage_offset()
            padding[f"{module_name}.{name}"] = tuple(
                Extent(start + part.start * width, start + part.stop * width) for part in rows if part.start < part.stop
            )
    return padding

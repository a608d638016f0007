"""What vLLM does to a module's weights after loading, and how to do it again with new ones.

A *live* module computes with the storage its loader filled: writing there is enough. A *repacked* module computes
with something derived (on CPU every linear layer, head, embedding and expert layer holds a packed copy): new weights
are put into loader layout and vLLM's own post-load processing runs again. Which is which is decided from the device
and the quantisation method; a method that was not tried is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.config.inference_rules import QUANTIZATIONS
from hybrid_engine.errors import ModelError
from hybrid_engine.records.layout import Extent


def post_load_method(module: torch.nn.Module) -> Any | None:
    """The object whose `process_weights_after_loading(module)` vLLM calls, if the module has one."""
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, internals.QUANTIZE_METHOD.load()) else None


def is_repacked(name: str, module: torch.nn.Module, device: torch.device) -> bool:
    """Whether new weights of this module need its post-load processing.

    Raises ModelError for a method that was not tried, naming it.
    """
    method = post_load_method(module)
    if method is None:
        return False
    kind = type(method).__name__
    if _is_one_of(internals.DENSE_METHODS, method):
        return device.type == "cpu"
    if _is_one_of(internals.ONLINE_METHODS.get(device.type, ()), method):
        return True
    if _is_one_of(internals.EXPERT_METHODS, method):
        kernel = getattr(method.unquantized_backend, "name", str(method.unquantized_backend))
        if device.type == "cpu" or kernel in internals.LOADER_LAYOUT_KERNELS:
            return device.type == "cpu"
        kind = f"{kind} with the {kernel} kernel"
    unquantized = ", ".join(method.name for method in (*internals.DENSE_METHODS, *internals.EXPERT_METHODS))
    kernels = ", ".join(internals.LOADER_LAYOUT_KERNELS).lower()
    raise ModelError(
        f"{name}: vLLM's {kind} on {device.type} may change the layout of weights after loading, and writing new ones "
        f"was not tried. Use unquantised weights ({unquantized}), on GPU with "
        f"moe_backend one of {kernels}, or a quantization that was tried here: "
        f"{', '.join(QUANTIZATIONS.get(device.type, ())) or 'none'}, for models without experts"
    )


def _is_one_of(kinds: Sequence[internals.Internal], method: object) -> bool:
    return any(kind.is_type_of(method) for kind in kinds)


def is_dense_method(method: object) -> bool:
    """Whether the method computes with the values that were loaded, in any form."""
    return _is_one_of(internals.DENSE_METHODS, method)


def is_linear_method(method: object) -> bool:
    """Whether the method's `apply` multiplies by one matrix."""
    online = (kind for kinds in internals.ONLINE_METHODS.values() for kind in kinds)
    return is_dense_method(method) or _is_one_of([*online], method)


def process(module: torch.nn.Module) -> None:
    """Run a module's post-load processing on the weights it holds now, in loader layout."""
    method = post_load_method(module)
    assert method is not None
    forget_kernel(method)
    method.process_weights_after_loading(module)
    if (update := getattr(module, "update_param_tp_status", None)) is not None:
        update()


def process_attention(layer: torch.nn.Module, dtype: torch.dtype) -> None:
    """Derive again what an attention layer makes of the weights inside it; `dtype`: of the model's activations."""
    cast(Callable[[torch.dtype], None], layer.process_weights_after_loading)(dtype)


def forget_kernel(method: Any) -> None:
    """Make expert layers prepack again: with a kernel in place vLLM takes the weights for prepacked ones."""
    for attribute in ("moe_kernel", "moe_quant_config"):
        if getattr(method, attribute, None) is not None:
            setattr(method, attribute, None)


def deriving_attention(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, list[str]]]:
    """Attention layers that derive something from weights of modules inside them (MLA): name, layer, those modules."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    names = {id(module): name for name, module in model.named_modules()}
    for name, module in model.named_modules():
        if is_deferred_attention_layer(module):
            inner = [names[id(child)] for child in module.modules() if child is not module and child._parameters]
            if inner:
                yield name, module, inner


def require_repeatable(name: str, attention: torch.nn.Module, device: torch.device) -> None:
    """Raise ModelError off CPU: what attention derives from weights is repeatable there only."""
    if device.type != "cpu":
        raise ModelError(
            f"{name}: vLLM's {type(attention).__name__} derives tensors from the weights inside it, and renewing them "
            f"on {device.type} was not tried. Run this model's inference on CPU, or use a model without MLA"
        )


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

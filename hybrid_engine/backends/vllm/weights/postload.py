"""What vLLM does to a module's weights after loading, and how to do it again with new ones.

A *live* module computes with the storage its loader filled: writing there is enough. A *repacked* module computes
with something derived (on CPU every linear layer, head, embedding and expert layer holds a packed copy): new weights
are put into loader layout and vLLM's own post-load processing runs again. Which is which is decided from the device
and the quantisation method; a method that was not tried is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hybrid_engine.backends.vllm.weights.quantization import ONLINE_METHODS
from hybrid_engine.config.constraints import QUANTIZATIONS
from hybrid_engine.errors import ModelError
from hybrid_engine.records.layout import Extent

DENSE_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "_GateLinearMethod")
"""Methods whose weights stay live storage on GPU and whose processing can be repeated on CPU."""

EXPERT_METHODS = ("UnquantizedFusedMoEMethod",)
"""As above on CPU; on GPU only with a kernel that takes the loader's layout."""

LOADER_LAYOUT_KERNELS = ("TRITON", "BATCHED_TRITON")
"""Expert kernels on GPU that compute with the loader's layout."""


def post_load_method(module: torch.nn.Module) -> Any | None:
    """The object whose `process_weights_after_loading(module)` vLLM calls, if the module has one."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(module, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) else None


def is_repacked(name: str, module: torch.nn.Module, device: torch.device) -> bool:
    """Whether new weights of this module need its post-load processing.

    Raises ModelError for a method that was not tried, naming it.
    """
    method = post_load_method(module)
    if method is None:
        return False
    kind = type(method).__name__
    if kind in DENSE_METHODS:
        return device.type == "cpu"
    if kind in ONLINE_METHODS.get(device.type, ()):
        return True
    if kind in EXPERT_METHODS:
        kernel = getattr(method.unquantized_backend, "name", str(method.unquantized_backend))
        if device.type == "cpu" or kernel in LOADER_LAYOUT_KERNELS:
            return device.type == "cpu"
        kind = f"{kind} with the {kernel} kernel"
    raise ModelError(
        f"{name}: vLLM's {kind} on {device.type} may change the layout of weights after loading, and writing new ones "
        f"was not tried. Use unquantised weights ({', '.join((*DENSE_METHODS, *EXPERT_METHODS))}), on GPU with "
        f"moe_backend one of {', '.join(LOADER_LAYOUT_KERNELS).lower()}, or a quantization that was tried here: "
        f"{', '.join(QUANTIZATIONS.get(device.type, ())) or 'none'}, for models without experts"
    )


def process(module: torch.nn.Module) -> None:
    """Run a module's post-load processing on the weights it holds now, in loader layout."""
    method = post_load_method(module)
    assert method is not None
    forget_kernel(method)
    method.process_weights_after_loading(module)
    if hasattr(module, "update_param_tp_status"):
        module.update_param_tp_status()


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


def refuse_attention(name: str, module: torch.nn.Module, device: torch.device) -> None:
    """Raise ModelError: what attention derives from weights is repeatable on CPU only."""
    raise ModelError(
        f"{name}: vLLM's {type(module).__name__} derives tensors from the weights inside it, and renewing them on "
        f"{device.type} was not tried. Run this model's inference on CPU, or use a model without MLA"
    )


def vocabulary_padding(model: torch.nn.Module) -> Mapping[str, tuple[Extent, ...]]:
    """Parameter name -> rows of it beyond the vocabulary, as element intervals of its (row-major) storage."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    padding = {}
    for module_name, module in model.named_modules():
        if not isinstance(module, VocabParallelEmbedding):
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

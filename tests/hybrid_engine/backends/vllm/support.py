"""Helpers of the vLLM tests: random checkpoints, filling by records, bitwise comparison."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import VllmAdaptor
from hybrid_engine.backends.vllm.cpu.host_memory import CpuWeightMemory
from hybrid_engine.backends.vllm.native_load import native_parameters, second_model
from hybrid_engine.backends.vllm.weights.postload import module_tensors
from hybrid_engine.errors import StateError
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.zoo.checkpoint_shapes import checkpoint_dtypes, checkpoint_shapes
from tests.zoo.families import served_config
from tests.zoo.megatron_models import region_slices, view_of

__all__ = ["LLAMA", "QWEN3", "QWEN3_MOE", "native_parameters"]

Tensors = Mapping[str, torch.Tensor]

LLAMA, QWEN3, QWEN3_MOE = map(served_config, ("llama", "qwen3", "qwen3_moe"))


def random_weights(
    config: Mapping[str, Any], seed: int, dtype: torch.dtype = torch.bfloat16
) -> TensorDict:
    """Return the tensors of a checkpoint; the same seed gives the same values."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    dtypes = checkpoint_dtypes(config)
    for name, shape in checkpoint_shapes(config).items():
        values = torch.randn(shape, generator=generator) * 0.1
        is_norm = "norm" in name or ".ln_" in name  # norms are around 1
        tensor_dtype = getattr(torch, dtypes[name]) if name in dtypes else dtype
        weights[name] = (values + 1 if is_norm else values).to(tensor_dtype)
    return weights


def write_config(directory: Path, config: Mapping[str, Any]) -> str:
    """Write config.json to a new directory and return the directory. Every rank may call."""
    directory.mkdir(parents=True, exist_ok=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        (directory / "config.json").write_text(json.dumps(dict(config)))
    if dist.is_initialized():
        dist.barrier()
    return str(directory)


def write_checkpoint(directory: Path, config: Mapping[str, Any], weights: Tensors) -> str:
    """Write a checkpoint that vLLM can load, on rank 0, and return its directory."""
    from safetensors.torch import save_file

    if not dist.is_initialized() or dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(dict(weights), str(directory / "model.safetensors"))
    return write_config(directory, config)


def fill_by_records(adaptor: Any, weights: Tensors) -> TensorDict:
    """Write tensors by the layout's records; return the parameters in the loader's layout."""
    parameters: TensorDict = {}
    with adaptor.observed(
        lambda name, tensor: parameters.__setitem__(name, tensor.detach().clone())
    ):
        write_by_records(adaptor, weights)
    return parameters


def write_by_records(adaptor: Any, weights: Tensors) -> None:
    """Do the same as `fill_by_records` without observing the parameters."""
    layout = adaptor.layout()
    shards: dict[str, list[Any]] = {}
    for shard in layout.shards:
        shards.setdefault(layout.buffers[shard.place.buffer].group, []).append(shard)
    groups = sorted({buffer.group for buffer in layout.buffers.values()})
    for start in range(0, len(groups), 3):
        batch = groups[start : start + 3]
        buffers = adaptor.allocate(batch)
        with torch.no_grad():
            for shard in (shard for group in batch for shard in shards.get(group, ())):
                view_of(buffers, shard).copy_(weights[shard.region.tensor][region_slices(shard)])
        adaptor.commit(batch)
        del buffers
    adaptor.finish_fill()


def is_ready(adaptor: VllmAdaptor) -> bool:
    """Return whether every group holds committed weights."""
    try:
        adaptor.require_ready()
    except StateError:
        return False
    return True


def adaptor_of(engine: Any, directory: str, model: Mapping[str, Any]) -> Any:
    """Make another adaptor in this rank's groups like `InferenceEngine`, without an engine."""
    from vllm.config import set_current_vllm_config

    from hybrid_engine.backends.vllm.weights.processed_model import inspect_model
    from hybrid_engine.backends.vllm.weights.traced_model import trace_model

    module, config = second_model(engine.settings, engine.rank, directory)
    dtype = config.model_config.dtype
    shapes = checkpoint_shapes(model)
    dtypes = {name: getattr(torch, value) for name, value in checkpoint_dtypes(model).items()}
    traced = trace_model(module, shapes, dict.fromkeys(shapes, dtype) | dtypes, engine.rank)
    context = functools.partial(set_current_vllm_config, config)
    process(module, config)
    return VllmAdaptor(
        inspect_model(traced, context, dtype, keeps_addresses=False), CpuWeightMemory()
    )


def load(module: torch.nn.Module, config: Any, model_config: Any = None) -> None:
    """Fill `module`, or a drafter of another model config, from its checkpoint by vLLM's own
    loader.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import DefaultModelLoader

    with torch.no_grad(), set_current_vllm_config(config):
        for parameter in module.parameters():
            parameter.zero_()  # padding, which no loader writes
        DefaultModelLoader(config.load_config).load_weights(
            module, model_config or config.model_config
        )


def process(module: torch.nn.Module, config: Any, model_config: Any = None) -> None:
    """Run vLLM's post-load processing on `module`."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    with set_current_vllm_config(config):
        process_weights_after_loading(
            module, model_config or config.model_config, torch.device("cpu")
        )


def tensors_of(module: torch.nn.Module) -> TensorDict:
    """Return all tensors that a model computes with, by path."""
    modules = dict(module.named_modules())
    return {
        path: tensor
        for path, tensor in module_tensors(modules, modules).tensors.items()
        if tensor.numel()
    }


def misread_layers(model: torch.nn.Module, sent: Tensors) -> list[str]:
    """Return the dense layers whose kernels do not compute with the weights `sent`."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    wrong = []
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        weight = sent.get(f"{name}.weight")
        is_dense = isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
        if is_dense and weight is not None and weight.ndim == 2:
            # For unit vectors a kernel returns its weight exactly: each element plus zeros.
            read = method.apply(layer, torch.eye(weight.shape[1], dtype=weight.dtype))
            if not torch.equal(read.to(weight.dtype), weight.t()):
                wrong.append(name)
    return wrong


def differences(ours: Tensors, native: Tensors) -> list[str]:
    """Return the names of tensors that are missing on one side or differ bitwise."""
    # Bytes are compared, so that equal NaN are no difference.
    return [
        name
        for name in sorted({*ours, *native})
        if name not in ours or name not in native or not same_bits(ours[name], native[name])
    ]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8),
        right.contiguous().reshape(-1).view(torch.uint8),
    )

"""What the vLLM tests share: tiny models by their HF names, random checkpoints, filling by records, native loading."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.hybrid_engine.tiny_models import region_slices, view_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 130,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 128}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def checkpoint_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """HF names and shapes of a checkpoint on disk for one of the configs above, written out independently."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    head_dim = config["head_dim"] if config["model_type"] != "qwen2" else hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("input_layernorm.weight", "post_attention_layernorm.weight"), (hidden,)
    )
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if config["model_type"] == "qwen2":
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    if config["model_type"].startswith("qwen3"):
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes | _mlp_shapes(config)


def _mlp_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "mixtral":
        experts = {f"block_sparse_moe.experts.{e}.{w}.weight": (inner, hidden) for e in range(4) for w in ("w1", "w3")}
        experts |= {f"block_sparse_moe.experts.{e}.w2.weight": (hidden, inner) for e in range(4)}
        return {"block_sparse_moe.gate.weight": (4, hidden), **experts}
    if config["model_type"] == "qwen3_moe":
        inner = config["moe_intermediate_size"]
        experts = {f"mlp.experts.{e}.{w}_proj.weight": (inner, hidden) for e in range(4) for w in ("gate", "up")}
        experts |= {f"mlp.experts.{e}.down_proj.weight": (hidden, inner) for e in range(4)}
        return {"mlp.gate.weight": (4, hidden), **experts}
    return {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def random_weights(
    config: Mapping[str, Any], seed: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in checkpoint_shapes(config).items():
        values = torch.randn(shape, generator=generator) * 0.1
        weights[name] = (values + 1 if "norm" in name else values).to(dtype)
    return weights


def write_config(directory: Path, config: Mapping[str, Any]) -> str:
    """A directory with config.json and nothing else; its name. Every rank may write it."""
    directory.mkdir(parents=True, exist_ok=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        (directory / "config.json").write_text(json.dumps(dict(config)))
    if dist.is_initialized():
        dist.barrier()
    return str(directory)


def write_checkpoint(directory: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> str:
    """A directory that vLLM loads natively; its name. Rank 0 writes."""
    from safetensors.torch import save_file

    if not dist.is_initialized() or dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(dict(weights), str(directory / "model.safetensors"))
    return write_config(directory, config)


def fill_by_records(
    adaptor: Any, weights: Mapping[str, torch.Tensor], groups_at_once: int = 3, observed: bool = True
) -> dict[str, torch.Tensor]:
    """Write whole tensors into vLLM through the layout's records alone; returns the loader-layout parameters."""
    seen: dict[str, torch.Tensor] = {}
    if observed:
        adaptor.observer = lambda name, tensor: seen.__setitem__(name, tensor.detach().clone())
    layout = adaptor.layout()
    shards: dict[str, list[Any]] = {}
    for shard in layout.shards:
        shards.setdefault(layout.buffers[shard.place.buffer].group, []).append(shard)
    groups = sorted({buffer.group for buffer in layout.buffers.values()})
    for start in range(0, len(groups), groups_at_once):
        batch = groups[start : start + groups_at_once]
        buffers = adaptor.allocate(batch)
        with torch.no_grad():
            for shard in (shard for group in batch for shard in shards.get(group, ())):
                view_of(buffers, shard).copy_(weights[shard.region.tensor][region_slices(shard)])
        adaptor.commit(batch)
    adaptor.observer = None
    return seen


def second_model(engine: Any, directory: str, **changes: Any) -> tuple[Any, Any]:
    """Another vLLM model in this rank's groups, constructed but not loaded: the model and its configuration."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from hybrid_engine.backends.vllm.guest import register_model_class

    register_model_class(directory)
    arguments = {**engine._llm_arguments(), "model": directory, "load_format": "safetensors", **changes}
    config = EngineArgs(
        **{key: value for key, value in arguments.items() if key != "worker_cls"}
    ).create_engine_config()
    with _building(config):
        model = DefaultModelLoader(config.load_config).create_model(config, config.model_config)
    return model, config


def native_parameters(engine: Any, checkpoint: str, **changes: Any) -> dict[str, torch.Tensor]:
    """What vLLM's own loader puts into a model of this rank, before post-load processing."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    model, config = second_model(engine, checkpoint, **changes)
    for parameter in model.parameters():
        parameter.data.zero_()
    with _building(config):
        DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
    return {name: parameter.data for name, parameter in model.named_parameters()}


@contextlib.contextmanager
def _building(config: Any) -> Iterator[None]:
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(config.model_config.dtype), set_current_vllm_config(config):
        yield


def adaptor_of(engine: Any, directory: str, tensors: Mapping[str, tuple[int, ...]], **changes: Any) -> Any:
    """A second adaptor in this rank's groups, as `InferenceEngine` makes one, but without an engine around it."""
    from vllm.config import set_current_vllm_config

    from hybrid_engine.backends.vllm import VllmAdaptor

    model, config = second_model(engine, directory, **changes)
    adaptor = VllmAdaptor(model, tensors, config.model_config.dtype, engine.rank)
    adaptor.context = lambda: set_current_vllm_config(config)
    return adaptor


def differences(ours: Mapping[str, torch.Tensor], native: Mapping[str, torch.Tensor]) -> list[str]:
    """Parameters that are missing on one side or differ in any bit."""
    return [
        name
        for name in sorted({*ours, *native})
        if name not in ours or name not in native or not _same_bits(ours[name], native[name])
    ]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )

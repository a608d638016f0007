"""Small jobs with both real engines, as rank functions for tests.launch: what the end-to-end tests run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine import ActorHybridWorker, HybridConfig, Sampling, load_config
from hybrid_engine.planning.layout import Layout

SEQ_LENGTH = 32
GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False},
}


def write_model(directory: Path, family: str, **changes: Any) -> Path:
    """A directory with the config.json of a small model: 4 layers, 4 heads over 2 KV heads, a vocabulary to pad."""
    config = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 130,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        **FAMILIES[family],
        **changes,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def configuration(model: Path, actor: Mapping[str, Any], generate: Mapping[str, Any] | None = None) -> HybridConfig:
    """A configuration with sizes that keep a test short."""
    values = {
        "model": str(model),
        "actor_config": {
            "params_dtype": "float32",
            "make_vocab_size_divisible_by": 8,
            "micro_batch_size": 2,
            "seq_length": SEQ_LENGTH,
            "optimizer": {"lr": 1e-2},
            **actor,
        },
        "generate_config": {"max_model_len": 64, "max_num_seqs": 16, "timeout_seconds": 120, **(generate or {})},
    }
    return load_config(values, int(os.environ["WORLD_SIZE"]))


def build_worker(model: Path, actor: Mapping[str, Any], generate: Mapping[str, Any] | None = None) -> ActorHybridWorker:
    """The worker of this rank."""
    return ActorHybridWorker(configuration(model, actor, generate))


def batch(seed: int, vocab_size: int = 130, num_sequences: int = 8) -> dict[str, torch.Tensor]:
    """Random tokens and the labels that follow them; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (num_sequences, SEQ_LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def cross_entropy(
    micro_batch: Mapping[str, torch.Tensor], log_probs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -log_probs.mean()
    return loss, {"loss": loss}


def canonical_weights(worker: ActorHybridWorker) -> dict[str, torch.Tensor]:
    """The checkpoint tensors of the present training weights, whole, on every rank, read through the records."""
    own = (worker.train.weights.layout(), {n: t.clone() for n, t in worker.train.weights.buffers().items()})
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    layout = Layout.merge(rank_layout for rank_layout, _ in everyone)
    weights = {name: torch.full(shape, torch.nan) for name, shape in layout.tensors.items()}
    for shard in layout.shards:
        flat = everyone[shard.place.buffer.rank][1][shard.place.buffer.name]
        region = tuple(slice(low, high) for low, high in zip(shard.region.offsets, shard.region.ends, strict=True))
        weights[shard.region.tensor][region] = flat.as_strided(
            shard.region.lengths, shard.place.strides, shard.place.offset
        )
    return weights


def global_nbytes(worker: ActorHybridWorker) -> dict[str, int]:
    """Bytes received and least bytes of the last switch, summed over ranks."""
    report = worker.sharding.last_report
    agreement = worker.sharding.agreement
    return {"received": agreement.total(report.bytes_received), "least": agreement.total(report.bytes_least)}

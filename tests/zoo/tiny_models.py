"""Tiny Hugging Face models on disk, and Megatron actors of the same architecture on real ranks.

path = save_model(directory, "qwen3", tie_word_embeddings=True)      # here: transformers writes a checkpoint
with running(path, ActorConfig(...)) as run:                         # on the ranks of tests.harness.launch.launch
    load_canonical(run, path)                                        # Megatron holds the checkpoint's weights
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hybrid_engine.config import ActorConfig
from hybrid_engine.models import ModelTable, table_for
from hybrid_engine.records.layout import Shard

if TYPE_CHECKING:
    from hybrid_engine.backends.megatron.build import Actor
    from hybrid_engine.backends.megatron.train_engine import TrainEngine

# 130 tokens: not a multiple of anything Megatron pads to. head_dim is not hidden_size / num_attention_heads.
SIZES: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DENSE_FLOAT32: dict[str, Any] = {"params_dtype": "float32", "make_vocab_size_divisible_by": 8, "seq_length": 12}


# What a family's config has instead of SIZES, or besides them. At their real values soft caps and windows would not
# show at this size.
GEMMA: dict[str, Any] = {"sliding_window": 5, "query_pre_attn_scalar": 6, "pad_token_id": None}
GPT2: dict[str, Any] = {
    "vocab_size": 130,
    "n_embd": 32,
    "n_inner": 40,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {**SIZES, **GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}),
    "gemma3": ("Gemma3Text", {**SIZES, **GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "glm": ("Glm", {**SIZES, "pad_token_id": None}),
    "glm4": ("Glm4", {**SIZES, "pad_token_id": None}),
    "gpt2": ("GPT2", GPT2),
    "llama": ("Llama", SIZES),
    "qwen2": ("Qwen2", {**{k: v for k, v in SIZES.items() if k != "head_dim"}, "hidden_size": 32}),  # knows no head_dim
    "qwen3": ("Qwen3", SIZES),
}
"""Family -> (name of its classes in transformers, sizes)."""


def build_hf_model(family: str, **overrides: Any) -> torch.nn.Module:
    """A transformers model of one of FAMILIES, fp32, in which every parameter is random and matters."""
    import transformers

    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**sizes, **overrides})
    suffix = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    # other implementations of attention leave out soft caps
    config._attn_implementation = "eager"
    model = getattr(transformers, name.removesuffix("Text") + suffix)(config).float().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            base = norm_base(family, parameter_name)
            parameter.copy_(base + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def norm_base(family: str, name: str) -> float:
    """What the weights of a norm lie around: 1, or 0 where the model adds 1; 0 for everything that is no norm."""
    is_norm = name.endswith("weight") and ("norm" in name or ".ln_" in name)
    return 1.0 if is_norm and not family.startswith("gemma") else 0.0


def train_hf_model(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor], num_steps: int, weight_decay: float, eps: float = 1e-8
) -> tuple[list[float], list[float], torch.Tensor]:
    """Losses, gradient norms and final log-probabilities of steps with torch's Adam at a learning rate of 3e-3.

    As Megatron does it: norms and biases do not decay, gradients are clipped to norm 1.
    """
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.95),
        eps=eps,
    )
    losses, norms = [], []
    for _ in range(num_steps):
        loss = -label_log_probs(model(batch["tokens"]).logits, batch["labels"]).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, norms, label_log_probs(model(batch["tokens"]).logits, batch["labels"])


def label_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probability of each label."""
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def save_model(directory: Path, family: str, **overrides: Any) -> Path:
    """Write such a model as transformers does; returns the directory."""
    build_hf_model(family, **overrides).save_pretrained(directory)
    return directory


def read_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def read_canonical(path: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by name."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@dataclass(frozen=True)
class Run:
    """What `running` gives."""

    actor: Actor
    table: ModelTable
    config: ActorConfig
    engine: TrainEngine


@contextlib.contextmanager
def running(path: Path, config: ActorConfig) -> Iterator[Run]:
    """Megatron's parallel state, model, DDP and optimizer on this rank. Several may follow one another."""
    with parallel_state_of(config):
        from hybrid_engine.backends.megatron.build import build_actor, end_training
        from hybrid_engine.backends.megatron.train_engine import TrainEngine

        table = table_for(read_config(path))
        actor = build_actor(config, table, read_config(path))
        try:
            yield Run(actor, table, config, TrainEngine(actor, table, config.micro_batch_size))
        finally:
            end_training(actor)


@contextlib.contextmanager
def parallel_state_of(config: ActorConfig) -> Iterator[None]:
    """The patches, a gloo process group (kept for the next one), and Megatron's parallel state."""
    import megatron_patches

    megatron_patches.apply()
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    from hybrid_engine.backends.megatron.build import destroy_parallel_state, initialize_parallel_state

    initialize_parallel_state(config, timeout_seconds=120)
    try:
        yield
    finally:
        destroy_parallel_state()


def load_canonical(run: Run, path: Path) -> None:
    """Write the checkpoint into Megatron's parameters through the adaptor's records."""
    canonical, buffers = read_canonical(path), run.engine.weights.base.buffers()
    with torch.no_grad():
        for shard in run.engine.weights.base.layout().shards:
            view_of(buffers, shard).copy_(canonical[shard.region.tensor][region_slices(shard)])
    if run.actor.optimizer is not None:
        run.actor.optimizer.reload_model_params()


def view_of(buffers: Mapping[str, torch.Tensor], shard: Shard) -> torch.Tensor:
    """The part of a flat buffer that a record speaks of."""
    flat, place = buffers[shard.place.buffer.name], shard.place
    assert flat.dim() == 1 and flat.is_contiguous()
    return flat.as_strided(shard.region.lengths, place.strides, flat.storage_offset() + place.offset)


def region_slices(shard: Shard) -> tuple[slice, ...]:
    """The record's region, to index the canonical tensor with."""
    return tuple(slice(low, high) for low, high in zip(shard.region.offsets, shard.region.ends, strict=True))


def token_batch(seed: int, num_sequences: int, length: int) -> dict[str, torch.Tensor]:
    """Random tokens and the labels that follow them, [num_sequences, length]; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(SIZES["vocab_size"], (num_sequences, length + 1), generator=generator)
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def negative_log_likelihood(
    _batch: Mapping[str, torch.Tensor], log_probs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The report shares the loss's memory, as an unsuspecting user's would."""
    loss = -log_probs.mean()
    return loss, {"loss": loss.detach()}

"""Tiny Hugging Face models, written and computed by transformers.

path = zoo.path("qwen3", tie_word_embeddings=True)      # `zoo` is a fixture
path = zoo.path("deepseek_v3", mtp_layers=1)  # the tensors of MTP layers are random
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hybrid_engine.models import table_for
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.processes import wait_until
from tests.harness.values import Values
from tests.zoo.families import FAMILIES, SIZES, read_config, tiny_config


def build_hf_model(family: str, mtp_layers: int = 0, **overrides: Any) -> torch.nn.Module:
    """Build a float32 model of a family in which every parameter and router bias is random and has
    an effect.

    The config lists `mtp_layers`, which transformers does not build.
    """
    import transformers

    if mtp_layers:
        overrides["num_nextn_predict_layers"] = mtp_layers

    name = FAMILIES[family].transformers
    config = getattr(transformers, f"{name}Config").from_dict(tiny_config(family, **overrides))
    suffix = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    # Other implementations of attention ignore soft caps.
    config._attn_implementation = "eager"
    model = getattr(transformers, name.removesuffix("Text") + suffix)(config).float().eval()
    randomise(model, family)
    return model


def randomise(model: torch.nn.Module, family: str) -> None:
    """Set every parameter and router bias to random values large enough to matter."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                norm_base(family, name) + 0.2 * torch.randn(parameter.shape, generator=generator)
            )
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def norm_base(family: str, name: str) -> float:
    """Return the mean of a norm's weights: 1, or 0 if the model adds 1; 0 for other weights."""
    is_norm = name.endswith("weight") and ("norm" in name or ".ln_" in name)
    return 1.0 if is_norm and not family.startswith("gemma") else 0.0


def save_model(directory: Path, family: str, mtp_layers: int = 0, **overrides: Any) -> Path:
    """Write a model of `build_hf_model`, with random MTP layers; return the directory."""
    build_hf_model(family, mtp_layers, **overrides).save_pretrained(directory)
    if mtp_layers:
        table = table_for(read_config(directory))
        generator = torch.Generator().manual_seed(8)
        rest = {
            name: norm_base(family, name) + 0.2 * torch.randn(shape, generator=generator)
            for name, shape in table.shapes.items()
            if not table.is_served(name)
        }
        save_file(rest, directory / "multi_token_prediction.safetensors")
    return directory


@dataclass(frozen=True)
class TinyModel:
    """A family with changes of its config, or `mtp_layers`."""

    family: str
    changes: Values = field(default_factory=dict)

    def build(self) -> torch.nn.Module:
        return build_hf_model(self.family, **self.changes)


@dataclass(frozen=True)
class Zoo:
    """Tiny models on disk, shared by all tests: they only read them.

    A model is saved when it is first asked for; on ranks all of them, or rank 0 alone, must ask.
    """

    root: Path

    def path(self, family: str, **changes: Any) -> Path:
        path = self.root / f"{family}-{text_digest(json.dumps(changes, sort_keys=True)):x}"
        if os.environ.get("RANK", "0") == "0" and not path.exists():
            with tempfile.TemporaryDirectory(dir=self.root) as directory:
                save_model(Path(directory) / "model", family, **changes).rename(path)
        wait_until(path.exists)  # transformers saves on rank 0 alone
        return path

    def saved(self, model: TinyModel) -> Path:
        return self.path(model.family, **model.changes)


def read_canonical(path: Path) -> TensorDict:
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def token_batch(seed: int, num_sequences: int, length: int) -> TensorDict:
    """Return random tokens and their labels [num_sequences, length], the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(SIZES["vocab_size"], (num_sequences, length + 1), generator=generator)
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def label_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def adamw(
    parameters: Iterable[torch.nn.Parameter], lr: float, weight_decay: float, eps: float = 1e-8
) -> torch.optim.Optimizer:
    """Return torch's AdamW with Megatron's betas.

    As in Megatron, norms and biases have no weight decay.
    """
    decayed = []
    others = []
    for parameter in parameters:
        (decayed if parameter.dim() > 1 else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=eps)


def train_by_torch(
    parameters: Sequence[torch.nn.Parameter],
    loss_of: Callable[[], torch.Tensor],
    num_steps: int,
    **settings: float,
) -> tuple[list[float], list[float]]:
    """Train at learning rate 3e-3 with gradients clipped to norm 1.

    Returns losses, and norms before clipping.

    Args:
        settings: of `adamw`.
    """
    optimizer = adamw(parameters, lr=3e-3, **settings)
    losses = []
    norms = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def build_mtp_layer(model: torch.nn.Module, tensors: Batch, layer: int) -> torch.nn.Module:
    """Build transformers' layer for multi-token prediction from the checkpoint `tensors` of layer
    `layer`.

    `model` is the DeepSeek-V3 model of the checkpoint.
    """
    from transformers.modeling_layers import MtpLayer

    decoder_layer = model.model.layers[-1]
    result = MtpLayer(
        model.config, type(decoder_layer), type(decoder_layer.input_layernorm), layer
    ).eval()
    prefix = f"model.layers.{layer}."
    remaining = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    state = {name: remaining.pop(f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj")}
    state = {f"{name}.weight": tensor for name, tensor in state.items()}
    state["post_norm.weight"] = remaining.pop("shared_head.norm.weight")
    experts = range(model.config.n_routed_experts)

    def stacked(projection: str) -> torch.Tensor:
        return torch.stack(
            [remaining.pop(f"mlp.experts.{expert}.{projection}_proj.weight") for expert in experts]
        )

    state["mtp_block.mlp.experts.gate_up_proj"] = torch.cat([stacked("gate"), stacked("up")], dim=1)
    state["mtp_block.mlp.experts.down_proj"] = stacked("down")
    state |= {f"mtp_block.{name}": tensor for name, tensor in remaining.items()}
    result.load_state_dict(state)
    return result


def mtp_losses(path: Path, model: torch.nn.Module, batch: Batch) -> list[float]:
    """Return the mean loss of each layer for multi-token prediction, computed with transformers'
    layers.

    At token t, layer k reads the embedding of token t + k + 1 and predicts the next label.
    Positions past the end count as token 0, are masked in the loss, and are invisible to earlier
    tokens. A `mask` in the batch must have the same number of ones in every sequence.
    """
    mask = batch.get("mask", torch.ones(batch["tokens"].shape))
    tensors = read_canonical(path)
    num_layers = model.config.num_hidden_layers
    tokens, labels = batch["tokens"], batch["labels"]
    losses = []
    length = tokens.shape[1]
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state
        positions = torch.arange(length)[None]
        angles = model.model.rotary_emb(hidden, positions)
        future = torch.full((length, length), float("-inf")).triu(1)[None, None]
        for index in range(model.config.num_nextn_predict_layers):
            tokens, labels = (
                torch.cat([row[:, 1:], torch.zeros_like(row[:, :1])], 1) for row in (tokens, labels)
            )
            layer = build_mtp_layer(model, tensors, num_layers + index)
            embedded = model.model.embed_tokens(tokens)
            hidden = layer(embedded, hidden, angles, future, positions, None)
            token_losses = -label_log_probs(model.lm_head(hidden), labels)[:, : length - index - 1]
            losses.append(token_losses[mask[:, index + 1 :] == 1].mean().item())
    return losses

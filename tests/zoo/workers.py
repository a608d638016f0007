"""Small jobs with both real engines, for functions that tests.harness.launch runs on ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hybrid_engine import ActorHybridWorker, HybridConfig, Sampling, load_config
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.zoo.families import served_config, write_config
from tests.zoo.tiny_models import token_batch

SEQ_LENGTH = 32
GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)


def write_model(directory: Path, family: str, **changes: Any) -> Path:
    """Write the config.json of a model with 4 layers and a vocabulary that needs padding."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "torch_dtype": "float32",
    }
    return write_config(directory, served_config(family, **{**sizes, **changes}))


def settings(
    model: Any, actor: Mapping[str, Any], generate: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return settings with sizes for short tests.

    They are for `load_config` or, with a model object, `train`.
    """
    return {
        "model": model,
        "actor_config": {
            "micro_batch_size": 2,
            "seq_length": SEQ_LENGTH,
            "optimizer": {"lr": 1e-2},
            **actor,
        },
        # The cache is small, because vLLM zeroes it at each build and switch.
        "generate_config": {
            **{"max_model_len": 64, "max_num_seqs": 16, "kv_cache_mb": 16, "timeout_seconds": 120},
            **(generate or {}),
        },
    }


def configuration(
    model: Path, actor: Mapping[str, Any], generate: Mapping[str, Any] | None = None, **more: Any
) -> HybridConfig:
    """Return a configuration with `settings`, random weights and `more` top-level keys."""
    values = settings(
        str(model),
        {"params_dtype": "float32", "make_vocab_size_divisible_by": 8, **actor},
        generate,
    )
    return load_config({"random_weights": True, **values, **more}, int(os.environ["WORLD_SIZE"]))


def build_worker(
    model: Path, actor: Mapping[str, Any], generate: Mapping[str, Any] | None = None, **more: Any
) -> ActorHybridWorker:
    return ActorHybridWorker(configuration(model, actor, generate, **more))


def batch(seed: int) -> TensorDict:
    return token_batch(seed, num_sequences=8, length=SEQ_LENGTH)


def cross_entropy(micro_batch: Batch, log_probs: torch.Tensor) -> tuple[torch.Tensor, TensorDict]:
    """Return a loss, and a report that is still part of the graph."""
    loss = -log_probs.mean()
    return loss, {"loss": loss}

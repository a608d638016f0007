"""Abilities of every engine, and those of an engine that builds its trainer."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from hybrid_engine import HybridEngine

BY_THE_OWNER = (
    "update",
    "compute_log_probs",
    "learning_rate",
    "set_learning_rate",
    "save_checkpoint",
    "load_checkpoint",
)
"""Names of `ActorHybridWorker` alone: the loop of a model's owner does these by itself."""


@torch.no_grad()
def stored_and_loaded(engine: HybridEngine[Any], model: torch.nn.Module) -> bool:
    """Whether weights that were saved as a Hugging Face checkpoint, lost, and loaded are the same to the bit.

    In the end the model has what it had, with its padding, of which a checkpoint has nothing.
    """
    first, second = (Path(engine.job.agreement.gather(tempfile.mkdtemp(), str, "a directory")[0]) for _ in range(2))
    with engine.train_context():
        weights = [_local(parameter) for parameter in model.parameters()]
        before = [weight.clone() for weight in weights]
        engine.save_hf_checkpoint(first)
        for weight in weights:
            weight.fill_(7.0)
        engine.load_hf_checkpoint(first)
        engine.save_hf_checkpoint(second)
        stored, loaded = _tensors_of(first), _tensors_of(second)
        for weight, kept in zip(weights, before, strict=True):
            weight.copy_(kept)
        engine.train.reload_main_params()
    engine.barrier("all have read")
    for directory in (first, second):
        shutil.rmtree(directory, ignore_errors=True)
    same = [torch.equal(stored[name], loaded.get(name, torch.empty(0))) for name in stored]
    return (
        all(same) and stored.keys() == loaded.keys() and not any(bool((each == 7.0).all()) for each in loaded.values())
    )


def _tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in directory.glob("*.safetensors") for name, each in load_file(path).items()}


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()

"""Abilities of every engine, and further ones of an engine that builds its trainer."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from hybrid_engine import HybridEngine
from tests.zoo.tiny_models import read_canonical

BY_THE_OWNER = (
    "update",
    "compute_log_probs",
    "learning_rate",
    "set_learning_rate",
    "save_checkpoint",
    "load_checkpoint",
)
"""Names of `ActorHybridWorker` only; owners of a model implement these in their loop."""


@torch.no_grad()
def stored_and_loaded(engine: HybridEngine, model: torch.nn.Module) -> bool:
    """Return whether weights saved as a Hugging Face checkpoint, overwritten, and loaded are
    bitwise equal.

    Restores the model including its padding, which a checkpoint does not contain.
    """
    first, second = (
        Path(engine.job.agreement.gather(tempfile.mkdtemp(), str, "a directory")[0])
        for _ in range(2)
    )
    with engine.train_context():
        weights = [_local(parameter) for parameter in model.parameters()]
        before = [weight.clone() for weight in weights]
        engine.save_hf_checkpoint(first)
        for weight in weights:
            weight.fill_(7.0)
        engine.load_hf_checkpoint(first)
        engine.save_hf_checkpoint(second)
        stored = read_canonical(first)
        loaded = read_canonical(second)
        for weight, kept in zip(weights, before, strict=True):
            weight.copy_(kept)
        engine.train.reload_main_params()
    engine.barrier("read of the checkpoints")
    for directory in (first, second):
        shutil.rmtree(directory, ignore_errors=True)
    is_equal = all(torch.equal(stored[name], loaded.get(name, torch.empty(0))) for name in stored)
    is_overwritten = any(bool((tensor == 7.0).all()) for tensor in loaded.values())
    return is_equal and stored.keys() == loaded.keys() and not is_overwritten


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()

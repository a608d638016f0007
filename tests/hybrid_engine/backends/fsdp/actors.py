"""FSDP2 actor of a worker on real ranks, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.models import table_for
from hybrid_engine.ports import Batch, Report
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.fsdp.actor import FsdpActor, build_actor
from hybrid_engine.trainer.fsdp.train_engine import FsdpTrainEngine
from tests.hybrid_engine.end_to_end.digests import digest
from tests.zoo.shares import share_of
from tests.zoo.tiny_models import token_batch

OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5}
TIED_WITH_ODD_ROWS = {"tie_word_embeddings": True, "intermediate_size": 37}
State = dict[str, Any]


def batch(step: int) -> TensorDict:
    return token_batch(step, num_sequences=8, length=12)


@contextmanager
def actor(path: Path, **settings: Any) -> Iterator[FsdpActor]:
    """Build an actor from a configuration and close it like a worker."""
    with closing(Job.join(60)) as job, ExitStack() as owner:
        config = configuration(path, job.world_size, **settings)
        yield build_actor(config, table_for(config.hf_config()), job, owner)


def configuration(path: Path, world_size: int, **settings: Any) -> HybridConfig:
    defaults = {
        "fsdp": {},
        "params_dtype": "float32",
        "micro_batch_size": 2,
        "seq_length": 12,
        "optimizer": OPTIMIZER,
    }
    # The directory has a config, but no weights.
    return load_config(
        {"model": path, "random_weights": True, "actor_config": {**defaults, **settings}},
        world_size,
    )


def train(engine: FsdpTrainEngine, step: int) -> dict[str, float]:
    return engine.train_step(share_of(engine, batch(step)), cross_entropy)


def cross_entropy(micro_batch: Batch, log_probs: torch.Tensor) -> tuple[torch.Tensor, Report]:
    loss = -log_probs.mean()
    return loss, {"loss": loss}


def weights_of(engine: FsdpTrainEngine) -> TensorDict:
    return {name: whole(tensor) for name, tensor in engine.model.weights.tensors.tensors.items()}


def state_of(engine: FsdpTrainEngine) -> State:
    """Return the whole state that a resumed run needs; tensors as digests."""
    state: State = {name: digest(tensor) for name, tensor in weights_of(engine).items()}
    for name, tensor in engine.model.model.named_parameters():
        for key, value in engine.optimizer.inner.state.get(tensor, {}).items():
            state[f"{name}: {key}"] = digest(whole(value))
    # Parameters are compared by name, above.
    state["groups"] = [
        {key: value for key, value in group.items() if key != "params"}
        for group in engine.optimizer.inner.param_groups
    ]
    return {**state, "version": engine.model.version, "generator": digest(torch.get_rng_state())}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()

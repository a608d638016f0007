"""Checkpoints on two real ranks: what is loaded is bitwise what was saved, and so is the step that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.agreement import Agreement
from hybrid_engine.config import ActorConfig
from hybrid_engine.memory.offloader import MegatronOffloader
from hybrid_engine.worker import share_of
from tests.hybrid_engine.tiny_models import (
    DENSE_FLOAT32,
    negative_log_likelihood,
    running,
    save_model,
    token_batch,
)
from tests.launch import launch

pytestmark = pytest.mark.engines

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
BFLOAT16 = {"params_dtype": "bfloat16"}
PLAIN = {"use_distributed_optimizer": False}

# name -> (family, model changes, actor settings)
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp2, distributed optimizer": ("qwen3", {}, TP2),
    "dp2, distributed optimizer, bfloat16": ("qwen3", {}, BFLOAT16),
    "tp2, plain optimizer": ("llama", {}, {**TP2, **PLAIN}),
    "dp2, plain optimizer, bfloat16": ("llama", {}, {**BFLOAT16, **PLAIN}),
    "pp2 vpp2, tied": (
        "qwen3",
        {"tie_word_embeddings": True, "num_hidden_layers": 4},
        {**PP2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "tp2, adapters": ("qwen3", {}, {**TP2, "lora": {"rank": 4}}),
}


def save_and_load(paths: dict[str, Path], root: Path) -> dict[str, dict[str, Any]]:
    """On every rank: the states of a run, and of a fresh one that took up its checkpoint."""
    return {name: round_trip(paths[name], settings, root / name) for name, (_, _, settings) in LAYOUTS.items()}


def round_trip(path: Path, settings: dict[str, Any], root: Path) -> dict[str, Any]:
    config = ActorConfig(**{**DENSE_FLOAT32, **settings, "optimizer": {"lr": 1e-2}})
    result: dict[str, Any] = {}
    with running(path, config) as run:
        agreement = Agreement(timeout_seconds=60)
        from hybrid_engine.backends.megatron.checkpoint import load_checkpoint, save_checkpoint

        save_checkpoint(root / "untrained", run.actor, agreement)
        result["untrained"] = state_of(run)
        for step in range(2):
            train(run, step)
        run.engine.set_learning_rate(3e-3)
        save_checkpoint(root / "trained", run.actor, agreement)
        result["saved"] = state_of(run)
        train(run, 2)
        result["continued"] = state_of(run)
    with running(path, ActorConfig(**{**config.model_dump(), "seed": 99})) as run:
        load_checkpoint(root / "trained", run.actor, agreement)
        offload_and_back(run)
        result["loaded"] = state_of(run)
        train(run, 2)
        result["resumed"] = state_of(run)
        load_checkpoint(root / "untrained", run.actor, agreement)  # back again, onto optimizer state that exists
        result["reloaded"] = state_of(run)
        save_checkpoint(root / "untrained", run.actor, agreement)  # replaces
        load_checkpoint(root / "untrained", run.actor, agreement)
        result["replaced"] = state_of(run)
    return result


def offload_and_back(run: Any) -> None:
    """A loaded state must be able to leave the device like any other."""
    offloader = MegatronOffloader(run.engine.offload_items)
    offloader.offload({"param", "grad", "optimizer"})
    offloader.onload({"param", "grad", "optimizer"})


def train(run: Any, step: int) -> None:
    batch = token_batch(step, num_sequences=4, length=12)
    run.engine.train_step(share_of(run.engine, batch), negative_log_likelihood)


def state_of(run: Any) -> dict[str, Any]:
    """All that has to come back, copied."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from megatron_patches.optimizers import optimizer_tensors

    tensors = {name: p.detach().clone() for name, p in run.engine.weights.named_parameters()}
    for state in optimizer_tensors(run.actor.optimizer):
        if state.kind != "main_grad":
            tensors[f"{state.path}.{state.key}"] = state.tensor.detach().clone()
    tensors["generator"] = torch.get_rng_state()
    tensors.update({f"tracker.{name}": s.clone() for name, s in get_cuda_rng_tracker().get_states().items()})
    groups = [{k: v for k, v in group.items() if k != "params"} for group in run.actor.optimizer.param_groups]
    return {"tensors": tensors, "groups": groups, "version": run.engine.version}


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["version"] == second["version"]
    assert [group["lr"] for group in first["groups"]] == [group["lr"] for group in second["groups"]]
    assert first["tensors"].keys() == second["tensors"].keys()
    different = [name for name, tensor in first["tensors"].items() if not torch.equal(tensor, second["tensors"][name])]
    assert not different


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """By rank: layout -> states."""
    paths = {
        name: save_model(tmp_path_factory.mktemp("model"), family, **changes)
        for name, (family, changes, _) in LAYOUTS.items()
    }
    return launch(save_and_load, 2, paths, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("expected", "actual"),
    [("saved", "loaded"), ("continued", "resumed"), ("untrained", "reloaded"), ("untrained", "replaced")],
)
def test_bitwise(results: list[dict[str, dict[str, Any]]], layout: str, expected: str, actual: str) -> None:
    for by_layout in results:
        states = by_layout[layout]
        assert_same(states[expected], states[actual])
        assert states["saved"]["version"] == 2

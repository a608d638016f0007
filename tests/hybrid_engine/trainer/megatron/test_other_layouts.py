"""Checkpoints loaded in another layout: every weight and moment is equal, and training goes on as before."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.errors import StateError
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import failing
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.hybrid_engine.backends.fsdp.actors import actor
from tests.hybrid_engine.backends.fsdp.actors import train as train_sharded
from tests.hybrid_engine.trainer.megatron.test_checkpoint import BFLOAT16, PLAIN, checkpoints_of, state_of, train
from tests.zoo.megatron_models import EP2, PP2, SP2, TP2, VPP2, running, whole_weights
from tests.zoo.tiny_models import TinyModel, Zoo

UNEVEN = {**PP2, "num_layers_in_first_pipeline_stage": 1}
BUCKETS = {"overlap_grad_reduce": True, "overrides": {"ddp": {"bucket_size": 2000}}}
PADDED = {"make_vocab_size_divisible_by": 512}
FOUR = {"num_hidden_layers": 4}

# name -> model, and layouts: saved in each, loaded in the next, and at last in the first.
CHAINS: dict[str, tuple[TinyModel, list[Values]]] = {
    "dense": (TinyModel("qwen3", FOUR), [TP2, VPP2, {}, BUCKETS, {**TP2, **PLAIN}, PADDED, PP2, PLAIN]),
    "tied": (TinyModel("qwen3", {"tie_word_embeddings": True, **FOUR}), [VPP2, TP2, {}, PP2]),
    "bfloat16": (TinyModel("llama"), [{**BFLOAT16, **layout} for layout in ({}, TP2, PLAIN, PP2)]),
    "experts": (TinyModel("deepseek_v3"), [EP2, {}, SP2, {**SP2, **EP2, "expert_tensor_parallel_size": 1}, UNEVEN]),
    "shared gate": (TinyModel("qwen2_moe"), [EP2, SP2]),
    "few experts": (TinyModel("qwen3_moe"), [SP2, EP2, {**EP2, **PLAIN}]),
    "transposed": (TinyModel("gpt2"), [TP2, {}]),
}


def whole_state(run: Any) -> TensorDict:
    """Return every weight, and every moment as if it were the weight. The run is of no use afterwards."""
    from megatron_patches.optimizers import optimizer_members, stepped_parts

    tensors = whole_weights(run.engine.model.weights)
    state = {name: tensor.clone() for name, tensor in tensors.items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        with torch.no_grad():
            for part in stepped_parts(run.actor.optimizer):
                part.tensor.copy_(part.optimizer.state[part.tensor][kind])
            for _, member in optimizer_members(run.actor.optimizer):
                if hasattr(member, "_copy_main_params_to_model_params"):
                    member._copy_main_params_to_model_params()
            for chunk in run.actor.chunks:
                if chunk.ddp_config.use_distributed_optimizer:
                    chunk.start_param_sync(force_sync=True)
        tensors = whole_weights(run.engine.model.weights)
        state |= {f"{name}.{kind}": tensor.clone() for name, tensor in tensors.items()}
    return state


@on_engines(2)
@pytest.mark.parametrize("chain", CHAINS)
def test_state_is_equal_in_every_layout(zoo: Zoo, tmp_path: Path, chain: str) -> None:
    model, layouts = CHAINS[chain]
    job = Job.join(60)
    path = zoo.saved(model)
    expected: TensorDict = {}
    losses: list[float] = []
    for number, layout in enumerate([*layouts, layouts[0]]):
        with running(path, **layout, seed=number) as run:
            checkpoints = checkpoints_of(run, job)
            if number:
                checkpoints.load(tmp_path / str(number - 1))
            else:
                train(run, 0)
                train(run, 1)
            assert run.engine.model.version == 2
            checkpoints.save(tmp_path / str(number))
            losses.append(train(run, 2)["loss"])
            assert {int(step) for step in steps_of(run)} == {3}
            checkpoints.load(tmp_path / str(number))
            state = whole_state(run)
        expected = expected or state
        assert state.keys() == expected.keys()
        different = [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])]
        assert not different, (layout, different)
    assert all(math.isclose(loss, losses[0], rel_tol=2e-2 if chain == "bfloat16" else 1e-5) for loss in losses), losses


def steps_of(run: Any) -> list[float]:
    """Return the counts of steps that the optimizer has for each tensor."""
    from megatron_patches.optimizers import stepped_parts

    return [float(part.optimizer.state[part.tensor]["step"]) for part in stepped_parts(run.actor.optimizer)]


@on_engines(2)
@pytest.mark.parametrize("chain", ["dense", "few experts", "shared gate"])
def test_each_trainer_reads_the_checkpoint_of_the_other(zoo: Zoo, tmp_path: Path, chain: str) -> None:
    job = Job.join(60)
    model, (layout, *_) = CHAINS[chain]
    path = zoo.saved(model)
    with running(path, **layout) as run:
        for step in range(2):
            train(run, step)
        checkpoints_of(run, job).save(tmp_path / "megatron")
        expected = whole_state(run)
    with actor(path, seed=5) as parts:
        parts.checkpoints.load(tmp_path / "megatron")
        assert parts.engine.model.version == 2
        loaded = whole_weights(parts.engine.model.weights)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
        parts.checkpoints.save(tmp_path / "fsdp2")
        parts.checkpoints.load(tmp_path / "fsdp2")
        train_sharded(parts.engine, 2)
    with running(path, **layout, seed=7) as run:
        checkpoints_of(run, job).load(tmp_path / "fsdp2")
        assert run.engine.model.version == 2
        train(run, 2)
        checkpoints_of(run, job).load(tmp_path / "fsdp2")
        state = whole_state(run)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


@on_engines(2)
def test_adapters_are_read_in_their_layout_only(zoo: Zoo, tmp_path: Path) -> None:
    job = Job.join(60)
    path = zoo.path("qwen3")
    adapted = {**TP2, "lora": {"rank": 4}}
    with running(path, **adapted) as run:
        train(run, 0)
        checkpoints_of(run, job).save(tmp_path / "adapted")
    for layout in (TP2, {"lora": {"rank": 4}}):
        with running(path, **layout) as run:
            before = state_of(run)
            with failing(StateError, "checkpoint-of-another-layout", "resume with that layout"):
                checkpoints_of(run, job).load(tmp_path / "adapted")
            assert state_of(run) == before

"""Megatron value models in several layouts, compared with transformers and a linear head."""

from __future__ import annotations

import functools
import os
import shutil
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hybrid_engine.backends.huggingface import load_hf_checkpoint
from hybrid_engine.config import load_config
from hybrid_engine.models import table_for
from hybrid_engine.models.table import VALUE_HEAD, value_table
from hybrid_engine.ranks.job import Job, join_process_group
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.zoo.families import read_config
from tests.zoo.megatron_models import EP2, PP2, SP2, TP2, VPP2, actor_config, parallel_state_of
from tests.zoo.shares import share_of, spoiled
from tests.zoo.tiny_models import TinyModel, Zoo, token_batch, train_by_torch

BATCH = 4
LENGTH = 12
NUM_STEPS = 3
MODELS = {
    "qwen3": TinyModel("qwen3"),
    "qwen3 tied": TinyModel("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "qwen3_moe": TinyModel("qwen3_moe"),
}
LAYOUTS: dict[str, tuple[str, Values]] = {
    "tp2": ("qwen3", TP2),
    "tp2 sp": ("qwen3", SP2),
    "pp2": ("qwen3", PP2),
    "tied pp2 vpp2": ("qwen3 tied", VPP2),
    "experts ep2": ("qwen3_moe", EP2),
}


def make_batch() -> TensorDict:
    """Return tokens with a regression target for each."""
    batch = token_batch(3, BATCH, LENGTH)
    return {
        "tokens": batch["tokens"],
        "targets": torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(4)),
    }


def squared_error(micro_batch: Any, values: torch.Tensor) -> tuple[torch.Tensor, TensorDict]:
    loss = (values - micro_batch["targets"]).pow(2).mean()
    return loss, {"loss": loss}


def head_weights(hidden_size: int) -> torch.Tensor:
    return 0.2 * torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(5))


def with_head(zoo: Zoo, model: TinyModel, path: Path) -> Path:
    """Save the model with a value head on rank 0. Collective."""
    if dist.get_rank() == 0:
        shutil.copytree(zoo.saved(model), path)
        tensors = load_file(path / "model.safetensors")
        tensors.pop("lm_head.weight", None)  # tied models have none
        save_file(
            {**tensors, VALUE_HEAD: head_weights(read_config(path)["hidden_size"])},
            path / "model.safetensors",
        )
    dist.barrier()
    return path


@functools.cache
def by_transformers(model: str) -> tuple[torch.Tensor, list[float], list[float], torch.Tensor]:
    """Return values, losses and gradient norms of the steps, and final values."""
    decoder = MODELS[model].build().model
    head = torch.nn.Parameter(head_weights(decoder.config.hidden_size))
    batch = make_batch()
    parameters = [*decoder.parameters(), head]

    def values() -> torch.Tensor:
        hidden = decoder(batch["tokens"]).last_hidden_state
        return torch.nn.functional.linear(hidden, head)[..., 0]

    with torch.no_grad():
        before = values()
    losses, norms = train_by_torch(
        parameters, lambda: (values() - batch["targets"]).pow(2).mean(), NUM_STEPS, weight_decay=0.0
    )
    with torch.no_grad():
        return before, losses, norms, values()


@on_engines(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_steps_equal_transformers(zoo: Zoo, tmp_path: Path, layout: str) -> None:
    """A new head is zero and logged."""
    from hybrid_engine.trainer.megatron.build import build_actor, end_training
    from hybrid_engine.trainer.megatron.train_engine import TrainEngine

    name, settings = LAYOUTS[layout]
    without_head = zoo.saved(MODELS[name])
    values, losses, norms, final = by_transformers(name)
    assert losses[-1] < losses[0] - 0.1
    config = actor_config(**settings, optimizer={"lr": 3e-3})
    with parallel_state_of(config):
        path = with_head(zoo, MODELS[name], tmp_path / "with_head")
        table = value_table(table_for(read_config(path)))
        actor = build_actor(config, table, read_config(path), dist.get_world_size())
        engine = TrainEngine(actor, table, config.micro_batch_size)
        job = Job.join(120)
        share = share_of(engine, make_batch())

        def whole_values() -> torch.Tensor:
            return engine.data_parallel.gather(engine.values(share))

        with mock.patch("hybrid_engine.backends.huggingface.loading.logger.warning") as warning:
            load_hf_checkpoint(without_head, engine.model.weights.base, table, job)
        logged = [call.args[0] % call.args[1:] for call in warning.call_args_list]
        assert sum(f"no {VALUE_HEAD}: new" in text for text in logged) == (job.rank == 0)
        assert not whole_values().any()
        load_hf_checkpoint(path, engine.model.weights.base, table, job)
        engine.model.reload_main_params()  # the optimizer's copies of the weights
        torch.testing.assert_close(whole_values(), values, atol=1e-4, rtol=0)
        reports = [engine.train_step(share, squared_error) for _ in range(NUM_STEPS)]
        assert [report["loss"] for report in reports] == pytest.approx(losses, abs=1e-4)
        assert [report["grad_norm"] for report in reports] == pytest.approx(norms, rel=1e-3)
        assert engine.train_step(share, spoiled(squared_error))["skipped"] == 1
        torch.testing.assert_close(whole_values(), final, atol=1e-3, rtol=0)
        end_training(actor)
        job.agreement.close()


def step_in_contexts(path: Path, overlap: bool) -> list[float]:
    """Return losses of a data parallel critic, with values read between its steps."""
    from hybrid_engine import ValueModel

    actor = {
        **{"params_dtype": "float32", "make_vocab_size_divisible_by": 8},
        **{"overlap_grad_reduce": overlap, "overlap_param_gather": overlap},
    }
    values = {
        "model": str(path),
        "actor_config": actor,
        "critic_config": {"optimizer": {"lr": 3e-3}},
    }
    config = load_config(values, int(os.environ["WORLD_SIZE"]))
    batch = make_batch()
    with parallel_state_of(config.actor_config), ExitStack() as ends, closing(Job.join(120)) as job:
        worker = SimpleNamespace(  # attributes that a critic needs, without vLLM
            config=config,
            job=job,
            ends=ends,
            sharding=SimpleNamespace(entered=lambda state: nullcontext()),
            colocated_models=WeakSet(),
        )
        critic = ValueModel(worker)
        losses = []
        for _ in range(NUM_STEPS):
            with critic.train_context():
                losses.append(critic.update(batch, squared_error)["loss"])
            with critic.forward_context():
                critic.values(batch)
    return losses


@on_engines(2)
def test_reading_a_critic_completes_the_previous_step(zoo: Zoo, tmp_path: Path) -> None:
    """Reading gathers parameters with overlap_param_gather, and they stay gathered."""
    join_process_group(60)
    path = with_head(zoo, MODELS["qwen3"], tmp_path / "with_head")
    losses = step_in_contexts(path, overlap=False)
    assert step_in_contexts(path, overlap=True) == losses
    assert losses == pytest.approx(by_transformers("qwen3")[1], abs=1e-4)

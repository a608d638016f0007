"""Megatron value models in several layouts, compared with transformers and a linear head."""

from __future__ import annotations

import functools
import os
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
from hybrid_engine.config import ActorConfig, load_config
from hybrid_engine.models import table_for
from hybrid_engine.models.table import VALUE_HEAD, value_table
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.zoo.families import read_config
from tests.zoo.megatron_models import DENSE_FLOAT32, parallel_state_of
from tests.zoo.shares import share_of, spoiled
from tests.zoo.tiny_models import build_hf_model, save_model, token_batch

BATCH = 4
LENGTH = 12
NUM_STEPS = 3
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
MODELS: dict[str, tuple[str, Values]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "qwen3_moe": ("qwen3_moe", {}),
}
LAYOUTS: dict[str, tuple[str, Values]] = {
    "tp2": ("qwen3", TP2),
    "tp2 sp": ("qwen3", {**TP2, "sequence_parallel": True}),
    "pp2": ("qwen3", PP2),
    "tied pp2 vpp2": ("qwen3 tied", {**PP2, "virtual_pipeline_model_parallel_size": 2}),
    "experts ep2": ("qwen3_moe", {"expert_model_parallel_size": 2}),
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


def save_with_head(directory: Path, family: str, changes: Values) -> tuple[Path, Path]:
    """Save a language model and the same with a value head; returns (with, without) the head."""
    without = save_model(directory / "without", family, **changes)
    path = save_model(directory / "with", family, **changes)
    tensors = load_file(path / "model.safetensors")
    tensors.pop("lm_head.weight", None)  # tied models have none
    save_file({**tensors, VALUE_HEAD: head_weights(read_config(path)["hidden_size"])}, path / "model.safetensors")
    return path, without


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Models with and without a value head, by name."""
    return {name: save_with_head(tmp_path_factory.mktemp("model"), *model) for name, model in MODELS.items()}


@functools.cache
def by_transformers(model: str) -> tuple[torch.Tensor, list[float], list[float], torch.Tensor]:
    """Return values, losses and gradient norms of the steps, and final values."""
    family, changes = MODELS[model]
    decoder = build_hf_model(family, **changes).model
    head = torch.nn.Parameter(head_weights(decoder.config.hidden_size))
    batch = make_batch()
    parameters = [*decoder.parameters(), head]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)

    def values() -> torch.Tensor:
        hidden = decoder(batch["tokens"]).last_hidden_state
        return torch.nn.functional.linear(hidden, head)[..., 0]

    with torch.no_grad():
        before = values()
    losses = []
    norms = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = (values() - batch["targets"]).pow(2).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return before, losses, norms, values()


@on_engines(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_steps_equal_transformers(paths: dict[str, tuple[Path, Path]], layout: str) -> None:
    """A new head is zero and logged."""
    from hybrid_engine.trainer.megatron.build import build_actor, end_training
    from hybrid_engine.trainer.megatron.train_engine import ValueEngine

    name, settings = LAYOUTS[layout]
    path, without_head = paths[name]
    values, losses, norms, final = by_transformers(name)
    assert losses[-1] < losses[0] - 0.1
    config = ActorConfig(**{**DENSE_FLOAT32, **settings, "optimizer": {"lr": 3e-3}})
    with parallel_state_of(config):
        table = value_table(table_for(read_config(path)))
        actor = build_actor(config, table, read_config(path), dist.get_world_size())
        engine = ValueEngine(actor, table, config.micro_batch_size)
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

    actor = {**DENSE_FLOAT32, "overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    values = {"model": str(path), "actor_config": actor, "critic_config": {"optimizer": {"lr": 3e-3}}}
    config = load_config(values, int(os.environ["WORLD_SIZE"]))
    batch = make_batch()
    with parallel_state_of(config.actor_config), ExitStack() as ends, closing(Job.join(120)) as job:
        worker: Any = SimpleNamespace(  # attributes that a critic needs, without vLLM
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
def test_reading_a_critic_completes_the_previous_step(paths: dict[str, tuple[Path, Path]]) -> None:
    """Reading gathers parameters with overlap_param_gather, and they stay gathered."""
    path, _ = paths["qwen3"]
    losses = step_in_contexts(path, overlap=False)
    assert step_in_contexts(path, overlap=True) == losses
    assert losses == pytest.approx(by_transformers("qwen3")[1], abs=1e-4)

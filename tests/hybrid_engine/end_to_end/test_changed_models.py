"""By default settings a switch notices a model that computes otherwise than at the last comparison,
or on one rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import HybridEngine
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.errors import HybridEngineError
from tests.harness.launch import on_engines
from tests.zoo import sharded_models, workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Undo = Callable[[], object]
Change = Callable[[], Undo]
ROLLOUT = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 16}


def outcome(engine: HybridEngine, change: Change) -> str:
    """Return the code of the error of a switch after a change; else whether both sides were
    compared.
    """
    with engine.train_context():
        undo = change()
    try:
        with engine.rollout_context():
            report = engine.sharding.last_report
            return "compared" if "compute" in report.seconds_by_phase else "passed"
    except HybridEngineError as error:
        return f"{error.code}: {error}"
    finally:
        with engine.train_context():
            undo()


def nothing() -> Undo:
    return lambda: None


def halved(rotary: Any) -> Change:
    def change() -> Undo:
        rotary.inv_freq.mul_(0.5)
        return lambda: rotary.inv_freq.mul_(2)

    return change


def hooked(module: torch.nn.Module) -> Change:
    """Hook a module on rank 1; the other rank must take part in the comparison."""

    def change() -> Undo:
        if dist.get_rank() == 0:
            return lambda: None
        return module.register_forward_hook(lambda _module, _inputs, output: -output).remove

    return change


def reversed_layers(layers: Any) -> Change:
    def change() -> Undo:
        layers[0], layers[1] = layers[1], layers[0]
        return change

    return change


def on_one_rank(tensor: Any) -> Change:
    def change() -> Undo:
        before = tensor.detach().clone()
        tensor.data.add_(0.25 * dist.get_rank())
        return lambda: tensor.data.copy_(before)

    return change


def stepped(model: Any) -> Change:
    def change() -> Undo:
        model.train()
        tokens = torch.arange(8)[None]
        model(tokens, labels=tokens).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1e-2).step()
        model.gradient_checkpointing_enable()
        return model.eval

    return change


@contextmanager
def with_fsdp(directory: Path, shard: bool) -> Iterator[tuple[HybridEngine, dict[str, Change]]]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = sharded_models.from_config(directory)
    with HybridEngine(
        model=model,
        rollout_config=ROLLOUT,
        train_config={} if shard else None,
        **({} if shard else {"shard": False}),
    ) as engine:
        inner = model.model
        replica = inner.layers[1].mlp.gate.e_score_correction_bias if shard else inner.norm.weight
        yield (
            engine,
            {
                "trained": stepped(model),
                "inv_freq": halved(inner.rotary_emb),
                "hook": hooked(inner.layers[0].mlp),
                "layers": reversed_layers(inner.layers),
                "replica": on_one_rank(local_of(replica)),
            },
        )


@contextmanager
def with_megatron(directory: Path) -> Iterator[tuple[HybridEngine, dict[str, Change]]]:
    worker = workers.build_worker(directory, {}, {})
    try:
        (chunk,) = worker.train.chunks
        model = chunk.module

        def trained() -> Undo:
            worker.update(workers.batch(seed=0), workers.cross_entropy)
            return lambda: None

        yield (
            worker,
            {
                "trained": trained,
                "inv_freq": halved(model.rotary_pos_emb),
                "hook": hooked(model.embedding),
                "layers": reversed_layers(model.decoder.layers),
                "replica": on_one_rank(model.decoder.final_layernorm.weight),
            },
        )
    finally:
        worker.shutdown()


MODELS = {"sharded": "deepseek_v3", "whole": "qwen3", "megatron": "qwen3"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("changed")
    return {
        family: workers.write_model(directory / family, family) for family in set(MODELS.values())
    }


@on_engines({2: MODELS})
def test_a_changed_model_is_compared_again(paths: dict[str, Path], case: str) -> None:
    path = paths[MODELS[case]]
    is_hooked = os.environ["RANK"] == "1"
    codes = {
        "trained": ("passed", "passed"),
        "inv_freq": ("log-probabilities-differ", "compared"),
        "hook": ("log-probabilities-differ" if is_hooked else "rank-failed", "compared"),
        # A router's bias that has grown is due to be compared.
        "replica": ("", "compared" if case == "sharded" else "passed"),
        "layers": ("parameters-moved", ""),
    }
    trainer = with_megatron(path) if case == "megatron" else with_fsdp(path, case == "sharded")
    with trainer as (engine, changes):
        assert outcome(engine, nothing) == "compared"
        if case == "sharded":
            # Without its experts a router that ignores its bias may pass the comparison.
            with engine.rollout_context():
                vllm = engine.sharding.caches  # type: ignore[attr-defined]
                assert len(vllm.probe(torch.arange(8)[None]).routes) == 3, (
                    "each layer that has experts"
                )
        for name, change in changes.items():
            changed, after = codes[name]
            noticed = outcome(engine, change)
            assert noticed.startswith(changed), name
            if name == "replica":
                biases = {"sharded": "model.layers.1.mlp.gate.e_score_correction_bias"}
                assert biases.get(case, "model.norm.weight") in noticed
                assert "rank 0 and rank 1 train it with different bits" in noticed
            assert outcome(engine, nothing).startswith(after), name

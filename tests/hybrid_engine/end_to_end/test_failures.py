"""Misuse is refused; an error reaches every rank; a job can be rebuilt.

Failed switches are in switch/test_failures.py and test_verified_switches.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hybrid_engine import ActorHybridWorker, ReferenceModel
from hybrid_engine.errors import (
    ArgumentError,
    ConfigError,
    DependencyError,
    LostRankError,
    StateError,
    Violation,
)
from hybrid_engine.switch import setup
from tests.harness.errors import failing
from tests.harness.launch import on_engines
from tests.zoo import workers
from tests.zoo.shares import share_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TP2 = {"tensor_model_parallel_size": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workers.write_model(tmp_path_factory.mktemp("model"), "qwen3")


# -- failures of a running worker ------------------------------------------------------------------


@on_engines(2, timeout=800)
def test_calls_are_refused_in_other_states(model: Path) -> None:
    """A refused step is not counted, and generation continues after a bad prompt."""
    with workers.build_worker(model, TP2, {"bucket_mb": 1}) as worker:
        with pytest.raises(StateError, match="state train"):
            worker.generate_sequences([[1, 2]], workers.GREEDY)
        with worker.train_context():
            worker.update(workers.batch(seed=1), workers.cross_entropy)
        with worker.rollout_context():
            with pytest.raises(ArgumentError, match=r"prompts\[1\]"):
                worker.generate_sequences([[1, 2], [500_000]], workers.GREEDY)
            with pytest.raises(StateError):
                ReferenceModel(worker)
            for call in (*_updates(worker), *_scores(worker)):
                with pytest.raises(
                    StateError, match=r"in state infer \(rollout_context\); call this in train"
                ):
                    call()
            assert len(worker.generate_sequences([[1, 2], [3]], workers.GREEDY)) == 2
        with worker.forward_context():
            for call in _updates(worker):
                with pytest.raises(
                    StateError,
                    match=r"in state forward \(forward_context\); call this in train_context",
                ):
                    call()
            for call in _scores(worker):
                call()
        assert worker.train.version == 1


def _updates(worker: Any) -> list[Callable[[], Any]]:
    """Return calls that change training state."""
    from hybrid_engine.trainer.megatron.train_engine import copy_weights

    checkpoints = worker.actor.checkpoints
    engine = worker.actor.engine
    batch = share_of(engine, workers.batch(seed=1))
    return [
        lambda: checkpoints.save(worker.config.model / "never"),
        lambda: checkpoints.load(worker.config.model / "never"),
        lambda: engine.train_step(batch, workers.cross_entropy),
        lambda: engine.model.reload_main_params(),
        lambda: copy_weights(engine.model, engine.model),
    ]


def _scores(worker: Any) -> list[Callable[[], Any]]:
    engine = worker.actor.engine
    batch = share_of(engine, workers.batch(seed=1))
    return [
        lambda: engine.log_probs(batch),
        lambda: engine.logits(batch["tokens"]),
        lambda: worker.compute_log_probs(workers.batch(seed=1)),
    ]


@on_engines(2, timeout=800)
def test_an_error_in_the_workers_block_reaches_all_and_ends_its_group(model: Path) -> None:
    is_at_fault = int(os.environ["RANK"]) == 0
    error = "no reward for this answer"
    expected = ValueError if is_at_fault else LostRankError
    reaches_all = pytest.raises(
        expected, match=error if is_at_fault else f"rank 0, leaving: ValueError: {error}"
    )
    started = time.monotonic()
    with reaches_all, workers.build_worker(model, TP2) as worker:
        if is_at_fault:
            raise ValueError(error)
        worker.barrier("the next iteration")
    assert time.monotonic() - started < 60, "the timeout is 120 s"
    assert not dist.is_initialized()


# -- failures while a worker is built --------------------------------------------------------------


@on_engines(2, timeout=800)
def test_an_untested_megatron_on_one_rank_is_refused_on_all(model: Path) -> None:
    import megatron.core

    import megatron_patches

    megatron_patches.revert()  # the version counts when they are applied
    version = "0.15.0" if os.environ["RANK"] == "1" else megatron.core.__version__
    other = mock.patch.object(megatron.core, "__version__", version)
    with other, failing(DependencyError, "megatron-core-untested", r"0\.15\.0.*0\.16\.1", on=1):
        ActorHybridWorker(workers.configuration(model, TP2))


@on_engines(2, timeout=800)
def test_an_untested_vllm_is_refused(model: Path) -> None:
    from hybrid_engine.backends.vllm import version

    other = mock.patch.object(version, "installed", return_value={"vllm": "0.30.0"})
    with other, failing(DependencyError, "untested-version", r"0\.30\.0.*0\.32\.0"):
        ActorHybridWorker(workers.configuration(model, TP2))


@on_engines(2, timeout=800)
def test_a_worker_that_cannot_be_built_leaves_no_group(model: Path) -> None:
    """Fail with Megatron's groups built, and in the plan. Others follow on the same ranks."""
    from hybrid_engine.trainer.megatron import build

    for owner, name in ((build, "build_actor"), (setup, "plan")):
        error = ConfigError([Violation("actor_config", "it does not fit", "Use another")])
        with (
            mock.patch.object(owner, name, side_effect=error),
            failing(ConfigError, pattern="it does not fit"),
        ):
            workers.build_worker(model, TP2)
        assert not dist.is_initialized()

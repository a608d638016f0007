"""Failures reach every rank and lose nothing; misuse is refused in words; a job can be built again after one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import ActorHybridWorker, ReferenceModel
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.switch import setup
from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.end_to_end.digests import training_state
from tests.hybrid_engine.ranks.test_agreement import outcome_of, refusal_of
from tests.zoo import workers
from tests.zoo.shares import share_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TP2 = {"tensor_model_parallel_size": 2}


def kinds(failures: Iterable[str]) -> list[str]:
    """Classes of errors, each "class: text"."""
    return [failure.partition(":")[0] for failure in failures]


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    model = workers.write_model(tmp_path_factory.mktemp("model"), "qwen3")
    calls = {"versions": refuse_versions, "half built": fail_while_building, "failures": fail_and_go_on}
    return engines.launch_in_turn(2, {name: (function, (model,)) for name, function in calls.items()}, timeout=800)


# -- in the midst of things --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Misadventures:
    """What one rank saw, in the order in which it happened.

    Attributes:
        generating_in_train: generation before any switch.
        nan, inf: a switch with such an element in a weight of rank 1.
        transfer: a switch whose second bucket rank 0 fails to move.
        moved: a switch after somebody gave a parameter other memory.
        states: the training state, before the first failure and after each but the first.
        bad_prompt: a prompt with a token that there is not.
        reference_in_rollout: a reference model, made while training's weights are away.
        training_in_rollout, training_in_forward: calls of the training side there, see `_uses_of_training`.
        num_completions: of two prompts, after all that.
        version: after two updates.
        leaving: what ends the worker's block, which the caller's own code leaves on rank 0 only; seconds_to_leave.
        group_is_left: after the block.
    """

    generating_in_train: str
    nan: str
    inf: str
    transfer: str
    moved: str
    states: list[dict[str, str]]
    bad_prompt: str
    reference_in_rollout: str
    training_in_rollout: list[str]
    training_in_forward: list[str]
    num_completions: int
    version: int
    leaving: str
    seconds_to_leave: float
    group_is_left: bool


def fail_and_go_on(model: Path) -> Misadventures:
    """Failures of all kinds, on one rank only where that can be."""
    worker = workers.build_worker(model, TP2, {"bucket_mb": 1})
    generating_in_train = refusal_of(lambda: worker.generate_sequences([[1, 2]], workers.GREEDY))
    with worker.train_context():
        worker.update(workers.batch(seed=0), workers.cross_entropy)
    states = [training_state(worker.train)]

    parameter = dict(worker.train.weights.model.named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"]
    good = parameter.data[3, 5].clone()
    failures = []
    for value in (torch.nan, torch.inf):
        if worker.rank == 1:
            parameter.data[3, 5] = value
        failures.append(_failure_of_switch(worker))
    parameter.data[3, 5] = good
    states.append(training_state(worker.train))

    with mock.patch.object(worker.sharding.router, "run", _second_bucket_on_fire(worker)):
        failures.append(_failure_of_switch(worker))
    states.append(training_state(worker.train))

    home, parameter.data = parameter.data, parameter.data.clone()
    failures.append(_failure_of_switch(worker))
    parameter.data = home
    states.append(training_state(worker.train))

    with worker.train_context():
        worker.update(workers.batch(seed=1), workers.cross_entropy)
    with worker.rollout_context():
        bad_prompt = refusal_of(lambda: worker.generate_sequences([[1, 2], [500_000]], workers.GREEDY))
        reference_in_rollout = refusal_of(lambda: ReferenceModel(worker))
        in_rollout = [refusal_of(call) for call in _uses_of_training(worker)]
        num_completions = len(worker.generate_sequences([[1, 2], [3]], workers.GREEDY))
    with worker.forward_context():
        in_forward = [refusal_of(call) for call in _uses_of_training(worker)]
    version = worker.train.version
    leaving, seconds = _leave(worker)
    return Misadventures(
        generating_in_train,
        *failures,
        states=states,
        bad_prompt=bad_prompt,
        reference_in_rollout=reference_in_rollout,
        training_in_rollout=in_rollout,
        training_in_forward=in_forward,
        num_completions=num_completions,
        version=version,
        leaving=leaving,
        seconds_to_leave=seconds,
        group_is_left=dist.is_initialized(),
    )


def _leave(worker: Any) -> tuple[str, float]:
    started = time.monotonic()

    def iterate() -> None:
        with worker:
            if worker.rank == 0:
                raise ValueError("no reward for this answer")
            worker.barrier("the next iteration")

    return outcome_of(iterate), time.monotonic() - started


NUM_UPDATING = 5


def _uses_of_training(worker: Any) -> list[Callable[[], Any]]:
    """Calls past the worker: NUM_UPDATING that use all of the state, then calls that score."""
    engine, batch = worker.train, share_of(worker.train, workers.batch(seed=1))
    return [
        lambda: engine.save_checkpoint(worker.config.model / "never"),
        lambda: engine.load_checkpoint(worker.config.model / "never"),
        lambda: engine.train_step(batch, workers.cross_entropy),
        lambda: engine.reload_main_params(),
        lambda: engine.copy_weights_from(engine),
        lambda: engine.log_probs(batch),
        lambda: engine.logits(batch["tokens"]),
        lambda: worker.compute_log_probs(workers.batch(seed=1)),
    ]


def _failure_of_switch(worker: Any) -> str:
    """With which the switch to the rollout fails; training goes on afterwards."""

    def switch() -> None:
        with worker.rollout_context():
            raise AssertionError("entered the rollout all the same")

    failure = refusal_of(switch)
    assert worker.sharding.state.value == "train"
    return failure


def _second_bucket_on_fire(worker: Any) -> Any:
    """The router's run, which on rank 0 fails in the second bucket."""
    run = worker.sharding.router.run

    def fail(bucket: Any, *args: Any) -> Any:
        if worker.rank == 0 and bucket.index == 1:
            raise OSError("disk on fire")
        return run(bucket, *args)

    return fail


@pytest.fixture
def seen(outcomes: Outcomes) -> list[Misadventures]:
    return outcomes["failures"]


@pytest.mark.parametrize(("field", "what"), [("nan", "1 NaN"), ("inf", "1 Inf")])
def test_a_bad_weight_is_named_on_its_rank_and_told_to_the_other(
    seen: list[Misadventures], field: str, what: str
) -> None:
    failures = [getattr(found, field) for found in seen]
    assert kinds(failures) == ["RemoteError", "WeightError"]
    for failure in failures:
        assert "decoder.layers.1.mlp.linear_fc2.weight on rank 1" in failure
        assert f"model.layers.1.mlp.down_proj.weight): {what} of " in failure


def test_a_failed_transfer_is_told_to_all_with_its_bucket(seen: list[Misadventures]) -> None:
    assert kinds(found.transfer for found in seen) == ["ReshardError", "PeerTransportError"]
    for found in seen:
        assert "disk on fire" in found.transfer
        assert "bucket 1" in found.transfer


def test_a_parameter_with_other_memory_is_named(seen: list[Misadventures]) -> None:
    assert all("decoder.layers.1.mlp.linear_fc2.weight" in found.moved for found in seen)


def test_no_failed_switch_changes_the_training_state(seen: list[Misadventures]) -> None:
    for found in seen:
        assert found.states == [found.states[0]] * 4


def test_generation_is_refused_before_a_switch(seen: list[Misadventures]) -> None:
    assert all("state train" in found.generating_in_train for found in seen)


def test_training_is_refused_while_its_weights_are_away(seen: list[Misadventures]) -> None:
    for found in seen:
        for failure in found.training_in_rollout:
            assert failure.startswith("StateError: ")
            assert "in state infer (rollout_context); call this in train" in failure


def test_a_reference_is_refused_while_the_weights_are_away(seen: list[Misadventures]) -> None:
    assert kinds(found.reference_in_rollout for found in seen) == ["StateError"] * 2


def test_in_forward_weights_are_scored_and_not_changed(seen: list[Misadventures]) -> None:
    for found in seen:
        for failure in found.training_in_forward[:NUM_UPDATING]:
            assert failure.startswith("StateError: ")
            assert "in state forward (forward_context); call this in train_context" in failure
        assert all(outcome.startswith("returned ") for outcome in found.training_in_forward[NUM_UPDATING:])


def test_a_refused_step_is_not_counted(seen: list[Misadventures]) -> None:
    assert [found.version for found in seen] == [2, 2]


def test_a_bad_prompt_is_named_and_generation_goes_on(seen: list[Misadventures]) -> None:
    for found in seen:
        assert found.bad_prompt.startswith("ArgumentError: ")
        assert "prompts[1]" in found.bad_prompt
        assert found.num_completions == 2


def test_an_error_that_ends_the_workers_block_is_heard_of_by_all(seen: list[Misadventures]) -> None:
    assert kinds(found.leaving for found in seen) == ["ValueError", "LostRankError"]
    assert "rank 0, leaving: ValueError: no reward for this answer" in seen[1].leaving
    assert all(found.seconds_to_leave < 60 for found in seen), "the timeout is 120"


def test_the_group_of_the_worker_ends_with_it(seen: list[Misadventures]) -> None:
    assert not any(found.group_is_left for found in seen)


# -- before there is a worker ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusals:
    """Of a worker on an engine of a version that nobody tested: Megatron's on rank 1 only, vLLM's on all ranks."""

    megatron: str
    vllm: str


def refuse_versions(model: Path) -> Refusals:
    import megatron.core

    from hybrid_engine.backends.vllm import version

    config = workers.configuration(model, TP2)
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(megatron.core, "__version__", "0.15.0")
        of_megatron = refusal_of(lambda: ActorHybridWorker(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(version, "installed", lambda: {"vllm": "0.30.0"})
        of_vllm = refusal_of(lambda: ActorHybridWorker(config))
    return Refusals(of_megatron, of_vllm)


@pytest.fixture
def refusals(outcomes: Outcomes) -> list[Refusals]:
    return outcomes["versions"]


def test_an_untested_megatron_on_one_rank_is_refused_on_all(refusals: list[Refusals]) -> None:
    failures = [found.megatron for found in refusals]
    assert kinds(failures) == ["RemoteError", "DependencyError"]
    assert all("0.15.0" in failure and "0.16.1" in failure for failure in failures)


def test_an_untested_vllm_is_refused(refusals: list[Refusals]) -> None:
    failures = [found.vllm for found in refusals]
    assert kinds(failures) == ["DependencyError"] * 2
    assert all("0.30.0" in failure and "0.32.0" in failure for failure in failures)


@dataclass(frozen=True)
class HalfBuilt:
    """A worker whose construction failed."""

    failure: str
    group_is_left: bool


def fail_while_building(model: Path) -> dict[str, HalfBuilt]:
    """Once Megatron's groups are there, and in the plan. What follows on the same ranks builds more workers."""
    from hybrid_engine.trainer.megatron import build

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise ConfigError([Violation("actor_config", "it does not fit", "Take another")])

    found = {}
    for owner, name in ((build, "build_actor"), (setup, "plan")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, fail)
            failure = refusal_of(lambda: workers.build_worker(model, TP2))
        found[name] = HalfBuilt(failure, dist.is_initialized())
    return found


@pytest.mark.parametrize("name", ["build_actor", "plan"])
def test_a_worker_that_cannot_be_built_leaves_no_group(outcomes: Outcomes, name: str) -> None:
    for found in outcomes["half built"]:
        assert "it does not fit" in found[name].failure
        assert not found[name].group_is_left

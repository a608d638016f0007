"""Failures reach every rank and lose nothing; misuse is refused in words; a job can be built again after one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import ActorHybridWorker, ReferenceModel
from hybrid_engine.errors import ConfigError, HybridEngineError, Violation
from hybrid_engine.switch import rendezvous
from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.end_to_end.digests import training_state
from tests.zoo import workers
from tests.zoo.shares import share_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TP2 = {"tensor_model_parallel_size": 2}


@dataclass(frozen=True)
class Failure:
    """An error, by name of its class and text."""

    kind: str
    text: str


def failure_of(call: Callable[[], object]) -> Failure | None:
    """What the engine raises; None where it raises nothing."""
    try:
        call()
    except HybridEngineError as error:
        return Failure(type(error).__name__, str(error))
    return None


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
        flipped: a switch with a bit of another value in what rank 1 got; switches are verified.
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

    generating_in_train: Failure | None
    nan: Failure
    inf: Failure
    transfer: Failure
    flipped: Failure
    moved: Failure
    states: list[dict[str, str]]
    bad_prompt: Failure | None
    reference_in_rollout: Failure | None
    training_in_rollout: list[Failure | None]
    training_in_forward: list[Failure | None]
    num_completions: int
    version: int
    leaving: Failure
    seconds_to_leave: float
    group_is_left: bool


def fail_and_go_on(model: Path) -> Misadventures:
    """Failures of all kinds, on one rank only where that can be."""
    worker = workers.build_worker(model, TP2, {"bucket_mb": 1, "verify": "full"})
    generating_in_train = failure_of(lambda: worker.generate_sequences([[1, 2]], workers.GREEDY))
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

    run = worker.sharding.router.run
    for fault in (_second_bucket_on_fire, _flipped_bit):
        worker.sharding.router.run = fault(worker)
        failures.append(_failure_of_switch(worker))
        worker.sharding.router.run = run
        states.append(training_state(worker.train))

    home, parameter.data = parameter.data, parameter.data.clone()
    failures.append(_failure_of_switch(worker))
    parameter.data = home
    states.append(training_state(worker.train))

    with worker.train_context():
        worker.update(workers.batch(seed=1), workers.cross_entropy)
    with worker.rollout_context():
        bad_prompt = failure_of(lambda: worker.generate_sequences([[1, 2], [500_000]], workers.GREEDY))
        reference_in_rollout = failure_of(lambda: ReferenceModel(worker))
        in_rollout = [failure_of(call) for call in _uses_of_training(worker)]
        num_completions = len(worker.generate_sequences([[1, 2], [3]], workers.GREEDY))
    with worker.forward_context():
        in_forward = [failure_of(call) for call in _uses_of_training(worker)]
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


def _leave(worker: Any) -> tuple[Failure, float]:
    started = time.monotonic()
    with pytest.raises((ValueError, HybridEngineError)) as caught, worker:
        if worker.rank == 0:
            raise ValueError("no reward for this answer")
        worker.barrier("the next iteration")
    return Failure(type(caught.value).__name__, str(caught.value)), time.monotonic() - started


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


def _failure_of_switch(worker: Any) -> Failure:
    """With which the switch to the rollout fails; training goes on afterwards."""

    def switch() -> None:
        with worker.rollout_context():
            raise AssertionError("entered the rollout all the same")

    failure = failure_of(switch)
    assert failure is not None
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


def _flipped_bit(worker: Any) -> Any:
    """The router's run, after which a bit of an attention projection differs on rank 1."""
    run = worker.sharding.router.run

    def flip(bucket: Any, source: Any, destination: Any, *args: Any) -> Any:
        report = run(bucket, source, destination, *args)
        flat = destination.get("model.layers.1.self_attn.o_proj.weight")
        if worker.rank == 1 and flat is not None:
            flat[3:4].view(torch.uint8)[0] ^= 1
        return report

    return flip


@pytest.fixture
def seen(outcomes: Outcomes) -> list[Misadventures]:
    return outcomes["failures"]


@pytest.mark.parametrize(("field", "what"), [("nan", "1 NaN"), ("inf", "1 Inf")])
def test_a_bad_weight_is_named_on_its_rank_and_told_to_the_other(
    seen: list[Misadventures], field: str, what: str
) -> None:
    failures = [getattr(found, field) for found in seen]
    assert [failure.kind for failure in failures] == ["RemoteError", "WeightError"]
    for failure in failures:
        assert "decoder.layers.1.mlp.linear_fc2.weight on rank 1" in failure.text
        assert f"model.layers.1.mlp.down_proj.weight): {what} of " in failure.text


def test_a_failed_transfer_is_told_to_all_with_its_bucket(seen: list[Misadventures]) -> None:
    assert [found.transfer.kind for found in seen] == ["ReshardError", "PeerTransportError"]
    for found in seen:
        assert "disk on fire" in found.transfer.text
        assert "bucket 1" in found.transfer.text


def test_a_flipped_bit_is_named_on_all_ranks(seen: list[Misadventures]) -> None:
    assert [found.flipped.kind for found in seen] == ["RemoteError", "WeightError"]
    tensor = "model.layers.1.self_attn.o_proj.weight"
    for found in seen:
        assert f"{tensor}[" in found.flipped.text
        assert f"]: {tensor} of rank 1 differs from the training weights of rank" in found.flipped.text


def test_a_parameter_with_other_memory_is_named(seen: list[Misadventures]) -> None:
    assert all("decoder.layers.1.mlp.linear_fc2.weight" in found.moved.text for found in seen)


def test_no_failed_switch_changes_the_training_state(seen: list[Misadventures]) -> None:
    for found in seen:
        assert found.states == [found.states[0]] * 5


def test_generation_is_refused_before_a_switch(seen: list[Misadventures]) -> None:
    for found in seen:
        assert found.generating_in_train is not None
        assert "state train" in found.generating_in_train.text


def test_training_is_refused_while_its_weights_are_away(seen: list[Misadventures]) -> None:
    for found in seen:
        for failure in found.training_in_rollout:
            assert failure is not None
            assert failure.kind == "StateError"
            assert "in state infer (rollout_context); call this in train" in failure.text


def test_a_reference_is_refused_while_the_weights_are_away(seen: list[Misadventures]) -> None:
    assert [found.reference_in_rollout and found.reference_in_rollout.kind for found in seen] == ["StateError"] * 2


def test_in_forward_weights_are_scored_and_not_changed(seen: list[Misadventures]) -> None:
    for found in seen:
        for failure in found.training_in_forward[:NUM_UPDATING]:
            assert failure is not None
            assert failure.kind == "StateError"
            assert "in state forward (forward_context); call this in train_context" in failure.text
        assert set(found.training_in_forward[NUM_UPDATING:]) == {None}


def test_a_refused_step_is_not_counted(seen: list[Misadventures]) -> None:
    assert [found.version for found in seen] == [2, 2]


def test_a_bad_prompt_is_named_and_generation_goes_on(seen: list[Misadventures]) -> None:
    for found in seen:
        assert found.bad_prompt is not None
        assert found.bad_prompt.kind == "ArgumentError"
        assert "prompts[1]" in found.bad_prompt.text
        assert found.num_completions == 2


def test_an_error_that_ends_the_workers_block_is_heard_of_by_all(seen: list[Misadventures]) -> None:
    assert [found.leaving.kind for found in seen] == ["ValueError", "LostRankError"]
    assert "rank 0, leaving: ValueError: no reward for this answer" in seen[1].leaving.text
    assert all(found.seconds_to_leave < 60 for found in seen), "the timeout is 120"


def test_the_group_of_the_worker_ends_with_it(seen: list[Misadventures]) -> None:
    assert not any(found.group_is_left for found in seen)


# -- before there is a worker ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusals:
    """Of a worker on an engine of a version that nobody tested: Megatron's on rank 1 only, vLLM's on all ranks."""

    megatron: Failure | None
    vllm: Failure | None


def refuse_versions(model: Path) -> Refusals:
    import importlib.metadata

    import megatron.core

    config = workers.configuration(model, TP2)
    version = importlib.metadata.version
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(megatron.core, "__version__", "0.15.0")
        of_megatron = failure_of(lambda: ActorHybridWorker(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            importlib.metadata, "version", lambda name: "0.30.0" if name.startswith("vllm") else version(name)
        )
        of_vllm = failure_of(lambda: ActorHybridWorker(config))
    return Refusals(of_megatron, of_vllm)


@pytest.fixture
def refusals(outcomes: Outcomes) -> list[Refusals]:
    return outcomes["versions"]


def test_an_untested_megatron_on_one_rank_is_refused_on_all(refusals: list[Refusals]) -> None:
    failures = _raised(found.megatron for found in refusals)
    assert [failure.kind for failure in failures] == ["RemoteError", "DependencyError"]
    assert all("0.15.0" in failure.text and "0.16.1" in failure.text for failure in failures)


def test_an_untested_vllm_is_refused(refusals: list[Refusals]) -> None:
    failures = _raised(found.vllm for found in refusals)
    assert [failure.kind for failure in failures] == ["DependencyError"] * 2
    assert all("0.30.0" in failure.text and "0.32.0" in failure.text for failure in failures)


def _raised(failures: Any) -> Sequence[Failure]:
    found = list(failures)
    assert None not in found
    return found


@dataclass(frozen=True)
class HalfBuilt:
    """A worker whose construction failed."""

    failure: Failure | None
    group_is_left: bool


def fail_while_building(model: Path) -> dict[str, HalfBuilt]:
    """Once Megatron's groups are there, and in the plan. What follows on the same ranks builds more workers."""
    from hybrid_engine.trainer.megatron import build

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise ConfigError([Violation("actor_config", "it does not fit", "Take another")])

    found = {}
    for owner, name in ((build, "build_actor"), (rendezvous, "plan")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, fail)
            failure = failure_of(lambda: workers.build_worker(model, TP2))
        found[name] = HalfBuilt(failure, dist.is_initialized())
    return found


@pytest.mark.parametrize("name", ["build_actor", "plan"])
def test_a_worker_that_cannot_be_built_leaves_no_group(outcomes: Outcomes, name: str) -> None:
    for found in outcomes["half built"]:
        assert found[name].failure is not None
        assert "it does not fit" in found[name].failure.text
        assert not found[name].group_is_left

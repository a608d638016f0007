"""Failures reach every rank and lose nothing; misuse is refused; a job can be rebuilt."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import ActorHybridWorker, ReferenceModel
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.switch import setup
from tests.harness.launch import Outcomes, Ranks
from tests.harness.values import Values
from tests.hybrid_engine.end_to_end.digests import training_state
from tests.hybrid_engine.ranks.test_agreement import outcome_of, refusal_of
from tests.zoo import workers
from tests.zoo.shares import share_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TP2 = {"tensor_model_parallel_size": 2}


def kinds(failures: Iterable[str]) -> list[str]:
    """Return the classes of errors of the form "class: text"."""
    return [failure.partition(":")[0] for failure in failures]


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    model = workers.write_model(tmp_path_factory.mktemp("model"), "qwen3")
    calls = {"versions": refuse_versions, "half built": fail_while_building, "failures": fail_and_continue}
    return engines.launch_in_turn(2, {name: (function, (model,)) for name, function in calls.items()}, timeout=800)


# -- failures of a running worker ------------------------------------------------------------------


def fail_and_continue(model: Path) -> Values:
    """Cause failures of all kinds, on one rank only if possible; return the errors in order.

    "states" has the training state before the first failure, and after each but the first.
    """
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

    original = parameter.data
    parameter.data = original.clone()
    failures.append(_failure_of_switch(worker))
    parameter.data = original
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
    return {
        "generating in train": generating_in_train,
        **dict(zip(("nan", "inf", "moved"), failures, strict=True)),
        "states": states,
        "bad prompt": bad_prompt,
        "reference in rollout": reference_in_rollout,
        "training in rollout": in_rollout,
        "training in forward": in_forward,
        "num completions": num_completions,
        "version": version,
        "leaving": leaving,
        "seconds to leave": seconds,
        "group is left": dist.is_initialized(),
    }


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
    """Return NUM_UPDATING calls that change training state, then calls that only score."""
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
        lambda: engine.log_probs(batch),
        lambda: engine.logits(batch["tokens"]),
        lambda: worker.compute_log_probs(workers.batch(seed=1)),
    ]


def _failure_of_switch(worker: Any) -> str:
    """Return the error of a switch to the rollout; training must continue afterwards."""

    def switch() -> None:
        with worker.rollout_context():
            raise AssertionError("the switch must fail")

    failure = refusal_of(switch)
    assert worker.sharding.state.value == "train"
    return failure


@pytest.fixture
def failures_by_rank(outcomes: Outcomes) -> list[Values]:
    return outcomes["failures"]


@pytest.mark.parametrize(("field", "what"), [("nan", "1 NaN"), ("inf", "1 Inf")])
def test_a_bad_weight_is_reported_on_all_ranks(failures_by_rank: list[Values], field: str, what: str) -> None:
    failures = [failures[field] for failures in failures_by_rank]
    assert kinds(failures) == ["RemoteError", "WeightError"]
    for failure in failures:
        assert "decoder.layers.1.mlp.linear_fc2.weight on rank 1" in failure
        assert f"model.layers.1.mlp.down_proj.weight): {what} of " in failure


def test_a_parameter_with_other_memory_is_reported(failures_by_rank: list[Values]) -> None:
    assert all("decoder.layers.1.mlp.linear_fc2.weight" in failures["moved"] for failures in failures_by_rank)


def test_no_failed_switch_changes_the_training_state(failures_by_rank: list[Values]) -> None:
    for failures in failures_by_rank:
        assert failures["states"] == [failures["states"][0]] * 3


def test_generation_is_refused_before_a_switch(failures_by_rank: list[Values]) -> None:
    assert all("state train" in failures["generating in train"] for failures in failures_by_rank)


def test_training_is_refused_in_a_rollout(failures_by_rank: list[Values]) -> None:
    for failures in failures_by_rank:
        for failure in failures["training in rollout"]:
            assert failure.startswith("StateError: ")
            assert "in state infer (rollout_context); call this in train" in failure


def test_a_reference_is_refused_in_a_rollout(failures_by_rank: list[Values]) -> None:
    assert kinds(failures["reference in rollout"] for failures in failures_by_rank) == ["StateError"] * 2


def test_forward_context_scores_and_refuses_changes(failures_by_rank: list[Values]) -> None:
    for failures in failures_by_rank:
        for failure in failures["training in forward"][:NUM_UPDATING]:
            assert failure.startswith("StateError: ")
            assert "in state forward (forward_context); call this in train_context" in failure
        assert all(outcome.startswith("returned ") for outcome in failures["training in forward"][NUM_UPDATING:])


def test_a_refused_step_is_not_counted(failures_by_rank: list[Values]) -> None:
    assert [failures["version"] for failures in failures_by_rank] == [2, 2]


def test_generation_continues_after_a_bad_prompt(failures_by_rank: list[Values]) -> None:
    for failures in failures_by_rank:
        assert failures["bad prompt"].startswith("ArgumentError: ")
        assert "prompts[1]" in failures["bad prompt"]
        assert failures["num completions"] == 2


def test_an_error_in_the_workers_block_reaches_all(failures_by_rank: list[Values]) -> None:
    assert kinds(failures["leaving"] for failures in failures_by_rank) == ["ValueError", "LostRankError"]
    assert "rank 0, leaving: ValueError: no reward for this answer" in failures_by_rank[1]["leaving"]
    assert all(failures["seconds to leave"] < 60 for failures in failures_by_rank), "the timeout is 120 s"


def test_the_workers_group_ends_with_it(failures_by_rank: list[Values]) -> None:
    assert not any(failures["group is left"] for failures in failures_by_rank)


# -- failures while a worker is built --------------------------------------------------------------


def refuse_versions(model: Path) -> tuple[str, str]:
    """Return the errors of an untested Megatron on rank 1 only, and of an untested vLLM on all ranks."""
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
    return of_megatron, of_vllm


@pytest.fixture
def refusals(outcomes: Outcomes) -> list[tuple[str, str]]:
    return outcomes["versions"]


def test_an_untested_megatron_on_one_rank_is_refused_on_all(refusals: list[tuple[str, str]]) -> None:
    failures = [of_megatron for of_megatron, _ in refusals]
    assert kinds(failures) == ["RemoteError", "DependencyError"]
    assert all("0.15.0" in failure and "0.16.1" in failure for failure in failures)


def test_an_untested_vllm_is_refused(refusals: list[tuple[str, str]]) -> None:
    failures = [of_vllm for _, of_vllm in refusals]
    assert kinds(failures) == ["DependencyError"] * 2
    assert all("0.30.0" in failure and "0.32.0" in failure for failure in failures)


def fail_while_building(model: Path) -> dict[str, tuple[str, bool]]:
    """Fail with Megatron's groups built, and in the plan; return the error and whether a group is left.

    Other workers follow on the same ranks.
    """
    from hybrid_engine.trainer.megatron import build

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise ConfigError([Violation("actor_config", "it does not fit", "Use another")])

    outcomes = {}
    for owner, name in ((build, "build_actor"), (setup, "plan")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, fail)
            failure = refusal_of(lambda: workers.build_worker(model, TP2))
        outcomes[name] = failure, dist.is_initialized()
    return outcomes


@pytest.mark.parametrize("name", ["build_actor", "plan"])
def test_a_worker_that_cannot_be_built_leaves_no_group(outcomes: Outcomes, name: str) -> None:
    for half_built in outcomes["half built"]:
        failure, group_is_left = half_built[name]
        assert "it does not fit" in failure
        assert not group_is_left

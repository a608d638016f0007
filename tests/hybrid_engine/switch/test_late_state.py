"""Optimizer state that comes back late changes no bit, with either trainer on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_engine.errors import HybridEngineError
from hybrid_engine.memory.arena import QueuedCopy
from hybrid_engine.ranks.job import Job
from hybrid_engine.switch import sharding_manager
from hybrid_engine.switch.states import State
from tests.harness.late_copies import LateCopies, LateCopy
from tests.harness.launch import Ranks
from tests.walk.runs import configured, subject_of, written_model
from tests.zoo import workers

NUM_ITERATIONS = 20
# Iterations in which the step's wait fails on a rank, or ends by Ctrl-C; and those of the checkpoint.
FAILS = 4
IS_INTERRUPTED = 8
SAVES = 11
LOADS = 15


def iterations(directory: str, trainer: str, is_late: bool) -> dict[str, Any]:
    """Switch to inference and back before each step; return losses, errors and the state at the end."""
    losses: list[float] = []
    errors: list[str] = []
    with ExitStack() as ends:
        patch = ends.enter_context(pytest.MonkeyPatch.context())
        if not is_late:
            patch.setattr(sharding_manager, "LATE_KINDS", frozenset())
        elif not torch.cuda.is_available():
            LateCopies(patch)
        path = written_model(Path(directory))
        config = configured(path, trainer, {"bucket_mb": 1, "timeout_seconds": 60.0})
        job = ends.enter_context(closing(Job.join(60.0, host="here")))
        subject = subject_of(path, trainer, config, job, ends)
        sharding = subject.engine.sharding
        scorer = subject.trainer.engine
        limits = scorer.limits

        def step(number: int) -> float:
            rows = {name: values % 64 for name, values in workers.batch(seed=number).items()}
            share = {name: values.chunk(limits.dp_size)[limits.dp_rank] for name, values in rows.items()}
            return float(scorer.train_step(share, workers.cross_entropy)["loss"])

        for number in range(NUM_ITERATIONS):
            for state in (State.INFER, State.FORWARD, State.TRAIN)[:: 2 - number % 2]:
                sharding.enter(state)
            if number == SAVES:
                subject.save(Path(directory) / "saved")
            elif number == LOADS:
                subject.load(Path(directory) / "saved")
            if is_late and number in (FAILS, IS_INTERRUPTED):
                error = OSError("bus") if number == FAILS else KeyboardInterrupt()
                copy = QueuedCopy if torch.cuda.is_available() else LateCopy
                meets_it = number == IS_INTERRUPTED or job.rank == 1
                with mock.patch.object(copy, "wait", side_effect=error) if meets_it else nullcontext():
                    errors.append(_outcome_of(partial(step, number)))
                for state in (State.INFER, State.TRAIN):
                    sharding.enter(state)
            losses.append(step(number))
        subject.engine.train.guard(["optimizer"])
        tensors = {**subject.parameters(), **subject.optimizer_state()}
        state = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        return {"losses": losses, "errors": errors, "state": state}


def _outcome_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (HybridEngineError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing failed"


@pytest.mark.engines
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["megatron-bf16", "fsdp2"])
def test_late_state_changes_no_bit(engines: Ranks, tmp_path: Path, trainer: str) -> None:
    calls = {name: (iterations, (str(tmp_path / name), trainer, name == "late")) for name in ("late", "waited for")}
    for name in calls:
        (tmp_path / name).mkdir()
    outcomes = engines.launch_in_turn(2, calls)
    for late, waited_for in zip(outcomes["late"], outcomes["waited for"], strict=True):
        assert late["losses"] == waited_for["losses"]
        assert len(set(late["losses"])) == NUM_ITERATIONS
        assert any("exp_avg" in name for name in late["state"])
        assert late["state"].keys() == waited_for["state"].keys()
        for name, tensor in late["state"].items():
            assert torch.equal(tensor, waited_for["state"][name]), name
    (other, interrupted), (failed, _) = (rank["errors"] for rank in outcomes["late"])
    assert "copies of optimizer to the device failed: bus" in failed
    assert other.startswith("RemoteError: training step failed on 1 rank")
    assert interrupted.startswith("KeyboardInterrupt")

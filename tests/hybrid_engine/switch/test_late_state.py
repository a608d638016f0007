"""Optimizer state that comes back late changes no bit, with either trainer on two ranks."""

from __future__ import annotations

from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from hybrid_engine.errors import HybridEngineError, RemoteError
from hybrid_engine.memory.arena import QueuedCopy
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.switch import states
from hybrid_engine.switch.states import State
from tests.harness.late_copies import LateCopies, LateCopy
from tests.harness.launch import on_engines
from tests.walk.runs import configured, subject_of, written_model
from tests.zoo import workers

NUM_ITERATIONS = 20
# Iterations in which the step's wait fails on a rank, or ends by Ctrl-C; and those of the
# checkpoint.
FAILS = 4
IS_INTERRUPTED = 8
SAVES = 11
LOADS = 15


def iterations(directory: Path, trainer: str, is_late: bool) -> tuple[list[float], TensorDict]:
    """Switch to inference and back before each step; return losses, and the state at the end."""
    directory.mkdir(exist_ok=True)
    losses: list[float] = []
    with ExitStack() as ends:
        patch = ends.enter_context(pytest.MonkeyPatch.context())
        if not is_late:
            patch.setattr(states, "LATE_KINDS", frozenset())
        elif not torch.cuda.is_available():
            LateCopies(patch)
        path = written_model(directory)
        config = configured(path, trainer, {"bucket_mb": 1, "timeout_seconds": 60.0})
        job = ends.enter_context(closing(Job.join(60.0, host="here")))
        subject = subject_of(path, trainer, config, job, ends)
        sharding = subject.engine.sharding
        scorer = subject.trainer.engine
        limits = scorer.limits

        def step(number: int) -> float:
            rows = {name: values % 64 for name, values in workers.batch(seed=number).items()}
            share = {
                name: values.chunk(limits.dp_size)[limits.dp_rank] for name, values in rows.items()
            }
            return float(scorer.train_step(share, workers.cross_entropy)["loss"])

        for number in range(NUM_ITERATIONS):
            for state in (State.INFER, State.FORWARD, State.TRAIN)[:: 2 - number % 2]:
                sharding.enter(state)
            if number == SAVES:
                subject.save(directory / "saved")
            elif number == LOADS:
                subject.load(directory / "saved")
            if is_late and number in (FAILS, IS_INTERRUPTED):
                error = OSError("bus") if number == FAILS else KeyboardInterrupt()
                copy = QueuedCopy if torch.cuda.is_available() else LateCopy
                meets_it = number == IS_INTERRUPTED or job.rank == 1
                kind = type(error) if number == IS_INTERRUPTED else HybridEngineError
                failure = (
                    mock.patch.object(copy, "wait", side_effect=error)
                    if meets_it
                    else nullcontext()
                )
                with failure, pytest.raises(kind) as caught:
                    step(number)
                if number == FAILS and meets_it:
                    assert "copies of optimizer to the device failed: bus" in str(caught.value)
                elif number == FAILS:
                    assert type(caught.value) is RemoteError
                    assert str(caught.value).startswith("training step failed on 1 rank")
                for state in (State.INFER, State.TRAIN):
                    sharding.enter(state)
            losses.append(step(number))
        subject.engine.train.guard(["optimizer"])
        tensors = {**subject.parameters(), **subject.optimizer_state()}
        return losses, {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


@pytest.mark.slow
@on_engines({2: ["megatron-bf16", "fsdp2"]})
def test_late_state_changes_no_bit(tmp_path: Path, case: str) -> None:
    losses, state = iterations(tmp_path / "late", case, is_late=True)
    expected_losses, expected = iterations(tmp_path / "waited for", case, is_late=False)
    assert losses == expected_losses
    assert len(set(losses)) == NUM_ITERATIONS
    assert any("exp_avg" in name for name in state)
    assert state.keys() == expected.keys()
    assert [name for name, tensor in state.items() if not torch.equal(tensor, expected[name])] == []

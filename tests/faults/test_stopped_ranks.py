"""A rank that gets SIGSTOP, as one that hangs: the job ends when `timeout_seconds` are over, and can go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.job import Fault, Job

pytestmark = [pytest.mark.faults, pytest.mark.engines]

TIMEOUT = 20
MOST_SECONDS = 2 * TIMEOUT + 20 + 30 + 10
"""Two waits one after the other at most, the time for other ranks to say more, the 30 s that torchrun gives a rank that
does not end by SIGTERM once another has failed (whatever --shutdown-timeout says), and some for a busy machine."""

FAULTS = {
    "train step": Fault("stop", "hybrid_engine.trainer.megatron.train_engine:TrainEngine.train_step", call=8),
    "fill": Fault("stop", "hybrid_engine.switch.weight_container:WeightContainer.fill", call=2),
    "decoding with TP 2": Fault("stop", "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model", call=10),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    generate = {"infer_tensor_parallel_size": 2, "timeout_seconds": TIMEOUT}
    return Job(tmp_path_factory.mktemp("stopped"), generate=generate)


@pytest.mark.parametrize("where", FAULTS)
def test_a_rank_that_hangs_ends_the_job(job: Job, where: str, record: Callable[..., None]) -> None:
    before = job.iteration
    outcome = job.run(FAULTS[where])
    record(fault=f"SIGSTOP of rank 1: {where}", **outcome.row(), resumed=job.iteration > before)
    assert outcome.seconds is not None
    assert outcome.seconds < MOST_SECONDS
    assert "rank 1" in outcome.message, outcome.terminal
    assert outcome.status not in (0, None)
    assert outcome.leftovers == []


def test_the_run_is_finished(job: Job, record: Callable[..., None]) -> None:
    last = len(job.rows()) + 1
    outcome = job.run(None, f"rl_config.iterations={last}")
    record(fault="none, after the stalls", **outcome.row(), resumed=outcome.status == 0)
    assert outcome.status == 0, outcome.terminal
    assert outcome.leftovers == [], outcome.terminal

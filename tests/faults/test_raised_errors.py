"""An exception on one rank: the job ends within seconds, the terminal says that exception first, and nothing is left.

All cases happen to one run, one after the other; in the end it is finished.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.job import Fault, Job

pytestmark = [pytest.mark.faults, pytest.mark.engines]

MOST_SECONDS_TO_MESSAGE = 10
MOST_SECONDS = 50
"""To the end of the last process; below `timeout_seconds`, so nothing waited for its timeout. A rank that waits inside
vLLM is given 30 s to come back before it is ended."""

ENGINE = "hybrid_engine.backends.vllm.engine:InferenceEngine"
WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
FAULTS = {
    "train step": Fault("raise", "hybrid_engine.trainer.megatron.train_engine:TrainEngine.train_step", call=8),
    "transports run": Fault("raise", "hybrid_engine.transports.router:TransportSet.run", call=2),
    "transports prepare": Fault("raise", "hybrid_engine.transports.router:TransportSet.prepare", call=2),
    "generate": Fault("raise", f"{ENGINE}._run", call=4),
    "vLLM's start, before its groups": Fault("raise", f"{WORKER}.init_device"),
    "vLLM's start, memory": Fault("raise", f"{WORKER}.determine_available_memory"),
    "vLLM's start, warm-up": Fault("raise", f"{WORKER}.compile_or_warm_up_model"),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Tensor parallel 2 while generating, so that ranks wait for each other inside vLLM."""
    return Job(tmp_path_factory.mktemp("raised"), generate={"infer_tensor_parallel_size": 2})


@pytest.mark.parametrize("where", FAULTS)
def test_the_error_is_said_first_and_soon(job: Job, where: str, record: Callable[..., None]) -> None:
    fault = FAULTS[where]
    before = job.iteration
    outcome = job.run(fault)
    record(fault=f"exception on rank 1: {where}", **outcome.row(), resumed=job.iteration > before)
    assert fault.text in outcome.message.splitlines()[0], outcome.terminal
    assert "pair.cc" not in outcome.terminal
    assert outcome.seconds_to_message is not None
    assert outcome.seconds_to_message < MOST_SECONDS_TO_MESSAGE
    assert outcome.seconds is not None
    assert outcome.seconds < MOST_SECONDS
    assert job.iteration > before or fault.call == 1
    assert outcome.status not in (0, None)
    assert outcome.leftovers == []


def test_the_run_is_finished(job: Job, record: Callable[..., None]) -> None:
    last = len(job.rows()) + 1
    outcome = job.run(None, f"rl_config.iterations={last}")
    record(fault="none, after the exceptions", **outcome.row(), resumed=outcome.status == 0)
    assert outcome.status == 0, outcome.terminal
    assert outcome.leftovers == [], outcome.terminal
    assert [row["iteration"] for row in job.rows()] == list(range(last + 1))

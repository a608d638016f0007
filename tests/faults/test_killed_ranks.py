"""Ranks of the example that get SIGKILL: the job ends soon, leaves nothing, and the same command goes on.

All cases but the last happen to one run, one after the other: each takes up what the one before left. In the end that
run has the same results as one that nothing happened to.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.test_train import RESULTS
from tests.faults.job import Fault, Job
from tests.faults.running import Outcome

pytestmark = [pytest.mark.faults, pytest.mark.engines]

MOST_SECONDS = 45
"""To the end of the last process; below `timeout_seconds`, so nothing waited for its timeout."""

KILLS = {
    # 5 steps of warm-up, then 2 in each iteration
    "train step": Fault("kill", "hybrid_engine.trainer.megatron.train_engine:TrainEngine.train_step", call=8),
    "exchange of layouts": Fault("kill", "hybrid_engine.switch.rendezvous:rank_plan"),
    "fill": Fault("kill", "hybrid_engine.switch.weight_container:WeightContainer.fill", call=3),
    "commit": Fault("kill", "hybrid_engine.backends.vllm.weights.adaptor:VllmAdaptor.commit", call=3),
    "generate": Fault("kill", "hybrid_engine.backends.vllm.engine:InferenceEngine._run", call=4),
}

DECODING = Fault("kill", "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model", call=30)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("killed"))


@pytest.mark.parametrize("where", KILLS)
def test_a_killed_rank_ends_the_job(job: Job, where: str, record: Callable[..., None]) -> None:
    before = job.iteration
    outcome = job.run(KILLS[where])
    after = job.iteration
    record(fault=f"SIGKILL of rank 1: {where}", **outcome.row(), resumed=after > before)
    check_killed(outcome)
    assert after > before or KILLS[where].call == 1, outcome.terminal


def test_the_run_that_was_killed_is_finished(job: Job, tmp_path: Path, record: Callable[..., None]) -> None:
    """With the results of a run to which nothing happened."""
    last = len(job.rows()) + 1
    outcome = job.run(None, f"rl_config.iterations={last}")
    record(fault="none, after the kills", **outcome.row(), resumed=outcome.status == 0)
    assert outcome.status == 0, outcome.terminal
    assert outcome.leftovers == [], outcome.terminal
    rows = job.rows()
    assert [row["iteration"] for row in rows] == list(range(last + 1))
    undisturbed = Job(tmp_path)
    assert undisturbed.run(None, f"rl_config.iterations={last}").status == 0
    for seen, expected in zip(rows, undisturbed.rows(), strict=True):
        assert {key: seen[key] for key in RESULTS} == {key: expected[key] for key in RESULTS}


def test_a_rank_killed_while_decoding_with_its_partner(tmp_path: Path, record: Callable[..., None]) -> None:
    """Tensor parallel 2: the other rank waits inside vLLM, for the memory that they share."""
    job = Job(tmp_path, generate={"infer_tensor_parallel_size": 2})
    outcome = job.run(DECODING)
    record(fault="SIGKILL of rank 1: decoding with TP 2", **outcome.row())
    check_killed(outcome)


def check_killed(outcome: Outcome) -> None:
    """It ended in time, said who was killed, left nothing, and did not take torchrun's SIGTERM for the user's."""
    assert outcome.seconds is not None
    assert outcome.seconds < MOST_SECONDS
    assert outcome.status not in (0, None)
    assert "Signal 9 (SIGKILL)" in outcome.terminal
    assert "Stopping after this iteration" not in outcome.terminal
    assert outcome.leftovers == []

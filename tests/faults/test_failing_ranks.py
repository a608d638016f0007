"""If a rank of the example is killed, raises or hangs, the job ends soon, leaves nothing and can be
resumed.

Faults of one kind hit the same run in turn, each after a resume. Finally the run is finished; after
kills its results equal an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.faults.job import Fault, Job
from tests.faults.running import Outcome

pytestmark = [pytest.mark.faults, pytest.mark.engines]

RESULTS = (
    "accuracy",
    "reward",
    "kl",
    "loss",
    "grad_norm",
    "weight_version",
    "logprob_diff",
    "bytes_received",
)
"""Columns that must not depend on time or on interruptions."""
# 5 in the warm-up, 2 per iteration
STEP = "hybrid_engine.trainer.megatron.train_engine:TrainEngine.train_step"
FILL = "hybrid_engine.switch.weight_container:WeightContainer.fill"
GENERATE = "hybrid_engine.backends.vllm.engine:InferenceEngine._run"
DECODE = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model"
WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
TP2 = {"infer_tensor_parallel_size": 2}
"""With tensor parallelism in generation, so that ranks wait for each other inside vLLM."""
TIMEOUT = 20


def check_killed(outcome: Outcome, _: Fault) -> None:
    """The output reports the kill and does not take torchrun's SIGTERM for the user's."""
    assert "Signal 9 (SIGKILL)" in outcome.terminal
    assert "Stopping after this iteration" not in outcome.terminal


def check_raised(outcome: Outcome, fault: Fault) -> None:
    """The exception is the first line of the message, within seconds."""
    assert fault.text in outcome.message.splitlines()[0], outcome.terminal
    assert "pair.cc" not in outcome.terminal
    assert outcome.seconds_to_message is not None
    assert outcome.seconds_to_message < 10


def check_stopped(outcome: Outcome, _: Fault) -> None:
    assert "rank 1" in outcome.message, outcome.terminal


@dataclass(frozen=True)
class Kind:
    """Faults of one run.

    Attributes:
        faults: faults by place.
        most_seconds: maximum time from the fault to the end of the last process.
        check: check of the output.
        generate: keys of `generate_config`.
    """

    faults: Mapping[str, Fault]
    most_seconds: float
    check: Callable[[Outcome, Fault], None]
    generate: Mapping[str, Any] = field(default_factory=dict)


KINDS = {
    "killed": Kind(
        {
            "train step": Fault("kill", STEP, call=8),
            "exchange of layouts": Fault("kill", "hybrid_engine.switch.setup:rank_plan"),
            "fill": Fault("kill", FILL, call=3),
            "commit": Fault(
                "kill", "hybrid_engine.backends.vllm.weights.adaptor:VllmAdaptor.commit", call=3
            ),
            "generate": Fault("kill", GENERATE, call=4),
        },
        45,  # Less than `timeout_seconds`, so that no rank waited for a timeout.
        check_killed,
    ),
    "raises": Kind(
        {
            "train step": Fault("raise", STEP, call=8),
            "transports run": Fault(
                "raise", "hybrid_engine.transports.router:TransportSet.run", call=2
            ),
            "transports prepare": Fault(
                "raise", "hybrid_engine.transports.router:TransportSet.prepare", call=2
            ),
            "generate": Fault("raise", GENERATE, call=4),
            "vLLM's start, before its groups": Fault("raise", f"{WORKER}.init_device"),
            "vLLM's start, memory": Fault("raise", f"{WORKER}.determine_available_memory"),
            "vLLM's start, warm-up": Fault("raise", f"{WORKER}.compile_or_warm_up_model"),
        },
        50,  # Likewise; a rank that waits inside vLLM is killed after 30 s.
        check_raised,
        TP2,
    ),
    "stopped": Kind(
        {
            "train step": Fault("stop", STEP, call=8),
            "fill": Fault("stop", FILL, call=2),
            "decoding with TP 2": Fault("stop", DECODE, call=10),
        },
        # At most two waits in turn, 20 s for messages of other ranks, 30 s until torchrun kills a
        # rank that ignores SIGTERM after the failure of another (--shutdown-timeout does not
        # apply), and a margin.
        2 * TIMEOUT + 20 + 30 + 10,
        check_stopped,
        {**TP2, "timeout_seconds": TIMEOUT},
    ),
}
KILLED_WHILE_DECODING = Fault("kill", DECODE, call=30)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return {
        name: Job(tmp_path_factory.mktemp(name), generate=kind.generate)
        for name, kind in KINDS.items()
    }


def check(outcome: Outcome, fault: Fault, kind: Kind) -> None:
    assert outcome.seconds is not None
    assert outcome.seconds < kind.most_seconds
    assert outcome.status not in (0, None)
    assert outcome.leftovers == []
    kind.check(outcome, fault)


@pytest.mark.parametrize(
    ("name", "where"), [(name, where) for name, kind in KINDS.items() for where in kind.faults]
)
def test_the_job_ends_after_a_fault(jobs: dict[str, Job], name: str, where: str) -> None:
    job = jobs[name]
    fault = KINDS[name].faults[where]
    before = job.iteration
    outcome = job.run(fault)
    check(outcome, fault, KINDS[name])
    assert job.iteration > before or fault.call == 1 or name == "stopped", outcome.terminal


@pytest.mark.parametrize("name", KINDS)
def test_the_run_can_be_finished_after_faults(
    jobs: dict[str, Job], tmp_path: Path, name: str
) -> None:
    last = len(jobs[name].rows()) + 1
    outcome = jobs[name].run(None, f"rl_config.iterations={last}")
    assert outcome.status == 0, outcome.terminal
    assert outcome.leftovers == [], outcome.terminal
    rows = jobs[name].rows()
    assert [row["iteration"] for row in rows] == list(range(last + 1))
    if name == "killed":
        undisturbed = Job(tmp_path)
        assert undisturbed.run(None, f"rl_config.iterations={last}").status == 0
        for row, expected in zip(rows, undisturbed.rows(), strict=True):
            assert {key: row[key] for key in RESULTS} == {key: expected[key] for key in RESULTS}


def test_the_job_ends_if_a_rank_is_killed_while_decoding(tmp_path: Path) -> None:
    """The other rank waits inside vLLM for shared memory."""
    outcome = Job(tmp_path, generate=TP2).run(KILLED_WHILE_DECODING)
    check(outcome, KILLED_WHILE_DECODING, KINDS["killed"])

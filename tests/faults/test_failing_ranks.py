"""Ranks of the example that are killed, raise an exception or hang: the job ends soon, leaves nothing, and can go on.

The faults of one kind happen to one run, one after the other: each takes up what the one before left. In the end that
run is finished, after kills with the same results as one that nothing happened to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.examples.test_train import RESULTS
from tests.faults.job import Fault, Job
from tests.faults.running import Outcome

pytestmark = [pytest.mark.faults, pytest.mark.engines]

STEP = "hybrid_engine.trainer.megatron.train_engine:TrainEngine.train_step"  # 5 of warm-up, then 2 in each iteration
FILL = "hybrid_engine.switch.weight_container:WeightContainer.fill"
GENERATE = "hybrid_engine.backends.vllm.engine:InferenceEngine._run"
DECODE = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model"
WORKER = "vllm.v1.worker.cpu_worker:CPUWorker"
TP2 = {"infer_tensor_parallel_size": 2}
"""While generating, so that ranks wait for each other inside vLLM."""
TIMEOUT = 20


def check_killed(outcome: Outcome, _: Fault) -> None:
    """It says who was killed, and does not take torchrun's SIGTERM for the user's."""
    assert "Signal 9 (SIGKILL)" in outcome.terminal
    assert "Stopping after this iteration" not in outcome.terminal


def check_raised(outcome: Outcome, fault: Fault) -> None:
    """The exception is said first, and within seconds."""
    assert fault.text in outcome.message.splitlines()[0], outcome.terminal
    assert "pair.cc" not in outcome.terminal
    assert outcome.seconds_to_message is not None
    assert outcome.seconds_to_message < 10


def check_stopped(outcome: Outcome, _: Fault) -> None:
    assert "rank 1" in outcome.message, outcome.terminal


@dataclass(frozen=True)
class Kind:
    """Faults that happen to one run.

    Attributes:
        faults: by where they happen.
        most_seconds: to the end of the last process.
        check: what is said on the terminal.
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
            "commit": Fault("kill", "hybrid_engine.backends.vllm.weights.adaptor:VllmAdaptor.commit", call=3),
            "generate": Fault("kill", GENERATE, call=4),
        },
        45,  # below `timeout_seconds`, so nothing waited for its timeout
        check_killed,
    ),
    "raises": Kind(
        {
            "train step": Fault("raise", STEP, call=8),
            "transports run": Fault("raise", "hybrid_engine.transports.router:TransportSet.run", call=2),
            "transports prepare": Fault("raise", "hybrid_engine.transports.router:TransportSet.prepare", call=2),
            "generate": Fault("raise", GENERATE, call=4),
            "vLLM's start, before its groups": Fault("raise", f"{WORKER}.init_device"),
            "vLLM's start, memory": Fault("raise", f"{WORKER}.determine_available_memory"),
            "vLLM's start, warm-up": Fault("raise", f"{WORKER}.compile_or_warm_up_model"),
        },
        50,  # the same; a rank that waits inside vLLM is given 30 s to come back before it is ended
        check_raised,
        TP2,
    ),
    "stopped": Kind(
        {
            "train step": Fault("stop", STEP, call=8),
            "fill": Fault("stop", FILL, call=2),
            "decoding with TP 2": Fault("stop", DECODE, call=10),
        },
        # two waits one after the other at most, the time for other ranks to say more, the 30 s that torchrun gives a
        # rank that does not end by SIGTERM once another has failed (whatever --shutdown-timeout says), and some more
        2 * TIMEOUT + 20 + 30 + 10,
        check_stopped,
        {**TP2, "timeout_seconds": TIMEOUT},
    ),
}
KILLED_WHILE_DECODING = Fault("kill", DECODE, call=30)
FAULTS = [KILLED_WHILE_DECODING, *(fault for kind in KINDS.values() for fault in kind.faults.values())]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return {name: Job(tmp_path_factory.mktemp(name), generate=kind.generate) for name, kind in KINDS.items()}


def check(outcome: Outcome, fault: Fault, kind: Kind) -> None:
    assert outcome.seconds is not None
    assert outcome.seconds < kind.most_seconds
    assert outcome.status not in (0, None)
    assert outcome.leftovers == []
    kind.check(outcome, fault)


@pytest.mark.parametrize(("name", "where"), [(name, where) for name, kind in KINDS.items() for where in kind.faults])
def test_the_job_ends(jobs: dict[str, Job], name: str, where: str, record: Callable[..., None]) -> None:
    job, fault, before = jobs[name], KINDS[name].faults[where], jobs[name].iteration
    outcome = job.run(fault)
    record(fault=f"rank 1 {name}: {where}", **outcome.row(), resumed=job.iteration > before)
    check(outcome, fault, KINDS[name])
    assert job.iteration > before or fault.call == 1 or name == "stopped", outcome.terminal


@pytest.mark.parametrize("name", KINDS)
def test_the_run_is_finished(jobs: dict[str, Job], tmp_path: Path, name: str, record: Callable[..., None]) -> None:
    last = len(jobs[name].rows()) + 1
    outcome = jobs[name].run(None, f"rl_config.iterations={last}")
    record(fault=f"none, after rank 1 was {name}", **outcome.row(), resumed=outcome.status == 0)
    assert outcome.status == 0, outcome.terminal
    assert outcome.leftovers == [], outcome.terminal
    rows = jobs[name].rows()
    assert [row["iteration"] for row in rows] == list(range(last + 1))
    if name == "killed":
        undisturbed = Job(tmp_path)
        assert undisturbed.run(None, f"rl_config.iterations={last}").status == 0
        for seen, expected in zip(rows, undisturbed.rows(), strict=True):
            assert {key: seen[key] for key in RESULTS} == {key: expected[key] for key in RESULTS}


def test_a_rank_killed_while_decoding_with_its_partner(tmp_path: Path, record: Callable[..., None]) -> None:
    """The other rank waits inside vLLM, for the memory that they share."""
    outcome = Job(tmp_path, generate=TP2).run(KILLED_WHILE_DECODING)
    record(fault="rank 1 killed: decoding with TP 2", **outcome.row())
    check(outcome, KILLED_WHILE_DECODING, KINDS["killed"])

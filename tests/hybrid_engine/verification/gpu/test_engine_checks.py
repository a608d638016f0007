"""Stage 2 around engines that are none: what is wrong with a switch, a wake-up or an answer turns red.

With real engines: tests/faults/test_check_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid_engine.backends.vllm import Completion
from hybrid_engine.config import HybridConfig
from hybrid_engine.memory.offload_items import OffloadItem
from hybrid_engine.switch.report import ReshardReport, SwitchTally
from hybrid_engine.switch.states import State
from hybrid_engine.verification.gpu import engine_checks, fresh_checks
from hybrid_engine.verification.gpu.checks import CannotCheckError, Check, Colour, read_results, run_checks
from hybrid_engine.verification.gpu.engine_checks import EngineChecks
from hybrid_engine.verification.gpu.small_job import MAX_TOKENS, SmallJob

ALL = (
    *("build", "settings and environment as before", "all weights compared in the switch", "switch to vLLM, the first"),
    *("switch to vLLM", "switch to training", "completions, twice the same"),
    *("failed wake-up: training is as before", "failed wake-up: the next switch", "shut down asleep", "built again"),
)


class Worker:
    """In the place of ActorHybridWorker. What is wrong with it is said by `fault`."""

    fault = ""
    num_built = 0

    def __init__(self, config: HybridConfig) -> None:
        type(self).num_built += 1
        self.sharding = self
        self.state = State.TRAIN
        self.table = SimpleNamespace(dims=SimpleNamespace(vocab_size=512))
        self.inference = SimpleNamespace(wake_kv_cache=lambda: None, reset_caches=lambda: None)
        self.weights = torch.arange(4.0)
        self.train = SimpleNamespace(offload_items=lambda: [OffloadItem("weights", "param", self.weights)])
        if self.fault == "changes torch":
            torch.set_float32_matmul_precision("high")

    def enter(self, state: State) -> ReshardReport:
        if state is State.INFER and self.fault != "does not wake":
            try:
                self.inference.wake_kv_cache()
            except RuntimeError:
                if self.fault == "loses training":
                    self.weights.zero_()
                if self.fault == "stays half-way":
                    self.state = State.IDLE
                raise
        self.state = state
        report = SwitchTally().report("", 1, 0.5)
        return replace(report, tensors_verified=0 if self.fault == "compares nothing" else 3)

    def update(self, batch: object, loss_function: object) -> None:
        assert self.state is State.TRAIN

    def generate_sequences(self, prompts: list[list[int]], sampling: object) -> list[list[Completion]]:
        token = 1 if self.fault == "forgets" and self.num_built > 1 else 0
        return [[Completion((token,) * MAX_TOKENS, (), "length")] for _ in prompts]

    def save_hf_checkpoint(self, path: Path) -> None: ...

    def load_hf_checkpoint(self, path: Path) -> None: ...

    def shutdown(self) -> None: ...


@pytest.fixture
def job(tmp_path: Path) -> SmallJob:
    job = SmallJob(str(tmp_path), "cpu", eager=True)
    job.write_model()
    return job


def found_with(fault: str, job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> dict[str, Check]:
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(engine_checks, "ActorHybridWorker", type("Faulty", (Worker,), {"fault": fault}))
    run_checks(EngineChecks(job).planned(), Path(job.directory, "results"))
    torch.set_float32_matmul_precision(before)
    return {check.name: check for check in read_results(Path(job.directory, "results"), "")}


def test_all_checks_are_green(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_with("", job, monkeypatch)
    assert list(found) == [f"eager: {name}" for name in ALL]
    assert {check.colour for check in found.values()} == {Colour.GREEN}


@pytest.mark.parametrize(
    ("fault", "name", "note"),
    [
        ("changes torch", "settings and environment as before", "matmul precision: high, was highest"),
        ("compares nothing", "all weights compared in the switch", "[0, 0, 0, 0, 0] in turn"),
        (
            "loses training",
            "failed wake-up: training is as before",
            "the state is train, or training's contents changed",
        ),
        ("stays half-way", "failed wake-up: training is as before", "the state is idle"),
        ("does not wake", "failed wake-up", "it did not fail"),
        ("forgets", "built again", "prompt 0 differs from token 0 on"),
    ],
)
def test_a_fault_is_red(fault: str, name: str, note: str, job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_with(fault, job, monkeypatch)
    red = {check.name: check.note for check in found.values() if check.colour is Colour.RED}
    assert list(red) == [f"eager: {name}"]
    assert red[f"eager: {name}"].startswith(note)


@pytest.mark.parametrize(("peak", "colour"), [(2**30, Colour.GREEN), (2 * 2**30, Colour.RED)])
def test_a_switch_takes_no_more_than_either_side(peak: int, colour: Colour, job: SmallJob) -> None:
    checks = EngineChecks(job)
    checks._taken = {"train": 2**30, "infer": 2**29}
    checks._peaks = [2**29, peak]
    assert checks._peak().colour is colour


def test_a_fresh_vllm_that_says_something_else_is_red(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotCheckError, match="the engines left no completions"):
        next(fresh_checks.compared(job))
    job.answers.write_text("[[1, 2], [3, 4]]")
    for answer, colour in (([[1, 2], [3, 4]], Colour.GREEN), ([[1, 2], [3, 5]], Colour.RED)):
        monkeypatch.setattr(fresh_checks, "fresh_completions", lambda *_, answer=answer: answer)
        assert next(fresh_checks.compared(job)).colour is colour

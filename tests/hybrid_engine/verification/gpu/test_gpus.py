"""What is asked of GPUs, around programs that answer in their place: the asking process, torch.cuda and nvidia-smi."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid_engine.verification.gpu import machine
from hybrid_engine.verification.gpu.checks import CannotCheckError
from hybrid_engine.verification.gpu.gpus import GIB, Gpu, described, memory_users, too_little, visible_gpus

ONE = Gpu("H100", "9.0", 80 * GIB, 70 * GIB, "GPU-1")


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "GPU-1, 7, /usr/bin/python, 10240\nGPU-1, 8, [Not Found], [N/A]\nNo running processes"
    program(tmp_path / "nvidia-smi", f"printf '{rows}'")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def test_gpus_are_asked_in_another_process_and_nvidia_smi_for_their_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvidia_smi: None
) -> None:
    told = json.dumps([asdict(ONE)])
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", f"echo a library speaks; printf '{told}'"))
    (gpu,) = visible_gpus()
    assert (gpu.name, gpu.free_nbytes, gpu.has_bfloat16) == ("H100", 70 * GIB, True)
    assert gpu.users == ("process 7 (/usr/bin/python) has 10.0 GiB", "process 8 ([Not Found]) has memory")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo RuntimeError: driver too old >&2; exit 1", "driver too old"),
        ("exit 3", "status 3"),
        ("echo '[]'; echo a library speaks at the end", "wrote no JSON: nothing"),
        ("printf '[] and more'", r"wrote no JSON: \[\] and more"),
    ],
)
def test_gpus_that_cannot_be_asked_are_a_fact(
    script: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", script))
    with pytest.raises(CannotCheckError, match=says):
        visible_gpus()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = machine.this_machine()
    assert found.gpus == ()
    assert re.search(says, found.gpu_problem)


def test_without_nvidia_smi_nobody_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert memory_users() == {}
    assert "nvidia-smi shows nobody here" in too_little("GPU 0", GIB, 2 * GIB, ())


def test_what_torch_says_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda is replaced, and the GPUs by the CPU: one is full, one runs no kernel, the last is as it should be."""

    def mem_get_info(index: int) -> tuple[int, int]:
        if index == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.\nCUDA kernel errors might be reported elsewhere")
        return 70 * GIB, 80 * GIB

    properties = SimpleNamespace(name="H100", major=9, minor=0, uuid="1", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch, "device", lambda kind, index: "no such device" if index == 1 else "cpu")
    full, broken, last = described()
    assert full == replace(ONE, free_nbytes=0, problem="CUDA out of memory")
    assert broken.free_nbytes == 0
    assert "no such device" in broken.problem
    assert last == ONE

"""What a guest changes in a process, and leaves there, is seen and named."""

from __future__ import annotations

import gc
import os
import subprocess

import pytest
import torch

from hybrid_engine.memory.host_pages import HostMemory
from hybrid_engine.verification.gpu.process_state import FROZEN, ProcessState


def test_every_kind_of_change_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_TRAINING", "1")
    monkeypatch.setenv("OF_TRAINING_TOKEN", "secret")
    before = ProcessState.now()
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    assert ProcessState.now().changes(before) == []
    monkeypatch.delenv("OF_TRAINING")
    monkeypatch.setenv("OF_TRAINING_TOKEN", "another")
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen + 7)
    gc.set_threshold(1, 2, 3)
    try:
        with torch.no_grad():
            changes = ProcessState.now().changes(before)
    finally:
        gc.set_threshold(*thresholds)
    assert changes == [
        "$OF_TRAINING: None, was 1",
        "$OF_TRAINING_TOKEN changed",
        f"garbage collector's thresholds: (1, 2, 3), was {thresholds}",
        "gradients: False, was True",
        f"{FROZEN}: {frozen + 7}, was {frozen}",
    ]


def test_processes_and_shared_memory_are_named_while_they_are_there() -> None:
    before = ProcessState.now()
    memory = HostMemory.create(1, torch.float32, "left")
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert ProcessState.now().left_behind(before) == [
            f"process {child.pid}: sleep 60",
            f"shared memory /memfd:{memory.token}",
        ]
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    del memory
    assert ProcessState.now().left_behind(before) == [], "nor is one that has ended, though nobody asked how"
    child.wait()

"""Memory on a GPU, with and without vLLM's sleep mode, over a stand-in for vLLM; test_adaptor.py has a CPU's."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm.weights.weight_memory import SleepMode, WeightMemory

LIVE = {"norm.weight": torch.zeros(4)}


class Llm:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {', '.join(tags)}")


def sleeping() -> tuple[SleepMode, Llm]:
    llm = Llm()
    memory = SleepMode(lambda: llm)
    memory.free(LIVE)
    return memory, llm


def test_asleep_nothing_is_taken() -> None:
    memory, _ = sleeping()
    assert memory.nbytes(LIVE) == 0
    memory.restore(LIVE, [])
    assert memory.nbytes(LIVE) == 16


def test_vllm_falls_asleep_once_and_wakes_its_weights_once() -> None:
    memory, llm = sleeping()
    memory.free(LIVE)
    memory.restore(LIVE, [])
    memory.restore(LIVE, [])
    assert llm.calls == ["sleep 2", "wake weights"]


def test_the_kv_cache_stays_asleep_until_it_is_asked_for() -> None:
    memory, llm = sleeping()
    memory.restore(LIVE, [])
    assert memory.is_kv_cache_asleep
    memory.wake_kv_cache()
    memory.wake_kv_cache()
    assert not memory.is_kv_cache_asleep
    assert llm.calls[2:] == ["wake kv_cache"]


def test_weights_that_did_not_wake_are_still_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, llm = sleeping()

    def fail(**_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(llm, "wake_up", fail)
        memory.restore(LIVE, [])
    memory.restore(LIVE, [])
    assert llm.calls == ["sleep 2", "wake weights"]


def test_without_sleep_mode_weights_stay_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    memory = WeightMemory()
    with caplog.at_level(logging.WARNING):
        memory.free(LIVE)
    assert "its 16 bytes of weights stay on the device" in caplog.text
    assert memory.nbytes(LIVE) == 16

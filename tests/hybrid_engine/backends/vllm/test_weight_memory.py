"""Memory on a GPU, with and without vLLM's sleep mode, over a stand-in for vLLM; test_adaptor.py has a CPU's."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_engine.backends.vllm import internals
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


class PartlyAwake(Llm):
    """vLLM, and its sleep mode's backend, where memory ends in the middle of a wake-up."""

    def __init__(self) -> None:
        super().__init__()
        self.num_awake = 4
        self.fails = False

    def wake_up(self, tags: list[str]) -> None:
        self.num_awake = 2 if self.fails else 4
        if self.fails:
            raise RuntimeError("CUDA Error: out of memory")
        super().wake_up(tags)

    def sleep(self, level: int) -> None:
        super().sleep(level)
        self.num_awake = 0

    def suspend(self, level: int) -> None:
        self.calls.append(f"suspend {level}")
        self.num_awake = 0


def test_what_a_failed_wake_up_left_awake_goes_back_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = PartlyAwake()
    monkeypatch.setattr(internals, "worker_of", lambda llm: SimpleNamespace(sleep_mode_backend=llm))
    memory = SleepMode(lambda: llm)
    memory.free(LIVE)
    llm.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.restore(LIVE, [])
    assert llm.num_awake == 2
    memory.free(LIVE)
    memory.free(LIVE)
    assert llm.num_awake == 0
    llm.fails = False
    memory.restore(LIVE, [])
    assert llm.calls == ["sleep 2", "suspend 2", "wake weights"]


@pytest.mark.slow  # imports vLLM
def test_vllm_itself_would_leave_it_awake() -> None:
    """The reason for the test above, with vLLM's own executor: once this fails, ours may call `sleep` again."""
    from vllm.v1.executor.abstract import Executor

    executor = mock.Mock(spec=["sleeping_tags", "collective_rpc"], sleeping_tags=set())
    executor.is_sleeping = True
    Executor.sleep(executor, level=2)
    executor.collective_rpc.side_effect = RuntimeError("CUDA Error: out of memory")
    with pytest.raises(RuntimeError):
        Executor.wake_up(executor, tags=["weights"])
    executor.collective_rpc.reset_mock(side_effect=True)
    Executor.sleep(executor, level=2)
    executor.collective_rpc.assert_not_called()


@pytest.mark.parametrize("is_asleep", [True, False])
def test_the_error_of_freeing_what_sleeps_is_taken_away(monkeypatch: pytest.MonkeyPatch, is_asleep: bool) -> None:
    memory, _ = sleeping()
    if not is_asleep:
        memory.restore(LIVE, [])
    unmap = mock.Mock(side_effect=RuntimeError("CUDA Error: invalid argument"))
    monkeypatch.setattr(internals, "UNMAP", mock.Mock(load=lambda: unmap))
    memory.after_shutdown()
    assert unmap.called == is_asleep


def test_without_sleep_mode_weights_stay_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    memory = WeightMemory()
    with caplog.at_level(logging.WARNING):
        memory.free(LIVE)
    assert "its 16 bytes of weights stay on the device" in caplog.text
    assert memory.nbytes(LIVE) == 16

"""Memory on a GPU, with and without vLLM's sleep mode, over a stand-in for vLLM; test_adaptor.py has a CPU's."""

from __future__ import annotations

import logging
from types import MethodType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.sleeping_segments import SleepingSegments
from hybrid_engine.backends.vllm.weights.weight_memory import SleepMode, WeightMemory, require_unused_allocator
from hybrid_engine.errors import StateError
from hybrid_engine.memory.borrowed import tensor_over

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


@pytest.fixture(autouse=True)
def whole_wake_up(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No segments are known, but in the tests below that have an allocator."""
    if "segmented" not in request.fixturenames:
        monkeypatch.setattr(SleepingSegments, "of", lambda *_: SleepingSegments(()))


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
    assert memory.nbytes(LIVE) == 0
    assert not memory.is_given_back(LIVE)  # so that the adaptor's release comes here
    memory.free(LIVE)
    memory.free(LIVE)
    assert llm.num_awake == 0
    assert memory.is_given_back(LIVE)
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


class Segmented:
    """vLLM's own allocator, backend and worker, over a driver that only counts; a worker of one model.

    Segment "first" holds a weight and the model's buffer, "second" two weights, "third" one.
    """

    NBYTES = 64

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.device_allocator import cumem, sleep_mode_backend
        from vllm.v1.executor.abstract import Executor
        from vllm.v1.worker.gpu_worker import Worker

        self._wake = Worker.wake_up
        self.budget = 100
        self.pages: dict[str, torch.Tensor] = {}
        tags = {"workspace": "workspace", "kv": "kv_cache"}
        self.allocator = cumem.CuMemAllocator()
        for name in ("first", "workspace", "second", "third", "kv"):
            self.add(name, tags.get(name, "weights"))
        self.model = torch.nn.Module()
        self.model.register_buffer("rotary", self.over("first", 0).fill_(7))
        self.live = {
            name: self.over(segment, start)
            for name, segment, start in [("a", "first", 64), ("b", "second", 0), ("c", "second", 64), ("d", "third", 0)]
        }
        self.worker = SimpleNamespace(
            sleep_mode_backend=sleep_mode_backend.CuMemBackend(),
            model_runner=SimpleNamespace(model=self.model),
            get_draft_model=lambda: None,
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
            synchronize_device=lambda: None,
            _sleep_saved_parameters={},
            _sleep_saved_draft_buffers={},
        )
        self.requested = {"first": 128, "second": 128, "third": 64}
        self.allocator.allocator_and_pools["weights"] = [[SimpleNamespace(snapshot=self.snapshot), None]]
        monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", lambda: self.allocator)
        monkeypatch.setattr("vllm.device_allocator.get_mem_allocator_instance", lambda: self.allocator)
        monkeypatch.setattr(cumem, "create_and_map", self._map)
        monkeypatch.setattr(cumem, "unmap_and_release", self._unmap)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
        self.executor = SimpleNamespace(
            sleeping_tags=set(), collective_rpc=lambda name, args: self.worker.sleep_mode_backend.discard(*args)
        )
        self.executor.discard = MethodType(Executor.discard, self.executor)
        monkeypatch.setattr(internals, "worker_of", lambda _: self.worker)
        monkeypatch.setattr(internals, "core_of", lambda _: SimpleNamespace(model_executor=self.executor))

    def add(self, name: str, tag: str) -> None:
        from vllm.device_allocator import AllocationData

        pages = self.pages[name] = torch.zeros(self.NBYTES)
        data = AllocationData((0, pages.nbytes, pages.data_ptr(), 0), tag)
        self.allocator.pointer_to_data[pages.data_ptr()] = data

    def over(self, segment: str, start: int) -> torch.Tensor:
        pages = self.pages[segment]
        return tensor_over(pages.data_ptr() + start, 64, pages.device, pages).view(torch.float32)

    def snapshot(self) -> list[dict[str, int]]:
        """As torch's memory pools give it, of which this much is used."""
        return [
            {"address": self.pages[name].data_ptr(), "requested_size": nbytes}
            for name, nbytes in self.requested.items()
        ]

    def asleep(self) -> list[str]:
        data = self.allocator.pointer_to_data
        return [name for name, pages in self.pages.items() if data[pages.data_ptr()].is_asleep]

    def storages(self, *names: str) -> list[Any]:
        return [SimpleNamespace(name=name) for name in names]

    def sleep(self, level: int) -> None:
        if level == 0:
            return
        assert "first" not in self.asleep()  # the worker reads buffers
        self.worker._sleep_saved_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.worker.sleep_mode_backend.suspend(level)

    def wake_up(self, tags: list[str]) -> None:
        self._wake(self.worker, tags)
        self.executor.sleeping_tags -= set(tags)

    def _map(self, handle: tuple[int, ...]) -> None:
        if not self.budget:
            raise RuntimeError("CUDA Error: out of memory")
        self.budget -= 1
        next(pages for pages in self.pages.values() if pages.data_ptr() == handle[2]).fill_(torch.nan)

    def _unmap(self, handle: tuple[int, ...]) -> None:
        self.budget += 1


@pytest.fixture
def segmented(monkeypatch: pytest.MonkeyPatch) -> Segmented:
    return Segmented(monkeypatch)


@pytest.mark.slow  # imports vLLM
def test_weights_wake_group_by_group(segmented: Segmented) -> None:
    memory, live = SleepMode(lambda: segmented), segmented.live
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    memory.free(live)
    assert segmented.asleep() == list(segmented.pages)
    memory.restore(live, segmented.storages("d"))
    assert segmented.asleep() == ["second", "kv"]  # the first holds a buffer, whose contents are back:
    assert bool((segmented.model.rotary == 7).all())
    assert memory.nbytes(live) == 2 * 64
    live["d"].fill_(1)
    memory.restore(live, segmented.storages("b"))
    assert segmented.asleep() == ["kv"]
    live["c"].fill_(2)
    memory.restore(live, segmented.storages("c"))
    memory.complete()
    assert bool((live["d"] == 1).all() and (live["c"] == 2).all())  # nothing is mapped anew
    memory.wake_kv_cache()
    assert segmented.asleep() == []
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses


@pytest.mark.slow
def test_a_segment_with_a_tensor_that_nobody_knows_wakes_at_once(segmented: Segmented) -> None:
    memory = SleepMode(lambda: segmented)
    segmented.requested["third"] += 16
    memory.free(segmented.live)
    memory.restore(segmented.live, [])
    assert segmented.asleep() == ["second", "kv"]


@pytest.mark.slow
def test_a_weight_that_is_a_buffer_wakes_at_once(segmented: Segmented) -> None:
    """vLLM copies into it as it wakes up what it had before."""
    segmented.model.register_buffer("written", segmented.live["d"])
    memory = SleepMode(lambda: segmented)
    memory.free(segmented.live)
    memory.restore(segmented.live, [])
    assert segmented.asleep() == ["second", "kv"]


@pytest.mark.slow
def test_what_was_derived_wakes_with_the_weights_of_its_group(segmented: Segmented) -> None:
    memory = SleepMode(lambda: segmented)
    memory.free(segmented.live)
    memory.restore(segmented.live, segmented.storages("passes through"), beside=["c"])
    assert segmented.asleep() == ["third", "kv"]


@pytest.mark.slow
def test_what_no_group_asks_for_wakes_in_the_end(segmented: Segmented) -> None:
    memory = SleepMode(lambda: segmented)
    memory.free(segmented.live)
    memory.restore(segmented.live, [])
    assert segmented.asleep() == ["second", "third", "kv"]
    memory.complete()
    assert segmented.asleep() == ["kv"]


@pytest.mark.slow
def test_a_segment_without_memory_leaves_vllm_ready_to_sleep(segmented: Segmented) -> None:
    memory, live = SleepMode(lambda: segmented), segmented.live
    memory.free(live)
    segmented.budget = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.restore(live, segmented.storages("d"))
    assert not memory.is_given_back(live)
    memory.free(live)
    assert segmented.asleep() == list(segmented.pages)
    segmented.budget = 100
    memory.restore(live, segmented.storages("d"))
    assert segmented.asleep() == ["second", "kv"]


@pytest.mark.slow
def test_a_wake_up_that_fails_marks_every_segment_asleep(segmented: Segmented) -> None:
    memory, live = SleepMode(lambda: segmented), segmented.live
    memory.free(live)
    segmented.budget = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.restore(live, segmented.storages("d"))
    memory.free(live)
    assert segmented.asleep() == list(segmented.pages)


@pytest.mark.slow
def test_with_another_way_of_sleeping_vllm_wakes_whole(segmented: Segmented) -> None:
    segmented.worker._sleep_saved_parameters = {"a": torch.zeros(1)}
    memory = SleepMode(lambda: segmented)
    memory.free(segmented.live)
    segmented.worker.model_runner.model.get_parameter = lambda _: torch.zeros(1)
    segmented.worker._restore_sleep_parameters = lambda _: None
    memory.restore(segmented.live, [])
    assert segmented.asleep() == ["kv"]


@pytest.mark.slow
def test_the_kv_cache_goes_where_weights_stay(segmented: Segmented) -> None:
    memory = SleepMode(lambda: segmented)
    for _ in range(2):
        memory.free_kv_cache()
        memory.free_kv_cache()
        assert segmented.asleep() == ["kv"]
        memory.wake_kv_cache()
        assert segmented.asleep() == []


@pytest.mark.slow
def test_a_kv_cache_that_does_not_fit_takes_nothing(segmented: Segmented) -> None:
    memory = SleepMode(lambda: segmented)
    segmented.add("kv, second part", "kv_cache")
    memory.free_kv_cache()
    segmented.budget = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        memory.wake_kv_cache()
    assert segmented.asleep() == ["kv", "kv, second part"]
    segmented.budget = 2
    memory.wake_kv_cache()
    assert segmented.asleep() == []


@pytest.mark.parametrize("is_asleep", [True, False])
def test_before_the_end_all_goes_to_sleep_and_then_the_error_of_freeing_it_is_taken_away(
    monkeypatch: pytest.MonkeyPatch, is_asleep: bool
) -> None:
    memory, llm = SleepMode(lambda: llm), PartlyAwake()
    monkeypatch.setattr(internals, "worker_of", lambda llm: SimpleNamespace(sleep_mode_backend=llm))
    memory.is_kv_cache_asleep = is_asleep
    unmap = mock.Mock(side_effect=RuntimeError("CUDA Error: invalid argument"))
    monkeypatch.setattr(internals, "UNMAP", mock.Mock(load=lambda: unmap))
    memory.before_shutdown(llm)
    memory.after_shutdown()
    assert llm.calls == ["suspend 2"] * is_asleep
    assert unmap.called == is_asleep


def test_an_engine_is_built_only_where_vllms_allocator_has_nothing_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    unmap = mock.Mock(side_effect=RuntimeError("CUDA Error: invalid argument"))
    allocator = mock.Mock(get_current_usage=lambda: 0)
    monkeypatch.setattr(internals, "UNMAP", mock.Mock(load=lambda: unmap))
    monkeypatch.setattr(internals, "CUMEM_ALLOCATOR", mock.Mock(load=lambda: SimpleNamespace(instance=None)))
    require_unused_allocator()
    unmap.assert_not_called()
    monkeypatch.setattr(internals, "CUMEM_ALLOCATOR", mock.Mock(load=lambda: SimpleNamespace(instance=allocator)))
    require_unused_allocator()
    unmap.assert_called_once_with((0, 0, 0, 0))
    allocator.get_current_usage = lambda: 7
    with pytest.raises(StateError, match="7 bytes of an earlier vLLM's weights or caches are in use"):
        require_unused_allocator()


def test_without_sleep_mode_weights_stay_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    memory = WeightMemory()
    with caplog.at_level(logging.WARNING):
        memory.free(LIVE)
    assert "its 16 bytes of weights stay on the device" in caplog.text
    assert memory.nbytes(LIVE) == 16

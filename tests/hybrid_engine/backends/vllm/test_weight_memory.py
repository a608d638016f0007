"""GPU memory of weights with and without vLLM's sleep mode; test_adaptor.py covers CPUs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm.weights.weight_memory import (
    SleepMode,
    WeightMemory,
    prepare_allocator,
    without_what_stays,
)
from hybrid_engine.errors import StateError
from tests.harness.errors import has_code
from tests.hybrid_engine.backends.vllm import sleeping
from tests.hybrid_engine.backends.vllm.sleeping import SleepingVllm
from tests.software_gpu.device import GRANULE, VirtualMemory, limit, load_driver, virtual_memory

ALL = ["second", "third", "kv"]


@pytest.fixture(params=["compiled", "ported"])
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SleepingVllm]:
    api = load_driver()
    extension = sleeping.compiled() if request.param == "compiled" else sleeping.Ported(api)
    vllm = SleepingVllm(monkeypatch, api, extension)
    yield vllm
    vllm.leave()


@pytest.fixture
def memory(vllm: SleepingVllm) -> SleepMode:
    return SleepMode(lambda: vllm.worker)


def storages(*names: str) -> list[Any]:
    return [SimpleNamespace(name=name) for name in names]


@pytest.mark.slow  # imports vLLM
def test_module_tensors_leave_the_memory_of_weights(vllm: SleepingVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("imported_while_weights_are_loaded")
    module.table = table = vllm.over("second", 0)
    table.copy_(torch.arange(table.numel()))  # like the table of FP4 values in compressed_tensors
    before = table.data_ptr()
    load = without_what_stays(lambda _: monkeypatch.setitem(sys.modules, module.__name__, module))
    load(SimpleNamespace(device=torch.device("cpu")))
    assert module.table is table
    assert table.data_ptr() != before
    assert torch.equal(table, torch.arange(table.numel(), dtype=table.dtype))


@pytest.mark.slow  # imports vLLM
def test_weights_wake_up_group_by_group(vllm: SleepingVllm, memory: SleepMode) -> None:
    live = vllm.live
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    for value in (1, 2):
        memory.free(live)  # twice: the second call changes nothing
        memory.free(live)
        assert vllm.asleep() == ALL
        assert memory.nbytes(live) == 0
        memory.restore(live, storages("d"))
        assert vllm.asleep() == ["second", "kv"]
        # What no fill writes has stayed.
        assert bool((vllm.model.rotary == 7).all() and (vllm.workspace == 5).all())
        assert memory.nbytes(live) == 2 * 64
        live["d"].fill_(value)
        memory.restore(live, storages("b"))
        assert vllm.asleep() == ["kv"]
        live["c"].fill_(value)
        memory.restore(live, storages("c"))
        memory.complete()
        # Mapping a segment again would lose the values.
        assert bool((live["d"] == value).all() and (live["c"] == value).all())
        memory.wake_kv_cache()
        memory.wake_kv_cache()
        assert vllm.asleep() == []
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses


def unknown_tensor(vllm: SleepingVllm) -> None:
    vllm.requested["third"] += 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "derived", "asleep"),
    [
        (lambda _: None, [], ["second", "third", "kv"]),
        (lambda _: None, ["c"], ["third", "kv"]),
        (unknown_tensor, [], ["second", "kv"]),
    ],
)
def test_segments_with_anything_else_stay(
    vllm: SleepingVllm, memory: SleepMode, change: Callable[[SleepingVllm], None], derived: list[str], asleep: list[str]
) -> None:
    change(vllm)
    memory.free(vllm.live)
    memory.restore(vllm.live, storages("passes through"), others=derived)
    assert vllm.asleep() == asleep
    memory.complete()
    assert vllm.asleep() == ["kv"]


@pytest.mark.slow
def test_a_wake_up_without_memory_can_be_undone(vllm: SleepingVllm, memory: SleepMode) -> None:
    live = vllm.live
    memory.free(live)
    limit(virtual_memory().nbytes + GRANULE)
    with pytest.raises(RuntimeError, match=r"(?i)out.of.memory"):
        memory.restore(live, storages("d", "b"))
    assert not memory.is_given_back(live)
    memory.free(live)
    memory.free(live)
    assert vllm.asleep() == ALL
    limit(None)
    memory.restore(live, storages("d"))
    assert vllm.asleep() == ["second", "kv"]


@pytest.mark.slow
def test_the_kv_cache_is_freed_while_weights_stay(vllm: SleepingVllm, memory: SleepMode) -> None:
    vllm.add("kv, second part", "kv_cache")
    kv_segments = ["kv", "kv, second part"]
    for _ in range(2):
        memory.free_kv_cache()
        memory.free_kv_cache()
        assert vllm.asleep() == kv_segments
        limit(virtual_memory().nbytes + GRANULE)  # room for one of two segments
        with pytest.raises(RuntimeError, match=r"(?i)out.of.memory"):
            memory.wake_kv_cache()
        assert vllm.asleep() == kv_segments  # a cache that does not fit takes no memory
        limit(None)
        memory.wake_kv_cache()
        assert vllm.asleep() == []


@pytest.mark.slow
@pytest.mark.parametrize("asleep", [[], ["kv"], ALL])
def test_the_next_engine_gets_memory_after_the_end(vllm: SleepingVllm, memory: SleepMode, asleep: list[str]) -> None:
    if asleep == ALL:
        memory.free(vllm.live)
    elif asleep:
        memory.free_kv_cache()
    assert vllm.asleep() == asleep
    # The driver reuses the handles of released memory, here for an owner that keeps using it.
    handles = [vllm.driver.create(GRANULE) for _ in ALL]
    vllm.end("kv", "first", "workspace", "second", "third")  # vLLM ends the pool of the cache first
    assert virtual_memory() == VirtualMemory(len(handles), nbytes=len(handles) * GRANULE)
    for handle in handles:
        vllm.driver.release(handle)
    vllm.add("next", "weights")


@pytest.mark.slow
def test_a_sleeping_engine_can_end_on_a_full_device(vllm: SleepingVllm, memory: SleepMode) -> None:
    memory.free(vllm.live)
    handles = [vllm.driver.create(GRANULE) for _ in ALL]
    limit(virtual_memory().nbytes)
    vllm.end()
    assert virtual_memory() == VirtualMemory(len(handles), nbytes=len(handles) * GRANULE)
    limit(None)
    for handle in handles:
        vllm.driver.release(handle)
    prepare_allocator()
    vllm.add("next", "weights")


@pytest.mark.slow
def test_segments_released_by_vllm_end_with_their_pool(vllm: SleepingVllm, memory: SleepMode) -> None:
    vllm.add("free after loading", "weights")
    vllm.trim("free after loading")  # vLLM does so after loading
    memory.free(vllm.live)
    vllm.end()
    assert virtual_memory() == VirtualMemory()


@pytest.mark.slow
def test_memory_that_outlives_its_engine_is_reported(vllm: SleepingVllm, memory: SleepMode) -> None:
    memory.free(vllm.live)
    vllm.end("kv", "workspace")
    with pytest.raises(StateError, check=has_code("earlier-engine-in-use", str(3 * GRANULE))):
        prepare_allocator()
    vllm.end()
    prepare_allocator()
    vllm.add("next", "weights")


def test_without_sleep_mode_weights_stay_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    memory = WeightMemory()
    live = {"norm.weight": torch.zeros(4)}
    with caplog.at_level(logging.WARNING):
        memory.free(live)
    assert "its 16 bytes of weights stay on the device" in caplog.text
    assert memory.nbytes(live) == 16

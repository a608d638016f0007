"""Memory on a GPU, with and without vLLM's sleep mode; test_adaptor.py has a CPU's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm.weights.weight_memory import (
    SleepingLlm,
    SleepingWorker,
    SleepMode,
    WeightMemory,
    prepare_allocator,
)
from hybrid_engine.errors import StateError
from tests.harness.errors import has_code
from tests.hybrid_engine.backends.vllm import sleeping
from tests.hybrid_engine.backends.vllm.sleeping import SleepingVllm
from tests.software_gpu.device import GRANULE, VirtualMemory, limit, load_driver, virtual_memory

ALL = ["first", "workspace", "second", "third", "kv"]


@pytest.fixture(params=["compiled", "ported"])
def vllm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SleepingVllm]:
    api = load_driver()
    extension = sleeping.compiled() if request.param == "compiled" else sleeping.Ported(api)
    vllm = SleepingVllm(monkeypatch, api, extension)
    yield vllm
    vllm.leave()


@pytest.fixture(params=["engine of this process", "server's worker"])
def memory(request: pytest.FixtureRequest, vllm: SleepingVllm) -> SleepMode:
    if request.param == "engine of this process":
        return SleepMode(SleepingLlm(lambda: vllm))
    sleeper = SleepingWorker()
    sleeper.worker = vllm.worker
    return SleepMode(sleeper)


def storages(*names: str) -> list[Any]:
    return [SimpleNamespace(name=name) for name in names]


@pytest.mark.slow  # imports vLLM
def test_a_module_keeps_the_tensor_that_it_made_of_weights_memory(
    vllm: SleepingVllm, memory: SleepMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compressed_tensors' table of FP4 values, which vLLM imports while it loads weights."""
    module = ModuleType("imported_while_weights_are_loaded")
    module.table = table = vllm.over("first", 0)
    table.copy_(torch.arange(table.numel()))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    memory.free(vllm.live)
    assert module.table is table
    assert torch.equal(table, torch.arange(table.numel(), dtype=table.dtype))


@pytest.mark.slow  # imports vLLM
def test_weights_wake_group_by_group(vllm: SleepingVllm, memory: SleepMode) -> None:
    live = vllm.live
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    for value in (1, 2):
        memory.free(live)
        memory.free(live)
        assert vllm.asleep() == ALL
        assert memory.nbytes(live) == 0
        memory.restore(live, storages("d"))
        assert vllm.asleep() == ["second", "kv"]  # the first holds a buffer, whose contents are back:
        assert bool((vllm.model.rotary == 7).all() and (vllm.workspace == 5).all())
        assert memory.nbytes(live) == 2 * 64
        live["d"].fill_(value)
        memory.restore(live, storages("b"))
        assert vllm.asleep() == ["kv"]
        live["c"].fill_(value)
        memory.restore(live, storages("c"))
        memory.complete()
        assert bool((live["d"] == value).all() and (live["c"] == value).all())  # nothing is mapped anew
        memory.wake_kv_cache()
        memory.wake_kv_cache()
        assert vllm.asleep() == []
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == addresses


def unknown_tensor(vllm: SleepingVllm) -> None:
    vllm.requested["third"] += 16


def weight_that_is_a_buffer(vllm: SleepingVllm) -> None:
    """vLLM copies into it as it wakes up what it had before."""
    vllm.model.register_buffer("written", vllm.live["d"])


def another_way_of_sleeping(vllm: SleepingVllm) -> None:
    """Some parameters keep their contents."""
    saved = vllm.worker._sleep_saved_parameters
    bias = torch.nn.Parameter(vllm.over("third", 0))
    vllm.model.register_parameter("bias", bias)
    vllm.worker._save_sleep_parameters = lambda _: saved.update(bias=bias.detach().clone())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "derived", "asleep"),
    [
        (lambda _: None, [], ["second", "third", "kv"]),
        (lambda _: None, ["c"], ["third", "kv"]),
        (unknown_tensor, [], ["second", "kv"]),
        (weight_that_is_a_buffer, [], ["second", "kv"]),
        (another_way_of_sleeping, [], ["kv"]),
    ],
)
def test_what_wakes_at_once(
    vllm: SleepingVllm, memory: SleepMode, change: Callable[[SleepingVllm], None], derived: list[str], asleep: list[str]
) -> None:
    change(vllm)
    memory.free(vllm.live)
    memory.restore(vllm.live, storages("passes through"), others=derived)
    assert vllm.asleep() == asleep
    memory.complete()
    assert vllm.asleep() == ["kv"]


@pytest.mark.slow
@pytest.mark.parametrize("num_awake", [1, 2])
def test_without_memory_for_a_wake_up_all_goes_back_to_sleep(
    vllm: SleepingVllm, memory: SleepMode, num_awake: int
) -> None:
    live = vllm.live
    memory.free(live)
    limit(num_awake * GRANULE)
    with pytest.raises(RuntimeError, match=r"(?i)out.of.memory"):
        memory.restore(live, storages("d"))
    assert not memory.is_given_back(live)
    if num_awake == 1 and vllm.is_told():  # in vLLM's own wake-up, after which it passes over what woke:
        vllm.sleep(level=2)
        assert memory.nbytes(live) == 0
        assert vllm.asleep() == ALL[1:]
    memory.free(live)
    memory.free(live)
    assert vllm.asleep() == ALL
    limit(None)
    memory.restore(live, storages("d"))
    assert vllm.asleep() == ["second", "kv"]
    assert bool((vllm.model.rotary == 7).all() and (vllm.workspace == 5).all())


@pytest.mark.slow
def test_the_kv_cache_goes_where_weights_stay(vllm: SleepingVllm, memory: SleepMode) -> None:
    vllm.add("kv, second part", "kv_cache")
    both = ["kv", "kv, second part"]
    for _ in range(2):
        memory.free_kv_cache()
        memory.free_kv_cache()
        assert vllm.asleep() == both
        limit(virtual_memory().nbytes + GRANULE)
        with pytest.raises(RuntimeError, match=r"(?i)out.of.memory"):
            memory.wake_kv_cache()
        assert vllm.asleep() == both  # nothing of a cache that does not fit is taken
        limit(None)
        memory.wake_kv_cache()
        assert vllm.asleep() == []


@pytest.mark.slow
@pytest.mark.parametrize("asleep", [[], ["kv"], ALL])
def test_after_the_end_the_next_engine_gets_memory(vllm: SleepingVllm, memory: SleepMode, asleep: list[str]) -> None:
    if asleep == ALL:
        memory.free(vllm.live)
    elif asleep:
        memory.free_kv_cache()
    assert vllm.asleep() == asleep
    # What released memory was known by, the driver gives away again: here to one who goes on using it.
    others = [vllm.driver.create(GRANULE) for _ in ALL]
    vllm.end("kv", *ALL[:-1])  # vLLM ends the cache's pool first
    assert virtual_memory() == VirtualMemory(len(others), nbytes=len(others) * GRANULE)
    for handle in others:
        vllm.driver.release(handle)
    vllm.add("next", "weights")


@pytest.mark.slow
def test_an_engine_that_sleeps_ends_on_a_full_device(vllm: SleepingVllm, memory: SleepMode) -> None:
    memory.free(vllm.live)
    others = [vllm.driver.create(GRANULE) for _ in ALL]
    limit(virtual_memory().nbytes)
    vllm.end()
    assert virtual_memory() == VirtualMemory(len(others), nbytes=len(others) * GRANULE)
    limit(None)
    for handle in others:
        vllm.driver.release(handle)
    prepare_allocator()
    vllm.add("next", "weights")


@pytest.mark.slow
def test_what_vllm_has_released_itself_ends_with_its_pool(vllm: SleepingVllm, memory: SleepMode) -> None:
    """As vLLM releases what is free once weights are loaded, of which torch hears nothing."""
    vllm.add("free after loading", "weights")
    vllm.trim("free after loading")
    memory.free(vllm.live)
    vllm.end()
    assert virtual_memory() == VirtualMemory()


@pytest.mark.slow
def test_tensors_that_outlive_their_engine_are_named_and_harmless(vllm: SleepingVllm, memory: SleepMode) -> None:
    memory.free(vllm.live)
    vllm.end("kv", "workspace")
    with pytest.raises(StateError, check=has_code("earlier-engine-in-use", str(3 * GRANULE))):
        prepare_allocator()
    vllm.end()
    prepare_allocator()
    vllm.add("next", "weights")


def test_without_sleep_mode_weights_stay_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    memory, live = WeightMemory(), {"norm.weight": torch.zeros(4)}
    with caplog.at_level(logging.WARNING):
        memory.free(live)
    assert "its 16 bytes of weights stay on the device" in caplog.text
    assert memory.nbytes(live) == 16

"""Copies in the background; switch/test_prefetch.py has limits and what is dropped again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_engine.errors import OffloadError
from hybrid_engine.memory import arena
from hybrid_engine.memory import offload_items as inventory_module
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offload_items import Items, OffloadItem
from hybrid_engine.memory.offloader import Offloader
from tests.harness.errors import has_code

NUMEL = 4096
NBYTES = 4 * NUMEL


class Rig:
    """Four tensors of one size in each copied kind, with their expected values."""

    def __init__(self, *, elastic: bool = False) -> None:
        make: Callable[[], torch.Tensor] = (
            (lambda: allocate_elastic(NUMEL, torch.float32, "cpu", "param")) if elastic else lambda: torch.zeros(NUMEL)
        )
        self.tensors = {kind: [make() for _ in range(4)] for kind in ("param", "optimizer")}
        self.offloader = Offloader(Items(self.inventory), "cpu")
        self.write(0)

    def inventory(self) -> list[OffloadItem]:
        return [OffloadItem(f"{kind} {n}", kind, t) for kind in self.tensors for n, t in enumerate(self.tensors[kind])]

    def write(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.all():
            tensor.normal_(generator=generator)
        self.expected = [tensor.clone() for tensor in self.all()]

    def all(self) -> list[torch.Tensor]:
        return [tensor for tensors in self.tensors.values() for tensor in tensors]

    def on_device(self, kind: str) -> list[bool]:
        resident = self.offloader.resident_nbytes()[kind]
        return [resident[f"{kind} {n}"] > 0 for n in range(4)]

    def assert_restored(self) -> None:
        assert all(map(torch.equal, self.all(), self.expected))

    def assert_onload_restores(self) -> None:
        self.offloader.onload()
        self.assert_restored()

    def assert_still_works(self) -> None:
        """Assert that an offload and onload of other values succeeds."""
        self.write(1)
        self.offloader.offload()
        self.assert_onload_restores()


@pytest.fixture(params=[False, True], ids=["resized", "elastic"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(elastic=request.param)


def test_an_onload_without_wait_returns_before_the_copy(gate: threading.Event):
    rig = Rig(elastic=True)  # restored memory holds zeros until the copy
    rig.offloader.offload()
    rig.offloader.onload(["optimizer"], read_only=True, wait=False)
    assert not any(map(torch.equal, rig.tensors["optimizer"], rig.expected[4:]))
    gate.set()
    rig.assert_onload_restores()


def test_an_offload_that_began_frees_nothing_until_offload_is_called(rig: Rig, gate: threading.Event):
    rig.offloader.begin_offload(["optimizer"])
    assert rig.offloader.offload(["param"]).nbytes == {"param": 4 * NBYTES}  # does not wait for it
    assert rig.on_device("optimizer") == [True] * 4
    gate.set()
    assert rig.offloader.offload().nbytes == {"grad": 0, "optimizer": 4 * NBYTES}
    assert rig.on_device("optimizer") == [False] * 4
    rig.assert_onload_restores()


def test_queued_copies_end_before_their_memory_is_freed(
    rig: Rig, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.offloader.offload()
    departure = rig.offloader.departure("optimizer")
    rig.offloader.onload(["optimizer"], wait=False)
    assert rig.offloader.departure("optimizer") is not departure
    gate.set()
    calls: list[str] = []
    call_off = inventory_module.Storage.call_off
    monkeypatch.setattr(rig.offloader._copier, "finish", calls.append)
    monkeypatch.setattr(inventory_module.Storage, "call_off", lambda s: calls.append(s.owner) or call_off(s))
    rig.offloader.offload(["optimizer"])
    assert calls[:5] == ["to device", *(f"optimizer {n}" for n in range(4))]
    rig.assert_onload_restores()


def test_what_an_onload_calls_off_is_copied_again(rig: Rig) -> None:
    rig.offloader.begin_offload(["optimizer"])
    rig.offloader.onload(["optimizer"])
    rig.assert_still_works()


def test_a_failure_to_begin_an_offload_moves_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    def full(*_arguments: Any, **_options: Any) -> None:
        raise MemoryError("no host memory")

    monkeypatch.setattr(arena.Arena, "reserve", full)
    with pytest.raises(OffloadError, check=has_code("offload-failed", "no host memory")):
        rig.offloader.begin_offload()
    monkeypatch.undo()
    rig.assert_still_works()


def test_without_a_thread_the_copy_is_made_by_the_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    start = threading.Thread.start
    refused = ["once"]

    def refusing(self: threading.Thread) -> None:
        if refused:
            raise RuntimeError(f"can't start new thread, {refused.pop()}")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    rig.offloader.offload()
    rig.offloader.onload(wait=False)
    assert not refused
    rig.assert_onload_restores()
    rig.write(1)  # a copy left in a queue would overwrite these values
    rig.offloader.begin_offload(["optimizer"])
    rig.offloader.offload()
    rig.assert_onload_restores()


@pytest.mark.parametrize("is_lasting", [False, True])
def test_contents_of_a_failed_copy_stay_in_host_memory(rig: Rig, is_lasting: bool, monkeypatch: pytest.MonkeyPatch):
    copy = arena._timed_copy
    errors = [OSError("bus")] * (100 if is_lasting else 1)

    def failing(*tensors: torch.Tensor) -> float:
        if errors:
            raise errors.pop()
        return copy(*tensors)

    rig.offloader.offload()
    monkeypatch.setattr(arena, "_timed_copy", failing)
    rig.offloader.onload(["optimizer"], wait=False)
    if is_lasting:
        with pytest.raises(OffloadError, check=has_code("onload-failed", "optimizer", "bus")):
            rig.offloader.wait()
        errors.clear()
    rig.assert_onload_restores()
    rig.assert_still_works()


class Stop(BaseException):
    """Stand-in for KeyboardInterrupt."""


def test_a_copy_that_began_before_an_interrupt_is_waited_for(
    rig: Rig, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        raise Stop

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(Stop):
        rig.offloader.begin_offload(["optimizer"])
    monkeypatch.undo()
    threading.Timer(0.1, gate.set).start()  # the copy ends while offload waits
    rig.offloader.offload()
    assert gate.is_set()
    rig.assert_onload_restores()


@pytest.mark.parametrize("error", [Stop, MemoryError])
def test_memory_of_a_failed_onload_is_released(rig: Rig, error: type, monkeypatch: pytest.MonkeyPatch):
    take_back = inventory_module.Storage.take_back

    def failing(storage: Any) -> None:
        take_back(storage)
        storage.bytes_view().fill_(1)
        raise error

    rig.offloader.offload()
    monkeypatch.setattr(inventory_module.Storage, "take_back", failing)
    with pytest.raises((Stop, OffloadError)):
        rig.offloader.onload(["optimizer"])
    monkeypatch.undo()
    rig.offloader.offload()
    assert rig.on_device("optimizer") == [False] * 4
    rig.assert_onload_restores()

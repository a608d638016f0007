"""State that comes back late, behind other work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from hybrid_engine.errors import OffloadError, StateError
from hybrid_engine.memory import offload_items as inventory_module
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offload_items import KINDS, LATE_KINDS, Items, OffloadItem, survey
from hybrid_engine.memory.offloader import Offloader
from tests.harness.errors import refused
from tests.harness.late_copies import SECONDS, SECONDS_EXPOSED, LateCopies
from tests.hybrid_engine.memory.test_offloader import CopiesToHost

NUMEL = 4096
NBYTES = 4 * NUMEL


class Rig:
    """Four tensors of one size in each copied kind, with their expected values."""

    def __init__(self, *, elastic: bool = False) -> None:
        make: Callable[[], torch.Tensor] = (
            (lambda: allocate_elastic(NUMEL, torch.float32, "cpu", "param"))
            if elastic
            else lambda: torch.zeros(NUMEL)
        )
        self.tensors = {kind: [make() for _ in range(4)] for kind in ("param", "optimizer")}
        self.offloader = Offloader(items := Items(self.inventory), "cpu")
        self.optimizer = torch.optim.SGD(self.all())
        items.guard.reach([self.optimizer])
        self.write(0)

    def inventory(self) -> list[OffloadItem]:
        return [
            OffloadItem(f"{kind} {n}", kind, t)
            for kind in self.tensors
            for n, t in enumerate(self.tensors[kind])
        ]

    def write(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.all():
            tensor.normal_(generator=generator)
        self.expected = [tensor.clone() for tensor in self.all()]

    def all(self) -> list[torch.Tensor]:
        return [tensor for tensors in self.tensors.values() for tensor in tensors]

    def on_device(self, kind: str) -> list[bool]:
        return [
            s.resident_nbytes() > 0
            for s in survey(self.inventory(), "cpu").storages
            if s.kind == kind
        ]

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


USES: dict[str, Callable[[Rig], object]] = {
    "guard": lambda rig: rig.offloader.require_present(KINDS),
    "wait": lambda rig: rig.offloader.wait(),
    "onload": lambda rig: rig.offloader.onload(),
    "direct use": lambda rig: rig.tensors["optimizer"][0].norm(),
}


@pytest.mark.parametrize("use", USES)
def test_late_state_is_there_before_its_use(rig: Rig, late_copies: LateCopies, use: str):
    with rig.offloader.owner_rests():
        rig.offloader.offload()
    for kind, tensors in rig.tensors.items():
        assert tensors[0].shape == (NUMEL,)
        for call in (tensors[0].norm, tensors[1].zero_, partial(copy.deepcopy, tensors[2])):
            with refused(StateError, "state-is-offloaded", kind):
                call()
    with rig.offloader.owner_rests():
        rig.offloader.onload(late=LATE_KINDS)
    for _ in range(2):
        rig.offloader.require_present(["param", "grad"])
        assert len(late_copies.under_way) == 4, "passes wait for no optimizer state"
    assert not rig.offloader.is_offloaded("optimizer")
    USES[use](rig)
    rig.assert_restored()
    assert {type(tensor) for tensor in rig.all()} == {torch.Tensor}
    rig.offloader.require_present(KINDS)
    waited = use != "onload"
    exposed = waited * SECONDS_EXPOSED
    assert rig.offloader.take_seconds_behind() == (waited * 4 * SECONDS - exposed, exposed)
    assert rig.offloader.take_seconds_behind() == (0, 0)
    rig.assert_still_works()


@pytest.mark.parametrize("kind", KINDS)
def test_late_state_that_leaves_again_keeps_its_contents(
    rig: Rig, late_copies: LateCopies, kind: str
):
    rig.offloader.offload()
    departure = rig.offloader.departure("optimizer")
    rig.offloader.onload(late=LATE_KINDS)
    assert rig.offloader.departure("optimizer") is not departure
    copies = CopiesToHost(rig.offloader)
    assert rig.offloader.offload([kind, "optimizer"]) == 4 * NBYTES * len(
        {kind, "optimizer"} - {"grad"}
    )
    assert late_copies.under_way == [], "memory goes after its copies"
    assert copies.nbytes == 4 * NBYTES * (kind == "param")
    assert rig.on_device("optimizer") == [False] * 4
    with refused(StateError, "state-is-offloaded", "optimizer"):
        rig.offloader.require_present(["optimizer"])
    rig.assert_onload_restores()


@pytest.mark.parametrize("use", USES)
def test_contents_of_a_failed_copy_stay_in_host_memory(rig: Rig, late_copies: LateCopies, use: str):
    with rig.offloader.owner_rests():
        rig.offloader.offload()
        rig.offloader.onload(late=LATE_KINDS)
    for _ in range(2):
        late_copies.errors = [OSError("bus")]
        with refused(OffloadError, "onload-failed", "optimizer", "bus"):
            USES[use](rig)
    USES[use](rig)
    rig.assert_restored()
    rig.assert_still_works()


class Stop(BaseException):
    """Stand-in for KeyboardInterrupt."""


@pytest.mark.parametrize("error", [Stop, MemoryError])
def test_memory_of_a_failed_onload_is_released(
    rig: Rig, error: type, monkeypatch: pytest.MonkeyPatch
):
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

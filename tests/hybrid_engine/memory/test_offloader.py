"""Offload and onload change only the location of bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_engine.errors import OffloadError, StateError
from hybrid_engine.memory.arena import Copier, QueuedCopy
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offload_items import KINDS, Items, OffloadItem, Part, Storage
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ranks.torch_internals import TensorDict
from tests.harness.errors import refused

SIZE = 32
PAGE = os.sysconf("SC_PAGE_SIZE")


def fail(
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    method: str,
    after: int = 0,
    owner: str | None = None,
) -> None:
    """Make one call of a method fail as when out of memory, after `after` successful calls.

    owner: counts and fails only calls on the storage of that name.
    """
    original = getattr(kind, method)
    calls = iter(range(after + 1))

    def failing(self: Any, *arguments: Any, **options: Any) -> Any:
        if owner in (None, getattr(self, "owner", None)) and next(calls, None) == after:
            raise RuntimeError("out of memory")
        return original(self, *arguments, **options)

    monkeypatch.setattr(kind, method, failing)


class CopiesToHost(Copier):
    """Makes copies at once and counts their bytes.

    Attributes:
        nbytes: bytes copied to the host.
    """

    def __init__(self, offloader: Offloader) -> None:
        """Make the copies of an offloader."""
        # The offloader's arenas wait for these streams before they free memory.
        self._streams = offloader._copier._streams
        self.nbytes = 0
        offloader._copier = self

    def copy(self, destination: torch.Tensor, source: torch.Tensor, direction: Any) -> QueuedCopy:
        if direction == "to host":
            self.nbytes += source.numel()
        return super().copy(destination, source, direction)


class Model:
    """A network with Adam; parameters and gradients are views of flat buffers, like Megatron's."""

    def __init__(
        self, *, elastic: bool, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
    ) -> None:
        torch.manual_seed(1)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(SIZE, SIZE), torch.nn.Tanh(), torch.nn.Linear(SIZE, SIZE)
        )
        numel = sum(parameter.numel() for parameter in self.network.parameters())
        self.param_data = self._allocate(numel, "param", elastic)
        self.grad_data = self._allocate(numel, "grad", elastic)
        start = 0
        for parameter in self.network.parameters():
            stop = start + parameter.numel()
            self.param_data[start:stop] = parameter.data.flatten()
            parameter.data = self.param_data[start:stop].view(parameter.shape)
            parameter.grad = self.grad_data[start:stop].view(parameter.shape)
            start = stop
        self.optimizer = optimizer(self.network.parameters(), lr=0.01)

    @staticmethod
    def _allocate(numel: int, kind: str, elastic: bool) -> torch.Tensor:
        if elastic:
            return allocate_elastic(numel, torch.float32, "cpu", kind)
        return torch.zeros(numel)

    def inventory(self) -> list[OffloadItem]:
        return [
            OffloadItem("flat params", "param", self.param_data),
            OffloadItem("flat grads", "grad", self.grad_data, "drop"),
            *(
                OffloadItem(f"weight of layer {n}", "param", layer.weight)
                for n, layer in enumerate(self.network[::2])
            ),
            *(
                OffloadItem(f"{name} {number}", "optimizer", value)
                for number, state in enumerate(self.optimizer.state.values())
                for name, value in state.items()
            ),
        ]

    def step(self, number: int) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        inputs = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(number))
        self.network(inputs).square().mean().backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        return [
            self.param_data,
            *(value for state in self.optimizer.state.values() for value in state.values()),
        ]


def trained(elastic: bool = False) -> tuple[Model, list[torch.Tensor], Offloader]:
    """Return a model after a step, copies of its tensors, and its offloader."""
    model = Model(elastic=elastic)
    model.step(0)
    before = [tensor.clone() for tensor in (*model.tensors(), model.grad_data)]
    return model, before, Offloader(Items(model.inventory), "cpu")


@pytest.mark.parametrize("elastic", [False, True], ids=["resized", "elastic"])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("kinds", [KINDS, ("optimizer",), ("param", "grad")], ids=str)
def test_offloading_does_not_change_training(elastic: bool, optimizer: type, kinds: tuple):
    plain = Model(elastic=False, optimizer=optimizer)
    moved = Model(elastic=elastic, optimizer=optimizer)
    offloader = Offloader(Items(moved.inventory), "cpu")
    addresses = set()
    for number in range(4):
        plain.step(number)
        moved.step(number)
        before = [tensor.clone() for tensor in moved.tensors()]
        references = moved.tensors()
        offloader.offload(kinds)
        assert all(offloader.is_offloaded(kind) == (kind in kinds) for kind in KINDS)
        resident = offloader.resident_nbytes()
        assert all(resident[kind] == 0 for kind in kinds)
        offloader.onload(kinds)
        assert not any(offloader.is_offloaded(kind) for kind in KINDS)
        assert all(map(torch.equal, references, before))
        addresses.add(tuple(arena.memory.data_ptr() for arena in offloader._arenas.values()))
    assert len(addresses) == 1, "arenas are reused"
    for expected, tensor in zip(plain.tensors(), moved.tensors(), strict=True):
        assert torch.equal(expected, tensor)


@pytest.mark.parametrize("elastic", [False, True], ids=["resized", "elastic"])
def test_bytes_are_counted_once_and_dropped_ones_are_not_copied(elastic: bool):
    model, _, offloader = trained(elastic)
    flat = model.param_data.untyped_storage().nbytes()
    moments = 2 * flat + 4 * 4  # two per parameter, and a step counter for each of four
    nbytes = {"param": flat, "grad": flat, "optimizer": moments}
    copies = CopiesToHost(offloader)
    assert {kind: offloader.offload([kind]) for kind in KINDS} == nbytes
    assert offloader.offload() == 0
    assert copies.nbytes == flat + moments
    assert (
        flat + moments
        <= sum(arena.nbytes for arena in offloader._arenas.values())
        < flat + moments + 16 * 12
    )
    assert {kind: offloader.onload([kind]) for kind in KINDS} == nbytes
    assert offloader.onload() == 0
    assert not model.grad_data.any()


def test_a_storage_of_two_kinds_moves_with_the_first_and_is_copied():
    flat = torch.arange(10.0)
    items = [
        OffloadItem("master weight", "optimizer", flat[:4]),
        OffloadItem("gradient", "grad", flat, "drop"),
    ]
    offloader = Offloader(Items(lambda: items), "cpu")
    copies = CopiesToHost(offloader)
    assert offloader.offload({"optimizer"}) == 0
    assert offloader.offload({"grad"}) == copies.nbytes == 40
    offloader.onload()
    assert torch.equal(flat, torch.arange(10.0))


def test_dropping_a_part_of_a_storage_keeps_the_rest():
    flat = torch.arange(10.0)
    offloader = Offloader(Items(lambda: [OffloadItem("part", "grad", flat[:4], "drop")]), "cpu")
    offloader.offload()
    offloader.onload()
    assert torch.equal(flat[4:], torch.arange(4.0, 10.0))


def test_tensors_of_other_devices_are_not_moved():
    tensor = torch.ones(4)
    offloader = Offloader(Items(lambda: [OffloadItem("step", "optimizer", tensor)]), "meta")
    assert offloader.offload() == 0
    assert bool((tensor == 1).all())


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(4).share_memory_(), "allocate_elastic"),
        (torch.from_numpy(np.zeros(4)), "from_numpy"),
    ],
    ids=["shared", "foreign"],
)
def test_a_storage_that_cannot_be_freed_is_refused_before_any_move(
    tensor: torch.Tensor, reason: str
):
    good = torch.ones(100)
    items = [OffloadItem("good one", "param", good), OffloadItem("module.bad", "param", tensor)]
    offloader = Offloader(Items(lambda: items), "cpu")
    with refused(OffloadError, "cannot-offload", "module.bad", "param", reason):
        offloader.offload()
    assert good.untyped_storage().nbytes() == 400
    assert not offloader.is_offloaded("param")


@pytest.mark.parametrize("elastic", [False, True], ids=["resized", "elastic"])
def test_a_failed_offload_restores_everything(monkeypatch: pytest.MonkeyPatch, elastic: bool):
    model, before, offloader = trained(elastic)
    fail(monkeypatch, Storage, "bytes_view", owner="exp_avg 2")
    with refused(OffloadError, "offload-failed", "out of memory"):
        offloader.offload()
    assert not any(offloader.is_offloaded(kind) for kind in KINDS)
    assert all(map(torch.equal, (*model.tensors(), model.grad_data), before))
    offloader.offload()
    offloader.onload()
    assert all(map(torch.equal, model.tensors(), before))


def test_a_failed_onload_names_locations_and_can_be_continued(monkeypatch: pytest.MonkeyPatch):
    model, before, offloader = trained()
    offloader.offload()
    fail(monkeypatch, Storage, "take_back", owner="exp_avg 1")
    with refused(OffloadError, "onload-failed", "exp_avg 1", "out of memory") as failure:
        offloader.onload()
    on_device, in_arena = str(failure.value).split("Still in host memory")
    assert "exp_avg 0" in on_device
    assert "exp_avg 2" in in_arena
    assert not offloader.is_offloaded("param")
    offloader.require_present(["param", "grad"])  # kinds before the failure are complete and usable
    assert offloader.is_offloaded("optimizer")
    offloader.onload()
    assert not offloader.is_offloaded("optimizer")
    assert all(map(torch.equal, model.tensors(), before))


def test_a_failure_to_restore_is_an_error_and_can_be_continued(monkeypatch: pytest.MonkeyPatch):
    model, before, offloader = trained()
    fail(monkeypatch, Storage, "free", owner="exp_avg 2")
    fail(monkeypatch, Storage, "take_back", owner="flat params")
    with refused(OffloadError, "cannot-restore", "flat params"):
        offloader.offload()
    away = offloader.away_nbytes()
    assert away["param"]
    assert away["optimizer"]
    offloader.onload()
    assert all(map(torch.equal, model.tensors(), before))


class Holder:
    """A flat weight, and a cache computed from it."""

    def __init__(self) -> None:
        self.weight = allocate_elastic(PAGE, torch.int32, "cpu", "param").fill_(1)  # takes pages
        self.caches: TensorDict = {"mask": torch.ones(50)}

    def items(self) -> list[OffloadItem]:
        caches = [
            OffloadItem(n, "param", t, "rebuild", forget=self.caches.clear)
            for n, t in self.caches.items()
        ]
        return [OffloadItem("weight", "param", self.weight), *caches]

    def offloader(self) -> Offloader:
        return Offloader(Items(self.items))


def test_caches_are_dropped_with_their_kind_even_if_it_is_offloaded():
    holder = Holder()
    offloader = holder.offloader()
    assert offloader.resident_nbytes()["param"] == 4 * PAGE + 200
    copies = CopiesToHost(offloader)
    assert offloader.offload({"optimizer"}) == 0
    assert holder.caches
    assert offloader.offload() == 4 * PAGE + 200
    assert copies.nbytes == 4 * PAGE
    assert holder.caches == {}
    holder.caches["mask"] = torch.ones(50)  # computed meanwhile with other weights
    assert offloader.offload() == 200
    assert holder.caches == {}
    assert offloader.onload() == 4 * PAGE


def test_a_view_of_a_weight_is_not_a_cache():
    holder = Holder()
    holder.caches["mask"] = holder.weight[:10]
    offloader = holder.offloader()
    assert offloader.offload() == 4 * PAGE
    assert holder.caches


def test_state_is_guarded_until_every_byte_is_back():
    flat = allocate_elastic(5000, torch.float32, "cpu", "param").fill_(1)
    owner = Items(lambda: [OffloadItem("flat", "param", flat)])
    offloader = Offloader(owner, "cpu")
    another = Offloader(owner, "cpu")  # each offloader has its own guard
    leaving: list[Callable[[], object]] = [
        lambda: offloader.offload({"param"}),
        lambda: offloader.offload_parts("param", [Part(flat, 0, 10)]),
    ]
    for leave in leaving:
        owner.guard(KINDS)
        leave()
        with refused(StateError, "state-is-offloaded", "param"):
            owner.guard(["param"])
        owner.guard(["optimizer"])
        offloader.onload()
    another.offload({"grad"})
    with pytest.raises(StateError):
        owner.guard(KINDS)
    del another
    owner.guard(KINDS)

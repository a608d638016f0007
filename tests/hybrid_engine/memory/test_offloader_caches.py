"""Caches, which are forgotten rather than copied, and what is left on the device."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offload_items import OffloadItem, Reached
from hybrid_engine.memory.offloader import MegatronOffloader
from hybrid_engine.memory.residual import UNACCOUNTED

PAGE = os.sysconf("SC_PAGE_SIZE")


class Holder:
    """A flat weight, a cache that is computed from it, a small thing that stays, and whatever a test adds."""

    def __init__(self) -> None:
        self.weight = allocate_elastic(PAGE, torch.int32, "cpu", "param").fill_(1)  # takes its pages
        self.caches: dict[str, torch.Tensor] = {"mask": torch.ones(50)}
        self.small = torch.ones(3)
        self.extra: dict[str, torch.Tensor] = {}

    def items(self) -> list[OffloadItem]:
        caches = [OffloadItem(n, "param", t, "rebuild", forget=self.caches.clear) for n, t in self.caches.items()]
        return [OffloadItem("weight", "param", self.weight), *caches]

    def reachable(self) -> list[Reached]:
        return [
            Reached("the weight again", self.weight[5:]),
            *(Reached(f"cache {name}", tensor) for name, tensor in self.caches.items()),
            Reached("small", self.small, stays="small"),
            *(Reached(name, tensor) for name, tensor in self.extra.items()),
        ]

    def offloader(self) -> MegatronOffloader:
        return MegatronOffloader(self.items, reachable=self.reachable)


def test_caches_are_forgotten_with_their_kind_even_when_that_is_away():
    holder = Holder()
    offloader = holder.offloader()
    assert offloader.resident_nbytes()["param"] == {"weight": 4 * PAGE, "mask": 200}
    assert offloader.offload({"optimizer"}).nbytes == {"optimizer": 0}
    assert holder.caches
    report = offloader.offload()
    assert report.nbytes["param"] == 4 * PAGE + 200
    assert report.copied_nbytes["param"] == 4 * PAGE
    assert holder.caches == {}
    holder.caches["mask"] = torch.ones(50)  # somebody computed with other weights meanwhile
    assert offloader.offload().nbytes == {}
    assert holder.caches == {}
    assert sum(offloader.onload().nbytes.values()) == 4 * PAGE


def test_a_tensor_that_somebody_keeps_is_no_cache():
    holder = Holder()
    holder.caches["mask"] = holder.weight[:10]
    offloader = holder.offloader()
    assert offloader.offload().nbytes["param"] == 4 * PAGE
    assert holder.caches


def test_residual_names_what_is_on_the_device():
    holder = Holder()
    holder.extra = {"somewhere.scratch": torch.zeros(2)}
    offloader = holder.offloader()
    left = {"small": 12, f"{UNACCOUNTED}somewhere.scratch": 8}
    assert offloader.residual() == {"weight": 4 * PAGE, "mask": 200, **left}
    offloader.offload()
    assert offloader.residual() == left


def test_more_than_a_trifle_that_nobody_lists_is_a_warning_once(caplog: pytest.LogCaptureFixture):
    holder = Holder()
    offloader = holder.offloader()
    with caplog.at_level(logging.WARNING, logger="hybrid_engine"):
        offloader.offload()
        offloader.onload()
        assert caplog.messages == []  # the small thing is known
        fresh = Holder()
        fresh.extra = {"tiny": torch.zeros(1), "somewhere.scratch": torch.zeros(PAGE // 10)}
        offloader = fresh.offloader()
        for _ in range(2):
            offloader.offload()
            offloader.onload()
    [message] = caplog.messages
    assert f"{4 + 4 * (PAGE // 10)} bytes that model or optimizer refer to stay on the device" in message
    assert f"the inventory ({4 * PAGE} bytes)" in message
    assert f"Largest: somewhere.scratch ({4 * (PAGE // 10)} bytes), tiny (4 bytes)" in message

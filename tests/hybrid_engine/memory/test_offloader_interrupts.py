"""An interrupt at every line of an offloader's calls: whatever is called next, an onload has everything back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offload_items import Items, OffloadItem, Part
from hybrid_engine.memory.offloader import Offloader
from tests.harness.signals_at_lines import Interrupter, Stop

NUMEL = 4096


class Rig:
    """A tensor of each kind, parameters and optimizer state with what they must hold."""

    def __init__(self, *, elastic: bool) -> None:
        self.param, self.grad, self.state = (
            allocate_elastic(NUMEL, torch.float32, "cpu", kind) if elastic else torch.zeros(NUMEL)
            for kind in ("param", "grad", "optimizer")
        )
        self.offloader = Offloader(Items(self.inventory), "cpu")
        self.step()

    def inventory(self) -> list[OffloadItem]:
        return [
            OffloadItem("param", "param", self.param),
            OffloadItem("grad", "grad", self.grad, "drop"),
            OffloadItem("state", "optimizer", self.state),
        ]

    def step(self) -> None:
        for tensor in (self.param, self.grad, self.state):
            tensor.add_(torch.arange(1, NUMEL + 1))
        self.expected = self.param.clone()

    def assert_back(self) -> None:
        assert torch.equal(self.param, self.expected)
        assert torch.equal(self.state, self.expected)
        assert self.grad.untyped_storage().nbytes() == 4 * NUMEL


CALLS: dict[str, Callable[[Rig], object]] = {
    "offload": lambda rig: rig.offloader.offload(),
    "offload param": lambda rig: rig.offloader.offload(["param"]),
    "begin": lambda rig: rig.offloader.begin_offload(),
    "parts": lambda rig: rig.offloader.offload_parts("param", [Part(rig.param, 0, NUMEL // 2)]),
    "onload": lambda rig: rig.offloader.onload(),
    "read": lambda rig: rig.offloader.onload(read_only=True),
    "background": lambda rig: rig.offloader.onload(wait=False),
    "wait": lambda rig: rig.offloader.wait(),
}
SEQUENCES = {
    "offload": ["offload"],
    "what began": ["begin", "offload"],
    "after parts": ["parts", "offload"],
    "onload": ["offload", "onload"],
    "onload of parts": ["parts", "onload"],
    "calling off": ["begin", "onload"],
    "to be read": ["offload", "read"],
    "wait": ["offload", "background", "wait"],
    "turning back": ["offload", "background", "offload"],
    "what was read": ["offload", "read", "offload"],
}
"""Calls before, and the one that is interrupted."""
CONTINUATIONS: list[list[str]] = [[], ["offload"], ["offload param"], ["read", "offload"]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer nobody hears of it
@pytest.mark.parametrize("elastic", [False, True], ids=["resized, by a thread", "elastic, without"])
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("how_many", [1, pytest.param(4, marks=pytest.mark.long)])
def test_an_interrupt_at_any_line_loses_nothing(
    name: str, elastic: bool, how_many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`how_many` of the continuations are tried at each line."""
    chosen = random.Random(f"{name} {elastic}")
    if elastic:  # no copy in the background is made before it is called off
        monkeypatch.setattr(ThreadPoolExecutor, "submit", mock.Mock(side_effect=RuntimeError("no thread")))
    *before, interrupted = SEQUENCES[name]

    def prepared() -> Rig:
        rig = Rig(elastic=elastic)
        for call in before:
            CALLS[call](rig)
        return rig

    rig = prepared()
    with Interrupter() as counting:
        CALLS[interrupted](rig)
    for at in range(counting.num_lines):
        for following in chosen.sample(CONTINUATIONS, how_many):
            rig = prepared()
            with contextlib.suppress(Stop), Interrupter(at):
                CALLS[interrupted](rig)
            for call in following:
                CALLS[call](rig)
            rig.offloader.onload()
            rig.assert_back()
            rig.step()
            rig.offloader.offload()
            rig.offloader.onload()
            rig.assert_back()

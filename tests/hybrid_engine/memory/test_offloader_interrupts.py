"""An interrupt at every line of an offloader's calls; a later onload restores everything."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest
import torch

from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offload_items import LATE_KINDS, Items, OffloadItem, Part
from hybrid_engine.memory.offloader import Offloader
from tests.harness.late_copies import LateCopies
from tests.harness.signals_at_lines import Interrupter, Stop

NUMEL = 4096


class Rig:
    """A tensor of each kind, with the expected values of parameters and optimizer state."""

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
    "parts": lambda rig: rig.offloader.offload_parts("param", [Part(rig.param, 0, NUMEL // 2)]),
    "onload": lambda rig: rig.offloader.onload(),
    "read": lambda rig: rig.offloader.onload(read_only=True),
    "late": lambda rig: rig.offloader.onload(late=LATE_KINDS),
    "wait": lambda rig: rig.offloader.wait(),
}
SEQUENCES = {
    "offload": ["offload"],
    "after parts": ["parts", "offload"],
    "onload": ["offload", "onload"],
    "onload of parts": ["parts", "onload"],
    "read-only onload": ["offload", "read"],
    "late onload": ["offload", "late"],
    "wait": ["offload", "late", "wait"],
    "cancelled onload": ["offload", "late", "offload"],
    "offload after a read-only onload": ["offload", "read", "offload"],
}
"""Earlier calls, and the call that is interrupted."""
CONTINUATIONS: list[list[str]] = [[], ["offload"], ["offload param"], ["read", "offload"]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from finalizers
@pytest.mark.parametrize("elastic", [False, True], ids=["resized", "elastic"])
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("how_many", [1, pytest.param(4, marks=pytest.mark.long)])
def test_an_interrupt_at_any_line_loses_nothing(
    name: str, elastic: bool, how_many: int, late_copies: LateCopies
) -> None:
    """Try `how_many` of the continuations at each line."""
    rng = random.Random(f"{name} {elastic}")
    *before, interrupted = SEQUENCES[name]

    def prepare_rig() -> Rig:
        rig = Rig(elastic=elastic)
        for call in before:
            CALLS[call](rig)
        return rig

    rig = prepare_rig()
    with Interrupter() as counting:
        CALLS[interrupted](rig)
    for at in range(counting.num_lines):
        for following in rng.sample(CONTINUATIONS, how_many):
            rig = prepare_rig()
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

"""Each wait of the offloader is needed: without it the checker reports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_engine.memory import arena
from hybrid_engine.memory.arena import Copier
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.offload_items import Storage
from hybrid_engine.memory.offloader import Offloader
from tests.software_gpu.device import Reports
from tests.software_gpu.training_state import WAYS_TO_COME, WAYS_TO_LEAVE, TrainingState, leave_and_come_back


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """A job that was broken on purpose may leave something."""


@dataclass(frozen=True)
class Mutant:
    """A function of the product, and what takes its place."""

    owner: object
    name: str
    replacement: Callable[..., Any]


def _does_nothing(*_arguments: object) -> None: ...


def _queue_copy_at_once(destination: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        destination.copy_(source, non_blocking=True)


def _seconds_without_waiting(_begin: torch.cuda.Event, _end: torch.cuda.Event) -> float:
    return 0.0


MUTANTS = {
    "copies do not wait for what is computed": Mutant(arena, "_queue_copy", _queue_copy_at_once),
    "pages go before they are saved": Mutant(Storage, "wait_saved", _does_nothing),
    "contents are used before they are back": Mutant(Copier, "finish", _does_nothing),
    "nobody waits for copies in the background": Mutant(arena, "_seconds_between", _seconds_without_waiting),
    "pages go before the stream is done": Mutant(CudaDriver, "finish_stream", _does_nothing),
    "an offload does not wait for other streams": Mutant(Offloader, "_synchronize", _does_nothing),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wait_that_is_taken_away_is_noticed(name: str, reports: Reports) -> None:
    mutant, noticed = MUTANTS[name], list[str]()
    with mock.patch.object(mutant.owner, mutant.name, mutant.replacement):
        for leave in WAYS_TO_LEAVE:
            state = TrainingState(0)
            with suppress(AssertionError):
                for seed, come in enumerate(WAYS_TO_COME):
                    leave_and_come_back(state, leave, come, seed)
            torch.cuda.synchronize()
            noticed += [line for line in reports.new().splitlines() if line.startswith(("RACE", "RELEASE"))]
            if noticed:
                break
    assert noticed, f"without {mutant.name} nothing is reported: it is not needed"

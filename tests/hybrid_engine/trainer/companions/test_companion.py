"""When a model beside the actor leaves the device with all ranks, and when alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch

from hybrid_engine.memory.offload_items import Items, OffloadItem
from hybrid_engine.trainer.companions.companion import PARAMETERS, Companion


class RecordingAgreement:
    """Notes the phases that all ranks ended together."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield
        self.ended.append(name)


def test_it_leaves_with_all_ranks_and_alone_after_an_error() -> None:
    agreement, parameter = RecordingAgreement(), torch.ones(1000)
    worker: Any = SimpleNamespace(
        job=SimpleNamespace(agreement=agreement, device=torch.device("cpu")),
        sharding=SimpleNamespace(entered=lambda state: nullcontext()),
        companions=WeakSet(),
        note_memory=lambda phase: None,
    )
    companion = Companion("critic", worker, Items(lambda: [OffloadItem("weight", "param", parameter)]))
    assert agreement.ended == ["offload of the critic"]
    contexts = (
        lambda: companion.entered(PARAMETERS, "critic forward"),
        lambda: companion.beside(PARAMETERS, read_only=True),
    )
    for context in contexts:
        agreement.ended.clear()
        with context():
            assert companion.resident_nbytes() == parameter.nbytes
        assert companion.resident_nbytes() == 0
        assert agreement.ended == ["onload of the critic", "offload of the critic"]
        agreement.ended.clear()
        with pytest.raises(ZeroDivisionError), context():
            raise ZeroDivisionError
        assert companion.resident_nbytes() == 0
        assert agreement.ended == ["onload of the critic"]

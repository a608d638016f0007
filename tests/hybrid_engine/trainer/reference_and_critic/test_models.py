"""Offload of a model that shares the device: on all ranks together, or alone after an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch

from hybrid_engine.memory.offload_items import Items, OffloadItem
from hybrid_engine.trainer.reference_and_critic.models import PARAMETERS, AuxiliaryModel


class RecordingAgreement:
    """Records the phases that all ranks concluded."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield
        self.ended.append(name)


def test_a_model_is_offloaded_with_all_ranks_or_alone_after_an_error() -> None:
    agreement = RecordingAgreement()
    parameter = torch.ones(1000)
    worker = SimpleNamespace(
        job=SimpleNamespace(agreement=agreement, device=torch.device("cpu")),
        sharding=SimpleNamespace(entered=lambda state: nullcontext()),
        colocated_models=WeakSet(),
    )
    model = AuxiliaryModel(
        "critic", worker, Items(lambda: [OffloadItem("weight", "param", parameter)])
    )
    assert agreement.ended == ["offload of the critic"]
    contexts = (
        lambda: model.exclusive_context(PARAMETERS, "critic forward"),
        lambda: model.shared_context(PARAMETERS, read_only=True),
    )
    for context in contexts:
        agreement.ended.clear()
        with context():
            assert model.resident_nbytes() == parameter.nbytes
        assert model.resident_nbytes() == 0
        assert agreement.ended == ["onload of the critic", "offload of the critic"]
        agreement.ended.clear()
        with pytest.raises(ZeroDivisionError), context():
            raise ZeroDivisionError
        assert model.resident_nbytes() == 0
        assert agreement.ended == ["onload of the critic"]

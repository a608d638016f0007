"""Computed sources: scratch tensors that `prepare` computes and a layout shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from unittest import mock

import pytest
import torch

from hybrid_engine.backends.computed_sources import AdaptorWithSources, ComputedSources
from hybrid_engine.backends.training_side import layout_in
from hybrid_engine.errors import WeightError
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from tests.harness.torch_modes import other_torch_modes
from tests.zoo.megatron_models import view_of

NORM = torch.tensor([1.5, 2.0, 0.25])
MATRIX = torch.arange(6.0).view(2, 3)


class ShiftedNorm(AdaptorWithSources):
    """Weights of a model that stores a norm as its difference from 1, and computes the product with
    a matrix.
    """

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.stored = NORM.clone()
        self.num_finished = 0
        shapes = {
            "norm": self.stored,
            "product": torch.empty(2, dtype=torch.bfloat16),
            "nothing": torch.empty(0, 3),
        }
        self.sources = ComputedSources("made up", shapes, torch.device("cpu"), self._compute)
        self.computed.append(self.sources)

    def _compute(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert not torch.is_grad_enabled()
        tensors["norm"].copy_(self.stored - 1)
        tensors["product"].copy_(MATRIX @ self.stored)

    def stored_buffers(self) -> Mapping[str, torch.Tensor]:
        return {"stored": self.stored}

    def finish_pending(self) -> None:
        self.num_finished += 1

    def described_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "the norm", self.stored

    def own_origins(self) -> Mapping[str, Sequence[torch.Tensor]]:
        return {"norm": [self.stored], "product": [self.stored]}

    def own_layout(self) -> Layout:
        shards = []
        shapes = {}
        for name, home in self.sources.homes.items():
            tensor = self.sources.tensors[name]
            shapes[name] = tuple(tensor.shape)
            place = Place(BufferId(self.rank, home.buffer), home.offset, tuple(tensor.stride()))
            shards.append(Shard(Region(name, (0,) * tensor.dim(), shapes[name]), place))
        return layout_in(self.buffers(), self.rank, shapes, shards)

    def read(self) -> TensorDict:
        """Return the tensors as a switch reads them: by their records."""
        buffers = self.buffers()
        return {shard.region.tensor: view_of(buffers, shard) for shard in self.layout().shards}


def test_prepare_computes_what_the_records_show() -> None:
    weights = ShiftedNorm()
    for _ in range(2):
        with other_torch_modes():  # values do not depend on the caller's modes
            weights.prepare()
        shown = weights.read()
        assert torch.equal(shown["norm"], weights.stored - 1)
        assert torch.equal(shown["product"], (MATRIX @ weights.stored).bfloat16())
        weights.stored.mul_(3)
    assert weights.num_finished == 2
    assert torch.equal(weights.stored, NORM * 9)  # the stored weight is never written


def test_scratch_buffers_are_shown_to_peers_and_need_no_copy() -> None:
    weights = ShiftedNorm()
    names = {"made up in float32", "made up in bfloat16"}
    assert weights.scratch == names
    assert weights.buffers().keys() == {"stored", *names}
    buffers = {buffer.name: record for buffer, record in weights.layout().buffers.items()}
    assert {name for name, record in buffers.items() if record.exported} == names
    # A tensor without elements has no place, but is computed with the others.
    assert weights.sources.homes.keys() == {"norm", "product"}
    assert weights.sources.tensors["nothing"].shape == (0, 3)


def test_without_its_view_an_adaptor_has_the_same_sources() -> None:
    """A checkpoint is written from it, and must not compute sums of LoRA into further memory."""
    weights = ShiftedNorm()
    assert weights.without_view() is weights
    view = mock.Mock(
        sources=ComputedSources("view", {"scale": NORM}, torch.device("cpu"), mock.Mock())
    )
    weights.view = view
    plain = weights.without_view()
    assert (plain.view, weights.view) == (None, view)
    assert plain.scratch == weights.scratch - {"view in float32"}
    assert all(flat is weights.buffers()[name] for name, flat in plain.buffers().items())


def test_values_that_cannot_be_used_are_named_by_the_stored_tensor() -> None:
    weights = ShiftedNorm()
    weights.stored[1] = torch.nan
    weights.prepare()
    with pytest.raises(WeightError, match="the norm: 1 NaN of 3 elements"):
        weights.check_values()

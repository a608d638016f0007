"""Says where a sharded model keeps every canonical tensor on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from hybrid_engine.backends.flat_buffers import describe, gaps, require_usable_values, runs_by_buffer
from hybrid_engine.backends.fsdp.canonical_names import canonical_views
from hybrid_engine.backends.fsdp.sharded_tensors import ShardedTensors, local_of, reshard
from hybrid_engine.errors import ParameterMismatchError, ReshardError
from hybrid_engine.layouts.sharded import Packed, held_boxes
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.layout import BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region


class FsdpAdaptor:
    """The weights of one rank (port `TrainingWeights`).

    Args:
        model: sharded by `fully_shard`.
        table: of its architecture.
        rank: of this process in the job.

    Attributes:
        packed: canonical name -> where it lies in the whole parameters.
        tensors: what of these this rank holds.

    Raises:
        ModelError: for a model that is not sharded, or whose shards cannot be read.
        ParameterMismatchError: naming every tensor that transformers does not convert to one of a checkpoint.
    """

    def __init__(self, model: torch.nn.Module, table: ModelTable, rank: int) -> None:
        self.model, self.table, self.rank = model, table, rank
        self.tensors = ShardedTensors(model)
        self.packed = canonical_views(model, self.tensors.tensors, table)

    def layout(self) -> Layout:
        """This rank's records. Raises ParameterMismatchError that names every tensor it cannot place."""
        shards: list[Shard] = []
        findings: list[str] = []
        for name, packed in self.packed.items():
            try:
                shards += self._shards_of(name, packed)
            except ValueError as error:
                findings.append(f"{name}: {error}")
        if findings:
            raise ParameterMismatchError(findings)
        held = {shard.region.tensor for shard in shards}
        runs = runs_by_buffer(shards)
        buffers = {
            BufferId(self.rank, name): describe(flat, gaps(flat.numel(), runs.get(name, ())))
            for name, flat in self.buffers().items()
        }
        return Layout({name: self.table.shapes[name] for name in self.packed if name in held}, buffers, tuple(shards))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Flat live storage by buffer name."""
        return self.tensors.flat_buffers

    def prepare(self) -> None:
        """Free gathered parameters. Raises ReshardError if parameters moved since the layout was made."""
        reshard(self.model)
        if moved := self.tensors.moved():
            raise ReshardError(
                f"{len(moved)} parameters moved, came or went since the layout was made, first "
                f"{', '.join(moved[:4])}. Offload through the engine, not by .data or .to(); or build a new engine"
            )

    def check_values(self) -> None:
        """Raise WeightError naming every parameter that holds a NaN or an infinity. Reads each buffer once."""
        require_usable_values(self.buffers().values(), self._described_tensors)

    def _described_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.tensors.items():
            yield f"{name} on rank {self.rank}", local_of(tensor)

    def _shards_of(self, name: str, packed: Packed) -> Iterator[Shard]:
        """The records of what this rank holds of a canonical tensor."""
        shape = tuple(self.tensors.tensors[packed.parameter].shape)
        buffer = BufferId(self.rank, self.tensors.buffer_of[packed.parameter])
        for box in held_boxes(packed.view, shape, self.tensors.parts[packed.parameter]):
            yield Shard(Region(name, box.offsets, box.lengths), Place(buffer, box.start, box.strides))

"""Says where a sharded model keeps every canonical tensor on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from hybrid_engine.backends.flat_buffers import describe, gaps, require_usable_values, runs_by_buffer
from hybrid_engine.backends.fsdp.canonical_names import Packed, canonical_views
from hybrid_engine.backends.fsdp.sharded_tensors import LocalPart, ShardedTensors, local_of, reshard
from hybrid_engine.errors import ParameterMismatchError, ReshardError
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.layout import BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region, StridedView, boxes_of_copy, contiguous_strides


class FsdpAdaptor:
    """The weights of one rank (port `TrainingWeights`).

    Args:
        model: sharded by `fully_shard`.
        table: of its architecture.
        rank: of this process in the job.

    Raises:
        ModelError: for a model that is not sharded, or whose shards cannot be read.
        ParameterMismatchError: naming every tensor that transformers does not convert to one of a checkpoint.
    """

    def __init__(self, model: torch.nn.Module, table: ModelTable, rank: int) -> None:
        self.model, self.table, self.rank = model, table, rank
        self.tensors = ShardedTensors(model)
        self._packed = canonical_views(model, self.tensors.tensors, table)

    def layout(self) -> Layout:
        """This rank's records. Raises ParameterMismatchError that names every tensor it cannot place."""
        shards: list[Shard] = []
        findings: list[str] = []
        for name, packed in self._packed.items():
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
        return Layout({name: self.table.shapes[name] for name in self._packed if name in held}, buffers, tuple(shards))

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
        whole = StridedView(0, self.table.shapes[name], contiguous_strides(self.table.shapes[name]))
        parameter, part = self.tensors.tensors[packed.parameter], self.tensors.parts[packed.parameter]
        buffer = BufferId(self.rank, part.buffer)
        for box in boxes_of_copy(whole.shape, whole, packed.view):
            cut = _cut(box.lengths, box.dst_offset, box.dst_strides, tuple(parameter.shape), part)
            if cut is not None:
                shifts, lengths, place = cut
                offsets = tuple(offset + shift for offset, shift in zip(box.offsets, shifts, strict=True))
                yield Shard(Region(name, offsets, lengths), Place(buffer, *place))


def _cut(
    lengths: tuple[int, ...],
    start: int,
    strides: tuple[int, ...],
    shape: tuple[int, ...],
    part: LocalPart,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, tuple[int, ...]]] | None:
    """What a rank holds of a box.

    Args:
        lengths: of the box.
        start, strides: where it lies in the whole parameter, whose elements are contiguous.
        shape: of the whole parameter.
        part: what the rank holds of the parameter.

    Returns where the held part begins in the box, its lengths, and (offset, strides) in the rank's buffer; None for
    nothing. Raises ValueError for a box whose rows are not rows of the parameter.
    """
    unit = contiguous_strides(shape)
    corner = [start // step % size for step, size in zip(unit, shape, strict=True)]  # of the box, in the parameter
    shifts, held, local_strides = [0] * len(lengths), list(lengths), [0] * len(lengths)
    along: dict[int, int] = {}  # dim of the parameter -> dim of the box that runs along it
    for dim, (length, stride) in enumerate(zip(lengths, strides, strict=True)):
        if length > 1:
            parameter_dim = _dim_of(stride, unit, shape)
            if parameter_dim is None or parameter_dim in along:
                raise ValueError(f"transformers packs its dim {dim} otherwise than along one dim of the parameter")
            along[parameter_dim] = dim
    offset = part.start
    for dim, (low, length) in enumerate(zip(part.offsets, part.lengths, strict=True)):
        box_dim = along.get(dim)
        size = 1 if box_dim is None else lengths[box_dim]
        first, last = max(low, corner[dim]), min(low + length, corner[dim] + size)
        if first >= last:
            return None
        offset += (first - low) * part.strides[dim]
        if box_dim is not None:
            shifts[box_dim], held[box_dim] = first - corner[dim], last - first
            local_strides[box_dim] = part.strides[dim]
    return tuple(shifts), tuple(held), (offset, tuple(local_strides))


def _dim_of(stride: int, unit: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """The dim along which a step of `stride` goes, if it is one step of a dim: dims of one element never are."""
    return next((dim for dim, step in enumerate(unit) if step == stride and shape[dim] > 1), None)

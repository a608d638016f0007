"""Refuses finite weights that would be infinite in the dtype in which they are sent (compress_reshard)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybrid_engine.errors import WeightError
from hybrid_engine.ports import TrainingWeights
from hybrid_engine.records.layout import Layout, Shard
from hybrid_engine.transports.copies import strided


class ValueRanges:
    """The parts of one rank's training weights that inference holds in a dtype of a smaller range.

    Args:
        rank: of this process.
        source: what it holds for training.
        destinations: what all ranks hold for inference.

    float16 ends at 65504, and bfloat16 a little below float32. Rounding keeps the order of numbers, so that all of a
    part are finite in a dtype if the smallest and the largest are.
    """

    def __init__(self, rank: int, source: Layout, destinations: Sequence[Layout]) -> None:
        self._rank = rank
        self._parts: list[tuple[Shard, torch.dtype]] = []
        own, others = (
            {buffer.dtype for each in side for buffer in each.buffers.values()} for side in ([source], destinations)
        )
        if not any(_is_smaller(other, one) for one in own for other in others):
            return
        served: dict[str, set[str]] = {}
        for layout in destinations:
            for shard in layout.shards:
                served.setdefault(shard.region.tensor, set()).add(layout.buffers[shard.place.buffer].dtype)
        for shard in source.shards:
            one = source.buffers[shard.place.buffer].dtype
            smaller = [each for each in sorted(served.get(shard.region.tensor, ())) if _is_smaller(each, one)]
            self._parts += [(shard, getattr(torch, each)) for each in smaller if 0 not in shard.region.lengths]

    def require(self, training: TrainingWeights) -> None:
        """Raise WeightError naming every tensor with a value that a cast makes infinite.

        Reads each part once; where nothing is cast to a smaller range, nothing.
        """
        if not self._parts:
            return
        buffers = training.buffers()
        ends = [torch.stack(self._view(buffers, shard).aminmax()) for shard, _ in self._parts]
        fits = [end.to(dtype).isfinite().all() for end, (_, dtype) in zip(ends, self._parts, strict=True)]
        if bool(torch.stack(fits).all()):
            return
        raise WeightError(
            [self._finding(buffers, *part) for part, fit in zip(self._parts, fits, strict=True) if not fit]
        )

    def _finding(self, buffers: Mapping[str, torch.Tensor], shard: Shard, dtype: torch.dtype) -> str:
        values = self._view(buffers, shard)
        name, most = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
        return (
            f"{shard.region.tensor} on rank {self._rank}: {int(values.to(dtype).isinf().sum())} of {values.numel()} "
            f"elements are too large for {name}, in which they are sent: up to {float(values.abs().max()):g}, which "
            f"ends at {most:g}. Use compression_dtype: bfloat16, or leave compress_reshard out"
        )

    @staticmethod
    def _view(buffers: Mapping[str, torch.Tensor], shard: Shard) -> torch.Tensor:
        return strided(buffers[shard.place.buffer.name].detach(), shard.region.lengths, shard.place)


def _is_smaller(dtype: str, than: str) -> bool:
    """Whether the numbers of one dtype end before those of another."""
    one, other = getattr(torch, dtype), getattr(torch, than)
    return one.is_floating_point and other.is_floating_point and torch.finfo(one).max < torch.finfo(other).max

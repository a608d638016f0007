"""Quantised weights as computed sources: what crosses the wire is what vLLM computes with.

    stored layout    weight, bfloat16, in a training buffer
    -> layout        weight, float8_e4m3fn, and weight_scale_inv, float32, in scratch buffers

    fill   1  largest magnitude of every block, over this rank's parts of it
           2  blocks with parts on several ranks: agreement that no rank has failed; their maximum
              over ranks, in a single all-reduce
           3  scales, and this rank's parts divided by them

Works on records alone, and therefore for every trainer, and on merged LoRA as well. A part that is
no multiple of a block in rows or columns needs no gather of weights: a rank needs only the scale of
a block to quantise its part of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from hybrid_engine.backends.computed_sources import AdaptorWithSources, ComputedSources
from hybrid_engine.backends.training_side import layout_in
from hybrid_engine.models.block_quantization import (
    LARGEST,
    SCALE_DTYPE,
    WEIGHT_DTYPE,
    BlockQuantization,
    scale_name,
)
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.records.layout import BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region, contiguous_strides, subtract_all
from hybrid_engine.transports.copies import strided


def quantise(adaptor: AdaptorWithSources, quantization: BlockQuantization) -> QuantisedSources:
    """Show the quantised weights of an adaptor to switches, in place of the weights. Returns them.

    Checkpoints are still read into the weights, and written from them.
    """
    buffers = adaptor.buffers()
    device = next(iter(buffers.values())).device
    view = QuantisedSources(adaptor.own_layout(), buffers, quantization, device)
    adaptor.view = view
    return view


class QuantisedSources:
    """Quantised weights of this rank, and the layout that shows them.

    Args:
        stored: this rank's layout of unquantised weights.
        buffers: the flat buffers of `stored`.
        quantization: weights to quantise.
        device: device of the buffers.

    Attributes:
        sources: the computed tensors.
        cut: weights with a block of which this rank holds some elements and not all.
    """

    def __init__(
        self,
        stored: Layout,
        buffers: Mapping[str, torch.Tensor],
        quantization: BlockQuantization,
        device: torch.device,
    ) -> None:
        self._blocks = quantization.blocks
        self._buffers = buffers
        self._shapes = stored.tensors
        self._shared: Mapping[str, tuple[int, ...]] = {}  # grids
        self._shards: dict[str, list[Shard]] = {}  # by weight
        for shard in stored.shards:
            name = shard.region.tensor
            if name in quantization.weights and shard.region.numel:
                self._shards.setdefault(name, []).append(shard)
        shapes: dict[Region, torch.Tensor] = {}
        for shards in self._shards.values():
            for shard in shards:
                scales = self._blocks.touched(shard.region)
                shapes[shard.region] = _shape(shard.region, WEIGHT_DTYPE)
                shapes[scales] = _shape(scales, SCALE_DTYPE)
        self.cut = frozenset(name for name in self._shards if self._is_cut(name))
        self.sources = ComputedSources("quantised weights", shapes, device, self._compute)

    def share(
        self, cut: Collection[str], shapes: Mapping[str, tuple[int, ...]], agreement: Agreement
    ) -> None:
        """Compute the scales of these weights over all ranks, in a collective of every `fill`.

        Args:
            cut: weights that are `cut` on any rank; the same on all ranks.
            shapes: shapes of all canonical tensors.
            agreement: of the same ranks. A rank that fails before the collective of a `fill` ends
                it on all ranks, if each of them is in a phase.
        """
        self._agreement = agreement
        self._shared = {name: self._blocks.grid(shapes[name]) for name in sorted(cut)}

    def layout(self, layout: Layout, buffers: Mapping[str, torch.Tensor], rank: int) -> Layout:
        """Return the layout with quantised weights and their scales in place of the weights."""
        shards = [shard for shard in layout.shards if shard.region.tensor not in self._shards]
        tensors = dict(layout.tensors)
        for region, home in self.sources.homes.items():
            strides = contiguous_strides(region.lengths)
            place = Place(BufferId(rank, home.buffer), home.offset, strides)
            shards.append(Shard(region, place))
        for name in self._shards:
            tensors[scale_name(name)] = self._blocks.grid(layout.tensors[name])
        return layout_in(buffers, rank, tensors, shards)

    def origins(
        self, origins: Mapping[str, Sequence[torch.Tensor]]
    ) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return the origins with those of scales, which are the weights'."""
        return {**origins, **{scale_name(name): origins[name] for name in self._shards}}

    def _is_cut(self, name: str) -> bool:
        held = [shard.region for shard in self._shards[name]]
        needed = []
        for region in held:
            scales = self._blocks.touched(region)
            needed.append(self._blocks.weights_of(scales, name, self._shapes[name]))
        return bool(subtract_all(list(dict.fromkeys(needed)), held))

    def _compute(self, tensors: Mapping[Region, torch.Tensor]) -> None:
        grids = self._largest()
        for name, shards in self._shards.items():
            # The scale of a block of zeros, or of values too small for a scale, changes nothing.
            scales = grids.pop(name) / LARGEST
            scales = torch.where(scales > 0, scales, torch.ones_like(scales))
            for shard in shards:
                touched = self._blocks.touched(shard.region)
                of_shard = scales[_slices(touched)]
                tensors[touched].copy_(of_shard)
                tensors[shard.region].copy_(
                    self._values(shard) / self._spread(of_shard, shard.region)
                )

    def _largest(self) -> dict[str, torch.Tensor]:
        """Return the largest magnitude in every block of this rank's weights. Collective if shared.

        Blocks of which this rank holds nothing are zero.
        """
        device = next(iter(self._buffers.values())).device
        grids = {name: self._blocks.grid(self._shapes[name]) for name in self._shards}
        largest = {name: torch.zeros(grid, device=device) for name, grid in grids.items()}
        if self._shared:
            # One tensor, of which `largest` has views, for a single collective.
            sizes = [math.prod(grid) for grid in self._shared.values()]
            flat = torch.zeros(sum(sizes), device=device)
            for name, part in zip(self._shared, flat.split(sizes), strict=True):
                if name in largest:
                    largest[name] = part.view(self._shared[name])
        for name, shards in self._shards.items():
            for shard in shards:
                view = largest[name][_slices(self._blocks.touched(shard.region))]
                view.copy_(torch.maximum(view, self._largest_of(shard)))
        if self._shared:
            # A rank that failed before this line concludes an outer phase, and sends nothing.
            self._agreement.conclude("largest magnitudes of blocks")
            dist.all_reduce(flat, dist.ReduceOp.MAX)
        return largest

    def _largest_of(self, shard: Shard) -> torch.Tensor:
        """Return the largest magnitude of a shard in each block that it touches."""
        rows, columns = self._blocks.touched(shard.region).lengths
        top, left = self._start_in_block(shard.region)
        height, width = shard.region.lengths
        padding = (
            left,
            columns * self._blocks.columns - left - width,
            top,
            rows * self._blocks.rows - top - height,
        )
        padded = torch.nn.functional.pad(self._values(shard).abs(), padding)
        blocks = padded.view(rows, self._blocks.rows, columns, self._blocks.columns)
        return blocks.amax((1, 3))

    def _spread(self, scales: torch.Tensor, region: Region) -> torch.Tensor:
        """Return the scale of each element of a region."""
        top, left = self._start_in_block(region)
        height, width = region.lengths
        rows = scales.repeat_interleave(self._blocks.rows, 0)[top : top + height]
        return rows.repeat_interleave(self._blocks.columns, 1)[:, left : left + width]

    def _start_in_block(self, region: Region) -> tuple[int, int]:
        row, column = region.offsets
        return row % self._blocks.rows, column % self._blocks.columns

    def _values(self, shard: Shard) -> torch.Tensor:
        flat = self._buffers[shard.place.buffer.name].detach()
        return strided(flat, shard.region.lengths, shard.place).float()


def _shape(region: Region, dtype: str) -> torch.Tensor:
    return torch.empty(region.lengths, dtype=getattr(torch, dtype), device="meta")


def _slices(region: Region) -> tuple[slice, ...]:
    bounds = zip(region.offsets, region.ends, strict=True)
    return tuple(slice(low, end) for low, end in bounds)

"""Quantised weights as computed sources: what crosses the wire is what vLLM computes with.

    stored layout    weight, bfloat16, in a training buffer
    -> layout        e.g. weight, float8_e4m3fn, and weight_scale_inv, float32, in scratch buffers

    fill   1  largest magnitude of every block, and with a tensor-wide scale of every group, over
              this rank's parts of them
           2  blocks and groups with parts on several ranks: agreement that no rank has failed;
              their maximum over ranks, in a single all-reduce
           3  scales, and this rank's parts divided by them

Weights that the trainer keeps in the format already are sent as they are: their elements from where
they are stored, and copies of their scales.

Works on records alone, and therefore for every trainer, and on merged LoRA as well. A part that is
no multiple of a block in rows or columns needs no gather of weights: a rank needs only the scale of
a block to quantise its part of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, starmap

import torch
import torch.distributed as dist

from hybrid_engine.backends.block_arithmetic import block_scales, elements, tensor_scale
from hybrid_engine.backends.computed_sources import (
    AdaptorWithSources,
    ComputedSources,
    StoredScales,
)
from hybrid_engine.backends.training_side import Origins, layout_in
from hybrid_engine.config.inference_rules import UNQUANTISED
from hybrid_engine.errors import ConfigError
from hybrid_engine.models.block_quantization import BlockQuantization
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region, Shapes, contiguous_strides, subtract_all
from hybrid_engine.transports.copies import FlatBuffers
from hybrid_engine.transports.runs import strided


def quantise(adaptor: AdaptorWithSources, quantization: BlockQuantization) -> QuantisedSources:
    """Show the quantised weights of an adaptor to switches, in place of the weights. Returns them.

    Checkpoints are still read into the weights, and written from them.

    Raises ConfigError for parts of weights that cannot be stored.
    """
    scales = adaptor.stored_scales(quantization)
    adaptor.sent_as_stored = frozenset(scales)
    buffers = adaptor.buffers()
    device = next(iter(buffers.values())).device
    view = QuantisedSources(adaptor.own_layout(), buffers, quantization, device, scales)
    adaptor.view = view
    return view


class QuantisedSources:
    """Quantised weights of this rank, and the layout that shows them.

    Args:
        stored: this rank's layout of unquantised weights.
        buffers: the flat buffers of `stored`.
        quantization: weights to quantise.
        device: device of the buffers.
        scales: weights of `stored` that are in the format, and the scales of their parts.

    Attributes:
        sources: the computed tensors.
        cut: weights with a block, and groups with an element, of which this rank holds some and
            not all. A group's name stands in front of `GROUP`.
    """

    def __init__(
        self,
        stored: Layout,
        buffers: FlatBuffers,
        quantization: BlockQuantization,
        device: torch.device,
        scales: Mapping[str, Sequence[StoredScales]],
    ) -> None:
        self._format = quantization.format
        self._groups = quantization.weights
        self._buffers = buffers
        self._shapes = stored.tensors
        self._shared: Shapes = {}  # shapes of maxima
        self._shards: dict[str, list[Shard]] = {}  # by weight
        for shard in stored.shards:
            name = shard.region.tensor
            if name in scales:
                continue
            if name in quantization.weights and shard.region.numel:
                self._shards.setdefault(name, []).append(shard)
        shapes: dict[Region, torch.Tensor] = {}
        for name, shards in self._shards.items():
            tensors = self._format.tensors_of(name, self._shapes[name])
            for region in (part for shard in shards for part in self._stored(shard.region)):
                dtype = getattr(torch, tensors[region.tensor][1])
                shapes[region] = torch.empty(region.lengths, dtype=dtype, device="meta")
        self._scales = {
            name: [self._by_blocks(part, device) for part in parts]
            for name, parts in scales.items()
        }
        # Weights that are stored in the format: their scales alone are computed, by copies.
        for part in chain(*scales.values()):
            region = self._format.scales_of(part.region)
            dtype = getattr(torch, self._format.scale)
            shapes[region] = torch.empty(region.lengths, dtype=dtype, device="meta")
        self._require_same_blocks(device)
        held = {name: [shard.region for shard in shards] for name, shards in self._shards.items()}
        self.cut = frozenset(name for name, parts in held.items() if self._is_cut(name, parts))
        if self._format.tensor_scale is not None:
            # Also groups of which this rank has some elements and not all.
            own = {self._groups[name] for name in self._shards}
            self.cut |= {
                group + GROUP
                for name, group in self._groups.items()
                if group in own and not self._is_whole(name)
            }
        self.sources = ComputedSources("quantised weights", shapes, device, self._compute)

    def share(self, cut: Collection[str], shapes: Shapes, agreement: Agreement) -> None:
        """Compute these maxima over all ranks, in a collective of every `fill`.

        Args:
            cut: weights and groups that are `cut` on any rank; the same on all ranks.
            shapes: shapes of all canonical tensors.
            agreement: of the same ranks. A rank that fails before the collective of a `fill` ends
                it on all ranks, if each of them is in a phase.
        """
        self._agreement = agreement
        self._shared = {
            name: (1,) if name.endswith(GROUP) else self._format.blocks.grid(shapes[name])
            for name in sorted(cut)
        }

    def layout(self, layout: Layout, buffers: FlatBuffers, rank: int) -> Layout:
        """Return the layout with quantised weights and their scales in place of the weights."""
        shards = [shard for shard in layout.shards if shard.region.tensor not in self._shards]
        tensors = dict(layout.tensors)
        for region, home in self.sources.homes.items():
            strides = contiguous_strides(region.lengths)
            place = Place(BufferId(rank, home.buffer), home.offset, strides)
            shards.append(Shard(region, place))
        for name in (*self._shards, *self._scales):
            shape = tensors.pop(name)
            for stored, (of_stored, _) in self._format.tensors_of(name, shape).items():
                tensors[stored] = of_stored
        return layout_in(buffers, rank, tensors, shards)

    def origins(self, origins: Origins) -> Origins:
        """Return the origins with those of stored tensors, which are the weights'."""
        shown = {name: of_name for name, of_name in origins.items() if name not in self._shards}
        for name in (*self._shards, *self._scales):
            stored = self._format.tensors_of(name, self._shapes[name])
            shown |= dict.fromkeys(stored, origins[name])
        return shown

    def _stored(self, region: Region) -> list[Region]:
        """Return the parts of stored tensors that belong to a part of a weight."""
        parts = [self._format.values_of(region), self._format.scales_of(region)]
        if self._format.tensor_scale is not None:
            parts.append(Region(region.tensor + self._format.tensor_scale.suffix, (0,), (1,)))
        return parts

    def _by_blocks(self, part: StoredScales, device: torch.device) -> StoredScales:
        """Return the part with rows and columns of each block of the format, all if it has more."""
        # Rows 0 to 255 with one stored scale for 64 rows, in blocks of 128: (block, stored) are
        # (0, 0), (0, 1), (1, 2), (1, 3). Four rows for two blocks: `_require_same_blocks` refuses.
        numbers = []
        sizes = (self._format.blocks.rows, self._format.blocks.columns)
        of_dims = zip((part.rows, part.columns), part.region.offsets, sizes, strict=True)
        for stored, low, size in of_dims:
            blocks = (low + torch.arange(len(stored))) // size
            numbers.append(torch.stack([blocks, stored]).unique(dim=1)[1].to(device))
        return replace(part, rows=numbers[0], columns=numbers[1])

    def _require_same_blocks(self, device: torch.device) -> None:
        """Raise ConfigError unless each block of a stored weight has one scale on one rank."""
        names = []
        for name, parts in self._scales.items():
            grid = torch.full(self._format.blocks.grid(self._shapes[name]), -1, device=device)
            is_split = self._is_cut(name, [part.region for part in parts])
            order = {parameter: n for n, parameter in enumerate({part.parameter for part in parts})}
            for part in parts:
                touched = self._format.blocks.touched(part.region)
                if touched.lengths != (len(part.rows), len(part.columns)):
                    is_split = True
                    continue
                # No parameter has as many rows or columns of blocks.
                numbers = (order[part.parameter] << 50) + (part.rows[:, None] << 25) + part.columns
                view = grid[_slices(touched)]
                is_split |= bool(((view >= 0) & (view != numbers)).any())
                view.copy_(numbers)
            if is_split:
                names.append(name)
        if names:
            raise ConfigError.of(
                "generate_config.quantization",
                f"{self._format.method}, but training has several scales, or ranks, in a block of "
                f"{len(names)} weights that it keeps in 8 bits, first {names[0]}",
                "Use parallel sizes that divide its rows and columns into whole blocks, or set it "
                f"to {UNQUANTISED}",
                code="blocks-with-several-scales",
            )

    def _is_cut(self, name: str, held: Sequence[Region]) -> bool:
        # All elements of the blocks that the parts touch, without the parts: others hold the rest.
        blocks = self._format.blocks
        needed = [blocks.weights_of(blocks.touched(part), self._shapes[name]) for part in held]
        return bool(subtract_all(list(dict.fromkeys(needed)), list(held)))

    def _is_whole(self, name: str) -> bool:
        if name not in self._shards:
            return False
        whole = Region(name, (0, 0), self._shapes[name])
        return not subtract_all([whole], [shard.region for shard in self._shards[name]])

    def _compute(self, tensors: Mapping[Region, torch.Tensor]) -> None:
        for part in chain(*self._scales.values()):
            by_block = part.read()[part.rows][:, part.columns]
            tensors[self._format.scales_of(part.region)].copy_(by_block)
        largest = self._largest()
        scale = self._format.tensor_scale
        for name, shards in self._shards.items():
            of_tensor = None
            if scale is not None:
                of_group = largest[self._groups[name] + GROUP]
                of_tensor = tensor_scale(of_group, self._format, scale)
            stored, divisors = block_scales(largest.pop(name), self._format, of_tensor)
            for shard in shards:
                values, scales, *rest = self._stored(shard.region)
                tensors[scales].copy_(stored[_slices(scales)])
                if of_tensor is not None:
                    tensors[rest[0]].copy_(of_tensor)
                of_shard = self._spread(divisors[_slices(scales)], shard.region)
                tensors[values].copy_(elements(self._values(shard) / of_shard, self._format))

    def _largest(self) -> TensorDict:
        """Return the largest magnitude in every block and group. Collective if shared.

        Blocks of which this rank holds nothing are zero.
        """
        device = next(iter(self._buffers.values())).device
        shapes = {name: self._format.blocks.grid(self._shapes[name]) for name in self._shards}
        if self._format.tensor_scale is not None:
            shapes |= dict.fromkeys((self._groups[name] + GROUP for name in self._shards), (1,))
        largest = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
        if self._shared:
            # One tensor, of which `largest` has views, for a single collective.
            sizes = [math.prod(shape) for shape in self._shared.values()]
            flat = torch.zeros(sum(sizes), device=device)
            for name, part in zip(self._shared, flat.split(sizes), strict=True):
                if name in largest:
                    largest[name] = part.view(self._shared[name])
        for name, shards in self._shards.items():
            for shard in shards:
                view = largest[name][_slices(self._format.blocks.touched(shard.region))]
                view.copy_(torch.maximum(view, self._largest_of(shard)))
            if self._format.tensor_scale is not None:
                of_group = largest[self._groups[name] + GROUP]
                of_group.copy_(torch.maximum(of_group, largest[name].max()))
        if self._shared:
            # A rank that failed before this line concludes an outer phase, and sends nothing.
            self._agreement.conclude("largest magnitudes of blocks")
            dist.all_reduce(flat, dist.ReduceOp.MAX)
        return largest

    def _largest_of(self, shard: Shard) -> torch.Tensor:
        """Return the largest magnitude of a shard in each block that it touches."""
        blocks = self._format.blocks
        rows, columns = blocks.touched(shard.region).lengths
        top, left = self._start_in_block(shard.region)
        height, width = shard.region.lengths
        # Zeros up to whole blocks, which are never the largest: rows 96 to 159 in blocks of 128 get
        # 96 rows above and 96 below.
        padding = (
            left,
            columns * blocks.columns - left - width,
            top,
            rows * blocks.rows - top - height,
        )
        padded = torch.nn.functional.pad(self._values(shard).abs(), padding)
        return padded.view(rows, blocks.rows, columns, blocks.columns).amax((1, 3))

    def _spread(self, divisors: torch.Tensor, region: Region) -> torch.Tensor:
        """Return the divisor of each element of a region."""
        top, left = self._start_in_block(region)
        height, width = region.lengths
        # Rows 96 to 159 in blocks of 128: each of two divisors 128 times, then 96 to 159 of these.
        rows = divisors.repeat_interleave(self._format.blocks.rows, 0)[top : top + height]
        return rows.repeat_interleave(self._format.blocks.columns, 1)[:, left : left + width]

    def _start_in_block(self, region: Region) -> tuple[int, int]:
        row, column = region.offsets
        return row % self._format.blocks.rows, column % self._format.blocks.columns

    def _values(self, shard: Shard) -> torch.Tensor:
        flat = self._buffers[shard.place.buffer.name].detach()
        return strided(flat, shard.region.lengths, shard.place).float()


GROUP = " (group)"
"""End of a group's name among names of weights."""


def _slices(region: Region) -> tuple[slice, ...]:
    bounds = zip(region.offsets, region.ends, strict=True)
    return tuple(starmap(slice, bounds))

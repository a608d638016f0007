"""Says where Megatron keeps every canonical tensor on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from hybrid_engine.backends.megatron.lora_layers import LORA, LoraSums, wrapped_layers
from hybrid_engine.backends.megatron.model_tensors import Home, ModelTensors
from hybrid_engine.backends.training_side import gaps, layout_in, read_parts, require_usable_values, runs_by_buffer
from hybrid_engine.errors import ParameterMismatchError, ReshardError
from hybrid_engine.models.lora_tensors import adapter_packings, adapter_shapes
from hybrid_engine.models.packing import Held, Packing, Shape, held_regions
from hybrid_engine.models.table import Match
from hybrid_engine.records.layout import BufferId, Extent, Layout, Place, Shard

LoraView = Literal["base", "merged", "separate"]
"""What is shown of a weight with LoRA: the frozen weight, its sum with LoRA, or both under their own names (PEFT's)."""

SUMS = "weights with LoRA"
"""Name of the buffer that holds sums of weights and LoRA."""


@dataclass(frozen=True, eq=False)
class _LoraMatrix:
    """A LoRA matrix of this rank, the parts of canonical tensors that it holds, and their whole shapes."""

    parameter: torch.nn.Parameter
    held: Sequence[Held]
    shapes: Mapping[str, Shape]


class MegatronAdaptor:
    """The training weights of one rank (ports `TrainingWeights` and `LoadableWeights`).

    Args:
        model: names and storage of this rank's model chunks.
        lora: what is shown of the weights that have LoRA; "merged" takes memory for the sums.
    """

    def __init__(self, model: ModelTensors, lora: LoraView = "merged") -> None:
        self.model = model
        self.lora = lora
        self.rank = model.rank
        layers = list(wrapped_layers(model.chunks))
        self._sums = LoraSums(layers) if layers and lora == "merged" else None

    @property
    def base(self) -> MegatronAdaptor:
        """The same model without LoRA: what a checkpoint is read into."""
        return MegatronAdaptor(self.model, "base")

    @property
    def merged(self) -> MegatronAdaptor:
        """The same model with LoRA added: what a checkpoint is written from."""
        return self if self.lora == "merged" else MegatronAdaptor(self.model, "merged")

    @property
    def scratch(self) -> frozenset[str]:
        """Names of buffers whose contents `prepare` computes; they need not be kept."""
        return frozenset() if self._sums is None else frozenset({SUMS})

    def layout(self) -> Layout:
        shards = self._weight_shards()
        held = {shard.region.tensor for shard in shards}
        shapes = {name: shape for name, shape in self.model.table.shapes.items() if name in held}
        for matrix in self._lora_matrices() if self.lora == "separate" else ():
            home = self.model.homes[matrix.parameter]
            shards += self._records(matrix.held, home, matrix.parameter.stride())
            shapes |= {part.region.tensor: matrix.shapes[part.region.tensor] for part in matrix.held}
        return layout_in(self.buffers(), self.rank, shapes, shards)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return self.model.flat_buffers | ({} if self._sums is None else {SUMS: self._sums.flat})

    def shown_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Megatron name, what `layout` shows of it); sums are those of the last `prepare`."""
        for name, tensor in self.model.named_weights():
            yield name, tensor if self._sums is None else self._sums.sums.get(tensor, tensor)

    def origins(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Canonical tensor -> this rank's tensors that what `layout` shows of it is made of."""
        found: dict[str, list[torch.Tensor]] = {}
        lora_of = {} if self._sums is None else self._sums.lora_of
        for name, tensor in self.model.named_weights():
            for canonical in self._tensors_of(name, tensor):
                found.setdefault(canonical, []).extend([tensor, *lora_of.get(tensor, ())])
        for matrix in self._lora_matrices() if self.lora == "separate" else ():
            for part in matrix.held:
                found.setdefault(part.region.tensor, []).append(matrix.parameter)
        return found

    @torch.no_grad()
    def zero_adapters(self) -> None:
        """Make LoRA add nothing, after the weights with LoRA in them were read into the base."""
        for name, parameter in self.model.named_lora():
            if name.endswith(f"{LORA}linear_out.weight"):
                parameter.zero_()

    @torch.no_grad()
    def zero_padding(self) -> None:
        """Zero what belongs to no weight and no LoRA matrix: padding of the vocabulary and of buckets."""
        runs = runs_by_buffer(self.base._weight_shards())
        for _, parameter in self.model.named_lora():
            home = self.model.homes[parameter]
            runs.setdefault(home.buffer, []).append(Extent(home.offset, home.offset + parameter.numel()))
        for name, flat in self.model.flat_buffers.items():
            for gap in gaps(flat.numel(), runs.get(name, ())):
                flat[gap.start : gap.stop] = 0

    def prepare(self) -> None:
        """Finish parameter gathers that an overlapping distributed optimizer left for the next forward pass, and add
        LoRA to the weights that are shown with it.

        Without overlap the optimizer's step has gathered already and nothing is done; with it every call gathers,
        needed or not, and is collective over data parallel ranks.

        Raises:
            ReshardError: if parameters moved since the layout was made: the switch would read stale memory.
        """
        for chunk in self.model.ddp_chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        if moved := self.model.moved():
            raise ReshardError(
                f"{len(moved)} parameters moved since the layout was made, first {', '.join(moved[:4])}. Offload "
                "through the engine, not by .data or .to(); or build a new engine"
            )
        if self._sums is not None:
            self._sums.fill()

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        require_usable_values(read_parts(self.buffers(), unread or {}), self._described_tensors)

    def _described_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in [*self.model.named_weights(), *self.model.named_lora()]:
            yield (
                f"{name} on rank {self.rank} (canonical {', '.join(self._tensors_of(name, tensor)) or 'LoRA'})",
                tensor,
            )

    def _weight_shards(self) -> list[Shard]:
        shards: list[Shard] = []
        findings: list[str] = []
        for name, tensor in self.model.named_weights():
            try:
                shards += self._shards_of(name, tensor)
            except ValueError as error:
                findings.append(f"{name}: {error}")
        if findings:
            raise ParameterMismatchError(findings)
        return shards

    def _shards_of(self, name: str, tensor: torch.Tensor) -> list[Shard]:
        """Raises ValueError when the name has no rule or the shape does not fit the rule."""
        home = self.model.homes[tensor]
        if self._sums is not None and tensor in self._sums.sums:
            home = Home(SUMS, int(self._sums.sums[tensor].storage_offset()))
        shards = []
        for member in self.model.members(name, tensor):
            match = self.model.table.match(member.name)
            if match is None:
                raise ValueError("the model's name table has no such parameter")
            held = self._held(match.packing, match, self.model.table.shapes, member.shape)
            place = Home(home.buffer, home.offset + member.start)
            shards += self._records(held, place, member.strides, transposed=match.packing.transposed)
        return shards

    def _records(
        self, held: Sequence[Held], home: Home, strides: tuple[int, ...], transposed: bool = False
    ) -> list[Shard]:
        """Records of the parts of one weight, which starts at `home`."""
        canonical = strides[::-1] if transposed else strides
        buffer = BufferId(self.rank, home.buffer)
        return [
            Shard(part.region, Place(buffer, home.offset + part.start * strides[part.local_dim], canonical))
            for part in held
        ]

    def _lora_matrices(self) -> Iterator[_LoraMatrix]:
        """This rank's LoRA matrices, but for those of a layer that the inference engine does not have."""

        @cache
        def shapes_of(module: str, lora_rank: int) -> Mapping[str, Shape]:
            return adapter_shapes(self.model.table, {module}, lora_rank)

        for name, parameter in self.model.named_lora():
            module, _, matrix = name.partition(LORA)
            match = self.model.table.match(f"{module}.weight")
            assert match is not None, name
            is_a = matrix == "linear_in.weight"  # A is [rank, in], B [out, rank]
            shapes = shapes_of(module.rpartition(".")[2], parameter.shape[0 if is_a else 1])
            of_a, of_b = adapter_packings(match.packing)
            for packing in of_a if is_a else (of_b,):
                if all(tensor.format(**match.indices) in shapes for tensor in packing.tensors()):
                    yield _LoraMatrix(parameter, self._held(packing, match, shapes, tuple(parameter.shape)), shapes)

    def _held(self, packing: Packing, match: Match, shapes: Mapping[str, Shape], local_shape: Shape) -> list[Held]:
        part, num_parts = self.model.parts[packing.over]
        return held_regions(packing, match.indices, shapes, local_shape, part, num_parts)

    def _tensors_of(self, name: str, tensor: torch.Tensor) -> list[str]:
        found: set[str] = set()
        for member in self.model.members(name, tensor):
            match = self.model.table.match(member.name)
            held = self._held(match.packing, match, self.model.table.shapes, member.shape) if match else ()
            found |= {part.region.tensor for part in held}
        return sorted(found)

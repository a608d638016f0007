"""Says where a sharded model keeps every canonical tensor on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from hybrid_engine.backends.flat_buffers import describe, gaps, read_parts, require_usable_values, runs_by_buffer
from hybrid_engine.backends.fsdp.canonical_names import canonical_views
from hybrid_engine.backends.fsdp.lora_views import LoraSums, separate_lora
from hybrid_engine.backends.fsdp.sharded_tensors import ShardedTensors, local_of, reshard
from hybrid_engine.backends.fsdp.wrapped_names import WrappedNames, wrapped_names
from hybrid_engine.errors import ParameterMismatchError, ReshardError, StateError
from hybrid_engine.layouts.sharded import Packed, held_boxes
from hybrid_engine.models.lora_tensors import ActorLora
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.layout import BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region

LoraDelivery = Literal["merge", "adapter"]
"""How LoRA reaches vLLM: added to the weights, or by itself (`generate_config.lora_delivery`)."""


@dataclass(frozen=True)
class ModelReading:
    """What a model has of a checkpoint; the same before and after it is sharded.

    Attributes:
        packed: canonical name -> where it lies in the whole parameters; names of these are the state dict's.
        names: of the parameters, and the LoRA of the model.
        lora: what is delivered by itself.
    """

    packed: Mapping[str, Packed]
    names: WrappedNames
    lora: ActorLora | None


def read_model_weights(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], table: ModelTable, delivery: LoraDelivery
) -> ModelReading:
    """Find the tensors of a checkpoint in a model, whatever is around it and its modules.

    Args:
        model: transformers', or PEFT's around it; sharded or not.
        tensors: its state dict.
        table: of its architecture.
        delivery: of its LoRA.

    Raises ModelError, ParameterMismatchError or ConfigError with everything that is in the way.
    """
    names = wrapped_names(model, tensors)
    views = canonical_views(names.model, {name: tensors[own] for name, own in names.weights.items()}, table)
    packed = {name: Packed(names.weights[view.parameter], view.view) for name, view in views.items()}
    if delivery == "merge":
        return ModelReading(packed, names, None)
    lora, places = separate_lora(names.loras, packed, tensors)
    return ModelReading(packed | dict(places), names, lora)


class FsdpAdaptor:
    """The weights of one rank (port `TrainingWeights`).

    Args:
        model: sharded by `fully_shard`.
        table: of its architecture.
        rank: of this process in the job.
        delivery: of its LoRA; "merge" takes memory for the sums.

    Attributes:
        packed: canonical name -> where it lies in the whole parameters.
        tensors: what of these this rank holds.
        lora: what is delivered by itself.

    Raises:
        ModelError: for a model that is not sharded, or whose shards cannot be read.
        ParameterMismatchError: naming every tensor that transformers does not convert to one of a checkpoint.
        ConfigError: for LoRA that cannot be delivered by itself.
    """

    def __init__(self, model: torch.nn.Module, table: ModelTable, rank: int, delivery: LoraDelivery = "merge") -> None:
        self.model, self.table, self.rank = model, table, rank
        self.tensors = ShardedTensors(model)
        reading = read_model_weights(model, self.tensors.tensors, table, delivery)
        self.packed, self.lora, self._names = reading.packed, reading.lora, reading.names
        merged = reading.names.loras if delivery == "merge" else ()
        self._sums = LoraSums(self.tensors, merged) if merged else None
        self._parts, self._buffer_of = self.tensors.parts, self.tensors.buffer_of
        if self._sums is not None:
            self._parts, self._buffer_of = self._parts | self._sums.parts, self._buffer_of | self._sums.buffer_of

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
        shapes = {name: place.view.shape for name, place in self.packed.items() if name in held}
        return Layout(shapes, buffers, tuple(shards))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Flat live storage by buffer name."""
        return self.tensors.flat_buffers | ({} if self._sums is None else self._sums.flat_buffers)

    @property
    def scratch(self) -> frozenset[str]:
        """Names of buffers whose contents `prepare` computes; they need not be kept."""
        return frozenset(() if self._sums is None else self._sums.flat_buffers)

    def origins(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Canonical tensor -> the model's tensors that what `layout` shows of it is made of."""
        added = {} if self._sums is None else self._sums.loras
        found = {}
        for name, packed in self.packed.items():
            matrices = [matrix for lora in added.get(packed.parameter, ()) for matrix in (lora.a, lora.b)]
            found[name] = [self.tensors.tensors[each] for each in (packed.parameter, *matrices)]
        return found

    def prepare(self) -> None:
        """Free gathered parameters, and add LoRA to the weights that are shown with it, which is collective.

        Raises ReshardError if parameters moved, or other adapters compute, since the layout was made.
        """
        reshard(self.model)
        if moved := self.tensors.moved():
            raise ReshardError(
                f"{len(moved)} parameters moved, came or went since the layout was made, first "
                f"{', '.join(moved[:4])}. Shard the model and add to it before the engine is built; offload through "
                "the engine, not by .data or .to()"
            )
        has_adapters = len(self._names.weights) < len(self.tensors.tensors)
        if has_adapters and wrapped_names(self.model, self.tensors.tensors) != self._names:
            raise ReshardError(
                "PEFT's active adapters or their scaling changed since the layout was made: set them as they were, or "
                "build a new engine"
            )
        if self._sums is not None:
            self._sums.fill()

    @property
    def base(self) -> FsdpAdaptor:
        """These, where the model has no adapters: what a checkpoint is read into. Raises StateError where it has."""
        if self._names.loras:
            raise StateError("the model has adapters: load weights before PEFT adds them")
        return self

    @property
    def merged(self) -> FsdpAdaptor:
        """The same model with LoRA added: what a checkpoint is written from."""
        return self if self.lora is None else FsdpAdaptor(self.model, self.table, self.rank)

    def zero_padding(self) -> None:
        """Nothing: FSDP pads in memory that no parameter shows."""

    def zero_adapters(self) -> None:
        """Nothing: `base` has none."""

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        """Raise WeightError naming every parameter that holds a NaN or an infinity. Reads each buffer once."""
        require_usable_values(read_parts(self.buffers(), unread or {}), self._described_tensors)

    def _described_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.tensors.items():
            yield f"{name} on rank {self.rank}", local_of(tensor)
        if self._sums is not None:
            yield from ((f"{name} with LoRA on rank {self.rank}", total) for name, total in self._sums.sums.items())

    def _shards_of(self, name: str, packed: Packed) -> Iterator[Shard]:
        """The records of what this rank holds of a canonical tensor."""
        shape = tuple(self.tensors.tensors[packed.parameter].shape)
        buffer = BufferId(self.rank, self._buffer_of[packed.parameter])
        for box in held_boxes(packed.view, shape, self._parts[packed.parameter]):
            yield Shard(Region(name, box.offsets, box.lengths), Place(buffer, box.start, box.strides))

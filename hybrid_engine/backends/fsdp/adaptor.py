"""Says where a sharded model keeps every canonical tensor on this rank.

Of weights with LoRA a switch gets their sums, or the weights and, by PEFT's names, the adapter:

    merge      W + scaling * B A, computed by each rank for its part of W; A and B, which are small, are gathered
    adapter    W, A and B as they lie; vLLM adds them while it computes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.tensor import DTensor

from hybrid_engine.backends.fsdp.names import Lora, WrappedNames, canonical_views, wrapped_names
from hybrid_engine.backends.fsdp.sharded_tensors import ShardedTensors, local_of, reshard
from hybrid_engine.backends.training_side import (
    dtype_name,
    flat_storage_of,
    layout_in,
    parts_in_elastic_buffers,
    read_parts,
    require_usable_values,
)
from hybrid_engine.errors import ConfigError, ParameterMismatchError, ReshardError, StateError, Violation
from hybrid_engine.layouts.sharded import LocalBox, Packed, held_boxes
from hybrid_engine.models.lora_tensors import (
    VLLM_LORA_RANKS,
    ActorLora,
    LoraSettings,
    a_name,
    adapted_modules,
    b_name,
    module_of,
)
from hybrid_engine.models.packing import Shape
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.torch_internals import torch_defaults
from hybrid_engine.records.layout import BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Region, StridedView, contiguous_strides

KEY = "generate_config.lora_delivery"


class LoraSums:
    """Memory for the sums of this rank's parts of weights and their adapters; the weights themselves are not written.

    As many elements as the adapted weights have here, in one flat buffer for each dtype, which peers on the host can
    map. `fill` computes the sums; between two switches the memory may be released.

    Attributes:
        loras: name of a weight -> what is added to it.
        sums: name of a weight -> this rank's part of its sum.
        parts: name of a weight -> where that is, in place of where the weight is.
        buffer_of: name of a weight -> the buffer.
        flat_buffers: by name.
    """

    def __init__(self, tensors: ShardedTensors, loras: Sequence[Lora]) -> None:
        self._tensors = tensors
        self.loras: dict[str, list[Lora]] = {}
        for lora in loras:
            self.loras.setdefault(lora.weight, []).append(lora)
        self.sums: dict[str, torch.Tensor] = {}
        self.parts: dict[str, LocalBox] = {}
        self.buffer_of: dict[str, str] = {}
        self.flat_buffers: dict[str, torch.Tensor] = {}
        weights = {name: local_of(tensors.tensors[name]) for name in self.loras}
        for name, part in zip(weights, parts_in_elastic_buffers([*weights.values()]), strict=True):
            if part.untyped_storage().nbytes():  # this rank may hold no row of any
                box, buffer = tensors.parts[name], f"weights with LoRA in {dtype_name(part)}"
                self.sums[name], self.buffer_of[name] = part, buffer
                self.parts[name] = LocalBox(box.offsets, box.lengths, int(part.storage_offset()), tuple(part.stride()))
                self.flat_buffers.setdefault(buffer, flat_storage_of(part))

    @torch_defaults()  # autocast would multiply in bfloat16
    @torch.no_grad()
    def fill(self) -> None:
        """Compute all sums, in float32. Collective: A and B of one adapter at a time are gathered."""
        for name, loras in self.loras.items():
            rows, columns = (
                slice(low, low + size)
                for low, size in zip(self._tensors.parts[name].offsets, self._tensors.parts[name].lengths, strict=True)
            )
            total = local_of(self._tensors.tensors[name]).float()
            for lora in loras:
                a, b = (_whole(self._tensors.tensors[matrix]).float() for matrix in (lora.a, lora.b))
                product = (b[columns] @ a[:, rows]).T if lora.transposed else b[rows] @ a[:, columns]
                total = total + lora.scaling * product
            if name in self.sums:
                self.sums[name].copy_(total)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def separate_lora(
    loras: Sequence[Lora], packed: Mapping[str, Packed], tensors: Mapping[str, torch.Tensor]
) -> tuple[ActorLora, Mapping[str, Packed]]:
    """The adapter as it is delivered by itself, and where its canonical tensors lie.

    Args:
        loras: what the model has.
        packed: canonical name of a weight -> where it lies.
        tensors: the state dict.

    Raises ConfigError, with everything that keeps vLLM from computing with the adapter.
    """
    canonical = {place.parameter: name for name, place in packed.items() if _is_whole(place, tensors)}
    if violations := _violations(loras, canonical, tensors):
        raise ConfigError(violations)
    places: dict[str, Packed] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for lora in loras:
        weight = canonical[lora.weight]
        for name, matrix in ((a_name(weight), lora.a), (b_name(weight), lora.b)):
            shape: Shape = tuple(tensors[matrix].shape)
            places[name] = Packed(matrix, StridedView(0, shape, contiguous_strides(shape)))
        module, rank = module_of(a_name(weight)), tensors[lora.a].shape[0]
        ranks[module], alphas[module] = rank, lora.scaling * rank
    rank, alpha = Counter(ranks.values()).most_common(1)[0][0], Counter(alphas.values()).most_common(1)[0][0]
    shapes = {name: place.view.shape for name, place in places.items()}
    settings = LoraSettings(
        rank,
        alpha,
        adapted_modules(shapes),
        {module: own for module, own in ranks.items() if own != rank},
        {module: own for module, own in alphas.items() if own != alpha},
    )
    return ActorLora(settings, shapes), places


def _is_whole(place: Packed, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a canonical tensor is a parameter, all of it and as it is."""
    shape = tuple(tensors[place.parameter].shape)
    return place.view == StridedView(0, shape, contiguous_strides(shape))


def _violations(
    loras: Sequence[Lora], canonical: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> list[Violation]:
    if not loras:
        remedy = "Wrap it by peft.get_peft_model, or leave lora_delivery out"
        return [Violation(KEY, "adapter, but the model has no active LoRA", remedy)]
    found = []
    for lora in loras:
        problem = None
        if lora.transposed:
            problem = "it is an embedding's, or of a weight that is stored transposed"
        elif lora.weight not in canonical:
            problem = "a checkpoint has no tensor that is just its weight"
        elif (rank := tensors[lora.a].shape[0]) > VLLM_LORA_RANKS[-1]:
            problem = f"rank {rank} is above vLLM's {VLLM_LORA_RANKS[-1]}"
        if problem:
            found.append(Violation(KEY, f"adapter, but {lora.a} cannot be delivered: {problem}", "Use merge"))
    weights = Counter(lora.weight for lora in loras)
    if several := [name for name, count in weights.items() if count > 1]:
        problem = f"adapter, but {len(several)} weights have several active adapters, first {several[0]}"
        found.append(Violation(KEY, problem, "Activate one by set_adapter, or use merge"))
    return found


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
    """Find the tensors of a checkpoint in a model of transformers', whatever is around it and its modules.

    `tensors`: its state dict, sharded or not.

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
        delivery: of its LoRA; "merge" takes memory for the sums.
        is_whole: it is not sharded; see `ShardedTensors`.

    Attributes:
        packed: canonical name -> where it lies in the whole parameters.
        tensors: what of these this rank holds.
        lora: what is delivered by itself.

    Raises:
        ModelError: for a model that is not sharded, or whose shards cannot be read.
        ParameterMismatchError: naming every tensor that transformers does not convert to one of a checkpoint.
        ConfigError: for LoRA that cannot be delivered by itself.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        table: ModelTable,
        rank: int,
        delivery: LoraDelivery = "merge",
        is_whole: bool = False,
    ) -> None:
        self.model, self.table, self.rank, self._is_whole = model, table, rank, is_whole
        self.tensors = ShardedTensors(model, is_whole)
        reading = read_model_weights(model, self.tensors.tensors, table, delivery)
        self.packed, self.lora, self._names = reading.packed, reading.lora, reading.names
        merged = reading.names.loras if delivery == "merge" else ()
        self._sums = LoraSums(self.tensors, merged) if merged else None
        self._parts, self._buffer_of = self.tensors.parts, self.tensors.buffer_of
        if self._sums is not None:
            self._parts, self._buffer_of = self._parts | self._sums.parts, self._buffer_of | self._sums.buffer_of

    def layout(self) -> Layout:
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
        shapes = {name: place.view.shape for name, place in self.packed.items() if name in held}
        return layout_in(self.buffers(), self.rank, shapes, shards)

    def buffers(self) -> Mapping[str, torch.Tensor]:
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
        return self if self.lora is None else FsdpAdaptor(self.model, self.table, self.rank, is_whole=self._is_whole)

    def zero_padding(self) -> None:
        """Nothing: FSDP pads in memory that no parameter shows."""

    def zero_adapters(self) -> None:
        """Nothing: `base` has none."""

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        require_usable_values(read_parts(self.buffers(), unread or {}), self._described_tensors)

    def _described_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.tensors.items():
            yield f"{name} on rank {self.rank}", local_of(tensor)
        if self._sums is not None:
            yield from ((f"{name} with LoRA on rank {self.rank}", total) for name, total in self._sums.sums.items())

    def _shards_of(self, name: str, packed: Packed) -> Iterator[Shard]:
        shape = tuple(self.tensors.tensors[packed.parameter].shape)
        buffer = BufferId(self.rank, self._buffer_of[packed.parameter])
        for box in held_boxes(packed.view, shape, self._parts[packed.parameter]):
            yield Shard(Region(name, box.offsets, box.lengths), Place(buffer, box.start, box.strides))

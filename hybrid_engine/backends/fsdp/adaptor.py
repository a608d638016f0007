"""Records of the location of every canonical tensor of a sharded model on this rank.

LoRA reaches a switch merged into the weights, or separately under PEFT's names:

    merge      W + scaling * B A. Each rank computes it for its part of W, and gathers A and B,
               which are small.
    adapter    W, A and B as stored; vLLM adds them while it computes.
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
from hybrid_engine.errors import (
    ConfigError,
    ParameterMismatchError,
    ReshardError,
    StateError,
    Violation,
)
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

LoraDelivery = Literal["merge", "adapter"]
"""Delivery of LoRA to vLLM: merged into the weights, or separately (`KEY`)."""


class ShardedLoraSums:
    """Sums of weights and their adapters, for this rank's part of each weight.

    The weights themselves are never written. The sums take as many elements as this rank holds of
    the adapted weights, in one flat buffer per dtype, which peers on the host can map. Their memory
    may be released between two switches, because `fill` computes them again.

    Attributes:
        loras: name of a weight -> its adapters.
        sums: name of a weight -> this rank's part of its sum.
        parts: name of a weight -> location of that part of the sum.
        buffer_of: name of a weight -> name of the buffer.
        flat_buffers: buffers by name.
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
        weights = [local_of(tensors.tensors[name]) for name in self.loras]
        sums = parts_in_elastic_buffers(weights)
        for name, part in zip(self.loras, sums, strict=True):
            # A rank that holds no row of any weight of a dtype has no buffer for it.
            if not part.untyped_storage().nbytes():
                continue
            box = tensors.parts[name]
            start = int(part.storage_offset())
            buffer = f"weights with LoRA in {dtype_name(part)}"
            self.sums[name] = part
            self.parts[name] = LocalBox(box.offsets, box.lengths, start, tuple(part.stride()))
            self.buffer_of[name] = buffer
            self.flat_buffers.setdefault(buffer, flat_storage_of(part))

    @torch_defaults()  # autocast would multiply in bfloat16
    @torch.no_grad()
    def fill(self) -> None:
        """Compute all sums in float32.

        Collective: all ranks gather A and B, of one adapter at a time.
        """
        for name, loras in self.loras.items():
            box = self._tensors.parts[name]
            row, column = box.offsets
            num_rows, num_columns = box.lengths
            rows = slice(row, row + num_rows)
            columns = slice(column, column + num_columns)
            total = local_of(self._tensors.tensors[name]).float()
            for lora in loras:
                a = _gathered(self._tensors.tensors[lora.a]).float()
                b = _gathered(self._tensors.tensors[lora.b]).float()
                # (B A)[rows, columns] = B[rows] A[:, columns]; W is (B A)^T if transposed.
                if lora.transposed:
                    product = (b[columns] @ a[:, rows]).T
                else:
                    product = b[rows] @ a[:, columns]
                # Not in place: for float32 weights `float` has returned the weight itself.
                total = total + lora.scaling * product
            # Ranks without a part of the weight have gathered for the others.
            if name in self.sums:
                self.sums[name].copy_(total)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def separate_lora(
    loras: Sequence[Lora], packed: Mapping[str, Packed], tensors: Mapping[str, torch.Tensor]
) -> tuple[ActorLora, Mapping[str, Packed]]:
    """Return the adapter for separate delivery, and the location of its canonical tensors.

    Args:
        loras: active adapters of the model.
        packed: canonical name of a weight -> location.
        tensors: the state dict.

    Raises:
        ConfigError: listing every reason why vLLM cannot compute with the adapter.
    """
    # Parameter -> canonical tensor that is the whole parameter, unchanged.
    canonical = {}
    for name, place in packed.items():
        if place.view == _whole_view(tensors[place.parameter]):
            canonical[place.parameter] = name
    if violations := _violations(loras, canonical, tensors):
        raise ConfigError(violations)
    places: dict[str, Packed] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for lora in loras:
        weight = canonical[lora.weight]
        places[a_name(weight)] = Packed(lora.a, _whole_view(tensors[lora.a]))
        places[b_name(weight)] = Packed(lora.b, _whole_view(tensors[lora.b]))
        module = module_of(a_name(weight))
        ranks[module] = tensors[lora.a].shape[0]
        # vLLM scales by alpha / rank.
        alphas[module] = lora.scaling * ranks[module]
    # The most frequent values become the defaults; modules with others are listed as exceptions.
    rank, _ = Counter(ranks.values()).most_common(1)[0]
    alpha, _ = Counter(alphas.values()).most_common(1)[0]
    shapes = {name: place.view.shape for name, place in places.items()}
    settings = LoraSettings(
        rank,
        alpha,
        adapted_modules(shapes),
        {module: value for module, value in ranks.items() if value != rank},
        {module: value for module, value in alphas.items() if value != alpha},
    )
    return ActorLora(settings, shapes), places


def _whole_view(tensor: torch.Tensor) -> StridedView:
    """Return the view of a contiguous parameter that is all of it."""
    shape: Shape = tuple(tensor.shape)
    return StridedView(0, shape, contiguous_strides(shape))


def _violations(
    loras: Sequence[Lora], canonical: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> list[Violation]:
    """Return the reasons why adapters cannot be delivered separately."""
    if not loras:
        remedy = "Wrap it by peft.get_peft_model, or remove lora_delivery"
        problem = "adapter, but the model has no active LoRA"
        return [Violation(KEY, problem, remedy, code="no-adapters")]
    violations = []
    for lora in loras:
        rank = tensors[lora.a].shape[0]
        if lora.transposed:
            problem = "it adapts an embedding, or a weight that is stored transposed"
        elif lora.weight not in canonical:
            problem = "no tensor of a checkpoint equals its weight"
        elif rank > VLLM_LORA_RANKS[-1]:
            problem = f"rank {rank} is above vLLM's {VLLM_LORA_RANKS[-1]}"
        else:
            continue
        problem = f"adapter, but {lora.a} cannot be delivered: {problem}"
        violations.append(Violation(KEY, problem, "Use merge", code="cannot-deliver-adapter"))
    counts = Counter(lora.weight for lora in loras)
    shared = [name for name, count in counts.items() if count > 1]
    if shared:
        problem = f"adapter, but {len(shared)} weights have several active adapters"
        remedy = "Activate one by set_adapter, or use merge"
        violations.append(
            Violation(KEY, f"{problem}, first {shared[0]}", remedy, code="several-adapters")
        )
    return violations


@dataclass(frozen=True)
class ModelReading:
    """Canonical tensors of a model; the same before and after the model is sharded.

    Attributes:
        packed: canonical name -> location in a whole parameter, by the state dict's name.
        names: names of the parameters, and the LoRA of the model.
        lora: the adapter that is delivered separately, if any.
    """

    packed: Mapping[str, Packed]
    names: WrappedNames
    lora: ActorLora | None


def read_model_weights(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    table: ModelTable,
    delivery: LoraDelivery,
) -> ModelReading:
    """Locate the tensors of a checkpoint in a transformers model, through any wrappers.

    Args:
        model: a transformers model, perhaps inside wrappers.
        tensors: state dict of `model`, sharded or not.
        table: name table of the model.
        delivery: delivery of its LoRA.

    Raises:
        ModelError: adapters of the model are not supported.
        ParameterMismatchError: tensors of the model and of a checkpoint differ.
        ConfigError: LoRA cannot be delivered separately.
    """
    names = wrapped_names(model, tensors)
    weights = {name: tensors[state_name] for name, state_name in names.weights.items()}
    packed = {}
    for name, view in canonical_views(names.model, weights, table).items():
        packed[name] = Packed(names.weights[view.parameter], view.view)
    if delivery == "merge":
        return ModelReading(packed, names, None)
    lora, places = separate_lora(names.loras, packed, tensors)
    return ModelReading(packed | dict(places), names, lora)


class FsdpAdaptor:
    """Weights of one rank (port `TrainingWeights`).

    Args:
        model: model sharded by `fully_shard`.
        table: name table of the model.
        rank: rank of this process in the job.
        delivery: delivery of the model's LoRA; "merge" needs memory for the sums.
        is_whole: the model is not sharded; see `ShardedTensors`.

    Attributes:
        packed: canonical name -> location in a whole parameter.
        tensors: this rank's parts of the parameters.
        lora: the adapter that is delivered separately, if any.

    Raises:
        ModelError: the model is not sharded, or its shards cannot be read.
        ParameterMismatchError: listing every tensor that transformers does not convert to one of a
            checkpoint.
        ConfigError: LoRA cannot be delivered separately.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        table: ModelTable,
        rank: int,
        delivery: LoraDelivery = "merge",
        is_whole: bool = False,
    ) -> None:
        self.model = model
        self.table = table
        self.rank = rank
        self._is_whole = is_whole
        self.tensors = ShardedTensors(model, is_whole)
        reading = read_model_weights(model, self.tensors.tensors, table, delivery)
        self.packed = reading.packed
        self.lora = reading.lora
        self._names = reading.names
        self._parts = self.tensors.parts
        self._buffer_of = self.tensors.buffer_of
        self._sums: ShardedLoraSums | None = None
        if delivery == "merge" and reading.names.loras:
            self._sums = ShardedLoraSums(self.tensors, reading.names.loras)
            # Records show the sums instead of the weights.
            # Copies, because `tensors` still needs the weights' own locations.
            self._parts = self._parts | self._sums.parts
            self._buffer_of = self._buffer_of | self._sums.buffer_of

    def layout(self) -> Layout:
        shards: list[Shard] = []
        findings: list[str] = []
        for name, packed in self.packed.items():
            parameter = packed.parameter
            shape = tuple(self.tensors.tensors[parameter].shape)
            buffer = BufferId(self.rank, self._buffer_of[parameter])
            try:
                for box in held_boxes(packed.view, shape, self._parts[parameter]):
                    region = Region(name, box.offsets, box.lengths)
                    shards.append(Shard(region, Place(buffer, box.start, box.strides)))
            except ValueError as error:
                findings.append(f"{name}: {error}")
        if findings:
            raise ParameterMismatchError(findings)
        # A rank may hold no element of a tensor, e.g. if there are more ranks than rows.
        held = {shard.region.tensor for shard in shards}
        shapes = {name: packed.view.shape for name, packed in self.packed.items() if name in held}
        return layout_in(self.buffers(), self.rank, shapes, shards)

    def buffers(self) -> Mapping[str, torch.Tensor]:
        if self._sums is None:
            return self.tensors.flat_buffers
        return self.tensors.flat_buffers | self._sums.flat_buffers

    @property
    def scratch(self) -> frozenset[str]:
        """Names of buffers whose contents `prepare` computes; they need not be kept."""
        return frozenset(() if self._sums is None else self._sums.flat_buffers)

    def origins(self) -> Mapping[str, Sequence[torch.Tensor]]:
        """Return the model's tensors from which each canonical tensor of `layout` is computed."""
        merged = {} if self._sums is None else self._sums.loras
        origins = {}
        for name, packed in self.packed.items():
            sources = [packed.parameter]
            for lora in merged.get(packed.parameter, ()):
                sources += [lora.a, lora.b]
            origins[name] = [self.tensors.tensors[source] for source in sources]
        return origins

    def prepare(self) -> None:
        """Free gathered parameters, and merge LoRA into the sums. Collective if there are sums.

        Raises:
            ReshardError: parameters moved, or other adapters are active, since the layout was made.
        """
        reshard(self.model)
        if moved := self.tensors.moved():
            raise ReshardError(
                f"{len(moved)} parameters moved, were added or were removed since the layout was "
                f"made, first {', '.join(moved[:4])}. Shard and extend the model before the "
                "engine is built; offload through the engine, not by .data or .to()",
                code="parameters-moved",
            )
        # Names need not be read again if all tensors are weights: then PEFT has added none.
        has_adapters = len(self._names.weights) < len(self.tensors.tensors)
        if has_adapters and wrapped_names(self.model, self.tensors.tensors) != self._names:
            raise ReshardError(
                "PEFT's active adapters or their scaling changed since the layout was made: "
                "restore them, or build a new engine",
                code="adapters-changed",
            )
        if self._sums is not None:
            self._sums.fill()

    @property
    def base(self) -> FsdpAdaptor:
        """This adaptor, for loading a checkpoint. Raises StateError if the model has adapters."""
        if self._names.loras:
            raise StateError(
                "the model has adapters: load weights before PEFT adds them", code="has-adapters"
            )
        return self

    @property
    def merged(self) -> FsdpAdaptor:
        """Adaptor of the same model with LoRA merged, for writing a checkpoint."""
        if self.lora is None:
            return self
        return FsdpAdaptor(self.model, self.table, self.rank, is_whole=self._is_whole)

    def zero_padding(self) -> None:
        """Do nothing: FSDP pads in memory outside of parameters."""

    def zero_adapters(self) -> None:
        """Do nothing: `base` has no adapters."""

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        require_usable_values(read_parts(self.buffers(), unread or {}), self._described_tensors)

    def _described_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.tensors.items():
            yield f"{name} on rank {self.rank}", local_of(tensor)
        if self._sums is not None:
            for name, total in self._sums.sums.items():
                yield f"{name} with LoRA on rank {self.rank}", total

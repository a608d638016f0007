"""Records of the location of every canonical tensor of a sharded model on this rank.

LoRA reaches a switch merged into the weights, or separately under PEFT's names:

    merge      W + scaling * B A. Each rank computes it for its part of W, and gathers A and B,
               which are small.
    adapter    W, A and B as stored; vLLM adds them while it computes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from hybrid_engine.backends.computed_sources import AdaptorWithSources, ComputedSources
from hybrid_engine.backends.fsdp.names import (
    Lora,
    WrappedNames,
    canonical_views,
    plain_name,
    wrapped_names,
)
from hybrid_engine.backends.fsdp.sharded_tensors import ShardedTensors, local_of, reshard
from hybrid_engine.backends.training_side import NamedTensor, Origins, layout_in
from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.errors import (
    ParameterMismatchError,
    ReshardError,
    Violation,
    Violations,
    require_none,
)
from hybrid_engine.layouts.sharded import Packed, held_boxes
from hybrid_engine.models.lora_tensors import (
    VLLM_LORA_RANKS,
    ActorLora,
    LoraSettings,
    a_name,
    adapted_modules,
    b_name,
    module_of,
)
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.torch_internals import TensorDict, Tensors
from hybrid_engine.records.layout import BufferId, Layout, Shard
from hybrid_engine.records.regions import LocalBox, Shape, StridedView, contiguous_strides
from hybrid_engine.transports.copies import FlatBuffers

KEY = "generate_config.lora_delivery"

LoraDelivery = Literal["merge", "adapter", "none"]
"""Delivery of LoRA: merged into the weights, separately (`KEY`), or the weights alone."""


def lora_sums(
    tensors: ShardedTensors,
    loras_of: Mapping[str, Sequence[Lora]],
) -> ComputedSources[str]:
    """Return the sums of weights and their adapters, for this rank's part of each weight.

    Computing them is collective: all ranks gather A and B, of one adapter at a time.

    Args:
        tensors: this rank's parts of the parameters.
        loras_of: name of a weight -> its adapters; not empty.
    """

    def compute(sums: Tensors) -> None:
        for name, total in sums.items():
            _write_sum(total, tensors, name, loras_of[name])

    weights = {name: local_of(tensors.tensors[name]) for name in loras_of}
    device = next(iter(weights.values())).device
    return ComputedSources("weights with LoRA", weights, device, compute)


def _write_sum(
    total: torch.Tensor,
    tensors: ShardedTensors,
    name: str,
    loras: Sequence[Lora],
) -> None:
    """Write this rank's part of a weight with its adapters, computed in float32. Collective."""
    weight = tensors.tensors[name]
    box = tensors.parts[name]
    ends = map(sum, zip(box.offsets, box.lengths, strict=True))
    # The leading slice takes all of the expert dim that a weight of two dims lacks.
    held = [slice(None), *map(slice, box.offsets, ends)]
    experts, rows, columns = held[-3:]
    num_experts = math.prod(weight.shape[:-2])
    factors = []
    for lora in loras:
        # Ranks without a part of the weight gather for the others.
        a = _gathered(tensors.tensors[lora.a])
        b = _gathered(tensors.tensors[lora.b])
        left = b.reshape(len(b), -1, num_experts).permute(2, 0, 1)  # [expert, out, rank]
        # 2 experts of rank 2: B's columns are r0e0 r0e1 r1e0 r1e1, A's rows e0r0 e0r1 e1r0 e1r1.
        right = a.reshape(num_experts, -1, a.shape[-1])  # [expert, rank, in]
        # (B A)^T = A^T B^T.
        if lora.transposed:
            left, right = right.mT, left.mT
        factors.append((lora.scaling, left[experts, rows], right[experts, :, columns]))
    # One expert at a time, because copies in float32 take memory.
    parts = zip(_by_expert(local_of(weight)), _by_expert(total), strict=True)
    for expert, (stored, part) in enumerate(parts):
        value = stored.float()
        for scaling, left, right in factors:
            # Not in place: for float32 weights `float` has returned the weight itself.
            value = value + scaling * (left[expert].float() @ right[expert].float())
        part.copy_(value)


def _by_expert(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.dim() == 3 else weight[None]


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def separate_lora(
    loras: Sequence[Lora],
    packed: Mapping[str, Packed],
    tensors: Tensors,
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
    require_none(_violations(loras, canonical, tensors))
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
    loras: Sequence[Lora],
    canonical: Mapping[str, str],
    tensors: Tensors,
) -> Violations:
    """Yield the reasons why adapters cannot be delivered separately."""
    if not loras:
        yield Violation(
            KEY,
            "adapter, but the model has no active LoRA",
            "Wrap it by peft.get_peft_model, or remove lora_delivery",
            code="no-adapters",
        )
        return
    for lora in loras:
        rank = tensors[lora.a].shape[0]
        if tensors[lora.weight].dim() > 2:
            problem = "it adapts experts"
        elif lora.transposed:
            problem = "it adapts an embedding, or a weight that is stored transposed"
        elif lora.weight not in canonical:
            problem = "no tensor of a checkpoint equals its weight"
        elif rank > VLLM_LORA_RANKS[-1]:
            problem = f"rank {rank} is above vLLM's {VLLM_LORA_RANKS[-1]}"
        else:
            continue
        yield Violation(
            KEY,
            f"adapter, but {lora.a} cannot be delivered: {problem}",
            "Use merge",
            code="cannot-deliver-adapter",
        )
    counts = Counter(lora.weight for lora in loras)
    shared = [name for name, count in counts.items() if count > 1]
    if shared:
        problem = f"adapter, but {len(shared)} weights have several active adapters"
        yield Violation(
            KEY,
            f"{problem}, first {shared[0]}",
            "Activate one by set_adapter, or use merge",
            code="several-adapters",
        )


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
    tensors: Tensors,
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
    if delivery != "adapter":
        return ModelReading(packed, names, None)
    lora, places = separate_lora(names.loras, packed, tensors)
    return ModelReading(packed | dict(places), names, lora)


class FsdpAdaptor(AdaptorWithSources):
    """Weights of one rank (port `TrainingWeights`).

    Args:
        model: model sharded by `fully_shard`.
        table: name table of the model.
        rank: rank of this process in the job.
        delivery: delivery of the model's LoRA; "merge" needs memory for the sums.
        is_whole: the model is not sharded; see `ShardedTensors`.
        tensors: those of another adaptor of the model; None: the parameters move to new memory.

    Attributes:
        packed: canonical name -> location in a whole parameter.
        tensors: this rank's parts of the parameters.
        fingerprint: structure of the model when they were located.
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
        tensors: ShardedTensors | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.table = table
        self.rank = rank
        self.tensors = tensors or ShardedTensors(model, is_whole)
        self.fingerprint = self.tensors.fingerprint
        reading = read_model_weights(model, self.tensors.tensors, table, delivery)
        self.packed = reading.packed
        self.lora = reading.lora
        self._names = reading.names
        self._parts = self.tensors.parts
        self._buffer_of = self.tensors.buffer_of
        self._merged: dict[str, list[Lora]] = {}
        self._sums: Tensors = {}  # by weight
        if delivery == "merge":
            for lora in reading.names.loras:
                self._merged.setdefault(lora.weight, []).append(lora)
        if self._merged:
            sums = lora_sums(self.tensors, self._merged)
            self.computed.append(sums)
            self._sums = sums.tensors
            # Records show the sums instead of the weights.
            # Copies, because `tensors` still needs the weights' own locations.
            self._parts = dict(self._parts)
            self._buffer_of = dict(self._buffer_of)
            for name, home in sums.homes.items():
                box = self._parts[name]
                strides = tuple(sums.tensors[name].stride())
                self._parts[name] = LocalBox(box.offsets, box.lengths, home.offset, strides)
                self._buffer_of[name] = home.buffer

    def own_layout(self) -> Layout:
        shards: list[Shard] = []
        findings: list[str] = []
        for name, packed in self.packed.items():
            parameter = packed.parameter
            shape = tuple(self.tensors.tensors[parameter].shape)
            buffer = BufferId(self.rank, self._buffer_of[parameter])
            try:
                for box in held_boxes(packed.view, shape, self._parts[parameter]):
                    shards.append(Shard.of(name, box, buffer))
            except ValueError as error:
                findings.append(f"{name}: {error}")
        if findings:
            raise ParameterMismatchError(findings)
        # A rank may hold no element of a tensor, e.g. if there are more ranks than rows.
        held = {shard.region.tensor for shard in shards}
        shapes = {name: packed.view.shape for name, packed in self.packed.items() if name in held}
        return layout_in(self.buffers(), self.rank, shapes, shards)

    def stored_buffers(self) -> FlatBuffers:
        return self.tensors.flat_buffers

    def own_origins(self) -> Origins:
        origins = {}
        for name, packed in self.packed.items():
            sources = [packed.parameter]
            for lora in self._merged.get(packed.parameter, ()):
                sources += [lora.a, lora.b]
            origins[name] = [self.tensors.tensors[source] for source in sources]
        return origins

    def finish_pending(self) -> None:
        """Free gathered parameters.

        Raises:
            ReshardError: parameters moved, or other adapters are active, since the layout was made.
        """
        reshard(self.model)
        self.fingerprint.require_placed()
        # Names need not be read again if all tensors are weights: then PEFT has added none.
        has_adapters = len(self._names.weights) < len(self.tensors.tensors)
        if has_adapters and wrapped_names(self.model, self.tensors.tensors) != self._names:
            raise ReshardError(
                "PEFT's active adapters or their scaling changed since the layout was made: "
                "restore them, or build a new engine",
                code="adapters-changed",
            )

    @property
    def base(self) -> FsdpAdaptor:
        """The stored weights, without adapters, into which a checkpoint is read."""
        if not self._names.loras:
            return self.merged
        return FsdpAdaptor(self.model, self.table, self.rank, "none", tensors=self.tensors)

    @torch.no_grad()
    def finish_loading(self) -> None:
        for lora in self._names.loras:
            # PEFT's own start: the other matrix stays, without which no gradient reaches this one.
            zero = lora.a if "lora_embedding_A" in lora.a else lora.b
            local_of(self.tensors.tensors[zero]).zero_()

    @property
    def merged(self) -> FsdpAdaptor:
        """Adaptor of the same model with LoRA merged, for writing a checkpoint."""
        if self.lora is None:
            return self.without_view()
        return FsdpAdaptor(self.model, self.table, self.rank, tensors=self.tensors)

    @property
    def adapters_add_nothing(self) -> bool:
        """True if this rank's part is that of the model without adapters, which is not trained."""
        names = self._names
        tensors = self.tensors.tensors
        trained = [tensors[name] for name in names.weights.values() if tensors[name].requires_grad]
        changed = [lora for lora in names.loras if local_of(tensors[lora.b]).any()]
        return bool(names.loras) and not changed and not trained

    @property
    def scalings(self) -> dict[str, float]:
        """Name of the A of each active adapter -> its scaling, which no state dict has."""
        return {lora.a: lora.scaling for lora in self._names.loras}

    def save_adapters(self, path: str | Path, *, writes: bool) -> None:
        """Save adapters, and all else that is trained, by PEFT. Collective; one rank writes."""
        base = {*self._names.weights.values()}
        tensors = {
            plain_name(name): _gathered(tensor).cpu()
            for name, tensor in self.tensors.tensors.items()
            if name not in base or tensor.requires_grad
        }
        if writes:
            model: Any = getattr(self.model, "_orig_mod", self.model)
            # PEFT takes the tensors of modules by their names, which may have those of wrappers.
            modules = [(plain_name(name), module) for name, module in model.named_modules()]
            with attributes_set([model], named_modules=lambda *_, **__: iter(modules)):
                model.save_pretrained(path, state_dict=tensors)

    def computing_tensors(self) -> TensorDict:
        """Return transformers' name -> this rank's part of the tensor, with adapters merged.

        After `prepare` of `merged`.
        """
        return {
            name: self._sums.get(state_name, local_of(self.tensors.tensors[state_name]))
            for name, state_name in self._names.weights.items()
        }

    def described_tensors(self) -> Iterator[NamedTensor]:
        for name, tensor in self.tensors.tensors.items():
            yield f"{name} on rank {self.rank}", local_of(tensor)
        for name, total in self._sums.items():
            yield f"{name} with LoRA on rank {self.rank}", total

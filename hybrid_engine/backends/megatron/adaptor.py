"""Records of the location of every canonical tensor of a Megatron model on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from hybrid_engine.backends.computed_sources import (
    AdaptorWithSources,
    ComputedSources,
    Home,
    StoredScales,
)
from hybrid_engine.backends.megatron.model_tensors import LORA, Member, ModelTensors
from hybrid_engine.backends.megatron.quantised_parameters import (
    dequantised_weights,
    is_quantised,
    not_sent_as_stored,
    scales_of,
)
from hybrid_engine.backends.training_side import (
    NamedTensor,
    Origins,
    gaps,
    layout_in,
    runs_by_buffer,
)
from hybrid_engine.errors import ConfigError, ParameterMismatchError, ReshardError
from hybrid_engine.models.block_quantization import BlockQuantization
from hybrid_engine.models.lora_tensors import adapter_packings, adapter_shapes
from hybrid_engine.models.packing import Packing, held_regions
from hybrid_engine.models.table import Match
from hybrid_engine.records.layout import BufferId, Extent, Layout, Place, Shard
from hybrid_engine.records.regions import Shapes
from hybrid_engine.transports.copies import FlatBuffers

LoraView = Literal["base", "merged", "separate"]
"""View of a weight with LoRA: the frozen weight, the sum, or both separately by PEFT's names."""


@dataclass(frozen=True, eq=False)
class _LoraMatrix:
    """LoRA matrix of this rank.

    Attributes:
        parameter: the part of the matrix on this rank.
        shards: the records of canonical tensors in it.
        shapes: whole shapes of these tensors.
    """

    parameter: torch.nn.Parameter
    shards: Sequence[Shard]
    shapes: Shapes


class MegatronAdaptor(AdaptorWithSources):
    """Training weights of one rank (port `TrainingWeights`).

    Args:
        model: names and storage of this rank's model chunks.
        lora: view of weights that have LoRA; "merged" takes memory for the sums.
    """

    def __init__(self, model: ModelTensors, lora: LoraView = "merged") -> None:
        super().__init__()
        self.model = model
        self.fingerprint = model.fingerprint
        self.lora = lora
        self.rank = model.rank
        self.table = model.table
        if model.norm_factors is not None:
            self.computed.append(model.norm_factors)
        if model.adapters.weights and lora == "merged":
            self.computed.append(model.adapters.sums())

    @property
    def base(self) -> MegatronAdaptor:
        """The same model without LoRA, into which a checkpoint is read."""
        return MegatronAdaptor(self.model, "base")

    @property
    def merged(self) -> MegatronAdaptor:
        """The same model with LoRA added, from which a checkpoint is written."""
        if self.lora == "merged":
            return self.without_view()
        return MegatronAdaptor(self.model, "merged")

    @property
    def separate(self) -> MegatronAdaptor:
        """The same model with LoRA beside the weights, from which adapters are written."""
        if self.lora == "separate":
            return self.without_view()
        return MegatronAdaptor(self.model, "separate")

    def without_view(self) -> MegatronAdaptor:
        if not self.sent_as_stored:
            return super().without_view()
        return MegatronAdaptor(self.model, self.lora)

    def late_sources(self) -> list[ComputedSources[Any]]:
        # Dequantised weights take twice the memory of the weights, so only those that are sent.
        weights = [
            tensor
            for name, tensor in self.model.quantised_weights
            if not self.sent_as_stored.issuperset(self._tensors_of(name, tensor))
        ]
        return [dequantised_weights(weights)] if weights else []

    def stored_scales(
        self,
        quantization: BlockQuantization,
    ) -> Mapping[str, Sequence[StoredScales]]:
        parts: dict[str, list[StoredScales]] = {}
        findings: dict[str, dict[str, None]] = {}
        for name, tensor in self.model.quantised_weights:
            home = self.model.homes[tensor]
            for shard in self.shards_of(name, tensor, home):
                if shard.region.tensor in quantization.weights and shard.region.numel:
                    try:
                        part = scales_of(tensor, shard, home.offset, quantization.format)
                    except ValueError as error:
                        findings.setdefault(str(error), {})[name] = None
                    else:
                        parts.setdefault(shard.region.tensor, []).append(part)
        if findings:
            raise ConfigError(not_sent_as_stored(findings))
        return parts

    def own_layout(self) -> Layout:
        homes = dict(self.model.homes)
        for sources in self.computed:
            homes |= sources.homes
        shards = self._weight_shards(homes)
        if self.sent_as_stored:
            stored = self._weight_shards(self.model.homes)
            # Sums and dequantised copies are shown in place of the weights, but for tensors that go
            # as stored.
            shards = [
                *(shard for shard in shards if shard.region.tensor not in self.sent_as_stored),
                *(shard for shard in stored if shard.region.tensor in self.sent_as_stored),
            ]
        held = {shard.region.tensor for shard in shards}
        refined = self.table.refined_shapes
        shapes = {name: shape for name, shape in refined.items() if name in held}
        # Adapters are not in the name table; their shapes follow from the adapted weights.
        for matrix in self._separate_matrices():
            shards += matrix.shards
            for shard in matrix.shards:
                shapes[shard.region.tensor] = matrix.shapes[shard.region.tensor]
        return layout_in(self.buffers(), self.rank, shapes, shards)

    def stored_buffers(self) -> FlatBuffers:
        return self.model.flat_buffers

    def shown_weights(self) -> Iterator[NamedTensor]:
        """Yield (Megatron name, tensor in `layout`), computed ones as of the last `prepare`."""
        shown = {key: value for sources in self.computed for key, value in sources.tensors.items()}
        for name, tensor in self.model.named_weights():
            yield name, shown.get(tensor, tensor)

    def own_origins(self) -> Origins:
        origins: dict[str, list[torch.Tensor]] = {}
        for name, tensor in self.model.named_weights():
            for canonical in self._tensors_of(name, tensor):
                # A sum changes if its weight or one of the matrices does.
                lora = self.model.adapters.tensors_of(tensor) if self.lora == "merged" else ()
                origins.setdefault(canonical, []).extend([tensor, *lora])
        for matrix in self._separate_matrices():
            for shard in matrix.shards:
                origins.setdefault(shard.region.tensor, []).append(matrix.parameter)
        return origins

    @torch.no_grad()
    def finish_loading(self) -> None:
        if self.model.norm_factors is not None:
            for weight, factor in self.model.norm_factors.tensors.items():
                # A checkpoint was read into the factors; Megatron stores them minus 1.
                weight.copy_(factor.float() - 1)
        for sources in self.computed:
            for weight, value in sources.tensors.items():
                if is_quantised(weight):
                    weight.copy_(value)
        # LoRA adds nothing if B is zero; A keeps its random values, without which no gradient
        # reaches B.
        for name, parameter in self.model.named_lora():
            if name.endswith(".linear_out.weight"):
                parameter.zero_()
        # The padding of the vocabulary and of buckets, outside weights and LoRA matrices. Of the
        # stored weights, because computed ones are in other buffers.
        runs = runs_by_buffer(self._weight_shards(self.model.homes))
        for _, parameter in self.model.named_lora():
            home = self.model.homes[parameter]
            extent = Extent(home.offset, home.offset + parameter.numel())
            runs.setdefault(home.buffer, []).append(extent)
        for name, flat in self.model.flat_buffers.items():
            for gap in gaps(flat.numel(), runs.get(name, ())):
                flat[gap.start : gap.stop] = 0

    def finish_pending(self) -> None:
        """Finish pending parameter gathers.

        With overlap_param_gather the distributed optimizer leaves gathers to the next forward pass.
        Then every call gathers, even if nothing is pending, and is collective over data parallel
        ranks. Without overlap the optimizer's step has gathered already.

        Raises:
            ReshardError: parameters moved since the layout was made, so that the switch would read
                stale memory, or other adapters compute.
        """
        # Gathers write the buffers, so they must end before anything reads these.
        for chunk in self.model.ddp_chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        self.fingerprint.require_placed()
        if self.model.adapters_changed():
            raise ReshardError(
                "adapters were added, removed, enabled, disabled or scaled since the layout was "
                "made: restore them, or build a new engine",
                code="adapters-changed",
            )

    def described_tensors(self) -> Iterator[NamedTensor]:
        for name, tensor in [*self.model.named_weights(), *self.model.named_lora()]:
            canonical = ", ".join(self._tensors_of(name, tensor)) or "LoRA"
            yield f"{name} on rank {self.rank} (canonical {canonical})", tensor

    def _weight_shards(self, homes: Mapping[torch.Tensor, Home]) -> list[Shard]:
        shards: list[Shard] = []
        findings: list[str] = []
        for name, tensor in self.model.named_weights():
            try:
                shards += self.shards_of(name, tensor, homes[tensor])
            except ValueError as error:
                findings.append(f"{name}: {error}")
        if findings:
            raise ParameterMismatchError(findings)
        return shards

    def shards_of(self, name: str, tensor: torch.Tensor, home: Home) -> list[Shard]:
        """Return the shards in a tensor of the model that is shown at `home`.

        Raises:
            ValueError: the name has no rule in the name table, or the shape does not fit the rule.
        """
        # A computed tensor is contiguous and of the same shape as the weight.
        shards = []
        for member in self.model.members(name, tensor):
            match = self.table.match(member.name)
            if match is None:
                raise ValueError("the model's name table has no such parameter")
            shards += self._held(match.packing, match, self.table.shapes, member, home)
        return shards

    def names_of(self, name: str, tensor: torch.Tensor) -> list[str]:
        """Return the canonical tensors that are packed in a tensor of the model, on all ranks."""
        names = [
            packed.format(**match.indices)
            for _, match in self._matches(name, tensor)
            for packed in match.packing.tensors()
        ]
        return [name for name in dict.fromkeys(names) if name in self.table.shapes]

    def _matches(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[Member, Match]]:
        """Yield the weights in a tensor of the model that have a rule, with it."""
        for member in self.model.members(name, tensor):
            match = self.table.match(member.name)
            if match is not None:
                yield member, match

    def _separate_matrices(self) -> Iterator[_LoraMatrix]:
        """Yield this rank's LoRA matrices if they are resharded separately.

        Matrices of a layer that the inference engine does not have are left out.
        """
        if self.lora != "separate":
            return

        # Layers of a type share their shapes, and computing them walks the name table.
        @cache
        def shapes_of(module: str, lora_rank: int) -> Shapes:
            return adapter_shapes(self.table, {module}, lora_rank)

        for name, parameter in self.model.named_lora():
            module, _, matrix = name.partition(LORA)
            match = self.table.match(f"{module}.weight")
            assert match is not None, name
            # A is [rank, in], B is [out, rank].
            is_a = matrix == "linear_in.weight"
            shapes = shapes_of(module.rpartition(".")[2], parameter.shape[0 if is_a else 1])
            home = self.model.homes[parameter]
            (member,) = self.model.members(name, parameter)
            packings_of_a, packing_of_b = adapter_packings(match.packing)
            for packing in packings_of_a if is_a else (packing_of_b,):
                names = [tensor.format(**match.indices) for tensor in packing.tensors()]
                # vLLM's model has no MTP layers, and `adapter_shapes` leaves out what it does not
                # read.
                if all(canonical in shapes for canonical in names):
                    shards = self._held(packing, match, shapes, member, home)
                    yield _LoraMatrix(parameter, shards, shapes)

    def _held(
        self,
        packing: Packing,
        match: Match,
        shapes: Shapes,
        member: Member,
        home: Home,
    ) -> list[Shard]:
        """Return the records of a weight in a tensor that starts at `home`."""
        part, num_parts = self.model.parts[packing.over]
        offset = home.offset + member.start
        place = Place(BufferId(self.rank, home.buffer), offset, member.strides)
        return held_regions(packing, match.indices, shapes, member.shape, place, part, num_parts)

    def _tensors_of(self, name: str, tensor: torch.Tensor) -> list[str]:
        """Return the canonical tensors of which a tensor of the model holds parts, sorted."""
        names: set[str] = set()
        for member, match in self._matches(name, tensor):
            shapes = self.table.shapes
            shards = self._held(match.packing, match, shapes, member, Home(name, 0))
            names |= {shard.region.tensor for shard in shards}
        return sorted(names)

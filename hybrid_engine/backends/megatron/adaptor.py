"""Says where Megatron keeps every canonical tensor on this rank."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.lora_layers import ADAPTER, WRAPPED, MergedWeights, wrapped_layers
from hybrid_engine.errors import ParameterMismatchError, ReshardError, WeightError
from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.models.lora_tensors import adapter_packings, adapter_shapes
from hybrid_engine.models.packing import Held, Over, Shape, held_regions
from hybrid_engine.models.table import Match, ModelTable
from hybrid_engine.records.layout import Buffer, BufferId, Extent, Layout, Place, Shard
from megatron_patches.buffers import iter_buffers

MERGED = "weights with adapters"
"""Name of the buffer that holds sums of weights and adapters."""


@dataclass(frozen=True)
class _Home:
    """Where a parameter lives: element `offset` of flat buffer `buffer`."""

    buffer: str
    offset: int


@dataclass
class _Storages:
    """The flat buffers of this rank and where each parameter lies in them."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    homes: dict[torch.Tensor, _Home] = field(default_factory=dict)


class MegatronAdaptor:
    """The training weights of one rank (port `TrainingWeights`).

    Args:
        model_chunks: this rank's model chunks, in virtual-pipeline order, with or without DDP and precision wrappers.
        table: the model's name table.

    Layer and expert numbers come from the live modules (`layer_number`, `local_expert_indices`), so uneven and virtual
    pipeline stages and expert parallelism need no arithmetic here. `noop_layers` are 0-based positions that hold no
    layer of the checkpoint and are not counted in its numbering.

    Adapters are added to the weights that the layout shows, or, with `adapters_apart`, shown beside them under PEFT's
    names.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module],
        table: ModelTable,
        noop_layers: Sequence[int] = (),
        adapters_apart: bool = False,
    ) -> None:
        self.model_chunks = list(model_chunks)
        self.table = table
        self.noop_layers = frozenset(noop_layers)
        self.rank = torch.distributed.get_rank()
        tensor_group = parallel_state.get_tensor_model_parallel_group()
        expert_group = parallel_state.get_expert_tensor_parallel_group()
        self._groups = {
            Over.NONE: (0, 1),
            Over.TENSOR: (tensor_group.rank(), tensor_group.size()),
            Over.EXPERT_TENSOR: (expert_group.rank(), expert_group.size()),
        }
        adapted = list(wrapped_layers(self.model_chunks))
        self._adapters_apart = adapters_apart and bool(adapted)
        self._storages = self._find_storages()
        self._merged = MergedWeights(adapted) if adapted and not adapters_apart else None

    @property
    def base(self) -> MegatronAdaptor:
        """The same weights without adapters: what a checkpoint is read into."""
        base = copy.copy(self)
        base._merged, base._adapters_apart = None, False
        return base

    @property
    def merged(self) -> MegatronAdaptor:
        """The same weights with adapters added, whatever is delivered: what a checkpoint is written from.

        Takes memory for the sums, if there is none yet, until the result is dropped.
        """
        if not self._adapters_apart:
            return self
        merged = copy.copy(self)
        merged._merged, merged._adapters_apart = MergedWeights(list(wrapped_layers(self.model_chunks))), False
        return merged

    @property
    def scratch(self) -> frozenset[str]:
        """Names of buffers whose contents `prepare` computes; they need not be kept."""
        return frozenset() if self._merged is None else frozenset({MERGED})

    def layout(self) -> Layout:
        """This rank's records. Raises ParameterMismatchError that names every parameter it cannot place."""
        shards: list[Shard] = []
        findings: list[str] = []
        for name, tensor in self.named_weights():
            try:
                shards.extend(self._shards_of(name, tensor))
            except ValueError as error:
                findings.append(f"{name}: {error}")
        if findings:
            raise ParameterMismatchError(findings)
        held = {shard.region.tensor for shard in shards}
        runs = _runs_by_buffer(shards)
        adapters = list(self._adapter_shards()) if self._adapters_apart else []
        shards += [shard for shard, _ in adapters]
        return Layout(
            tensors={name: shape for name, shape in self.table.shapes.items() if name in held}
            | {shard.region.tensor: shape for shard, shape in adapters},
            buffers={
                BufferId(self.rank, name): _describe(tensor, _gaps(tensor.numel(), runs.get(name, ())))
                for name, tensor in self.buffers().items()
            },
            shards=tuple(shards),
        )

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Flat live storage by buffer name."""
        return self._storages.tensors | ({} if self._merged is None else {MERGED: self._merged.flat})

    @torch.no_grad()
    def zero_adapters(self) -> None:
        """Make all adapters add nothing: the weights that were just read are the whole."""
        for name, parameter in self._adapter_parameters():
            if name.endswith(f"{ADAPTER}linear_out.weight"):
                parameter.zero_()

    @torch.no_grad()
    def zero_padding(self) -> None:
        """Zero what belongs to no weight and no adapter: padding of the vocabulary and of buckets."""
        runs = _runs_by_buffer(self.layout().shards)
        weights = {tensor for _, tensor in self.named_weights()}
        for tensor, home in self._storages.homes.items():
            if tensor not in weights:
                runs.setdefault(home.buffer, []).append(Extent(home.offset, home.offset + tensor.numel()))
        for name, flat in self._storages.tensors.items():
            for gap in _gaps(flat.numel(), runs.get(name, ())):
                flat[gap.start : gap.stop] = 0

    def prepare(self) -> None:
        """Finish parameter gathers that an overlapping distributed optimizer left for the next forward pass, and add
        adapters to what the layout shows of the weights they are on.

        Without overlap the optimizer's step has gathered already and nothing is done; with it every call gathers,
        owed or not, and is collective over data parallel ranks. Raises ReshardError with the number of parameters that
        no longer lie where the layout says, and the first of them: the switch would read what training does not write.
        """
        for chunk in self.model_chunks:
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        moved = [name for name, tensor in self.named_weights() if not self._is_home(tensor)]
        if moved:
            raise ReshardError(
                f"{len(moved)} parameters lie elsewhere than when the layout was made, first {', '.join(moved[:4])}. "
                "Offload through the engine, not by .data or .to(); or build a new engine"
            )
        if self._merged is not None:
            self._merged.fill()

    def check_values(self) -> None:
        """Raise WeightError naming every parameter that holds a NaN or an infinity. Reads each buffer once."""
        if all(_is_finite(tensor) for tensor in self.buffers().values()):
            return
        findings = [
            f"{name} on rank {self.rank} (canonical {', '.join(self._tensors_of(name, tensor)) or 'of an adapter'}): "
            f"{problem} of {tensor.numel()} elements"
            for name, tensor in [*self.named_weights(), *self._adapter_parameters()]
            if (problem := _unusable_values(tensor.detach()))
        ]
        if findings:
            raise WeightError(findings)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(Megatron name with global layer and expert numbers, parameter); shared parameters once a chunk."""
        for chunk in self.model_chunks:
            model = unwrap_model(chunk)
            names = _GlobalNames(model, self.table.dims.num_layers, self.noop_layers)
            for name, parameter in model.named_parameters():
                yield names.of(name), parameter

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters but those of adapters, and the persistent buffers that the name table speaks of (a router's
        expert bias)."""
        for name, parameter in self.named_parameters():
            if ADAPTER not in name:
                yield name.replace(WRAPPED, ""), parameter
        for chunk in self.model_chunks:
            model = unwrap_model(chunk)
            names = _GlobalNames(model, self.table.dims.num_layers, self.noop_layers)
            for local_name, tensor in model.named_buffers():
                if self.table.match(name := names.of(local_name)) is not None:
                    yield name, tensor

    def _adapter_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those of `named_parameters` that belong to adapters."""
        return ((name, parameter) for name, parameter in self.named_parameters() if ADAPTER in name)

    def published_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What `layout` shows of `named_weights`: with adapters added, once `prepare` did so."""
        for name, tensor in self.named_weights():
            has_sum = self._merged is not None and tensor in self._merged.offsets
            yield name, self._merged.view_of(tensor) if has_sum else tensor

    def _find_storages(self) -> _Storages:
        """Parameters in DDP's flat buffers by their index map; every other one is a buffer of its own."""
        storages = _Storages()
        ddp_chunks = [chunk for chunk in self.model_chunks if isinstance(chunk, DistributedDataParallel)]
        for record in iter_buffers(ddp_chunks):
            if record.param_data is None:
                continue
            buffer_name = f"chunk{record.chunk_index}.{record.kind}{record.index}"
            storages.tensors[buffer_name] = record.param_data
            for slot in record.slots:
                storages.homes[slot.param] = _Home(buffer_name, slot.start)
        for name, tensor in [*self.named_weights(), *self._adapter_parameters()]:
            if tensor not in storages.homes:
                storages.tensors[name] = _flat(tensor.data)
                storages.homes[tensor] = _Home(name, 0)
        return storages

    def _is_home(self, tensor: torch.Tensor) -> bool:
        home = self._storages.homes.get(tensor)
        if home is None:
            return False
        flat = self._storages.tensors[home.buffer]
        return tensor.data_ptr() == flat.data_ptr() + home.offset * flat.element_size()

    def _shards_of(self, name: str, tensor: torch.Tensor) -> Iterator[Shard]:
        """Raises ValueError when the name has no rule or the shape does not fit the rule."""
        match = self.table.match(name)
        if match is None:
            raise ValueError("the model's name table has no such parameter")
        strides = tensor.stride()[::-1] if match.packing.transposed else tensor.stride()
        return self._placed(self._held(match, tensor), self._published_home(tensor), tensor.stride(), strides)

    def _placed(
        self, parts: Sequence[Held], home: _Home, local_strides: tuple[int, ...], strides: tuple[int, ...]
    ) -> Iterator[Shard]:
        """Records of the parts of one parameter; `strides` are `local_strides` in the canonical tensor's order."""
        for held in parts:
            offset = home.offset + held.start * local_strides[held.local_dim]
            yield Shard(held.region, Place(BufferId(self.rank, home.buffer), offset, strides))

    def _adapter_shards(self) -> Iterator[tuple[Shard, Shape]]:
        """Records of this rank's adapters, each with its canonical tensor's whole shape."""
        shapes_of: dict[tuple[str, int], dict[str, Shape]] = {}  # by module and the adapter's rank; of all layers
        for name, parameter in self._adapter_parameters():
            module, _, matrix = name.partition(ADAPTER)
            match = self.table.match(f"{module}.weight")
            assert match is not None, name
            packings = adapter_packings(match.packing)
            is_a = matrix == "linear_in.weight"
            kind = module.rpartition(".")[2], parameter.shape[0 if is_a else 1]
            if kind not in shapes_of:
                shapes_of[kind] = adapter_shapes(self.table, {kind[0]}, kind[1])
            shapes, strides = shapes_of[kind], parameter.stride()
            for packing in packings.a if is_a else (packings.b,):
                if any(tensor.format(**match.indices) not in shapes for tensor in packing.tensors()):
                    continue  # of a layer that the inference engine does not have
                part, num_parts = self._groups[packing.over]
                held = held_regions(packing, match.indices, shapes, tuple(parameter.shape), part, num_parts)
                for shard in self._placed(held, self._storages.homes[parameter], strides, strides):
                    yield shard, shapes[shard.region.tensor]

    def _published_home(self, tensor: torch.Tensor) -> _Home:
        """Where a weight is read: where it lives, or where its sum with an adapter is."""
        if self._merged is not None and tensor in self._merged.offsets:
            return _Home(MERGED, self._merged.offsets[tensor])
        return self._storages.homes[tensor]

    def _held(self, match: Match, tensor: torch.Tensor) -> list[Held]:
        part, num_parts = self._groups[match.packing.over]
        return held_regions(match.packing, match.indices, self.table.shapes, tuple(tensor.shape), part, num_parts)

    def _tensors_of(self, name: str, tensor: torch.Tensor) -> list[str]:
        match = self.table.match(name)
        return sorted({held.region.tensor for held in self._held(match, tensor)}) if match else []


class _GlobalNames:
    """Turns the names of one model chunk into names with global numbers of layers and experts."""

    def __init__(self, model: torch.nn.Module, num_layers: int, noop_layers: frozenset[int]) -> None:
        self._layers = {
            f"decoder.layers.{index}.": f"decoder.layers.{_without_noops(layer.layer_number - 1, noop_layers)}."
            for index, layer in enumerate(model.decoder.layers)
        }
        for index, layer in enumerate(model.mtp.layers if getattr(model, "mtp", None) is not None else ()):
            # a checkpoint numbers these on after the decoder's
            self._layers[f"mtp.layers.{index}."] = f"mtp.layers.{num_layers + layer.layer_number - 1}."
        self._experts = {
            f"{name}.experts.": module.local_expert_indices
            for name, module in model.named_modules()
            if hasattr(module, "local_expert_indices")
        }

    def of(self, name: str) -> str:
        """The name with global numbers."""
        for prefix, experts in self._experts.items():
            if name.startswith(prefix):
                rest = _EXPERT.sub(lambda found, own=experts: str(own[int(found[0])]), name.removeprefix(prefix))
                name = prefix + rest
                break
        layer = ".".join(name.split(".")[:3]) + "."
        return self._layers[layer] + name.removeprefix(layer) if layer in self._layers else name


_EXPERT = re.compile(r"(?<=^local_experts\.)\d+(?=\.)|(?<=^linear_fc[12]\.weight)\d+$|(?<=^linear_fc[12]\.bias)\d+$")


def _without_noops(position: int, noop_layers: frozenset[int]) -> int:
    """The checkpoint's number of the layer at `position`."""
    return position - sum(noop < position for noop in noop_layers)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The run of storage from the tensor's first to its last element, whatever its strides."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach + 1,), (1,))


def _run_of(shard: Shard) -> Extent:
    """From a shard's first to its last element; parameters are dense and cut along their rows, so all of it is held."""
    reach = sum((size - 1) * step for size, step in zip(shard.region.lengths, shard.place.strides, strict=True))
    return Extent(shard.place.offset, shard.place.offset + reach + 1)


def _runs_by_buffer(shards: Sequence[Shard]) -> dict[str, list[Extent]]:
    runs: dict[str, list[Extent]] = {}
    for shard in shards:
        runs.setdefault(shard.place.buffer.name, []).append(_run_of(shard))
    return runs


def _gaps(numel: int, runs: Sequence[Extent]) -> tuple[Extent, ...]:
    """What no shard covers of a buffer: the ends of buckets and the padding of the vocabulary."""
    gaps, end = [], 0
    for run in (*sorted(runs), Extent(numel, numel)):
        if run.start > end:
            gaps.append(Extent(end, run.start))
        end = max(end, run.stop)
    return tuple(gaps)


def _describe(tensor: torch.Tensor, padding: tuple[Extent, ...]) -> Buffer:
    return Buffer(
        numel=tensor.numel(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        padding=padding,
        exported=exported_buffer_of(tensor) is not None,
    )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. The sum is the fastest look, but may overflow where no element does."""
    if not tensor.numel() or tensor.sum().isfinite():
        return True
    return all(bool(value.isfinite()) for value in tensor.aminmax())


def _unusable_values(tensor: torch.Tensor) -> str:
    """ "3 NaN, 1 Inf", or nothing when every element is finite."""
    counts = {"NaN": int(tensor.isnan().sum()), "Inf": int(tensor.isinf().sum())}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)

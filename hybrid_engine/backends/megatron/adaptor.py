"""Says where Megatron keeps every canonical tensor on this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from hybrid_engine.errors import ParameterMismatchError, ReshardError, WeightError
from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.models.packing import Packing, Piece, local_pieces, packed_shape
from hybrid_engine.models.table import ModelTable
from hybrid_engine.planning.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.planning.regions import Region
from megatron_patches.buffers import iter_buffers


@dataclass(frozen=True)
class _Home:
    """Where a parameter lives: element `offset` of flat buffer `buffer`."""

    buffer: str
    offset: int


@dataclass
class _Storages:
    """The flat buffers of this rank and where each parameter lies in them."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    homes: dict[torch.nn.Parameter, _Home] = field(default_factory=dict)


class MegatronAdaptor:
    """The training weights of one rank (port `TrainingWeights`).

    Args:
        model_chunks: this rank's model chunks, in virtual-pipeline order, with or without DDP and precision wrappers.
        table: the model's name table.

    The layer number of a parameter comes from the live module (`layer_number`), so uneven and virtual pipeline
    stages need no arithmetic here.
    """

    def __init__(self, model_chunks: Sequence[torch.nn.Module], table: ModelTable) -> None:
        self.model_chunks = list(model_chunks)
        self.table = table
        self.rank = torch.distributed.get_rank()
        self.tp_size = parallel_state.get_tensor_model_parallel_world_size()
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self._storages = self._find_storages()

    def layout(self) -> Layout:
        """This rank's records. Raises ParameterMismatchError that names every parameter it cannot place."""
        shards: list[Shard] = []
        findings: list[str] = []
        for name, parameter in self.named_parameters():
            try:
                shards.extend(self._shards_of(name, parameter))
            except ValueError as error:
                findings.append(f"{name}: {error}")
        if findings:
            raise ParameterMismatchError(findings)
        held = {shard.region.tensor for shard in shards}
        return Layout(
            tensors={name: shape for name, shape in self.table.shapes.items() if name in held},
            buffers={BufferId(self.rank, name): _describe(tensor) for name, tensor in self._storages.tensors.items()},
            shards=tuple(shards),
        )

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Flat live storage by buffer name."""
        return self._storages.tensors

    def prepare(self) -> None:
        """Finish parameter gathers that an overlapping distributed optimizer left for the next forward pass.

        Without overlap the optimizer's step has gathered already and nothing is done; with it every call gathers,
        owed or not, and is collective over data parallel ranks. Raises ReshardError with the number of parameters that
        no longer lie where the layout says, and the first of them: the switch would read what training does not write.
        """
        for chunk in self.model_chunks:
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        moved = [name for name, parameter in self.named_parameters() if not self._is_home(parameter)]
        if moved:
            raise ReshardError(
                f"{len(moved)} parameters lie elsewhere than when the layout was made, first {', '.join(moved[:4])}. "
                "Offload through the engine, not by .data or .to(); or build a new engine"
            )

    def check_values(self) -> None:
        """Raise WeightError naming every parameter that holds a NaN. Reads each buffer once."""
        if not any(torch.isnan(tensor.sum()) for tensor in self._storages.tensors.values()):
            return
        findings = [
            f"{name} on rank {self.rank} (canonical {', '.join(self._tensors_of(name, parameter))}): "
            f"{count} of {parameter.numel()} elements are NaN"
            for name, parameter in self.named_parameters()
            if (count := int(parameter.detach().isnan().sum()))
        ]
        if findings:
            raise WeightError(findings)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(Megatron name with the global layer number, parameter) of every chunk; shared parameters once a chunk."""
        for chunk in self.model_chunks:
            model = unwrap_model(chunk)
            global_layer = {
                f"decoder.layers.{index}.": f"decoder.layers.{layer.layer_number - 1}."
                for index, layer in enumerate(model.decoder.layers)
            }
            for name, parameter in model.named_parameters():
                prefix = ".".join(name.split(".")[:3]) + "."
                if prefix in global_layer:
                    name = global_layer[prefix] + name.removeprefix(prefix)
                yield name, parameter

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
        for name, parameter in self.named_parameters():
            if parameter not in storages.homes:
                storages.tensors[name] = _flat(parameter.data)
                storages.homes[parameter] = _Home(name, 0)
        return storages

    def _is_home(self, parameter: torch.nn.Parameter) -> bool:
        home = self._storages.homes.get(parameter)
        if home is None:
            return False
        flat = self._storages.tensors[home.buffer]
        return parameter.data_ptr() == flat.data_ptr() + home.offset * flat.element_size()

    def _shards_of(self, name: str, parameter: torch.nn.Parameter) -> Iterator[Shard]:
        """Raises ValueError when the name has no rule or the shape does not fit the rule."""
        match = self.table.match(name)
        if match is None:
            raise ValueError("the model's name table has no such parameter")
        packing, shape = match.packing, tuple(parameter.shape)
        self._check_shape(packing, match.layer, shape)
        home, strides = self._storages.homes[parameter], parameter.stride()
        for piece in self._pieces(packing, parameter):
            offsets = tuple(piece.start if dim == packing.dim else 0 for dim in range(len(shape)))
            lengths = tuple(piece.length if dim == packing.dim else size for dim, size in enumerate(shape))
            offset = home.offset + piece.local_start * strides[packing.dim]
            yield Shard(
                Region(piece.tensor.format(layer=match.layer), offsets, lengths),
                Place(BufferId(self.rank, home.buffer), offset, strides),
            )

    def _check_shape(self, packing: Packing, layer: int | None, local_shape: tuple[int, ...]) -> None:
        """Raise ValueError unless all ranks' parameters together hold exactly the canonical tensors of the rule."""
        packed = packed_shape(packing, local_shape, self.tp_size)
        held: Counter[str] = Counter()
        for segment in packing.segments(self.table.dims, self.tp_size, packed[packing.dim]):
            if segment.tensor is not None:
                held[segment.tensor.format(layer=layer)] += segment.length
        for tensor, length in held.items():
            found = tuple(length if dim == packing.dim else size for dim, size in enumerate(packed))
            expected = self.table.shapes.get(tensor)
            if expected is None:
                raise ValueError(f"the checkpoint of this model has no tensor {tensor}")
            if found != expected:
                raise ValueError(
                    f"local shape {local_shape} on {self.tp_size} tensor parallel rank(s) holds {tensor} in shape "
                    f"{found}, but its shape is {expected}"
                )

    def _pieces(self, packing: Packing, parameter: torch.nn.Parameter) -> list[Piece]:
        return local_pieces(packing, self.table.dims, parameter.shape[packing.dim], self.tp_size, self.tp_rank)

    def _tensors_of(self, name: str, parameter: torch.nn.Parameter) -> list[str]:
        match = self.table.match(name)
        pieces = self._pieces(match.packing, parameter) if match else []
        return sorted({piece.tensor.format(layer=match.layer) for piece in pieces})


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The run of storage from the tensor's first to its last element, whatever its strides."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((reach + 1,), (1,))


def _describe(tensor: torch.Tensor) -> Buffer:
    return Buffer(
        numel=tensor.numel(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        exported=exported_buffer_of(tensor) is not None,
    )

"""The tensors of a Megatron model on one rank: their names in the whole model, and the flat buffers they lie in.

Weights outside of DDP's buffers are moved into elastic memory, which peers on the host can map. An optimizer may be
there already: to these weights Megatron's refer by their parameters alone, not by views.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.internals import restore_float32_bias
from hybrid_engine.backends.megatron.live_attention import live_attention
from hybrid_engine.backends.megatron.lora_layers import LORA, WRAPPED, wrapped_layers
from hybrid_engine.backends.training_side import parts_in_elastic_buffers
from hybrid_engine.errors import ModelError
from hybrid_engine.layouts.stages import checkpoint_layers
from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.models.moe import interleave_experts
from hybrid_engine.models.packing import Over
from hybrid_engine.models.table import ModelTable
from hybrid_engine.probes import Attention
from megatron_patches.buffers import data_of, iter_buffers
from megatron_patches.patch import require_supported_version


@dataclass(frozen=True)
class Home:
    """Where a tensor starts: element `offset` of flat buffer `buffer`."""

    buffer: str
    offset: int


@dataclass(frozen=True)
class Member:
    """One weight in a parameter, which is all of it unless Transformer Engine keeps several experts as one.

    Attributes:
        name: with global numbers, as if the weight was a parameter.
        start: its first element, counted from the parameter's first.
        shape, strides: of the weight.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class ModelTensors:
    """Names and storage of one rank's model chunks.

    Args:
        chunks: in virtual-pipeline order, with or without DDP and precision wrappers.
        table: the model's name table.
        noop_layers: positions (from 0) of layers that pass their input on; a checkpoint does not count them.

    Attributes:
        table: the name table, packed as Megatron is configured to.
        rank: of this process in the job.
        parts: which part of how many this rank holds of a tensor that is split over each kind of ranks. Read once:
            another model's parallel state may be Megatron's present one later.
        flat_buffers: live 1-D storage by name: DDP's flat buffers, and one of its own for every other tensor.
        homes: where each tensor lies in them.

    Layer and expert numbers are read off the live modules (`layer_number`, `local_expert_indices`), so uneven and
    virtual pipeline stages and expert parallelism need no arithmetic here.

    Raises:
        UnsupportedVersionError: for a megatron-core that was not tested, unless `megatron_patches.apply` accepted it.
        ModelError: for a HybridModel of other layers than attention and MLP in turn.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], table: ModelTable, noop_layers: Sequence[int] = ()) -> None:
        require_supported_version()
        self.chunks = list(chunks)
        self.table = _as_laid_out(table, self.chunks)
        self.noop_layers = frozenset(noop_layers)
        self._in_lora_layers = {each for layer in wrapped_layers(self.chunks) for each in layer.parameters()}
        self.rank = torch.distributed.get_rank()
        tensor_group = parallel_state.get_tensor_model_parallel_group()
        expert_group = parallel_state.get_expert_tensor_parallel_group()
        self.parts = {
            Over.NONE: (0, 1),
            Over.TENSOR: (tensor_group.rank(), tensor_group.size()),
            Over.EXPERT_TENSOR: (expert_group.rank(), expert_group.size()),
        }
        self.flat_buffers: dict[str, torch.Tensor] = {}
        self.homes: dict[torch.Tensor, Home] = {}
        self._grouped = {
            names.of(name): experts
            for model, names in self._models()
            for name, _ in model.named_parameters()
            if _GROUPED.search(name) and (experts := names.experts_of(name))
        }
        self._find_storage()

    @property
    def ddp_chunks(self) -> list[DistributedDataParallel]:
        """Those of the chunks that are wrapped in DDP: all of a model that is trained."""
        return [chunk for chunk in self.chunks if isinstance(chunk, DistributedDataParallel)]

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(Megatron name with global layer and expert numbers, parameter); shared parameters once a chunk."""
        for model, names in self._models():
            for name, parameter in model.named_parameters():
                yield names.of(name), parameter

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters but LoRA's, and the persistent buffers that the name table knows (a router's expert bias).

        Another library's adapters, which nobody here would add, keep their names, and those are in no table.
        """
        for name, parameter in self.named_parameters():
            if parameter not in self._in_lora_layers:
                yield name, parameter
            elif LORA not in name:
                yield name.replace(WRAPPED, ""), parameter
        yield from self.named_buffers()

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The persistent buffers that the name table knows; training changes them beside its optimizer."""
        for model, names in self._models():
            for local_name, tensor in model.named_buffers():
                if self.table.match(name := names.of(local_name)) is not None:
                    yield name, tensor

    def named_lora(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        own = self._in_lora_layers
        return ((name, parameter) for name, parameter in self.named_parameters() if LORA in name and parameter in own)

    def members(self, name: str, tensor: torch.Tensor) -> list[Member]:
        """The weights that one of `named_weights` holds."""
        experts = self._grouped.get(name)
        if experts is None:
            return [Member(name, 0, tuple(tensor.shape), tensor.stride())]
        _, *shape = tensor.shape
        step, *strides = tensor.stride()
        return [
            Member(f"{name}{expert}", index * step, tuple(shape), tuple(strides))
            for index, expert in enumerate(experts)
        ]

    def moved(self) -> list[str]:
        """Names of the weights that no longer lie where `homes` says."""
        return [name for name, tensor in self.named_weights() if not self._is_home(tensor)]

    def attention(self) -> dict[int, Attention]:
        """The attention of this rank's decoder layers, by layer number in the checkpoint."""
        return {
            names.layers[index]: attention
            for model, names in self._models()
            for index, attention in live_attention(model).items()
        }

    def _models(self) -> Iterator[tuple[LanguageModule, GlobalNames]]:
        for chunk in self.chunks:
            model = unwrap_model(chunk)
            yield model, GlobalNames(model, self.table.dims.num_layers, self.noop_layers)

    def _find_storage(self) -> None:
        for record in iter_buffers(self.ddp_chunks):
            if record.param_data is not None:
                buffer = f"chunk{record.chunk_index}.{record.kind}{record.index}"
                self.flat_buffers[buffer] = record.param_data
                self.homes.update({slot.param: Home(buffer, slot.start) for slot in record.slots})
        for name, tensor in [*self.named_weights(), *self.named_lora()]:
            if tensor not in self.homes:
                self.flat_buffers[name] = _flat(data_of(tensor).data)
                self.homes[tensor] = Home(name, 0)

    def _is_home(self, tensor: torch.Tensor) -> bool:
        home = self.homes.get(tensor)
        if home is None:
            return False
        flat = self.flat_buffers[home.buffer]
        return data_of(tensor).data_ptr() == flat.data_ptr() + home.offset * flat.element_size()


class GlobalNames:
    """Names in the whole model of a chunk's tensors.

    Attributes:
        layers: numbers in the checkpoint of the chunk's decoder layers.
    """

    def __init__(self, model: LanguageModule, num_layers: int, noop_layers: frozenset[int]) -> None:
        pattern = getattr(model, "hybrid_layer_pattern", None)
        number_at = partial(_in_checkpoint, noop_layers) if pattern is None else _numbers_in(pattern).__getitem__
        self.layers = [number_at(layer.layer_number - 1) for layer in model.decoder.layers]
        self._layers = {
            f"decoder.layers.{index}.": f"decoder.layers.{number}." for index, number in enumerate(self.layers)
        }
        mtp = getattr(model, "mtp", None)
        for index, layer in enumerate(mtp.layers if mtp is not None else ()):
            # a checkpoint continues the decoder's numbers with those of the MTP layers
            self._layers[f"mtp.layers.{index}."] = f"mtp.layers.{num_layers + layer.layer_number - 1}."
        self._experts = {
            f"{name}.experts.": module.local_expert_indices
            for name, module in model.named_modules()
            if hasattr(module, "local_expert_indices")
        }

    def experts_of(self, name: str) -> Sequence[int]:
        return self._experts.get(self._prefix_of(name) or "", ())

    def _prefix_of(self, name: str) -> str | None:
        return next((prefix for prefix in self._experts if name.startswith(prefix)), None)

    def of(self, name: str) -> str:
        """The global name of a local one."""
        prefix = self._prefix_of(name)
        if prefix is not None:
            numbers = self._experts[prefix]
            name = prefix + _EXPERT.sub(lambda local: str(numbers[int(local[0])]), name.removeprefix(prefix))
        layer = ".".join(name.split(".")[:3]) + "."
        return self._layers[layer] + name.removeprefix(layer) if layer in self._layers else name


_GROUPED = re.compile(r"\.experts\.linear_fc[12]\.weight$")
"""All experts of a rank as one parameter: `moe_single_grouped_weight`."""

# Of megatron-core's own experts `local_experts.N.`, of Transformer Engine's `linear_fc1.weightN`.
_EXPERT = re.compile(r"(?<=^local_experts\.)\d+(?=\.)|(?<=^linear_fc[12]\.weight)\d+$|(?<=^linear_fc[12]\.bias)\d+$")


def _as_laid_out(table: ModelTable, chunks: Sequence[torch.nn.Module]) -> ModelTable:
    sizes = {getattr(unwrap_model(chunk).config, "moe_mlp_glu_interleave_size", None) for chunk in chunks}
    block = sizes.pop() if sizes else None  # all chunks have the same configuration
    return interleave_experts(table, block) if block else table


def _numbers_in(pattern: str) -> list[int]:
    """The checkpoint's number of the layer at each position of a HybridModel."""
    try:
        return checkpoint_layers(pattern)
    except ValueError as error:
        raise ModelError(f"a HybridModel with {error}") from error


def _in_checkpoint(noop_layers: frozenset[int], position: int) -> int:
    return position - sum(noop < position for noop in noop_layers)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of storage from the tensor's first to its last, whatever its strides."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.as_strided((span,), (1,))


def keep_expert_bias_in_float32(chunks: Sequence[torch.nn.Module]) -> None:
    """Undo what Float16Module did to the routers' biases."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                restore_float32_bias(module)


def move_loose_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Move the parameters outside of DDP's buffers: frozen ones and, without the distributed optimizer, all.

    Those that lie in elastic memory already stay there.

    Raises:
        ModelError: when experts that are one parameter are among them: only Megatron's DDP can move their data.
    """
    records = [record for record in iter_buffers(chunks) if record.param_data is not None]
    in_buffers = {slot.param for record in records for slot in record.slots}
    loose = [
        [each for each in chunk.parameters() if each not in in_buffers and exported_buffer_of(data_of(each)) is None]
        for chunk in chunks
    ]
    if grouped := sum(data_of(parameter) is not parameter for parameters in loose for parameter in parameters):
        raise ModelError(
            f"{grouped} weights that hold several experts each are outside of DDP's buffers and cannot be moved: use "
            "the distributed optimizer and freeze none of them, or turn moe_single_grouped_weight off"
        )
    for parameters in loose:
        _move_together(parameters)


def move_published_buffers(chunks: Sequence[torch.nn.Module], table: ModelTable) -> None:
    """Move the modules' persistent buffers that are resharded."""
    for chunk in chunks:
        buffers = unwrap_model(chunk).named_buffers()
        _move_together([tensor for name, tensor in buffers if table.match(name) is not None])


def _move_together(tensors: Sequence[torch.Tensor]) -> None:
    for tensor, part in zip(tensors, parts_in_elastic_buffers([tensor.data for tensor in tensors]), strict=True):
        tensor.data = part

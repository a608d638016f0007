"""Tensors of a Megatron model on one rank: their global names, and the flat buffers that hold them.

Weights outside DDP's buffers move into elastic memory, which peers on the host can map. The
optimizer may exist already, because Megatron's optimizers refer to these weights as parameters, not
as views.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.computed_sources import ComputedSources, Home
from hybrid_engine.backends.megatron.adapted_weights import WRAPPED, Adapters, adapter_wrappers
from hybrid_engine.backends.megatron.internals import CHANGED_BY_TRAINING
from hybrid_engine.backends.megatron.live_attention import live_attention
from hybrid_engine.backends.megatron.quantised_parameters import (
    as_elements,
    is_quantised,
    set_elements,
)
from hybrid_engine.backends.training_side import Modules, NamedTensor, parts_in_elastic_buffers
from hybrid_engine.compute_check.attention import POSITIONS, Attentions
from hybrid_engine.compute_check.fingerprint import Fingerprint
from hybrid_engine.errors import ModelError
from hybrid_engine.layouts.stages import checkpoint_layers
from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.models.moe import interleave_experts
from hybrid_engine.models.packing import Over
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.regions import Shape, Strides
from megatron_patches.buffers import data_of, iter_buffers
from megatron_patches.patch import require_supported_version

LORA = ".adapter."
"""Part of the name of a LoRA matrix."""

_GROUPED = re.compile(r"\.experts\.linear_fc[12]\.weight$")
"""All experts of a rank in one parameter: `moe_single_grouped_weight`."""

_EXPERT = re.compile(
    r"(?<=^local_experts\.)\d+(?=\.)|(?<=^linear_fc[12]\.weight)\d+$|(?<=^linear_fc[12]\.bias)\d+$"
)
"""Number of an expert in a parameter's name, after the name of the module of all experts.

megatron-core's own experts are `local_experts.N.`, Transformer Engine's `linear_fc1.weightN`.
"""


@dataclass(frozen=True)
class Member:
    """Weight in a parameter.

    A parameter is one weight, unless Transformer Engine stores several experts in one parameter.

    Attributes:
        name: global name, as if the weight were a parameter.
        start: its first element, counted from the parameter's first.
        shape, strides: of the weight, in elements.
    """

    name: str
    start: int
    shape: Shape
    strides: Strides


class ModelTensors:
    """Names and storage of one rank's model chunks.

    Args:
        chunks: in virtual-pipeline order, with or without DDP and precision wrappers.
        table: the model's name table.
        noop_layers: positions (from 0) of layers that pass their input on unchanged; a checkpoint
            does not count them.

    Attributes:
        table: the name table, packed as Megatron is configured to pack.
        adapters: adapters on the weights.
        rank: this process in the job.
        parts: (index, number of parts) of this rank, per kind of ranks that tensors are split over.
            Read once, because Megatron's parallel state may belong to another model later.
        flat_buffers: live 1-D storage by name: DDP's flat buffers, and a separate one for every
            other tensor.
        homes: location of each tensor in `flat_buffers`.
        quantised_weights: those of `named_weights` that Transformer Engine keeps in 8 bits. Found
            once, because every switch needs them, and a walk over a large model takes milliseconds.
        norm_factors: by weight, the factors of norms that Megatron stores minus 1; None: there are
            none.
        fingerprint: structure of the chunks when their tensors were located.

    Layer and expert numbers come from the live modules (`layer_number`, `local_expert_indices`), so
    uneven and virtual pipeline stages and expert parallelism need no arithmetic here.

    Raises:
        UnsupportedVersionError: this megatron-core was not tested, and `megatron_patches.apply` has
            not accepted it.
        ModelError: a HybridModel has neither the checkpoint's layers nor attention and MLP in
            turn.
        ConfigError: listing all adapters that cannot be merged.
    """

    def __init__(self, chunks: Modules, table: ModelTable, noop_layers: Sequence[int] = ()) -> None:
        require_supported_version()
        self.chunks = list(chunks)
        # All chunks have the same configuration. It may interleave the gates and units of experts.
        config = unwrap_model(self.chunks[0]).config if self.chunks else None
        block = getattr(config, "moe_mlp_glu_interleave_size", None)
        self.table = interleave_experts(table, block) if block else table
        self.noop_layers = frozenset(noop_layers)
        self.adapters = Adapters(list(map(unwrap_model, self.chunks)))
        self.rank = torch.distributed.get_rank()
        tensor_group = parallel_state.get_tensor_model_parallel_group()
        expert_group = parallel_state.get_expert_tensor_parallel_group()
        self.parts = {
            Over.NONE: (0, 1),
            Over.TENSOR: (tensor_group.rank(), tensor_group.size()),
            Over.EXPERT_TENSOR: (expert_group.rank(), expert_group.size()),
        }
        self.flat_buffers: TensorDict = {}
        self.homes: dict[torch.Tensor, Home] = {}
        # Global name of a grouped parameter -> numbers of its experts.
        self._grouped: dict[str, Sequence[int]] = {}
        for model, names in self._models():
            for name, _ in model.named_parameters():
                if _GROUPED.search(name) and (experts := names.experts_of(name)):
                    self._grouped[names.of_weight(name)] = experts
        self._locate_storage()
        self.quantised_weights = [pair for pair in self.named_weights() if is_quantised(pair[1])]
        self.norm_factors = self._norm_factors()
        self.fingerprint = Fingerprint(self.chunks, data_of, CHANGED_BY_TRAINING)

    @property
    def ddp_chunks(self) -> list[DistributedDataParallel]:
        """Chunks wrapped in DDP: all chunks of a model that is trained, none of a frozen one."""
        return [chunk for chunk in self.chunks if isinstance(chunk, DistributedDataParallel)]

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield (Megatron name with global layer and expert numbers, parameter).

        A shared parameter comes once per chunk.
        """
        for model, names in self._models():
            for name, parameter in model.named_parameters():
                yield names.of(name), parameter

    def named_weights(self) -> Iterator[NamedTensor]:
        """Yield (global name, tensor) of parameters except LoRA's, and of `named_buffers`.

        Adapters of another library keep their names. These are in no name table, so the model is
        refused instead of resharded without its adapters.
        """
        for model, names in self._models():
            for name, parameter in model.named_parameters():
                if not names.is_lora(name):
                    yield names.of_weight(name), parameter
        yield from self.named_buffers()

    def named_buffers(self) -> Iterator[NamedTensor]:
        """Yield (global name, tensor) of persistent buffers in the name table (expert biases).

        Training changes them without the optimizer.
        """
        for model, names in self._models():
            for local_name, tensor in model.named_buffers():
                name = names.of_weight(local_name)
                if self.table.match(name) is not None:
                    yield name, tensor

    def named_lora(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield (global name, parameter) of LoRA matrices."""
        for model, names in self._models():
            for name, parameter in model.named_parameters():
                if names.is_lora(name):
                    yield names.of(name), parameter

    def adapters_changed(self) -> bool:
        """Return whether other adapters compute than those in `adapters`, or with other scales."""
        present = Adapters(list(map(unwrap_model, self.chunks)))
        return present.settings != self.adapters.settings

    def members(self, name: str, tensor: torch.Tensor) -> list[Member]:
        """Return the weights in a tensor of `named_weights`."""
        experts = self._grouped.get(name)
        if experts is None:
            return [Member(name, 0, tuple(tensor.shape), tensor.stride())]
        # The first dim of a grouped parameter counts the experts.
        _, *shape = tensor.shape
        step, *strides = tensor.stride()
        return [
            Member(f"{name}{expert}", index * step, tuple(shape), tuple(strides))
            for index, expert in enumerate(experts)
        ]

    def attention(self, positions: Sequence[int] = POSITIONS) -> Attentions:
        """Return the attention of this rank's decoder layers, by layer number in the checkpoint."""
        return {
            names.layers[index]: attention
            for model, names in self._models()
            for index, attention in live_attention(model, positions).items()
        }

    def _models(self) -> Iterator[tuple[LanguageModule, GlobalNames]]:
        for chunk in self.chunks:
            model = unwrap_model(chunk)
            yield model, GlobalNames(model, self.table.dims.num_layers, self.noop_layers)

    def _locate_storage(self) -> None:
        for record in iter_buffers(self.ddp_chunks):
            # Without the distributed optimizer DDP has no parameter buffers.
            if record.param_data is not None:
                buffer = f"chunk{record.chunk_index}.{record.kind}{record.index}"
                self.flat_buffers[buffer] = as_elements(record.param_data)
                self.homes.update({slot.param: Home(buffer, slot.start) for slot in record.slots})
        # All other tensors have separate storage.
        for name, tensor in [*self.named_weights(), *self.named_lora()]:
            if tensor not in self.homes:
                self.flat_buffers[name] = as_elements(_flat(data_of(tensor).data))
                self.homes[tensor] = Home(name, 0)

    def _norm_factors(self) -> ComputedSources[torch.Tensor] | None:
        weights: dict[torch.Tensor, torch.Tensor] = {}
        if unwrap_model(self.chunks[0]).config.layernorm_zero_centered_gamma:
            for name, weight in self.named_weights():
                match = self.table.match(name)
                if match is not None and match.rule.around_one:
                    weights[weight] = weight.data
        if not weights:
            return None

        def compute(factors: Mapping[torch.Tensor, torch.Tensor]) -> None:
            for weight, factor in factors.items():
                factor.copy_(weight.float() + 1)

        device = next(iter(weights)).device
        return ComputedSources("factors of norms", weights, device, compute)


class GlobalNames:
    """Translation of the names of a chunk's tensors into names in the whole model.

    Attributes:
        layers: numbers in the checkpoint of the chunk's decoder layers.

    Raises:
        ModelError: a HybridModel has neither the checkpoint's layers nor attention and MLP in
            turn.
    """

    def __init__(self, model: LanguageModule, num_layers: int, noop_layers: frozenset[int]) -> None:
        positions = [layer.layer_number - 1 for layer in model.decoder.layers]
        pattern = getattr(model, "hybrid_layer_pattern", None)
        if pattern is None:
            # A checkpoint does not count the layers that do nothing.
            self.layers = [
                position - sum(noop < position for noop in noop_layers) for position in positions
            ]
        else:
            numbers = _checkpoint_numbers(pattern, num_layers)
            self.layers = [numbers[position] for position in positions]
        self._layers = {
            f"decoder.layers.{index}.": f"decoder.layers.{number}."
            for index, number in enumerate(self.layers)
        }
        mtp = getattr(model, "mtp", None)
        for index, layer in enumerate(mtp.layers if mtp is not None else ()):
            # A checkpoint numbers the MTP layers after the decoder's.
            number = num_layers + layer.layer_number - 1
            self._layers[f"mtp.layers.{index}."] = f"mtp.layers.{number}."
        self._experts = {
            f"{name}.experts.": module.local_expert_indices
            for name, module in model.named_modules()
            if hasattr(module, "local_expert_indices")
        }
        self._wrappers = {name for name, _ in adapter_wrappers(model)}

    def experts_of(self, name: str) -> Sequence[int]:
        """Return the global numbers of the experts in the module of a parameter."""
        return self._experts.get(self._experts_prefix(name) or "", ())

    def is_lora(self, name: str) -> bool:
        """Return whether a local name is a LoRA matrix's."""
        module, separator, _ = name.partition(LORA)
        return bool(separator) and module in self._wrappers

    def of_weight(self, name: str) -> str:
        """Return the global name of a local one, as if no LoRA wrapped its layer."""
        return self.of(plain_name(name, self._wrappers))

    def of(self, name: str) -> str:
        """Return the global name of a local one."""
        prefix = self._experts_prefix(name)
        if prefix is not None:
            # Local numbers count the rank's own experts: with 8 experts on 2 ranks, local 1 of the
            # second is expert 5.
            numbers = self._experts[prefix]
            local_name = name.removeprefix(prefix)
            name = prefix + _EXPERT.sub(lambda match: str(numbers[int(match[0])]), local_name)
        # The prefix is "decoder.layers.N." or "mtp.layers.N." for the parameters of layers. The
        # whole of "embedding.word_embeddings.weight" is not in `_layers`.
        layer = ".".join(name.split(".")[:3]) + "."
        return self._layers[layer] + name.removeprefix(layer) if layer in self._layers else name

    def _experts_prefix(self, name: str) -> str | None:
        return next((prefix for prefix in self._experts if name.startswith(prefix)), None)


def plain_name(name: str, wrappers: Collection[str]) -> str:
    """Return a local name as if none of the modules `wrappers` wrapped its layer."""
    module, _, rest = name.partition(WRAPPED)
    return f"{module}.{rest}" if module in wrappers else name


def _checkpoint_numbers(pattern: str, num_layers: int) -> list[int]:
    """Return the layer number in the checkpoint of each position of a HybridModel."""
    try:
        return checkpoint_layers(pattern, num_layers)
    except ValueError as error:
        message = f"unsupported HybridModel with {error}"
        raise ModelError(message, code="unsupported-layers") from error


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the storage from the tensor's first element to its last, for any strides."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return tensor.as_strided((last + 1,), (1,))


def keep_router_buffers_in_float32(chunks: Modules) -> None:
    """Undo Float16Module's cast of the routers' biases and counts of tokens.

    Left to Megatron, the first forward pass would give biases new storage, and counts would stay
    in 16 bits, where a sum stops growing.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                for buffer in module.buffers():
                    if buffer.is_floating_point():
                        buffer.data = buffer.float()


def move_loose_parameters(chunks: Modules) -> None:
    """Move the parameters outside DDP's buffers into elastic memory.

    They are frozen parameters and, without the distributed optimizer, all. Parameters that are in
    elastic memory already stay.

    Raises:
        ModelError: one of them holds several experts. Only Megatron's DDP can move such data.
    """
    in_buffers = {
        slot.param
        for record in iter_buffers(chunks)
        if record.param_data is not None
        for slot in record.slots
    }
    loose: list[list[torch.nn.Parameter]] = [
        [
            parameter
            for parameter in chunk.parameters()
            if parameter not in in_buffers and exported_buffer_of(data_of(parameter)) is None
        ]
        for chunk in chunks
    ]
    # All chunks are checked before the first parameter moves.
    # Of a grouped parameter `data_of` is another tensor, the one that holds all experts.
    num_grouped = sum(
        data_of(parameter) is not parameter and not is_quantised(parameter)
        for parameter in chain(*loose)
    )
    if num_grouped:
        raise ModelError(
            f"cannot move {num_grouped} weights that hold several experts each and are outside "
            "DDP's buffers: use the distributed optimizer and freeze none of them, or turn "
            "moe_single_grouped_weight off",
            code="grouped-weights-outside-ddp",
        )
    for parameters in loose:
        _move_together(parameters)


def move_published_buffers(chunks: Modules, table: ModelTable) -> None:
    """Move the modules' persistent buffers that are resharded into elastic memory."""
    for chunk in chunks:
        model = unwrap_model(chunk)
        wrappers = {name for name, _ in adapter_wrappers(model)}
        buffers = []
        for name, tensor in model.named_buffers():
            if table.match(plain_name(name, wrappers)) is not None:
                buffers.append(tensor)
        _move_together(buffers)


def _move_together(tensors: Sequence[torch.Tensor]) -> None:
    parts = parts_in_elastic_buffers([data_of(tensor).data for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        if is_quantised(tensor):
            set_elements(tensor, part)
        else:
            tensor.data = part

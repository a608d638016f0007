"""What a switch gets of weights with LoRA: their sums, or the weights and, by PEFT's names, the adapter.

merge      W + scaling * B A, computed by each rank for its part of W; A and B, which are small, are gathered
adapter    W, A and B as they lie; vLLM adds them while it computes
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from hybrid_engine.backends.fsdp.sharded_tensors import ShardedTensors, flat_storage_of, local_of, parts_of_one_buffer
from hybrid_engine.backends.fsdp.wrapped_names import Lora
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.layouts.sharded import LocalBox, Packed
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
from hybrid_engine.ranks.torch_defaults import torch_defaults
from hybrid_engine.records.regions import StridedView, contiguous_strides

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
        for dtype in dict.fromkeys(weight.dtype for weight in weights.values()):
            names = [name for name, weight in weights.items() if weight.dtype is dtype]
            if any(weights[name].numel() for name in names):
                self._place(f"weights with LoRA in {str(dtype).removeprefix('torch.')}", names, weights)

    def _place(self, buffer: str, names: Sequence[str], weights: Mapping[str, torch.Tensor]) -> None:
        sums = parts_of_one_buffer([weights[name] for name in names])
        self.flat_buffers[buffer] = flat_storage_of(sums[0])
        for name, part in zip(names, sums, strict=True):
            box = self._tensors.parts[name]
            self.sums[name], self.buffer_of[name] = part, buffer
            self.parts[name] = LocalBox(box.offsets, box.lengths, int(part.storage_offset()), tuple(part.stride()))

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

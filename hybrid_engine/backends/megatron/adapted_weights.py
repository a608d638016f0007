"""Adapters on the weights of a Megatron model, ours or Megatron-Bridge's, and their sums.

    weight     W [out, in] of this rank           ….to_wrap.weight
    adapter    A [rank, in] and B [out, rank]     ….adapter.linear_in.weight, linear_out.weight
    sum        W + alpha / rank * B A

    of                  A and B
    LoraLinear (ours)   split where W is
    LoRA                A split along its rank for a column-parallel W, B along its rows for a
                        row-parallel W, both for a W that is not split. On experts: one adapter for
                        all of the rank, or one for each: A [experts, rank, in]
    CanonicalLoRA       separate ones for q, k and v, or gate and up, which are parts of W's rows

A split that W does not have is undone by a gather over the adapter's tensor parallel ranks. Tensors
of Megatron-Bridge are read by attributes of its classes in `peft/`, version 0.6.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from hybrid_engine.backends.computed_sources import ComputedSources
from hybrid_engine.backends.megatron.lora_layers import LoraLinear
from hybrid_engine.backends.training_side import Modules
from hybrid_engine.errors import Violation, Violations, require_none

WRAPPED = ".to_wrap."
"""Part of the name of a tensor of a layer that LoRA wraps."""

SUMS = "weights with LoRA"
"""Part of the names of buffers that hold sums of weights and LoRA."""

_BRIDGE = "megatron.bridge.peft."

_PARTS: Mapping[str, Sequence[str]] = {
    "LoRALinear": (),
    "TEFusedLoRALinear": (),
    "LoRATopKRouter": (),
    "LoRALinearSplitQKV": ("adapter_q", "adapter_k", "adapter_v"),
    "LoRALinearSplitFC1UpGate": ("adapter_gate", "adapter_up"),
}
"""Megatron-Bridge's wrapper -> its adapters, in the order of the rows of W; (): one of all."""

_ADAPTERS = ("ParallelLinearAdapter", "GroupedExpertLinearAdapter")

_REMEDY = "Use LoRA or CanonicalLoRA of Megatron-Bridge without shared outer adapters, or merge it"

_PARTIAL = "its adapter applies B to a part of A x: ranks sum the layer's outputs outside of it"

_MIXED = (
    "its adapter mixes tokens: the ranks that share A x have different ones (sequence_parallel)"
)

_TIED = "its weight is tied to the embedding, which has no such adapter"

_REMEDIES = {
    _PARTIAL: (
        "Set expert_tensor_parallel_size to 1 and moe_shared_expert_overlap to false, or leave "
        "linear_fc2 out"
    ),
    _MIXED: "Leave out layers that tensor parallelism does not split, as the router",
    _TIED: "Leave output_layer out",
}


@dataclass(frozen=True, eq=False)
class Factors:
    """A and B of this rank.

    Attributes:
        a: A [rank, in], or of several experts [experts, rank, in].
        b: B [out, rank], or of several experts [experts, out, rank].
        scale: alpha / rank.
        group: ranks over which A and B may be split where the weight is not; None: they are not.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    group: torch.distributed.ProcessGroup | None = None

    @property
    def is_for_each(self) -> bool:
        """Whether each expert of a layer has an A and a B of its own."""
        return self.a.dim() == 3

    def product(self, expert: int, num_rows: int | None) -> torch.Tensor:
        """Return scale * B A in float32, a new tensor.

        Collective over `group` if A or B is split.

        Args:
            expert: position of the weight among those of its layer.
            num_rows: rows of the product; None: those of B.
        """
        a, b = (matrix[expert] if self.is_for_each else matrix for matrix in (self.a, self.b))
        # B [out, rank] has all of the rank, so its columns are the rows that A must have.
        a = self._gathered(a, b.shape[1])
        b = self._gathered(b, num_rows or len(b))
        return (b.float() @ a.float()).mul_(self.scale)

    def _gathered(self, matrix: torch.Tensor, num_rows: int) -> torch.Tensor:
        if len(matrix) == num_rows:
            return matrix
        parts = [torch.empty_like(matrix) for _ in range(num_rows // len(matrix))]
        torch.distributed.all_gather(parts, matrix.contiguous(), group=self.group)
        return torch.cat(parts)


@dataclass(frozen=True, eq=False)
class AdaptedWeight:
    """Weight of this rank with its adapters.

    Attributes:
        weight: W.
        expert: position of the weight among those of its layer.
        factors: adapters of consecutive rows of W.
        num_groups: number of groups of rows, each of which has rows of all `factors`.
    """

    weight: torch.Tensor
    expert: int
    factors: Sequence[Factors]
    num_groups: int

    def product(self) -> torch.Tensor:
        """Return what LoRA adds to W, in float32. Collective; see `Factors.product`."""
        num_rows = len(self.weight) if len(self.factors) == 1 else None
        products = [factors.product(self.expert, num_rows) for factors in self.factors]
        if len(products) == 1:
            return products[0]
        # Rows of 2 query groups are q0 k0 v0 q1 k1 v1, those of the adapters q0 q1, k0 k1 and v0
        # v1: as [2, rows of a group, in] they join along dim 1.
        groups = [product.unflatten(0, (self.num_groups, -1)) for product in products]
        return torch.cat(groups, dim=1).flatten(0, 1)


class Adapters:
    """All adapters of a model that compute.

    Args:
        models: the model's chunks, without wrappers of DDP and precision.

    Attributes:
        weights: weight -> the weight with its adapters.
        settings: by weight, the identities of its A and B, and the scales. They differ if other
            adapters compute.

    Raises:
        ConfigError: listing all adapters of Megatron-Bridge that cannot be merged.
    """

    def __init__(self, models: Modules) -> None:
        self.weights: dict[torch.Tensor, AdaptedWeight] = {}
        self.settings: dict[int, list[tuple[int, int, float]]] = {}
        require_none(unsupported_adapters(models))
        for _, wrapper in chain.from_iterable(map(adapter_wrappers, models)):
            # Megatron-Bridge has no public name for it.
            if getattr(wrapper, "_adapter_enabled", True):
                factors = _factors(wrapper)
                # Identities, not values: A and B change in every step, and only their exchange
                # makes the layout stale.
                settings = [(id(part.a), id(part.b), part.scale) for part in factors]
                for expert, weight in enumerate(_weights(wrapper)):
                    groups = _num_groups(wrapper, factors)
                    self.weights[weight] = AdaptedWeight(weight, expert, factors, groups)
                    self.settings[id(weight)] = settings

    def tensors_of(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """Return all A and B on a weight."""
        if weight not in self.weights:
            return []
        return [matrix for part in self.weights[weight].factors for matrix in (part.a, part.b)]

    def sums(self) -> ComputedSources[torch.Tensor]:
        """Return the sums of weights and LoRA, which are resharded in place of the weights.

        Keys are the weights, of which there must be one.
        """

        def compute(sums: Mapping[torch.Tensor, torch.Tensor]) -> None:
            shared: Sequence[Factors] = ()
            product = torch.empty(0)
            for weight, total in sums.items():
                adapted = self.weights[weight]
                # Experts of a layer follow one another, and may have one adapter together.
                # All experts of a layer have one list of factors, so identity tells the layers
                # apart.
                if adapted.factors is not shared:
                    product = adapted.product()
                is_shared = not any(factors.is_for_each for factors in adapted.factors)
                shared = adapted.factors if is_shared else ()
                # The sum is computed in float32, without a copy of the weight in it.
                total.copy_(weight + product)

        shapes = {weight: weight.data for weight in self.weights}
        return ComputedSources(SUMS, shapes, next(iter(shapes)).device, compute)


def adapter_wrappers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) of the modules that wrap a layer with adapters, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear) or _kind(module) in _PARTS:
            yield name, module


def unsupported_adapters(models: Modules) -> Violations:
    """Yield a violation for every adapter of Megatron-Bridge that cannot be merged."""
    for index, model in enumerate(models):
        for name, module in model.named_modules():
            problem = _problem(module)
            is_tied = getattr(model, "share_embeddings_and_output_weights", False)
            if is_tied and name == "output_layer" and _kind(module) in _PARTS:
                problem = _TIED
            if problem:
                yield Violation(
                    f"model_chunks[{index}]: {name}",
                    problem,
                    _REMEDIES.get(problem, _REMEDY),
                    code="unsupported-adapters",
                )


def _kind(module: Any) -> str:
    """Return the class name of a module of Megatron-Bridge's adapters; "" for another module."""
    # By name, because Megatron-Bridge is optional.
    kind = type(module)
    return kind.__name__ if kind.__module__.startswith(_BRIDGE) else ""


def _problem(module: Any) -> str:
    """Return the reason why the adapters of a module cannot be merged; "" if they can."""
    kind = _kind(module)
    if kind not in _PARTS:
        # Other modules of Megatron-Bridge are parts of adapters.
        is_wrapper = kind == "LinearAdapter" or hasattr(module, "to_wrap")
        return f"a switch does not merge its {kind}" if kind and is_wrapper else ""
    for adapter in _adapters(module):
        if _kind(adapter) not in _ADAPTERS:
            return f"its adapter is a {type(adapter).__name__}"
        if not isinstance(adapter.activation, torch.nn.Identity):
            return f"its adapter computes {type(adapter.activation).__name__} between A and B"
        names = {name for name, _ in adapter.named_parameters()}
        if others := names - {"linear_in.weight", "linear_out.weight"}:
            return f"its adapter also computes with {', '.join(sorted(others))}"
    weights = _weights(module)
    if not weights or any(weight.dim() != 2 for weight in weights):
        return f"its {type(module.to_wrap).__name__} has no weights of two dims of its own"
    factors = _factors(module)
    num_rows = sum(part.b.shape[-2] for part in factors)
    if len(factors) > 1 and num_rows != len(weights[0]):
        return f"its adapters have {num_rows} rows, the weight {len(weights[0])}"
    if not _num_groups(module, factors):
        return "its ranks have parts of query groups"
    if _is_partial(module, factors):
        return _PARTIAL
    return _MIXED if _mixes_tokens(module, factors) else ""


def _mixes_tokens(wrapper: Any, factors: Sequence[Factors]) -> bool:
    """Return whether ranks with different tokens exchange parts of A x.

    Megatron-Bridge 0.6.2 splits A by rank for a weight that tensor parallelism does not split.
    """
    of_whole_weight = not getattr(_adapters(wrapper)[0], "base_linear_is_parallel", True)
    is_by_sequence = bool(wrapper.to_wrap.config.sequence_parallel)
    return _is_split(factors) and of_whole_weight and is_by_sequence


def _is_partial(wrapper: Any, factors: Sequence[Factors]) -> bool:
    """Return whether ranks with parts of the inputs sum the outputs outside of a wrapped layer.

    Then each rank has a part of A x, to which Megatron-Bridge 0.6.2 applies only a part of B.
    """
    layer = wrapper.to_wrap
    # Transformer Engine's layers have a mode, megatron-core's a flag.
    is_outside = getattr(layer, "explicit_expert_comm", False)
    is_outside = is_outside or getattr(layer, "parallel_mode", "") is None
    return _is_split(factors) and _adapters(wrapper)[0].input_is_parallel and is_outside


def _is_split(factors: Sequence[Factors]) -> bool:
    """Return whether several ranks have parts of A or B."""
    (group,) = {part.group for part in factors}
    return group is not None and group.size() > 1


def _adapters(wrapper: Any) -> list[Any]:
    names = _PARTS.get(_kind(wrapper), ())
    return [wrapper.adapter[name] for name in names] if names else [wrapper.adapter]


def _factors(wrapper: Any) -> list[Factors]:
    factors = []
    for adapter in _adapters(wrapper):
        a, b = adapter.linear_in.weight, adapter.linear_out.weight
        if isinstance(wrapper, LoraLinear):
            factors.append(Factors(a, b, wrapper.scale))
        else:
            is_for_each = _kind(adapter) == "GroupedExpertLinearAdapter"
            group = adapter.expert_tp_group if is_for_each else adapter.tp_group
            factors.append(Factors(a, b, adapter.alpha / adapter.dim, group))
    return factors


def _weights(wrapper: Any) -> list[torch.Tensor]:
    """Return the weights of a wrapped layer; Transformer Engine's grouped layers have several."""
    numbers: dict[int, torch.Tensor] = {}
    for name, parameter in wrapper.to_wrap.named_parameters(recurse=False):
        if match := re.fullmatch(r"weight(\d*)", name):
            numbers[int(match[1] or 0)] = parameter
    return [numbers[number] for number in sorted(numbers)]


def _num_groups(wrapper: Any, factors: Sequence[Factors]) -> int:
    """Return the number of groups of rows: query groups of this rank, 1 for other layers.

    0: this rank has parts of query groups.
    """
    if _kind(wrapper) != "LoRALinearSplitQKV":
        return 1
    # `factors[1]` is of the keys: a head, `kv_channels` rows, for each query group.
    num_groups, rest = divmod(len(factors[1].b), wrapper.to_wrap.config.kv_channels)
    return 0 if rest else num_groups

"""Constraints on parallel sizes for a model: one record for each rule, which finds the problem and the remedy.

`training_side` and `inference_side` refuse sizes that break a rule; config/rules.py takes the same records over,
under the keys of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from hybrid_engine.errors import Violation
from hybrid_engine.layouts.parallelism import InferenceParallelism, Parallelism, TrainParallelism, sizes_of
from hybrid_engine.layouts.parameters import Parameter, packed_size, parameters_of
from hybrid_engine.layouts.stages import UNEVEN, pattern_violations, split_violations
from hybrid_engine.models.packing import GateUp, Over, Split, Vocabulary
from hybrid_engine.models.table import ModelTable

_Sizes = TypeVar("_Sizes", bound=Parallelism)


@dataclass(frozen=True)
class SizeRule(Generic[_Sizes]):
    """One rule.

    Attributes:
        size: the size that is most often to change; a finding names its own.
        text: what holds of possible sizes; a sentence for the documentation.
        find: yields what breaks it for a model, by the sizes' attributes.
    """

    size: str
    text: str
    find: Callable[[_Sizes, ModelTable], Iterator[Violation]]


def violations(sizes: Parallelism, table: ModelTable) -> list[Violation]:
    """Everything that makes these sizes impossible for a model; keys are the attributes' names."""
    if found := list(count_violations(sizes)):
        return found
    if isinstance(sizes, TrainParallelism):
        return [found for train_rule in TRAIN_RULES for found in train_rule.find(sizes, table)]
    return [found for infer_rule in INFER_RULES for found in infer_rule.find(sizes, table)]


def count_violations(sizes: Parallelism) -> Iterator[Violation]:
    """Counts below 1, about which no rule can say anything."""
    for name in ("world_size", *(size.name for size in sizes_of(type(sizes)))):
        value = getattr(sizes, name)
        if type(value) is int and value < 1:  # a bool is no count
            yield Violation(name, f"{value} is not a valid size", "Use 1 or more")


# -- training --------------------------------------------------------------------------------------------------------


def _train_ranks(sizes: TrainParallelism, table: ModelTable) -> Iterator[Violation]:
    yield from _product("tensor", {"TP": sizes.tensor, "PP": sizes.pipeline, "CP": sizes.context}, sizes)
    if table.dims.num_experts:
        factors = {"ETP": sizes.expert_cut, "EP": sizes.expert, "PP": sizes.pipeline}
        remedy = "ETP is TP unless it is given: try ETP 1" if sizes.expert_tensor is None and sizes.tensor > 1 else ""
        yield from _product("expert", factors, sizes, remedy)


def _train_experts(sizes: TrainParallelism, table: ModelTable) -> Iterator[Violation]:
    num_experts = table.dims.num_experts
    for key, size in (("expert", sizes.expert), ("expert_tensor", sizes.expert_tensor or 1)):
        if not num_experts and size > 1:
            yield Violation(key, f"{size}, but the model has no experts", "Use 1")
    if num_experts % sizes.expert:
        problem = f"{sizes.expert} does not divide the number of experts {num_experts}"
        yield Violation("expert", problem, f"Use a divisor of {num_experts}")


def _train_cuts(sizes: TrainParallelism, table: ModelTable) -> Iterator[Violation]:
    parts = {over: sizes.num_parts(over) for over in Over}
    keys = {Over.TENSOR: "tensor", Over.EXPERT_TENSOR: "tensor" if sizes.expert_tensor is None else "expert_tensor"}

    def is_even(parameter: Parameter) -> bool:
        """The vocabulary is padded; some projections are whole."""
        packing = parameter.packing
        return not isinstance(packing, Vocabulary) and (sizes.cuts_whole_projections or not packing.may_be_whole)

    yield from _cuts(table, parts, keys, is_even)


def _noop_positions(sizes: TrainParallelism, table: ModelTable) -> Iterator[Violation]:
    num_positions = table.dims.num_layers + len(sizes.noop_layers)
    if bad := [noop for noop in sizes.noop_layers if noop >= num_positions]:
        yield Violation("noop_layers", f"{bad} of {num_positions} positions, counted from 0", "Use smaller numbers")
    if len(set(sizes.noop_layers)) < len(sizes.noop_layers):
        yield Violation("noop_layers", f"{list(sizes.noop_layers)} names a position twice", "Name each once")


def _hybrid(sizes: TrainParallelism, table: ModelTable) -> Iterator[Violation]:
    pattern = sizes.hybrid_layer_pattern
    if pattern is None:
        return
    for key in (*UNEVEN, "pipeline_layout", "noop_layers"):
        if getattr(sizes, key) not in (None, False, ()):
            yield Violation(key, "set beside a hybrid pattern, which says where stages end", "Use one of the two")
    if table.dims.num_mtp_layers:
        problem = "the model has MTP layers, which are known of a GPTModel only"
        yield Violation("hybrid_layer_pattern", problem, "Use a GPTModel")
    dims, transformer = table.dims, table.transformer
    experts = [bool(has) for has in transformer["moe_layer_freq"]] if dims.num_experts else [False] * dims.num_layers
    has_latent = bool(transformer.get("multi_latent_attention"))
    yield from pattern_violations(pattern, sizes.pipeline, sizes.virtual_pipeline, experts, has_latent)


def _train_stages(sizes: TrainParallelism, table: ModelTable) -> Iterator[Violation]:
    if sizes.hybrid_layer_pattern is not None:
        return iter(())
    return split_violations(sizes, table.dims.num_layers, table.dims.num_mtp_layers)


# -- inference -------------------------------------------------------------------------------------------------------


def infer_rank_violations(sizes: InferenceParallelism) -> Iterator[Violation]:
    """Sizes that do not make whole replicas and instances of the ranks, for any model."""
    yield from _product("tensor", {"TP": sizes.tensor, "PP": sizes.pipeline}, sizes)
    if sizes.expert > 1 and sizes.expert % sizes.tensor:
        yield Violation("expert", f"{sizes.expert} is not a multiple of TP {sizes.tensor}", "Use 1 or a multiple")
    else:
        yield from _product("expert", {"EP": sizes.expert, "PP": sizes.pipeline}, sizes)
    if sizes.rank_order is not None and sorted(sizes.rank_order) != list(range(sizes.world_size)):
        problem = f"it does not name each of the {sizes.world_size} ranks once"
        yield Violation("rank_order", problem, f"Name every rank from 0 to {sizes.world_size - 1} once")


def _infer_counts(sizes: InferenceParallelism, table: ModelTable) -> Iterator[Violation]:
    dims = table.dims
    if sizes.pipeline > dims.num_layers:
        yield Violation("pipeline", f"{sizes.pipeline} stages for {dims.num_layers} layers", "Use fewer stages")
    if sizes.expert > max(dims.num_experts, 1):
        problem = f"{sizes.expert}, but the model has {dims.num_experts or 'no'} experts"
        yield Violation("expert", problem, f"Use {'fewer' if dims.num_experts else '1'}")


def _infer_cuts(sizes: InferenceParallelism, table: ModelTable) -> Iterator[Violation]:
    rows = sizes.padded_vocabulary(table.dims.vocab_size)
    if rows % sizes.tensor:
        problem = f"{sizes.tensor} does not divide the {rows} rows of the padded vocabulary"
        yield Violation("tensor", problem, f"Use a divisor of {rows}")
    parts = {Over.NONE: 1, Over.TENSOR: sizes.tensor, Over.EXPERT_TENSOR: sizes.tensor if sizes.expert == 1 else 1}

    def is_even(parameter: Parameter) -> bool:
        """The vocabulary is padded, heads are counted one by one, some projections are whole, some not there."""
        packing = parameter.packing
        is_cut = isinstance(packing, Split | GateUp) and not packing.may_be_whole
        return is_cut and table.is_served(parameter.tensors[0])

    yield from _cuts(table, parts, {Over.TENSOR: "tensor", Over.EXPERT_TENSOR: "tensor"}, is_even)


# -- either ----------------------------------------------------------------------------------------------------------


def _product(key: str, factors: Mapping[str, int], sizes: Parallelism, remedy: str = "") -> Iterator[Violation]:
    """Sizes whose product does not divide the number of ranks."""
    product = math.prod(factors.values())
    if sizes.world_size % product:
        text = " x ".join(f"{name} {size}" for name, size in factors.items())
        problem = f"{text} = {product} does not divide the world size {sizes.world_size}"
        yield Violation(key, problem, remedy or "Choose sizes whose product divides it")


def _heads(sizes: Parallelism, table: ModelTable) -> Iterator[Violation]:
    dims, tensor = table.dims, sizes.tensor
    if dims.num_heads % tensor:
        problem = f"{tensor} does not divide the number of attention heads {dims.num_heads}"
        yield Violation("tensor", problem, f"Use a divisor of {dims.num_heads}")
    if dims.num_kv_heads != dims.num_heads and dims.num_kv_heads % tensor and tensor % dims.num_kv_heads:
        problem = f"{tensor} neither divides nor is a multiple of the {dims.num_kv_heads} key/value heads"
        yield Violation("tensor", problem, "Choose a size that is one or the other")


def _cuts(
    table: ModelTable, parts: Mapping[Over, int], keys: Mapping[Over, str], is_even: Callable[[Parameter], bool]
) -> Iterator[Violation]:
    """Parameters that do not divide evenly: one finding for each rule of the table and length, naming a tensor.

    Args:
        parts: number of parts by the group that cuts.
        keys: the size that is this number.
        is_even: whether a parameter is cut evenly at all.
    """
    seen: set[tuple[int, int]] = set()
    for parameter in parameters_of(table, most_experts=1):
        packing, num_parts = parameter.packing, parts[parameter.packing.over]
        length = packed_size(packing, table.shapes, parameter.tensors)
        if num_parts == 1 or (parameter.rule, length) in seen or not is_even(parameter):
            continue
        seen.add((parameter.rule, length))
        units = length // 2 if isinstance(packing, GateUp) else length
        if units % num_parts:
            problem = f"{num_parts} does not divide the {units} indices of {parameter.tensors[0]}"
            yield Violation(keys[packing.over], problem, f"Use a divisor of {units}")


_HEADS_TEXT = "num_heads % TP == 0, and num_kv_heads % TP == 0 or TP % num_kv_heads == 0."

TRAIN_RULES: tuple[SizeRule[TrainParallelism], ...] = (
    SizeRule("tensor", "TP x PP x CP and, with experts, ETP x EP x PP divide the number of ranks.", _train_ranks),
    SizeRule("tensor", _HEADS_TEXT, _heads),
    SizeRule("expert", "num_experts % EP == 0; without experts EP and ETP are 1.", _train_experts),
    SizeRule("tensor", "TP, or ETP for experts, divides the dimension along which a parameter is cut.", _train_cuts),
    SizeRule("noop_layers", "No-op layers have distinct positions among all layers.", _noop_positions),
    SizeRule(
        "hybrid_layer_pattern",
        "A hybrid pattern has an attention and an MLP in turn for each layer, of the model's kinds, in stages.",
        _hybrid,
    ),
    SizeRule("pipeline", "The layers can be divided among pipeline stages and their virtual chunks.", _train_stages),
)

INFER_RULES: tuple[SizeRule[InferenceParallelism], ...] = (
    SizeRule(
        "tensor",
        "TP x PP divides the number of ranks; EP is 1 or a multiple of TP, and EP x PP divides the number of ranks.",
        lambda sizes, _: infer_rank_violations(sizes),
    ),
    SizeRule("tensor", _HEADS_TEXT, _heads),
    SizeRule("pipeline", "PP <= num_layers, and EP <= num_experts where there are experts.", _infer_counts),
    SizeRule(
        "tensor", "TP divides the projections, the padded vocabulary and, where EP is 1, every expert.", _infer_cuts
    ),
)

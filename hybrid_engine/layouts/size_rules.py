"""Constraints on parallel sizes for a model, one record per rule.

`training_side` and `inference_side` reject sizes that break a rule. config/rules.py applies the
same records under the keys of the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from hybrid_engine.errors import Violation, Violations, first_of, shortened
from hybrid_engine.layouts.parallelism import (
    InferenceParallelism,
    Parallelism,
    TrainParallelism,
    sizes_of,
)
from hybrid_engine.layouts.parameters import Parameter, packed_size, parameters_of
from hybrid_engine.layouts.stages import (
    UNEVEN,
    pattern_violations,
    split_violations,
    stage_violations,
)
from hybrid_engine.models.packing import GateUp, Over, Split, Vocabulary
from hybrid_engine.models.table import ModelTable

_Sizes = TypeVar("_Sizes", bound=Parallelism)


@dataclass(frozen=True)
class SizeRule(Generic[_Sizes]):
    """A constraint on the sizes.

    Attributes:
        size: the size that usually has to change. Each violation names its key.
        text: statement about valid sizes, a sentence for the documentation.
        find: yields the violations of sizes for a model. Keys are attributes of the sizes.
    """

    size: str
    text: str
    find: Callable[[_Sizes, ModelTable], Violations]


def violations(sizes: Parallelism, table: ModelTable) -> list[Violation]:
    """Return all violations of the sizes for a model. Keys are attributes of the sizes."""
    invalid = list(count_violations(sizes))
    if invalid:
        return invalid
    if isinstance(sizes, TrainParallelism):
        for train_rule in TRAIN_RULES:
            invalid += train_rule.find(sizes, table)
    else:
        for infer_rule in INFER_RULES:
            invalid += infer_rule.find(sizes, table)
    return invalid


def count_violations(sizes: Parallelism) -> Violations:
    """Yield a violation for each count below 1. No rule can be applied to these."""
    for name in ("world_size", *(size.name for size in sizes_of(type(sizes)))):
        value = getattr(sizes, name)
        # `type`, because a bool is an int and not a count.
        if type(value) is int and value < 1:
            yield Violation(
                name,
                f"{value} is not a valid size",
                "Use 1 or more",
                code="below-1",
            )


# -- training -------------------------------------------------------------------------------------


def _train_ranks(sizes: TrainParallelism, table: ModelTable) -> Violations:
    factors = {"TP": sizes.tensor, "PP": sizes.pipeline, "CP": sizes.context}
    yield from _product("tensor", factors, sizes)
    if table.dims.num_experts:
        factors = {"ETP": sizes.expert_cut, "EP": sizes.expert, "PP": sizes.pipeline}
        is_implied = sizes.expert_tensor is None and sizes.tensor > 1
        remedy = "ETP is TP unless it is given: try ETP 1" if is_implied else ""
        yield from _product("expert", factors, sizes, remedy)


def _train_experts(sizes: TrainParallelism, table: ModelTable) -> Violations:
    num_experts = table.dims.num_experts
    if not num_experts:
        for key, size in (("expert", sizes.expert), ("expert_tensor", sizes.expert_tensor or 1)):
            if size > 1:
                yield Violation(
                    key,
                    f"{size}, but the model has no experts",
                    "Use 1",
                    code="more-than-experts",
                )
    if num_experts % sizes.expert:
        yield Violation(
            "expert",
            f"{sizes.expert} does not divide the number of experts {num_experts}",
            f"Use a divisor of {num_experts}",
            code="not-divisible",
        )


def _train_cuts(sizes: TrainParallelism, table: ModelTable) -> Violations:
    if any(_heads(sizes, table)):
        return  # parameters are cut by heads
    num_parts = {over: sizes.num_parts(over) for over in Over}
    keys = {
        Over.TENSOR: "tensor",
        Over.EXPERT_TENSOR: "tensor" if sizes.expert_tensor is None else "expert_tensor",
    }

    def must_divide(parameter: Parameter) -> bool:
        # The vocabulary is padded, and some layer specs leave some projections whole.
        packing = parameter.packing
        if isinstance(packing, Vocabulary):
            return False
        return sizes.cuts_whole_projections or not packing.may_be_whole

    yield from _cuts(table, num_parts, keys, must_divide)


def _noop_positions(sizes: TrainParallelism, table: ModelTable) -> Violations:
    num_positions = table.dims.num_layers + len(sizes.noop_layers)
    too_large = [noop for noop in sizes.noop_layers if noop >= num_positions]
    if too_large:
        yield Violation(
            "noop_layers",
            f"{too_large} of {num_positions} positions, counted from 0",
            "Use smaller numbers",
            code="out-of-range",
        )
    if len(set(sizes.noop_layers)) < len(sizes.noop_layers):
        yield Violation(
            "noop_layers",
            f"{list(sizes.noop_layers)} names a position twice",
            "Name each position once",
            code="not-unique",
        )


def _hybrid(sizes: TrainParallelism, table: ModelTable) -> Violations:
    pattern = sizes.hybrid_layer_pattern
    if pattern is None:
        return
    for key in (*UNEVEN, "pipeline_layout", "noop_layers"):
        if getattr(sizes, key) not in (None, False, ()):
            yield Violation(
                key,
                "cannot be combined with a hybrid pattern, which defines the stages",
                "Use one of the two",
                code="conflicting-keys",
            )
    dims = table.dims
    if table.is_derived and len(pattern.replace("|", "")) == dims.num_layers:
        yield from stage_violations(pattern, sizes.pipeline, sizes.virtual_pipeline)
        return
    if table.is_derived:
        yield Violation(
            "hybrid_layer_pattern",
            f"{table.architecture} has no name table, so its layers are not known by kind, and "
            f"{shortened(pattern)} is not one position for each of {dims.num_layers}",
            "Use a GPTModel",
            code="unsupported-layers",
        )
        return
    if dims.num_mtp_layers:
        yield Violation(
            "hybrid_layer_pattern",
            "the model has MTP layers, which are supported for a GPTModel only",
            "Use a GPTModel",
            code="unsupported-layers",
        )
    experts = [False] * dims.num_layers
    if dims.num_experts:
        experts = [bool(is_moe) for is_moe in table.transformer["moe_layer_freq"]]
    has_latent = bool(table.transformer.get("multi_latent_attention"))
    yield from pattern_violations(
        pattern,
        sizes.pipeline,
        sizes.virtual_pipeline,
        experts,
        has_latent,
    )


def _train_stages(sizes: TrainParallelism, table: ModelTable) -> Violations:
    if sizes.hybrid_layer_pattern is not None:
        return iter(())
    return split_violations(sizes, table.dims.num_layers, table.dims.num_mtp_layers)


# -- inference ------------------------------------------------------------------------------------


def infer_rank_violations(sizes: InferenceParallelism) -> Violations:
    """Yield the violations of sizes that do not divide the ranks into replicas and instances.

    They are violations for any model.
    """
    yield from _product("tensor", {"TP": sizes.tensor, "PP": sizes.pipeline}, sizes)
    if sizes.expert > 1 and sizes.expert % sizes.tensor:
        yield Violation(
            "expert",
            f"{sizes.expert} is not a multiple of TP {sizes.tensor}",
            "Use 1 or a multiple",
            code="not-a-multiple",
        )
    else:
        yield from _product("expert", {"EP": sizes.expert, "PP": sizes.pipeline}, sizes)
    num_ranks = sizes.world_size
    if sizes.rank_order is not None and sorted(sizes.rank_order) != list(range(num_ranks)):
        yield Violation(
            "rank_order",
            f"it does not name each of the {num_ranks} ranks once",
            f"Name every rank from 0 to {num_ranks - 1} once",
            code="not-a-permutation",
        )


def _infer_counts(sizes: InferenceParallelism, table: ModelTable) -> Violations:
    num_layers = table.dims.num_layers
    num_experts = table.dims.num_experts
    if sizes.pipeline > num_layers:
        yield Violation(
            "pipeline",
            f"{sizes.pipeline} stages for {num_layers} layers",
            "Use fewer stages",
            code="more-stages-than-layers",
        )
    if sizes.expert > max(num_experts, 1):
        yield Violation(
            "expert",
            f"{sizes.expert}, but the model has {num_experts or 'no'} experts",
            f"Use {'fewer' if num_experts else '1'}",
            code="more-than-experts",
        )


def _infer_cuts(sizes: InferenceParallelism, table: ModelTable) -> Violations:
    if any(_heads(sizes, table)):
        return  # parameters are cut by heads
    rows = sizes.padded_vocabulary(table.dims.vocab_size)
    num_parts = {
        Over.NONE: 1,
        Over.TENSOR: sizes.tensor,
        # Without EP vLLM cuts every expert; with EP every expert is whole.
        Over.EXPERT_TENSOR: sizes.tensor if sizes.expert == 1 else 1,
    }

    def must_divide(parameter: Parameter) -> bool:
        # The vocabulary is padded, heads have a separate rule, and some parameters are replicated
        # or not loaded at all.
        packing = parameter.packing
        is_cut = isinstance(packing, Split | GateUp) and not packing.may_be_whole
        return is_cut and table.is_served(parameter.tensors[0])

    keys = {Over.TENSOR: "tensor", Over.EXPERT_TENSOR: "tensor"}
    yield from _cuts(table, num_parts, keys, must_divide, rows)


# -- both sides -----------------------------------------------------------------------------------


def _product(
    key: str,
    factors: Mapping[str, int],
    sizes: Parallelism,
    remedy: str = "",
) -> Violations:
    """Yield a violation if the product of sizes does not divide the number of ranks."""
    product = math.prod(factors.values())
    if sizes.world_size % product:
        text = " x ".join(f"{name} {size}" for name, size in factors.items())
        yield Violation(
            key,
            f"{text} = {product} does not divide the world size {sizes.world_size}",
            remedy or "Choose sizes whose product divides it",
            code="not-divisible",
        )


def _heads(sizes: Parallelism, table: ModelTable) -> Violations:
    tensor = sizes.tensor
    num_heads = table.dims.num_heads
    num_kv_heads = table.dims.num_kv_heads
    if num_heads % tensor:
        yield Violation(
            "tensor",
            f"{tensor} does not divide the number of attention heads {num_heads}",
            f"Use a divisor of {num_heads}",
            code="not-divisible",
        )
    # With fewer key/value heads than ranks, each head is replicated on equally many ranks.
    # 8 key/value heads: TP 4 gives each rank 2, TP 16 gives each head to 2 ranks, TP 6 does
    # neither.
    elif num_kv_heads % tensor and tensor % num_kv_heads:
        yield Violation(
            "tensor",
            f"{tensor} neither divides nor is a multiple of the {num_kv_heads} key/value heads",
            "Choose a size that is one or the other",
            code="not-divisible",
        )


def _cuts(
    table: ModelTable,
    num_parts: Mapping[Over, int],
    keys: Mapping[Over, str],
    must_divide: Callable[[Parameter], bool],
    num_rows: int = 0,
) -> Violations:
    """Yield a violation for each size that does not divide every length that it cuts.

    Args:
        table: name table of the model.
        num_parts: number of parts by the group that cuts.
        keys: size that defines this number, by group.
        must_divide: returns whether a parameter has to be cut evenly.
        num_rows: rows of the vocabulary, if they have to be cut evenly.
    """
    uneven: dict[str, dict[int, str]] = {key: {} for key in keys.values()}
    tensor = num_parts[Over.TENSOR]
    if num_rows % tensor:
        text = f"{tensor} does not divide the {num_rows} rows of the padded vocabulary"
        uneven[keys[Over.TENSOR]][num_rows] = text
    for parameter in parameters_of(table, most_experts=1):
        packing = parameter.packing
        parts = num_parts[packing.over]
        if parts > 1 and must_divide(parameter):
            units = packing.num_units(packed_size(parameter))
            text = f"{parts} does not divide the {units} indices or heads of {parameter.tensors[0]}"
            if units % parts:
                uneven[keys[packing.over]].setdefault(units, text)
    for key, lengths in uneven.items():
        if lengths:
            remedy = f"Use a divisor of {math.gcd(*lengths)}"
            yield Violation(key, first_of([*lengths.values()], 1), remedy, code="not-divisible")


_HEADS_TEXT = "num_heads % TP == 0, and num_kv_heads % TP == 0 or TP % num_kv_heads == 0."

TRAIN_RULES: tuple[SizeRule[TrainParallelism], ...] = (
    SizeRule(
        "tensor",
        "TP x PP x CP and, with experts, ETP x EP x PP divide the number of ranks.",
        _train_ranks,
    ),
    SizeRule("tensor", _HEADS_TEXT, _heads),
    SizeRule("expert", "num_experts % EP == 0; without experts EP and ETP are 1.", _train_experts),
    SizeRule(
        "tensor",
        "TP, or ETP for experts, divides the dimension along which a parameter is cut.",
        _train_cuts,
    ),
    SizeRule(
        "noop_layers", "No-op layers have distinct positions among all layers.", _noop_positions
    ),
    SizeRule(
        "hybrid_layer_pattern",
        "A hybrid pattern has an attention and an MLP in turn for each layer, "
        "of the model's kinds, in stages.",
        _hybrid,
    ),
    SizeRule(
        "pipeline",
        "The layers can be divided among pipeline stages and their virtual chunks.",
        _train_stages,
    ),
)

INFER_RULES: tuple[SizeRule[InferenceParallelism], ...] = (
    SizeRule(
        "tensor",
        "TP x PP divides the number of ranks; EP is 1 or a multiple of TP, "
        "and EP x PP divides the number of ranks.",
        lambda sizes, _: infer_rank_violations(sizes),
    ),
    SizeRule("tensor", _HEADS_TEXT, _heads),
    SizeRule(
        "pipeline",
        "PP <= num_layers, and EP <= num_experts where there are experts.",
        _infer_counts,
    ),
    SizeRule(
        "tensor",
        "TP divides the projections, the padded vocabulary and, where EP is 1, every expert.",
        _infer_cuts,
    ),
)

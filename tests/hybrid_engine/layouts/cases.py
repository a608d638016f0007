"""Random jobs without engines: a model of a few thousand elements, parallel sizes and hosts."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st

from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import (
    InferenceParallelism,
    ShardedParallelism,
    TrainParallelism,
)
from hybrid_engine.layouts.sharded import Packed, PackedModel, sharded_side
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.layouts.stages import split_violations
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import ModelTable, table_for
from hybrid_engine.records.holdings import SideLayout
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.regions import Shape, StridedView, contiguous_strides

# 12 heads of 2 elements divide by 1, 2, 3, 4, 6 and 12 ranks. vLLM pads 150 tokens to 192, Megatron
# does not.
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 3,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 2,
    "vocab_size": 150,
    "tie_word_embeddings": False,
}
EXPERTS = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
LATENT = {
    **DENSE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 1,
    "qk_rope_head_dim": 2,
    "v_head_dim": 1,
    "hidden_size": 12,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 1,
    "vocab_size": 140,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 12,
    "n_head": 12,
    "n_layer": 4,
    "n_positions": 5,
    "vocab_size": 150,
}


# Most random sizes are invalid.
JOBS = settings(
    max_examples=settings().max_examples // 2,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    deadline=None,
)


@dataclass(frozen=True)
class LayoutCase:
    """A job of both sides.

    Attributes:
        hosts: by rank.
        relaying: hosts with ranks that read each other's memory.
        train_dtype, infer_dtype: of the weights.
        packed: the model, if FSDP2 trains.
    """

    table: ModelTable = field(repr=False)
    train: TrainParallelism | ShardedParallelism
    infer: InferenceParallelism
    hosts: tuple[int, ...]
    relaying: tuple[int, ...] = ()
    train_dtype: str = "bfloat16"
    infer_dtype: str = "bfloat16"
    packed: PackedModel | None = field(default=None, repr=False)

    @property
    def source(self) -> SideLayout:
        if self.packed is not None:
            return sharded_side(self.table, self.packed, self.train, self.train_dtype)
        return training_side(self.table, self.train, self.train_dtype)

    @property
    def destination(self) -> SideLayout:
        return inference_side(self.table, self.infer, self.infer_dtype)

    @property
    def positions(self) -> SideLayout:
        return inference_side(self.table, replace(self.infer, rank_order=None), self.infer_dtype)

    @property
    def unserved(self) -> list[str]:
        return [name for name in self.table.shapes if not self.table.is_served(name)]


def held_tensors(layout: Layout) -> set[str]:
    return {shard.region.tensor for shard in layout.shards}


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    base = draw(st.sampled_from([DENSE, EXPERTS, LATENT, EXPERTS, LATENT, GPT2]))  # MoE more often
    if base is GPT2:
        return base
    heads = {} if base is LATENT else {"num_key_value_heads": draw(st.sampled_from([12, 6, 2, 1]))}
    return {**base, **heads, "tie_word_embeddings": draw(st.booleans())}


SPLIT = (
    "pipeline",
    "virtual_pipeline",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "noop_layers",
)
"""Sizes that assign layers to stages, without a layout of every stage."""


@functools.cache
def possible_splits(num_mtp_layers: int) -> list[dict[str, Any]]:
    kinds = itertools.product(
        (2, 3, 4),
        (None, 2),
        (None, 1, 2),
        (None, 1, 2),
        (False, True),
        (False, True),
        ((), (1,), (2, 4)),
    )
    layouts = (
        ("Ett|ttmL", "Et|t|t|tmL", "E|t*4||mL")
        if num_mtp_layers
        else ("Ettt|tL", "Et|t*2|t|L", "E|t|t*3L")
    )
    every = [dict(zip(SPLIT, sizes, strict=True)) for sizes in kinds]
    every += [{"pipeline": 2, "pipeline_layout": layout} for layout in layouts]
    valid = [
        split
        for split in every
        if not any(split_violations(TrainParallelism(1, **split), 4, num_mtp_layers))
    ]
    return valid + [{"pipeline": 1}] * (len(valid) // 3)  # a quarter without pipeline


@st.composite
def train_sizes(draw: st.DrawFn, world_size: int, table: ModelTable) -> TrainParallelism:
    splits = possible_splits(table.dims.num_mtp_layers)
    splits = [split for split in splits if world_size % split["pipeline"] == 0]
    split = draw(st.sampled_from(splits))
    in_stage = divisors(world_size // split["pipeline"])
    experts = [size for size in in_stage if table.dims.num_experts % size == 0]
    return TrainParallelism(
        world_size,
        **split,
        tensor=draw(st.sampled_from(in_stage)),
        expert=draw(st.sampled_from(experts)) if table.dims.num_experts else 1,
        expert_tensor=draw(st.sampled_from([None, 1, *in_stage]))
        if table.dims.num_experts
        else None,
        make_vocab_size_divisible_by=draw(st.sampled_from([1, 4, 50])),
        cuts_whole_projections=draw(st.booleans()),
    )


@st.composite
def infer_sizes(draw: st.DrawFn, world_size: int, table: ModelTable) -> InferenceParallelism:
    pipeline = draw(st.sampled_from([size for size in divisors(world_size) if size <= 4]))
    tensor = draw(st.sampled_from(divisors(world_size // pipeline)))
    experts = [tensor * size for size in divisors(world_size // (pipeline * tensor))]
    order = draw(st.one_of(st.none(), st.permutations(range(world_size)).map(tuple)))
    expert = draw(st.sampled_from([1, *experts])) if table.dims.num_experts else 1
    return InferenceParallelism(world_size, tensor, pipeline, expert, order)


@st.composite
def layout_cases(draw: st.DrawFn) -> LayoutCase:
    table = table_for(draw(configs()))
    world_size = draw(st.sampled_from([12, 8, 6, 4, 12, 8, 3, 2, 1]))  # large ones more often
    train = draw(train_sizes(world_size, table))
    assume(violations(train, table) == [])
    infer = draw(infer_sizes(world_size, table))
    assume(violations(infer, table) == [])
    hosts = draw(st.lists(st.integers(0, 2), min_size=world_size, max_size=world_size).map(tuple))
    in_order = draw(st.booleans())
    relaying = draw(st.sampled_from([(), (1,), (0, 1, 2)]))
    dtypes = draw(
        st.sampled_from(
            [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")]
        )
    )
    return LayoutCase(
        table, train, infer, tuple(sorted(hosts)) if in_order else hosts, relaying, *dtypes
    )


def packed_model(table: ModelTable) -> PackedModel:
    """Return a model as transformers has it: a parameter per tensor, but one for a layer's experts.

    The experts' gate and up projections follow one another in a parameter of 3 dims.
    """
    tensors: dict[str, Packed] = {}
    shapes: dict[str, Shape] = {}
    for name, shape in table.shapes.items():
        layer, is_expert, rest = name.partition(".experts.")
        if not is_expert:
            tensors[name] = Packed(name, StridedView(0, shape, contiguous_strides(shape)))
            shapes[name] = shape
            continue
        expert, projection, _ = rest.split(".")
        packs = 1 if projection == "down_proj" else 2
        numel = packs * math.prod(shape)
        start = math.prod(shape) if projection == "up_proj" else 0
        parameter = f"{layer}.experts.{'down_proj' if packs == 1 else 'gate_up_proj'}"
        view = StridedView(int(expert) * numel + start, shape, contiguous_strides(shape))
        tensors[name] = Packed(parameter, view)
        shapes[parameter] = (table.dims.num_experts, packs * shape[0], shape[1])
    return PackedModel(tensors, shapes)


@st.composite
def sharded_cases(draw: st.DrawFn) -> LayoutCase:
    """Draw jobs with FSDP2: any number of ranks, whether rows divide by it or not, and replicas."""
    case = draw(layout_cases())
    world_size = len(case.hosts)
    sizes = ShardedParallelism(world_size, draw(st.sampled_from(divisors(world_size))))
    return replace(case, train=sizes, packed=packed_model(case.table))

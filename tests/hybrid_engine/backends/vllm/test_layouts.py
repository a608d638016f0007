"""Every family in vLLM's layouts: traced, filled, and compared bitwise with vLLM's own load.

The traced layout must also equal the layout traced without memory and the layout computed without
vLLM. vLLM's models run on real ranks without an engine. A case is a model of the zoo in the groups
of some settings. Nothing is computed, so dozens of cases take seconds; those of a layout share its
groups. test_drafter.py fills a model in place, like on a GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybrid_engine.assembly import gather_positions
from hybrid_engine.backends.vllm import InferenceSettings, VllmAdaptor
from hybrid_engine.backends.vllm.arguments import llm_arguments
from hybrid_engine.backends.vllm.cpu.shm_cleanup import ENGINE_TOKEN, unnamed_shared_memory
from hybrid_engine.backends.vllm.isolation import (
    building_groups,
    destroy_groups,
    register_model_class,
    set_environment,
)
from hybrid_engine.config import GenerateConfig
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models import table_for
from hybrid_engine.records.layout import Layout, differences
from tests.harness.launch import of_all_ranks, on_engines
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import job
from tests.zoo.families import SERVED_VARIANTS, served_config


@dataclass(frozen=True)
class Case:
    """A model in a layout.

    Attributes:
        family: of `SERVED_VARIANTS`.
        tp, pp, dp, ep: parallel sizes.
        order: position -> rank.
        config: changed keys of config.json.
    """

    family: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    order: tuple[int, ...] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> dict[str, Any]:
        return served_config(self.family, **self.config)

    def settings(self, model_dir: str) -> InferenceSettings:
        return InferenceSettings(
            model_dir,
            InferenceParallelism(
                self.tp * self.pp * self.dp, self.tp, self.pp, self.ep, self.order
            ),
            GenerateConfig(max_model_len=64, max_num_seqs=8, kv_cache_mb=16),
        )

    @property
    def layout(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp} ep{self.ep} {self.order or ''}".strip()


@dataclass
class Host:
    """The attributes of an engine that `native_parameters` uses."""

    settings: InferenceSettings
    rank: int
    adaptor: VllmAdaptor | None = None


@contextlib.contextmanager
def vllm_groups(settings: InferenceSettings) -> Iterator[Host]:
    """Make vLLM's process groups for these settings like its worker."""
    rank = dist.get_rank()
    set_environment(settings, rank)
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    register_model_class(settings.model_dir)
    arguments = llm_arguments(settings, "cpu")
    del arguments["worker_cls"], arguments["load_format"]
    try:
        with unnamed_shared_memory(job().agreement), building_groups(settings, job()):
            config = EngineArgs(**arguments).create_engine_config()
            os.environ["VLLM_DIST_IDENT"] = os.environ[ENGINE_TOKEN]
            with set_current_vllm_config(config):
                parallel_state.init_distributed_environment(
                    dist.get_world_size(), rank, "env://", rank, "gloo"
                )
                parallel_state.initialize_model_parallel(
                    settings.sizes.tensor, settings.sizes.pipeline
                )
        yield Host(settings, rank)
    finally:
        destroy_groups()


def check_cases(base: Path, cases: Sequence[Case]) -> None:
    """Fill the cases of one layout by records and compare them with vLLM's own load."""
    job()
    # vLLM makes a group for experts if a model has some; all sizes here divide 12 heads.
    host_config = served_config("qwen3_moe", num_attention_heads=12, num_key_value_heads=12)
    host_model = support.write_config(base / "host", host_config)
    before = [
        _traced_before(case, base / "positions" / str(number)) for number, case in enumerate(cases)
    ]
    with vllm_groups(cases[0].settings(host_model)) as host:
        for number, case in enumerate(cases):
            _check(case, host, base / str(number), before[number])
    dist.barrier()


def _traced_before(case: Case, directory: Path) -> Layout:
    """Return the layout of this rank's position, traced without memory by another rank."""
    settings = case.settings(support.write_config(directory, case.model))
    sequential = replace(settings, sizes=replace(settings.sizes, rank_order=None))
    positions = gather_positions(sequential, table_for(case.model), job())
    rank = job().rank
    return positions.of_rank(settings.sizes.place_of(rank).position).on(rank)


def _check(case: Case, host: Host, directory: Path, traced_before: Layout) -> None:
    weights = support.random_weights(case.model, seed=0)
    checkpoint = support.write_checkpoint(directory, case.model, weights)
    adaptor = host.adaptor = support.adaptor_of(host, checkpoint, case.model)
    filled = support.fill_by_records(adaptor, weights)
    layout = adaptor.layout()
    assert support.differences(filled, support.native_parameters(host, checkpoint)) == [], case
    assert support.misread_layers(adaptor.model, filled) == [], (
        case
    )  # kernels compute with other weights
    assert adaptor.staged == (), case  # cannot be traced
    assert _differences_of_shards(traced_before, layout) == [], (
        case
    )  # traced otherwise without memory
    assert support.is_ready(adaptor), case
    _check_computed(case, host, layout)
    read = {shard.region.tensor for shard in layout.shards}
    assert len(read) > 5
    unread = frozenset.intersection(*of_all_ranks(frozenset(layout.tensors) - read))
    assert all(
        name.startswith(f"model.layers.{case.model['num_hidden_layers']}.") for name in unread
    ), case
    assert bool(unread) == ("deepseek_v3" in case.family)  # vLLM serves without MTP layers
    padding = {
        buffer_id.name: [(extent.start, extent.stop) for extent in buffer.padding]
        for buffer_id, buffer in layout.buffers.items()
        if buffer.padding
    }
    if (case.family, case.layout) in PADDING:
        rows = PADDING[case.family, case.layout][host.rank]
        assert padding == {
            name: [(first * 64, last * 64)] for name, (first, last) in rows.items()
        }, case


def _differences_of_shards(left: Layout, right: Layout) -> list[str]:
    """Return tensors with other boxes or places in two layouts, and buffers that differ."""
    tensors = {shard.region.tensor for shard in {*left.shards} ^ {*right.shards}}
    ids = left.buffers.keys() | right.buffers.keys()
    changed = [
        buffer_id.name
        for buffer_id in ids
        if left.buffers.get(buffer_id) != right.buffers.get(buffer_id)
    ]
    return sorted(tensors) + sorted(changed)


def _check_computed(case: Case, host: Host, traced: Layout) -> None:
    """Compare the layout computed without vLLM with the traced layout."""
    table = table_for(case.model)
    sizes = host.settings.sizes
    computed = inference_side(table, sizes).layout_of(host.rank)
    assert differences(computed, traced) == [], case
    # Otherwise plans would have other buckets than switches.
    assert _numel_of_expert_groups(computed) == _numel_of_expert_groups(traced), case
    if case.order is not None:  # only moves positions
        position = sizes.place_of(host.rank).position
        assert case.order[position] == host.rank
        sequential = inference_side(table, replace(sizes, rank_order=None)).layout_of(position)
        assert differences(computed, sequential) == [], case


def _numel_of_expert_groups(layout: Layout) -> list[int]:
    """Return the number of elements of routed experts in each group with experts, sorted."""
    numel: Counter[str] = Counter()
    for shard in layout.shards:
        if ".experts." in shard.region.tensor:
            numel[layout.buffers[shard.place.buffer].group] += shard.region.numel
    return sorted(numel.values())


WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
STAGED = ("llama", "llama tied", "qwen3", "glm", "glm4", "gemma2", "gpt2", *WITH_EXPERTS)
WHOLE = (
    "llama",
    "llama vocabulary without padding",
    "qwen2 tied",
    "glm",
    "gemma3",
    "gpt2",
    "deepseek_v3",
)
FIVE_LAYERS = {"num_hidden_layers": 5}
SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
SIX_LATENT_HEADS = {**SIX_HEADS, "num_key_value_heads": 6, "moe_intermediate_size": 48}

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
TP2 = "tp2 pp1 dp1 ep1"
DP2 = "tp1 pp1 dp2 ep1"
WHOLE_VOCABULARY = (130, 192)
HALF = (34, 96)

CASES = {
    2: [
        *(Case(family, dp=2) for family in WHOLE),
        *(Case(family, tp=2) for family in SERVED_VARIANTS),
        *(Case(family, pp=2) for family in STAGED),
        *(Case(family, tp=2, ep=2) for family in WITH_EXPERTS),
        *(Case(family, dp=2, ep=2) for family in WITH_EXPERTS),
        Case("llama tied", pp=2, config=FIVE_LAYERS),
        Case("deepseek_v3", pp=2, config=FIVE_LAYERS),
        Case("deepseek_v3", dp=2, ep=2, config={"n_routed_experts": 6, "n_group": 1}),
        Case("qwen3_moe", tp=2, ep=2, config={"num_experts": 5}),
        Case("gpt2", tp=2, order=(1, 0)),
        Case("llama tied", pp=2, config=FIVE_LAYERS, order=(1, 0)),
        Case("deepseek_v3", dp=2, ep=2, order=(1, 0)),
    ],
    3: [
        Case("llama", tp=3, config=SIX_HEADS),
        Case("qwen3_moe", tp=3, config={**SIX_HEADS, "moe_intermediate_size": 48}),
        Case("deepseek_v3", tp=3, config=SIX_LATENT_HEADS),
        Case("llama tied", pp=3, config=FIVE_LAYERS),
    ],
    4: [
        *(Case(family, tp=4) for family in ("llama", "qwen2 tied", "deepseek_v3", "gpt2")),
        *(Case(family, tp=2, dp=2, ep=4) for family in ("qwen3_moe", "deepseek_v3")),
        Case("qwen3_moe", dp=4, ep=2),
        Case("deepseek_v3", tp=2, pp=2, ep=2),
        Case("gemma2", tp=2, pp=2),
        Case("llama", tp=4, order=(2, 0, 3, 1)),
        Case("qwen3_moe", tp=2, dp=2, ep=4, order=(2, 0, 3, 1)),
        Case("qwen3_moe", dp=4, ep=2, order=(0, 2, 1, 3)),
        Case("gemma2", tp=2, pp=2, order=(1, 3, 0, 2)),
    ],
}


# Family and layout -> padding rows of each buffer by rank: 130 tokens in 192 rows. TP=2: rank 0 has
# 96 tokens, rank 1 has 34 and 62 rows.
PADDING: dict[tuple[str, str], list[dict[str, tuple[int, int]]]] = {
    ("llama", TP2): [{}, {EMBEDDING: HALF, HEAD: HALF}],
    ("llama tied", TP2): [{}, {EMBEDDING: HALF}],
    ("llama", DP2): [{EMBEDDING: WHOLE_VOCABULARY, HEAD: WHOLE_VOCABULARY}] * 2,
    ("llama vocabulary without padding", DP2): [{}, {}],
}


LAYOUTS = {num_ranks: {case.layout: None for case in cases} for num_ranks, cases in CASES.items()}


@on_engines(LAYOUTS)
def test_weights_are_traced_as_computed_and_filled_like_a_native_load(
    tmp_path: Path, case: str
) -> None:
    check_cases(
        tmp_path,
        [of_layout for cases in CASES.values() for of_layout in cases if of_layout.layout == case],
    )

"""Every family cut over ranks, and those that differ in every other kind of vLLM's layouts: traced, filled, bitwise
vLLM's own load, as traced without memory before there were groups, and as computed without vLLM.

vLLM's models on real ranks without an engine around them. A case is a model of the zoo with changes, in the groups of
some settings; nothing is computed, so a launch goes through dozens: one for each number of ranks, one call for each
layout.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.assembly import gather_positions
from hybrid_engine.backends.vllm import InferenceSettings, VllmAdaptor
from hybrid_engine.backends.vllm.arguments import llm_arguments
from hybrid_engine.backends.vllm.cpu.shm_cleanup import ENGINE_TOKEN, unnamed_shared_memory
from hybrid_engine.backends.vllm.isolation import building_groups, destroy_groups, register_model_class, set_environment
from hybrid_engine.config import GenerateConfig
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import Layout, differences
from hybrid_engine.records.regions import Region
from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.backends.vllm import support
from tests.zoo.families import SERVED_VARIANTS, served_config

IN_PLACE = ("qwen3", "qwen3_moe", "deepseek_v3")


@dataclass(frozen=True)
class Case:
    """One model in one layout.

    Attributes:
        family: of `SERVED_VARIANTS`; `config`: keys of it that change.
        tp, pp, dp, ep: sizes; `order`: position -> rank.
    """

    family: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    order: tuple[int, ...] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.family} {dict(self.config) or ''} {self.layout}".replace("  ", " ")

    @property
    def model(self) -> dict[str, Any]:
        return served_config(self.family, **self.config)

    @property
    def is_in_place(self) -> bool:
        """Whether it is filled in place too: experts, MLA, and neither, each once."""
        return self.layout == "tp2 pp1 dp1 ep1" and self.family in IN_PLACE

    def is_reordered(self, other: Case) -> bool:
        """Whether `other` is this case in another order than the sequential one."""
        return self.order is None and replace(other, order=None) == self

    def settings(self, model_dir: str) -> InferenceSettings:
        return InferenceSettings(
            model_dir,
            InferenceParallelism(self.tp * self.pp * self.dp, self.tp, self.pp, self.ep, self.order),
            GenerateConfig(max_model_len=64, max_num_seqs=8, kv_cache_mb=16),
        )

    @property
    def layout(self) -> str:
        return f"tp{self.tp} pp{self.pp} dp{self.dp} ep{self.ep} {self.order or ''}".strip()


@dataclass(frozen=True)
class Outcome:
    """What one rank has of a case.

    Attributes:
        faults: what is not as it should be, in words.
        position: of the rank in vLLM's order.
        digests: of every parameter.
        padding: buffer name -> intervals.
        unread: canonical tensors of which it holds nothing.
    """

    faults: list[str]
    position: int
    digests: dict[str, str]
    padding: dict[str, list[tuple[int, int]]]
    unread: frozenset[str]


@dataclass
class Host:
    """What `native_parameters` needs of an engine."""

    settings: InferenceSettings
    rank: int
    adaptor: VllmAdaptor | None = None


@contextlib.contextmanager
def vllm_groups(settings: InferenceSettings) -> Iterator[Host]:
    """vLLM's process groups of these settings, made as its worker makes them."""
    rank = dist.get_rank()
    set_environment(settings, rank)
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    register_model_class(settings.model_dir)
    arguments = llm_arguments(settings, "cpu")
    del arguments["worker_cls"], arguments["load_format"]
    job = Job.join(120)
    try:
        with unnamed_shared_memory(job.agreement), building_groups(settings, job):
            config = EngineArgs(**arguments).create_engine_config()
            os.environ["VLLM_DIST_IDENT"] = os.environ[ENGINE_TOKEN]
            with set_current_vllm_config(config):
                parallel_state.init_distributed_environment(dist.get_world_size(), rank, "env://", rank, "gloo")
                parallel_state.initialize_model_parallel(settings.sizes.tensor, settings.sizes.pipeline)
        yield Host(settings, rank)
    finally:
        destroy_groups()
        job.close()


def run_cases(directory: str, cases: Sequence[Case]) -> dict[str, Outcome]:
    """Cases of one layout, each filled by records and compared with vLLM's own load of the same checkpoint; by name."""
    if not dist.is_initialized():  # the next layout's on the same ranks finds it
        dist.init_process_group("gloo")
    base = Path(directory)
    # With experts, so that vLLM makes a group for them; 12 heads are a multiple of every size here.
    host_config = served_config("qwen3_moe", num_attention_heads=12, num_key_value_heads=12)
    host_model = support.write_config(base / "host", host_config)
    before = {case.name: _traced_before(case, base / "positions" / case.name.replace("/", "-")) for case in cases}
    with vllm_groups(cases[0].settings(host_model)) as host:
        results = {
            case.name: _outcome_of(case, host, base / case.name.replace("/", "-"), before[case.name]) for case in cases
        }
    dist.barrier()
    return results


def _traced_before(case: Case, directory: Path) -> Layout:
    """What this rank's position holds, as the rank of that number traced it without memory."""
    settings = case.settings(support.write_config(directory, case.model))
    sequential = replace(settings, sizes=replace(settings.sizes, rank_order=None))
    with contextlib.closing(Job.join(120)) as job:
        positions = gather_positions(sequential, table_for(case.model), job)
        return positions.of_rank(settings.sizes.place_of(job.rank).position).on(job.rank)


def _outcome_of(case: Case, host: Host, directory: Path, traced_before: Layout) -> Outcome:
    weights = support.random_weights(case.model, seed=0)
    checkpoint = support.write_checkpoint(directory, case.model, weights)
    adaptor = host.adaptor = support.adaptor_of(host, checkpoint, case.model)
    filled = support.fill_by_records(adaptor, weights)
    layout = adaptor.layout()
    native = support.native_parameters(host, checkpoint)
    held = {shard.region.tensor for shard in layout.shards}
    faults = [
        *(f"{name} has other bits than vLLM loads itself" for name in support.differences(filled, native)),
        *(f"{name} computes with other weights than were sent" for name in support.misread(adaptor.model, filled)),
        *(f"{name} cannot be traced" for name in adaptor.staged),
        *(f"{name} was traced otherwise without memory" for name in _differences_of_shards(traced_before, layout)),
        *_analytic_faults(case, host, layout),
        *([] if support.is_ready(adaptor) and len(held) > 5 else ["not all groups are committed"]),
        *(_faults_in_place(case, host, checkpoint) if case.is_in_place else ()),
    ]
    return Outcome(
        faults,
        position=host.settings.sizes.place_of(host.rank).position,
        digests={name: _digest(tensor) for name, tensor in filled.items()},
        padding={
            buffer_id.name: [(extent.start, extent.stop) for extent in buffer.padding]
            for buffer_id, buffer in layout.buffers.items()
            if buffer.padding
        },
        unread=frozenset(layout.tensors) - held,
    )


def _faults_in_place(case: Case, host: Host, checkpoint: str) -> list[str]:
    """Fill a model whose dense layers compute with what is loaded, as on a GPU; its experts are as on a CPU: packed.

    Every tensor that it computes with, wherever vLLM keeps it, is then that of a native load, and where it was.
    """
    from vllm.model_executor.layers import utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)
        patch.setattr(utils.ops, "_supports_onednn", False)
        adaptor = support.adaptor_of(host, checkpoint, case.model, keeps_addresses=True)
        before = support.held(adaptor.model)
        places = {path: (tensor.data_ptr(), tensor.stride()) for path, tensor in before.items()}
        for seed in (1, 0):
            support.write_by_records(adaptor, support.random_weights(case.model, seed))
        native = support.native_model(host, checkpoint)
    found = support.held(adaptor.model)
    is_derived = any(each.results for each in adaptor._processed.derivations.values())
    moved = [path for path, tensor in found.items() if places.get(path) != (tensor.data_ptr(), tensor.stride())]
    return [
        *(f"{path} moved" for path in moved),
        *(f"{path} is not that of a native load" for path in support.differences(found, support.held(native))),
        *([] if is_derived == (case.family in WITH_EXPERTS) else [f"vLLM derived something: {is_derived}"]),
    ]


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _differences_of_shards(one: Layout, other: Layout) -> list[str]:
    """Tensors of which two layouts have other boxes, or in other places; buffers that are not the same."""
    tensors = {shard.region.tensor for shard in {*one.shards} ^ {*other.shards}}
    ids = one.buffers.keys() | other.buffers.keys()
    return sorted(tensors) + sorted(each.name for each in ids if one.buffers.get(each) != other.buffers.get(each))


def _analytic_faults(case: Case, host: Host, traced: Layout) -> list[str]:
    """Tensors of which the computed layout says that this rank holds something else than its loader writes."""
    computed = inference_side(table_for(case.model), host.settings.sizes).layout_of(host.rank)
    ours, theirs = _regions(computed), _regions(traced)
    faults = [f"{name}: computed {ours.get(name)}, traced {theirs.get(name)}" for name in differences(computed, traced)]
    computed_groups, traced_groups = (_numel_of_expert_groups(layout) for layout in (computed, traced))
    if computed_groups != traced_groups:  # a plan would promise other buckets than a switch has
        faults.append(f"elements of groups of experts: computed {computed_groups}, traced {traced_groups}")
    return faults


def _numel_of_expert_groups(layout: Layout) -> list[int]:
    """Elements of routed experts in each group that has some, in order of size."""
    numel: Counter[str] = Counter()
    for shard in layout.shards:
        if ".experts." in shard.region.tensor:
            numel[layout.buffers[shard.place.buffer].group] += shard.region.numel
    return sorted(numel.values())


def _regions(layout: Layout) -> dict[str, list[Region]]:
    regions: dict[str, list[Region]] = {}
    for shard in layout.shards:
        regions.setdefault(shard.region.tensor, []).append(shard.region)
    return regions


# -- what is asserted --------------------------------------------------------------------------------------------------

WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
STAGED = ("llama", "llama tied", "qwen3", "glm", "glm4", "gemma2", "gpt2", *WITH_EXPERTS)
WHOLE = ("llama", "llama vocabulary without padding", "qwen2 tied", "glm", "gemma3", "gpt2", "deepseek_v3")
FIVE_LAYERS = {"num_hidden_layers": 5}
SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
SIX_LATENT_HEADS = {**SIX_HEADS, "num_key_value_heads": 6, "moe_intermediate_size": 48}

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WHOLE_VOCABULARY, HALF = (130, 192), (34, 96)

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


assert all(len({case.name for case in cases}) == len(cases) for cases in CASES.values())

ALL = [pytest.param(num_ranks, case, id=case.name) for num_ranks, cases in CASES.items() for case in cases]
ORDERED = [param for param in ALL if param.values[1].order is not None]

Runs = Callable[[int, Case], list[Outcome]]
"""Number of ranks and case -> by rank, its outcomes."""


@pytest.fixture(scope="module")
def runs(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = str(tmp_path_factory.mktemp("layouts"))

    @functools.cache
    def launched(num_ranks: int) -> Outcomes:
        """By layout."""
        by_layout: dict[str, list[Case]] = {}
        for case in CASES[num_ranks]:
            by_layout.setdefault(case.layout, []).append(case)
        calls = {layout: (run_cases, (directory, cases)) for layout, cases in by_layout.items()}
        return engines.launch_in_turn(num_ranks, calls)

    return lambda num_ranks, case: [found[case.name] for found in launched(num_ranks)[case.layout]]


@pytest.fixture
def by_rank(runs: Runs, num_ranks: int, case: Case) -> list[Outcome]:
    """The outcomes of one case."""
    return runs(num_ranks, case)


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_every_weight_is_traced_as_computed_and_filled_as_vllm_loads_it(by_rank: list[Outcome]) -> None:
    assert [outcome.faults for outcome in by_rank] == [[]] * len(by_rank)


@pytest.mark.parametrize(("num_ranks", "case"), ORDERED)
def test_another_order_gives_each_rank_what_its_position_has_in_sequence(
    runs: Runs, by_rank: list[Outcome], num_ranks: int, case: Case
) -> None:
    (sequential,) = [other for other in CASES[num_ranks] if other.is_reordered(case)]
    in_sequence = runs(num_ranks, sequential)
    assert [by_rank[rank].position for rank in case.order or ()] == list(range(num_ranks))
    assert all(outcome.digests == in_sequence[outcome.position].digests for outcome in by_rank)


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_what_is_never_read_belongs_to_others_or_to_nobody(by_rank: list[Outcome], case: Case) -> None:
    """Over all ranks every tensor of the checkpoint is read, but for the layer that predicts further tokens."""
    unread = frozenset.intersection(*(outcome.unread for outcome in by_rank))
    assert all(name.startswith(f"model.layers.{case.model['num_hidden_layers']}.") for name in unread)
    assert bool(unread) == ("deepseek_v3" in case.family)


@pytest.mark.parametrize(
    ("case", "rank", "rows"),
    [
        (Case("llama", tp=2), 0, {}),
        (Case("llama", tp=2), 1, {EMBEDDING: HALF, HEAD: HALF}),
        (Case("llama tied", tp=2), 1, {EMBEDDING: HALF}),
        (Case("llama", dp=2), 0, {EMBEDDING: WHOLE_VOCABULARY, HEAD: WHOLE_VOCABULARY}),
        (Case("llama vocabulary without padding", dp=2), 0, {}),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else None,
)
def test_vocabulary_padding_is_declared(runs: Runs, case: Case, rank: int, rows: dict[str, tuple[int, int]]) -> None:
    """130 words are padded to 192 rows of 64: 62 rows at TP=1; at TP=2 rank 0 has 96 words, rank 1 34 and 62 rows."""
    expected = {name: [(first * 64, last * 64)] for name, (first, last) in rows.items()}
    assert runs(2, case)[rank].padding == expected

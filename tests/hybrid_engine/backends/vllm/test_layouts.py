"""Every family in vLLM's layouts: traced, filled, and compared bitwise with vLLM's own load.

The traced layout must also equal the layout traced without memory and the layout computed without
vLLM. vLLM's models run on real ranks without an engine. A case is a model of the zoo in the groups
of some settings. Nothing is computed, so a launch covers dozens of cases: one launch for each
number of ranks, one call for each layout.
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
    def name(self) -> str:
        return f"{self.family} {dict(self.config) or ''} {self.layout}".replace("  ", " ")

    @property
    def model(self) -> dict[str, Any]:
        return served_config(self.family, **self.config)

    @property
    def is_in_place(self) -> bool:
        """Return whether to fill in place too: once with experts, with MLA, with neither."""
        return self.layout == "tp2 pp1 dp1 ep1" and self.family in IN_PLACE

    def is_reordered(self, other: Case) -> bool:
        """Return whether `other` is this sequential case in another order."""
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
    """Results of one rank for a case.

    Attributes:
        faults: differences from the expectation, in words.
        position: of the rank in vLLM's order.
        digests: of every parameter.
        padding: buffer name -> intervals.
        unread: canonical tensors of which the rank holds nothing.
    """

    faults: list[str]
    position: int
    digests: dict[str, str]
    padding: dict[str, list[tuple[int, int]]]
    unread: frozenset[str]


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
    """Fill the cases of one layout by records and compare them with vLLM's own load."""
    if not dist.is_initialized():  # calls of other layouts run on the same ranks
        dist.init_process_group("gloo")
    base = Path(directory)
    # vLLM makes a group for experts if a model has some; all sizes here divide 12 heads.
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
    """Return the layout of this rank's position, traced without memory by another rank."""
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
    read = {shard.region.tensor for shard in layout.shards}
    faults = [
        *(f"{name} has other bits than vLLM loads itself" for name in support.differences(filled, native)),
        *(
            f"{name} computes with other weights than were sent"
            for name in support.misread_layers(adaptor.model, filled)
        ),
        *(f"{name} cannot be traced" for name in adaptor.staged),
        *(f"{name} was traced otherwise without memory" for name in _differences_of_shards(traced_before, layout)),
        *_analytic_faults(case, host, layout),
        # An empty layout would have no faults.
        *([] if support.is_ready(adaptor) and len(read) > 5 else ["not all groups are committed"]),
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
        unread=frozenset(layout.tensors) - read,
    )


def _faults_in_place(case: Case, host: Host, checkpoint: str) -> list[str]:
    """Fill dense layers in place, like on a GPU; experts are packed, like on a CPU."""
    from vllm.model_executor.layers import utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)
        patch.setattr(utils.ops, "_supports_onednn", False)
        adaptor = support.adaptor_of(host, checkpoint, case.model, keeps_addresses=True)
        before = support.tensors_of(adaptor.model)
        places = {path: (tensor.data_ptr(), tensor.stride()) for path, tensor in before.items()}
        for seed in (1, 0):
            support.write_by_records(adaptor, support.random_weights(case.model, seed))
        native = support.native_model(host, checkpoint)
    # Every tensor must equal a native load and stay at its address.
    tensors = support.tensors_of(adaptor.model)
    is_derived = any(derivation.results for derivation in adaptor._processed.derivations.values())
    moved = [path for path, tensor in tensors.items() if places.get(path) != (tensor.data_ptr(), tensor.stride())]
    return [
        *(f"{path} moved" for path in moved),
        *(f"{path} is not that of a native load" for path in support.differences(tensors, support.tensors_of(native))),
        *([] if is_derived == (case.family in WITH_EXPERTS) else [f"vLLM derived something: {is_derived}"]),
    ]


def _digest(tensor: torch.Tensor) -> str:
    # Digests travel instead of tensors.
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _differences_of_shards(left: Layout, right: Layout) -> list[str]:
    """Return tensors with other boxes or places in two layouts, and buffers that differ."""
    tensors = {shard.region.tensor for shard in {*left.shards} ^ {*right.shards}}
    ids = left.buffers.keys() | right.buffers.keys()
    changed = [buffer_id.name for buffer_id in ids if left.buffers.get(buffer_id) != right.buffers.get(buffer_id)]
    return sorted(tensors) + sorted(changed)


def _analytic_faults(case: Case, host: Host, traced: Layout) -> list[str]:
    """Compare the layout computed without vLLM with the traced layout."""
    computed = inference_side(table_for(case.model), host.settings.sizes).layout_of(host.rank)
    boxes = _regions(computed)
    traced_boxes = _regions(traced)
    faults = [
        f"{name}: computed {boxes.get(name)}, traced {traced_boxes.get(name)}" for name in differences(computed, traced)
    ]
    computed_groups = _numel_of_expert_groups(computed)
    traced_groups = _numel_of_expert_groups(traced)
    if computed_groups != traced_groups:  # plans would have other buckets than switches
        faults.append(f"elements of groups of experts: computed {computed_groups}, traced {traced_groups}")
    return faults


def _numel_of_expert_groups(layout: Layout) -> list[int]:
    """Return the number of elements of routed experts in each group with experts, sorted."""
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


# -- assertions ------------------------------------------------------------------------------------

WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
STAGED = ("llama", "llama tied", "qwen3", "glm", "glm4", "gemma2", "gpt2", *WITH_EXPERTS)
WHOLE = ("llama", "llama vocabulary without padding", "qwen2 tied", "glm", "gemma3", "gpt2", "deepseek_v3")
FIVE_LAYERS = {"num_hidden_layers": 5}
SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
SIX_LATENT_HEADS = {**SIX_HEADS, "num_key_value_heads": 6, "moe_intermediate_size": 48}

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
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


assert all(len({case.name for case in cases}) == len(cases) for cases in CASES.values())

ALL = [pytest.param(num_ranks, case, id=case.name) for num_ranks, cases in CASES.items() for case in cases]
ORDERED = [param for param in ALL if param.values[1].order is not None]

# Number of ranks, case -> outcomes by rank.
Runs = Callable[[int, Case], list[Outcome]]


@pytest.fixture(scope="module")
def runs(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = str(tmp_path_factory.mktemp("layouts"))

    @functools.cache
    def launched(num_ranks: int) -> Outcomes:
        """Return the results by layout."""
        by_layout: dict[str, list[Case]] = {}
        for case in CASES[num_ranks]:
            by_layout.setdefault(case.layout, []).append(case)
        calls = {layout: (run_cases, (directory, cases)) for layout, cases in by_layout.items()}
        return engines.launch_in_turn(num_ranks, calls)

    return lambda num_ranks, case: [outcomes[case.name] for outcomes in launched(num_ranks)[case.layout]]


@pytest.fixture
def by_rank(runs: Runs, num_ranks: int, case: Case) -> list[Outcome]:
    """Outcomes of one case."""
    return runs(num_ranks, case)


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_every_weight_is_traced_as_computed_and_filled_like_a_native_load(by_rank: list[Outcome]) -> None:
    assert [outcome.faults for outcome in by_rank] == [[]] * len(by_rank)


@pytest.mark.parametrize(("num_ranks", "case"), ORDERED)
def test_a_rank_order_only_moves_positions(runs: Runs, by_rank: list[Outcome], num_ranks: int, case: Case) -> None:
    (sequential,) = [other for other in CASES[num_ranks] if other.is_reordered(case)]
    in_sequence = runs(num_ranks, sequential)
    assert [by_rank[rank].position for rank in case.order or ()] == list(range(num_ranks))
    assert all(outcome.digests == in_sequence[outcome.position].digests for outcome in by_rank)


@pytest.mark.parametrize(("num_ranks", "case"), ALL)
def test_every_tensor_but_those_of_mtp_layers_is_read(by_rank: list[Outcome], case: Case) -> None:
    unread = frozenset.intersection(*(outcome.unread for outcome in by_rank))
    assert all(name.startswith(f"model.layers.{case.model['num_hidden_layers']}.") for name in unread)
    assert bool(unread) == ("deepseek_v3" in case.family)  # vLLM serves without MTP layers


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
    """130 tokens in 192 rows of 64. TP=2: rank 0 has 96 tokens, rank 1 has 34 and 62 rows."""
    expected = {name: [(first * 64, last * 64)] for name, (first, last) in rows.items()}
    assert runs(2, case)[rank].padding == expected

"""`plan --search`: its terms computed by hand, its pairs against brute force, and its remedies."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hybrid_engine.config import ActorConfig, FsdpConfig, GenerateConfig, HybridConfig, find_violations
from hybrid_engine.config.job_rules import megatron_state, memory_plan
from hybrid_engine.errors import ConfigError
from hybrid_engine.layouts.inference import InferenceElements
from hybrid_engine.layouts.kv_cache import LayerCache, layer_caches, sequence_nbytes
from hybrid_engine.layouts.memory import GIB
from hybrid_engine.layouts.parallelism import InferenceParallelism, ShardedParallelism, TrainParallelism
from hybrid_engine.layouts.sharded import PackedModel
from hybrid_engine.layouts.size_rules import violations
from hybrid_engine.layouts.stages import split_violations
from hybrid_engine.layouts.training import TrainingElements
from hybrid_engine.models import table_for
from hybrid_engine.planning.planner import largest_bucket
from hybrid_engine.records.layout import DTYPE_NBYTES
from hybrid_engine.tools.plan.activations import Step, activation_nbytes, gathered_nbytes, vllm_step_nbytes
from hybrid_engine.tools.plan.answer import JobVerdict
from hybrid_engine.tools.plan.cluster_plan import CacheRoom, Cluster, plan_job
from hybrid_engine.tools.plan.search import (
    MOST_ALIKE,
    NUM_ROWS,
    RESERVE,
    VLLM_RESERVE,
    Search,
    SearchResult,
    find_pairs,
)
from hybrid_engine.tools.plan.searched_sizes import infer_keys, train_cost, train_keys, uneven_ends
from tests.harness.errors import has_violations
from tests.hybrid_engine.layouts.cases import DENSE, EXPERTS, JOBS, LATENT, LayoutCase, layout_cases, sharded_cases
from tests.zoo.families import write_config
from tests.zoo.published_configs import DEEPSEEK_V3, LLAMA_3_8B, LLAMA_3_70B

H100 = Cluster(device_gib=79.1)


@functools.cache
def directory(name: str) -> Path:
    """Return a model's directory, which lasts for the whole run."""
    models = {"dense": DENSE, "experts": EXPERTS, "latent": LATENT, "8b": LLAMA_3_8B, "70b": LLAMA_3_70B}
    return write_config(Path(tempfile.mkdtemp()), models[name])


def build_config(name: str, actor: dict[str, Any] | None = None, **generate: Any) -> HybridConfig:
    return HybridConfig(model=directory(name), actor_config=actor or {}, generate_config=generate)


# -- terms computed by hand ------------------------------------------------------------------------

# Elements of one rank, T = 1,024 tokens of a micro batch, 16,384 of a step of vLLM (H100), 256
# sequences with logits.  Llama-3 70B, TP 8, 64 ranks, so DP 8. A layer: q and o 8,192 x 8,192 each,
# k and v 1,024 x 8,192 each, 150,994,944; MLP 3 x 28,672 x 8,192 = 704,643,072; their eighth
# 106,954,752, and two norms 16,384: 106,971,136. 80 of them 8,557,690,880. Embedding and head:
# 128,256 rows padded to 129,024 (of 1,024), 2 x 129,024 x 8,192 / 8 = 264,241,152. Last norm 8,192.
# In all 8,821,940,224, each 2 bytes + 4 of gradient + 12 / 8 of optimizer: 7.5. Activations of a
# token and layer, with sequence parallelism: 4 x 8,192 / 8 = 4,096; q and output 2 x 8,192 and k, v
# 2 x 1,024, an eighth: 2,304; MLP 3 x 28,672 / 8 = 10,752; in all 17,152. 80 layers, 2 bytes:
# 2,744,320 a token; and logits 129,024 / 8 x (2 + 4) bytes = 96,768. vLLM, TP 4: (150,994,944 +
# 704,643,072) / 4 + 16,384 = 213,925,888, 80 of them; ends 2 x 128,256 x 8,192 / 4 = 525,336,576;
# norm: 17,639,415,808. A token: key and value, 2 of 8 heads, 128, 80 layers, 2 bytes = 81,920. A
# step: 2 bytes x 16,384 x (3 x 8,192 + 3 x 28,672 / 4) = 1,509,949,440, and 256 x 128,256 logits of
# 2 + 8 bytes.
# DeepSeek-V3, TP 8, PP
# 16 (4 x 15, 1), EP 32, ETP 1, 512 ranks, so DP 4, one replica of an expert. A layer: q down 1,536
# x 7,168 and kv down 576 x 7,168, whole, 15,138,816, with norms 2,048; q up 24,576 x 1,536 / 8 =
# 4,718,592; kv up 32,768 x 512 / 8 = 2,097,152; o 7,168 x 16,384 / 8 = 14,680,064; two norms
# 14,336: 36,651,008. Router 256 x 7,168 and its bias 256: 1,835,264. Shared expert 3 x 2,048 x
# 7,168 / 8 = 5,505,024. 4 layers 175,965,184. Experts: 8 of 44,040,192, 4 layers 1,409,286,144. 6
# bytes each, and 12 x (175,965,184 / 4 + 1,409,286,144). Activations of the second stage, 15 micro
# batches x 4 layers: 4 x 7,168 / 8 = 3,584; compressed 2 x (1,536 + 576) = 4,224; q, k 2 x 24,576
# and output 16,384, an eighth: 8,192; kv up 4,096; one copy for experts, 7,168 + 3 x 2,048 =
# 13,312; shared 768; in all 34,176. 60 x 34,176 = 2,050,560. The first has 16 x (3 x 27,008 +
# 34,176) = 1,843,200. vLLM, TP 8, EP 32: 36,651,008 + 1,835,264 + the shared expert whole
# 44,040,192 + 8 experts 352,321,536 = 434,848,000, 58 of them; 3 dense ones of 36,651,008 + 3 x
# 18,432 x 7,168 / 8 = 86,196,224; ends 2 x 129,280 x 7,168 / 8 = 231,669,760; norm 7,168:
# 25,711,449,600. A token: 576 x 61 x 2 = 70,272, on every rank. A step: 8 x (7,168 + 3 x 2,048) =
# 106,496 of experts, and 3 x 7,168; 256 x 129,280 logits.
TERMS = {
    "llama-3 70b": (
        LLAMA_3_70B,
        TrainParallelism(64, tensor=8),
        InferenceParallelism(64, tensor=4),
        8_821_940_224 * 15 // 2,
        1024 * (2_744_320 + 96_768),
        2 * 17_639_415_808,
        81_920,
        1_509_949_440 + 256 * 128_256 * 10,
    ),
    "deepseek-v3": (
        DEEPSEEK_V3,
        TrainParallelism(512, 8, 16, num_layers_in_last_pipeline_stage=1, expert=32, expert_tensor=1),
        InferenceParallelism(512, tensor=8, expert=32),
        6 * 1_585_251_328 + 12 * (43_991_296 + 1_409_286_144),
        1024 * 2 * 2_050_560,
        2 * 25_711_449_600,
        70_272,
        2 * 16_384 * (21_504 + 106_496) + 256 * 129_280 * 10,
    ),
}


@pytest.mark.parametrize("name", TERMS)
def test_terms_match_the_figures_computed_by_hand(name: str) -> None:
    model, train, infer, training, activations, weights, token_bytes, step = TERMS[name]
    table = table_for(model)
    actor = ActorConfig(sequence_parallel=True)
    assert megatron_state(actor, TrainingElements(table).count(train), train).total.max() == training
    assert activation_nbytes(table, Step.of(actor, train)).max() == activations
    assert 2 * InferenceElements(table).count(infer).num_elements.max() == weights
    assert max(sequence_nbytes(stage, 1) for stage in layer_caches(table, infer, 2)) == token_bytes
    assert vllm_step_nbytes(table, infer, GenerateConfig(), 2, 79.1 * GIB) == step


def test_activations_match_the_papers_layer() -> None:
    """Paper: sbh (34 + ...) bytes with dropout masks, so 32 h without them.

    TP 2 does not cut norms and inputs: 8 h + 24 h / 2.
    """
    gpt = {"architectures": ["GPT2LMHeadModel"], "n_embd": 1024, "n_head": 16, "n_layer": 1, "n_positions": 1024}
    table = table_for({**gpt, "vocab_size": 1024})
    logits = 1024 * 1024 * 6

    def layer_nbytes(tensor: int, **actor: Any) -> int:
        step = Step.of(ActorConfig(**actor), TrainParallelism(2, tensor=tensor))
        return int(activation_nbytes(table, step)[0]) - logits // tensor

    assert layer_nbytes(1) == 1024 * 1024 * 32
    assert layer_nbytes(2) == 1024 * 1024 * (8 + 24 // 2)
    assert layer_nbytes(2, sequence_parallel=True) == 1024 * 1024 * 16
    assert layer_nbytes(1, micro_batch_size=3) == 3 * 1024 * 1024 * 32 + 2 * logits


def full(method: str, num_layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": num_layers}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules or None}


@pytest.mark.parametrize(
    ("num_layers", "keys", "expected"),
    [
        (24, {}, 2 * 12 * 20),
        (24, selective(), 2 * 12 * 20),
        (24, selective("mlp"), 2 * 12 * 8 + 12),
        (24, selective("layernorm", "mlp"), 2 * 12 * 6 + 14),
        (12, full("uniform", 2), 2 * 6 // 2 + 2 * 20),  # the input of every group of two layers, and one full group
        (4, full("block", 1), 2 * (1 + 20) + 20),
        (4, full("block", 2), 2 * 2 + 20),
        (24, {"virtual_pipeline_model_parallel_size": 2}, (2 + 2 + 1) * 6 * 20),  # chunks of 6 layers
    ],
)
def test_recomputation_and_stages_in_flight(num_layers: int, keys: dict[str, Any], expected: int) -> None:
    """PP 2: the first stage keeps two micro batches.

    With h = q = kv = 8 and f = 32, a token and layer takes 20 h: norms and inputs 4 h; q, k, v and
    output 4 h; MLP 12 h.
    """
    sizes = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 32}
    table = table_for({**DENSE, **sizes, "num_hidden_layers": num_layers})
    actor = ActorConfig(pipeline_model_parallel_size=2, seq_length=10, **keys)
    assert activation_nbytes(table, Step.of(actor, actor.sizes(2)))[0] == 8 * 10 * 2 * expected


def test_fsdp_gathers_a_layer_and_the_root() -> None:
    """Root of 10 and 30 elements, layers of 100 and 120.

    In float32: 4 (40 + 240) + 4 (40 + 120) + 4 x 120.
    """
    shapes = {
        "embed": (10,),
        "layers.0.q": (100,),
        "layers.1.q": (70,),
        "layers.1.k": (50,),
        "head": (30,),
        "bias": (9,),
    }
    model = PackedModel({}, shapes, whole={"bias"})

    def gathered(**fsdp: Any) -> int:
        return gathered_nbytes(model, ActorConfig(fsdp=FsdpConfig(**fsdp), params_dtype="float32"))

    assert gathered() == 4 * 280 + 4 * 160 + 480
    assert gathered(mixed_precision="amp") == 2 * 280 + 2 * 160 + 480, "reduced in float32"
    assert gathered(sharding_strategy="SHARD_GRAD_OP") == 4 * 260 + 4 * 160 + 480, "all layers stay"


@JOBS
@given(layout_cases())
def test_counts_match_the_layouts(case: LayoutCase) -> None:
    if isinstance(case.train, TrainParallelism):
        count = TrainingElements(case.table).count(case.train)
        side = case.source
        for stage, ranks in enumerate(case.train.ranks):
            assert set(side.num_elements[ranks.ravel()]) == {count.num_elements[stage]}
            assert set(side.num_expert_elements[ranks.ravel()]) == {count.num_expert_elements[stage]}
    most = InferenceElements(case.table).count(case.infer).num_elements
    for stage in range(case.infer.pipeline):
        assert case.destination.num_elements[case.infer.ranks[:, :, stage].ravel()].max() == most[stage]


@JOBS
@given(layout_cases() | sharded_cases())
def test_no_bucket_exceeds_its_size_by_more_than_one_part(case: LayoutCase) -> None:
    """A search does not plan buckets: it adds a rank's largest part to the requested size."""
    inference = InferenceElements(case.table).count(case.infer).largest_part * DTYPE_NBYTES[case.infer_dtype]
    if isinstance(case.train, TrainParallelism):
        training = TrainingElements(case.table).count(case.train).largest_part
    else:
        assert case.packed is not None
        training = max(case.packed.numel_by_layer(case.train.num_shards).values())
    largest_part = max(inference, training * DTYPE_NBYTES[case.train_dtype])
    assert largest_bucket(case.source, case.destination, bucket_nbytes=100) < 100 + largest_part


# -- verdicts of single jobs -----------------------------------------------------------------------


@given(
    share=st.integers(1, 100),
    step=st.integers(0, 20),
    per_token=st.integers(1, 9),
    longest=st.integers(1, 20),
    more=st.integers(-5, 5),
    cache_size=st.none() | st.integers(1, 90),
    other=st.integers(0, 50),
)
def test_a_vllm_that_cannot_start_never_fits(
    share: int, step: int, per_token: int, longest: int, more: int, cache_size: int | None, other: int
) -> None:
    """Device of 100 bytes: weights leave `more` than a step and the longest sequence take."""
    needed = longest * per_token
    weights = max(0, share - step - needed - more)
    cache = CacheRoom(100, share / 100, weights, step, (LayerCache(per_token),), 7, longest, cache_size, other)
    taken = math.ceil(100 * (share / 100))
    size = taken - weights - step
    if cache_size is not None:
        size = cache_size
        taken = weights + step + cache_size
    assert cache.fits == (needed <= size and taken + other <= 100)
    if cache.fits and cache_size is None:
        assert 100 * cache.needed <= share + 1
    if weights + step + needed > taken and cache_size is None:
        assert 100 * cache.needed > share


# -- all pairs -------------------------------------------------------------------------------------

CONFIGURED = [
    {},
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 3},
    {"expert_model_parallel_size": 2},
]


@pytest.mark.parametrize("name", ["dense", "experts", "latent"])
@pytest.mark.parametrize(
    ("configured", "num_ranks", "host"),
    [
        *((configured, *ranks) for configured in CONFIGURED for ranks in ((1, 8), (6, 8))),
        *(pytest.param({}, number, 4, marks=pytest.mark.slow) for number in (8, 12)),
    ],
)
def test_every_size_that_the_rules_allow_is_tried(
    name: str, configured: dict[str, int], num_ranks: int, host: int
) -> None:
    """Compare with a search over all sizes up to the number of ranks."""
    config = build_config(name, configured, **({"infer_pipeline_parallel_size": 2} if len(configured) else {}))
    table = table_for({"dense": DENSE, "experts": EXPERTS, "latent": LATENT}[name])
    actor = config.actor_config
    generate = config.generate_config
    every = range(1, num_ranks + 1)
    hosts = [size for size in every if min(host, num_ranks) % size == 0]
    expected = set()
    for tensor, pipeline, expert, is_whole in itertools.product(every, every, every, (True, False)):
        sizes = {
            "tensor": tensor,
            "pipeline": pipeline,
            "expert": expert,
            "expert_tensor": 1 if is_whole else None,
        }
        ends = {} if 4 % pipeline == 0 else uneven_ends(4, pipeline)
        train = TrainParallelism(num_ranks, **sizes, **ends, cuts_whole_projections=True)
        is_kept = all(getattr(train, key.split("_")[0]) == size for key, size in configured.items())
        is_tried = tensor in hosts or "tensor_model_parallel_size" in configured
        if is_kept and is_tried and not (is_whole and min(tensor, expert) == 1) and not violations(train, table):
            expected.add((tensor, pipeline, expert, train.expert_tensor))
    tried = [actor.model_copy(update=keys).sizes(num_ranks) for keys in train_keys(actor, table, num_ranks, host)]
    assert sorted(map(str, expected)) == sorted(
        str((sizes.tensor, sizes.pipeline, sizes.expert, sizes.expert_tensor)) for sizes in tried
    )
    kept = generate.infer_pipeline_parallel_size if configured else None
    expected_infer = {
        (tensor, pipeline, expert)
        for tensor, pipeline, expert in itertools.product(hosts, every, every)
        if pipeline in (kept or pipeline,)
        and not violations(InferenceParallelism(num_ranks, tensor, pipeline, expert), table)
    }
    found_infer = [
        generate.model_copy(update=keys).sizes(num_ranks) for keys in infer_keys(generate, table, num_ranks, host)
    ]
    assert expected_infer == {(sizes.tensor, sizes.pipeline, sizes.expert) for sizes in found_infer}
    assert len(found_infer) == len(expected_infer)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "experts", "latent"])
def test_a_pair_fits_if_and_only_if_its_plan_fits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exception: the rounded peak exceeds the device. Half of the pairs fit."""
    monkeypatch.setattr("hybrid_engine.tools.plan.search.RESERVE", 0)
    monkeypatch.setattr("hybrid_engine.tools.plan.search.VLLM_RESERVE", 0)
    config = build_config(name, {"seq_length": 1}, max_model_len=2, max_num_seqs=1, vllm={"max_num_batched_tokens": 2})
    every = Search(config, 4, Cluster(ranks_per_host=2))
    peaks = sorted(every._pair(*sizes).peak for sizes in itertools.product(every._trains, every._infers))
    gib = peaks[len(peaks) // 2] / GIB
    cluster = Cluster(ranks_per_host=2, device_gib=gib)
    search = Search(config, 4, cluster)
    assert all(not pair.lacks for pair in search.fitting())
    fitting = {str(pair.keys) for pair in search.fitting()}
    assert fitting
    planned = 0
    for train, infer in itertools.product(search._trains, search._infers):
        pair = search._pair(train, infer)
        if find_violations(pair.config, 4, weights_only=True):
            continue
        job = plan_job(pair.config, 4, cluster)
        planned += JobVerdict(job).fits
        assert job.cache == pair.cache
        assert job.peak.max() <= pair.peak
        assert (str(pair.keys) in fitting) == (pair.peak <= gib * GIB and JobVerdict(job).fits)
    assert 0 < len(fitting) <= planned < len(search._trains) * len(search._infers)


@functools.cache
def search_70b(num_ranks: int, **generate: Any) -> SearchResult:
    return find_pairs(build_config("70b", **generate), num_ranks, H100)


@pytest.mark.slow
def test_rows_are_sorted_by_cost() -> None:
    """TP 8 -> TP 4, 64 H100: 3 doublings, 2 doublings; TP 4 caches 16 x 469,643 tokens.

    A cache: 0.89 x 79.1 GiB less 35,278,831,616 of weights and 1,838,284,800 of a step are 469,643
    x 81,920 bytes.
    """
    result = search_70b(64)
    first = result.rows[0].as_dict()
    assert (first["train"]["tensor"], first["infer"]["tensor"]) == (8, 4)
    assert first["keys"]["actor_config"] == {"tensor_model_parallel_size": 8, "sequence_parallel": True}
    assert first["keys"]["generate_config"] == {"infer_tensor_parallel_size": 4, "gpu_memory_utilization": 0.89}
    assert first["cache_tokens"] == 469_643
    assert (first["cost"]["train"], first["cost"]["infer"]) == (3, 2)
    assert first["left"] >= RESERVE
    facts = [row.as_dict() for row in result.rows]
    assert len(facts) == NUM_ROWS
    assert [round(fact["cost"]["all"], 2) for fact in facts] == sorted(round(fact["cost"]["all"], 2) for fact in facts)
    for section in ("actor_config", "generate_config"):
        alike = [str(fact["keys"][section]) for fact in facts]
        assert max(map(alike.count, alike)) <= MOST_ALIKE
    halves = [fact for fact in facts if fact["train"] == first["train"] and fact["infer"]["tensor"] == 8]
    tokens = 16 * 469_643 / (8 * halves[0]["cache_tokens"])
    assert first["cost"]["cache"] - halves[0]["cost"]["cache"] == pytest.approx(-np.log2(tokens))


def test_doublings_match_the_figures_computed_by_hand() -> None:
    assert train_cost(TrainParallelism(64, tensor=2, pipeline=4), 8) == 3
    assert train_cost(TrainParallelism(64, pipeline=4, expert=8), 8) == 2, "an expert group fits on a host"
    assert train_cost(TrainParallelism(64, tensor=2, pipeline=2, expert=8), 8) == 3, "ETP is TP: two hosts"
    assert train_cost(TrainParallelism(64, tensor=2, expert=32, expert_tensor=1), 8) == 3
    assert train_cost(ShardedParallelism(64, replicas=8), 8) == 3


def test_uneven_ends_are_shorter() -> None:
    assert uneven_ends(94, 8) == {"num_layers_in_first_pipeline_stage": 11, "num_layers_in_last_pipeline_stage": 11}
    assert uneven_ends(61, 16) == {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 2}
    assert uneven_ends(64, 8) == {}
    assert uneven_ends(61, 32) == {}, "two stages would share one layer"


@given(st.integers(1, 200), st.integers(1, 64))
def test_uneven_ends_assign_all_layers(num_layers: int, pipeline: int) -> None:
    ends = uneven_ends(num_layers, pipeline)
    assume(ends)
    assert not list(split_violations(TrainParallelism(pipeline, pipeline=pipeline, **ends), num_layers, 0))
    assert max(ends.values()) <= -(-num_layers // pipeline)


def test_configured_keys_are_kept_and_listed() -> None:
    config = build_config("8b", {"tensor_model_parallel_size": 2}, gpu_memory_utilization=0.6)
    result = find_pairs(config, 8, H100)
    assert result.fixed == ["actor_config.tensor_model_parallel_size: 2", "generate_config.gpu_memory_utilization: 0.6"]
    assert {row.job.train.tensor for row in result.rows} == {2}
    assert {row.job.cache.utilization for row in result.rows} == {0.6}


# -- without a fitting pair ------------------------------------------------------------------------


@pytest.mark.slow
def test_missing_memory_and_remedies_are_reported() -> None:
    """70B on 8 H100 (DP 1): 8.8 G x 18 bytes a rank, 147.9 GiB, and 2.7 GiB of activations."""
    result = search_70b(8, max_model_len=8192)
    assert not result.rows
    assert result.nearest is not None
    assert result.nearest.lacks == {"training": pytest.approx((147.89 + 2.71 - 79.1) * GIB, rel=1e-3)}
    assert result.mends == ["--ranks 16"]
    assert search_70b(16, max_model_len=8192).rows, "the remedy must work"


@pytest.mark.parametrize(
    ("actor", "generate", "remedy"),
    [
        ({"micro_batch_size": 64}, {}, "actor_config: {micro_batch_size: 1}"),
        (
            {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
            {},
            "without actor_config.tensor_model_parallel_size: 1",
        ),
        ({}, {"gpu_memory_utilization": 0.05}, "without generate_config.gpu_memory_utilization: 0.05"),
        (
            {},
            {"release_weights": False, "infer_tensor_parallel_size": 1},
            "without generate_config.release_weights: False",
        ),
        ({"seq_length": 8192}, {}, "actor_config: {recompute_granularity: full, recompute_method: uniform, "),
        ({}, {"max_model_len": 2**29}, "generate_config: {max_model_len: "),
    ],
    ids=lambda keys: str(keys)[:40],
)
def test_remedies_have_been_tried(
    actor: dict[str, Any], generate: dict[str, Any], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8B on two devices of 75 GiB of one host; only the named key prevents a fit."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    generate = {"max_model_len": 1024, **generate}
    result = find_pairs(build_config("8b", actor, **generate), 2, Cluster(ranks_per_host=2, device_gib=75.0))
    assert not result.rows
    assert any(text.startswith(remedy) for text in result.mends), result.mends
    assert result.nearest is not None
    assert result.nearest.lacks


def test_a_chosen_share_leaves_the_reserve() -> None:
    row = find_pairs(build_config("dense"), 2, H100).rows[0].as_dict()
    assert row["keys"]["generate_config"]["gpu_memory_utilization"] == 0.89
    assert row["left"] >= VLLM_RESERVE > RESERVE


@pytest.mark.slow
def test_limits_of_host_memory_and_budget_are_kept() -> None:
    """8B on 16 ranks keeps 2 + 12 / DP bytes of 8.03 G parameters over 8 ranks of a host."""
    config = build_config("8b", max_model_len=4096)
    least = 8 * 8.03e9 * (2 / 16 + 12 / 16) / GIB
    for host_gib in (1.1 * least, 0.9 * least):
        rows = find_pairs(config, 16, replace(H100, host_gib=host_gib)).rows
        assert bool(rows) == (host_gib > least)
        assert all(row.job.fits_host for row in rows)
    limited = find_pairs(config.model_copy(update={"device_budget_gib": 12.0}), 16, H100)
    assert limited.rows
    for row in limited.rows:
        assert not memory_plan(row.job.config, 16).over_budget()


def test_rules_that_no_size_satisfies_are_reported() -> None:
    no_training_sizes = has_violations(("actor_config", "no-valid-sizes"))
    with pytest.raises(ConfigError, check=no_training_sizes):
        find_pairs(build_config("dense", {"tensor_model_parallel_size": 5}), 10, H100)
    no_prefetch = has_violations(("generate_config.prefetch_mb", "has-no-effect"))
    with pytest.raises(ConfigError, check=no_prefetch):
        find_pairs(build_config("dense", prefetch_mb=5), 2, H100)

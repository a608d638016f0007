"""Megatron really trains on CPU and gloo, and every layout computes the same.

One launch per number of ranks runs all its layouts; a layout's losses are compared with those of the
same model on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from tests.harness.core_versions import without
from tests.harness.launch import Ranks
from tests.megatron_patches.gpt import GptSpec, running

NUM_STEPS = 3
FP32_TOLERANCE = 2e-5  # losses around 5, sums in another order
BF16_TOLERANCE = 2e-2

DENSE = GptSpec()
DEEP = GptSpec(num_layers=4)
TIED = GptSpec(tied=True, qkv_bias=True, qk_norm=True)
MOE = GptSpec(num_experts=4)
MIXED = GptSpec(num_experts=4, num_layers=3, moe_first_dense_layers=1)
DEEP_MOE = GptSpec(num_experts=4, num_layers=4)
ONE_GROUP = GptSpec(num_kv_groups=1)
BF16 = GptSpec(dtype="bf16")
FP16 = GptSpec(dtype="fp16")
DROPOUT = GptSpec(dropout=0.2)
ONE_RANK = {
    "dense": DENSE,
    "deep": DEEP,
    "tied": TIED,
    "moe": MOE,
    "mixed": MIXED,
    "deep moe": DEEP_MOE,
    "one kv group": ONE_GROUP,
    "bf16": BF16,
    "fp16": FP16,
    "dropout": DROPOUT,
    "dropout, recomputed": replace(DROPOUT, recompute=True),
    "distributed optimizer": replace(DENSE, distributed_optimizer=True),
}

OVERLAP = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}

FREED = {
    "overlap_p2p_comm": True,
    "batch_p2p_comm": False,
    "deallocate_pipeline_outputs": True,
}  # as Megatron's scripts


@dataclass(frozen=True)
class Layout:
    """`spec` on several ranks must give the losses of `like` (a name in ONE_RANK) on one."""

    like: str
    spec: GptSpec


TWO_RANKS = {
    "tp2": Layout("dense", replace(DENSE, tp=2)),
    "tp2 sequence parallel": Layout("tied", replace(TIED, tp=2, sequence_parallel=True)),
    "tp2 sequence parallel, recompute": Layout("tied", replace(TIED, tp=2, sequence_parallel=True, recompute=True)),
    "more tp than kv groups": Layout("one kv group", replace(ONE_GROUP, tp=2)),
    "dp2": Layout("dense", DENSE),
    "dp2 distributed optimizer": Layout("dense", replace(DENSE, distributed_optimizer=True)),
    "dp2 overlap": Layout("dense", replace(DENSE, **OVERLAP, bucket_size=5000)),
    "dp2 grads overlap only": Layout("dense", replace(DENSE, overlap_grad_reduce=True, bucket_size=5000)),
    "dp2 bf16": Layout("bf16", BF16),
    "dp2 bf16 overlap": Layout("bf16", replace(BF16, **OVERLAP, bucket_size=5000)),
    "dp2 bf16 gradients": Layout("bf16", replace(BF16, grad_reduce_in_fp32=False, distributed_optimizer=True)),
    "dp2 fp16": Layout("fp16", FP16),
    "pp2": Layout("dense", replace(DENSE, pp=2)),
    "pp2 tied": Layout("tied", replace(TIED, pp=2)),
    "pp2 vpp2": Layout("deep", replace(DEEP, pp=2, vpp=2)),
    "pp2 vpp2, outputs freed while they are sent": Layout("deep", replace(DEEP, pp=2, vpp=2, config_overrides=FREED)),
    "pp2 vpp2 overlap": Layout("deep", replace(DEEP, pp=2, vpp=2, **OVERLAP)),
    "ep2": Layout("moe", replace(MOE, ep=2)),
    "ep2 distributed optimizer": Layout("mixed", replace(MIXED, ep=2, distributed_optimizer=True)),
    "tp2 ep2 etp1": Layout("moe", replace(MOE, tp=2, ep=2, etp=1, **OVERLAP)),
    "tp2 moe": Layout("moe", replace(MOE, tp=2)),
    "tp2 moe allgather": Layout("moe", replace(MOE, tp=2, config_overrides={"moe_token_dispatcher_type": "allgather"})),
    "tp2 etp1": Layout("moe", replace(MOE, tp=2, etp=1)),
    "pp2 uneven": Layout("mixed", replace(MIXED, pp=2, config_overrides={"num_layers_in_first_pipeline_stage": 1})),
}
FOUR_RANKS = {
    "tp2 pp2": Layout("dense", replace(DENSE, tp=2, pp=2)),
    "tp2 dp2": Layout("dense", replace(DENSE, tp=2, distributed_optimizer=True)),
    "tp2 pp2 vpp2": Layout("deep", replace(DEEP, tp=2, pp=2, vpp=2, **OVERLAP)),
    "tp2 ep2 etp2": Layout("mixed", replace(MIXED, tp=2, ep=2, etp=2, distributed_optimizer=True)),
    "pp2 ep2": Layout("deep moe", replace(DEEP_MOE, pp=2, ep=2)),
}


def train(specs: dict[str, GptSpec]) -> dict[str, list[float]]:
    """On every rank: the losses of NUM_STEPS steps on one batch, for each spec."""
    losses = {}
    for name, spec in specs.items():
        with running(spec) as gpt:
            losses[name] = [gpt.train_step() for _ in range(NUM_STEPS)]
    return losses


@pytest.fixture(scope="module")
def one_rank(engines: Ranks) -> dict[str, list[float]]:
    return engines.launch(train, 1, ONE_RANK)[0]


def check(engines: Ranks, layouts: dict[str, Layout], num_ranks: int, one_rank: dict[str, list[float]]) -> None:
    results = engines.launch(train, num_ranks, {name: layout.spec for name, layout in layouts.items()})
    assert all(result == results[0] for result in results), "ranks disagree about the loss"
    for name, layout in layouts.items():
        tolerance = FP32_TOLERANCE if layout.spec.dtype == "fp32" else BF16_TOLERANCE
        assert results[0][name] == pytest.approx(one_rank[layout.like], abs=tolerance), name


def test_one_rank_learns(one_rank: dict[str, list[float]]) -> None:
    for name, losses in one_rank.items():
        assert losses[-1] < losses[0] - 0.5, name


def test_recomputed_dropout_draws_the_same_numbers(one_rank: dict[str, list[float]]) -> None:
    assert one_rank["dropout, recomputed"] == pytest.approx(one_rank["dropout"], abs=1e-6)
    assert one_rank["dropout"] != pytest.approx(one_rank["dense"], abs=1e-3)


def test_two_ranks_compute_what_one_does(engines: Ranks, one_rank: dict[str, list[float]]) -> None:
    check(engines, without(TWO_RANKS, "tp2 etp1", since="0.19.0"), 2, one_rank)


def test_four_ranks_compute_what_one_does(engines: Ranks, one_rank: dict[str, list[float]]) -> None:
    check(engines, FOUR_RANKS, 4, one_rank)

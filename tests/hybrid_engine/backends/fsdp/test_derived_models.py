"""Models by derived tables, switched from FSDP2 to vLLM and compared bitwise.

    torchrun ... -m tests.hybrid_engine.backends.fsdp.test_derived_models ...

is `verify` without written name tables, so that every table is derived.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hybrid_engine.models import TABLES
from hybrid_engine.planning.plan import ReshardPlan
from hybrid_engine.tools.verify import verify
from hybrid_engine.tools.verify.cases import Case
from hybrid_engine.tools.verify.comparison import Verdict
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.hybrid_engine.models.small_configs import SMALL, small_config
from tests.hybrid_engine.tools.programs import run_forked
from tests.zoo.families import write_config

if TYPE_CHECKING:
    from hybrid_engine.trainer.worker import ActorHybridWorker

TENSOR: Values = {"infer_tensor_parallel_size": 2}
EXPERT: Values = {**TENSOR, "infer_expert_parallel_size": 2}
FEW = {
    # All experts in one tensor, attention sinks, biases that only the loader can write.
    "GptOssForCausalLM": TENSOR,
    # One tensor per expert, a float32 router bias, dense first layers.
    "Glm4MoeForCausalLM": EXPERT,
    # Heads of different sizes, embeddings per layer, tied embeddings.
    "Gemma4ForCausalLM": TENSOR,
    # Mamba, where vLLM computes A from its logarithm.
    "NemotronHForCausalLM": TENSOR,
    # Fused projections; vLLM runs transformers' modules.
    "SmolLM3ForCausalLM": TENSOR,
    # Stages of vLLM, which then only loads on a CPU.
    "Glm4MoeLiteForCausalLM": {"infer_pipeline_parallel_size": 2},
}
# Models that are not run, with the reason.
EXCLUDED = {
    "Ernie4_5_MoeForCausalLM": "vLLM computes another router than transformers",
    "DeepseekV32ForCausalLM": "vLLM has no sparse attention on a CPU",
    "GlmMoeDsaForCausalLM": "vLLM has no sparse attention on a CPU",
    "MiniMaxM2ForCausalLM": "vLLM's router on a CPU takes softmax alone",
    "Qwen3NextForCausalLM": "vLLM's gated delta nets take bfloat16 alone on a CPU",
    "Qwen3_5ForCausalLM": "vLLM imports torchvision for it",
    "Qwen3_5MoeForCausalLM": "vLLM imports torchvision for it",
}


def cases_of(layouts: dict[str, Values], directory: Path) -> list[Case]:
    cases = []
    for architecture, infer in layouts.items():
        model = write_config(directory / architecture, small_config(architecture))
        cases.append(Case(architecture, str(model), {"fsdp": {}}, infer))
    return cases


def verdicts_of(cases: list[Case], directory: Path, engines: Ranks) -> list[Verdict]:
    verdicts = run_forked(engines, verify_derived, directory, cases, 2)
    assert [verdict.faults for verdict in verdicts] == [[]] * len(cases)
    return verdicts


def verify_derived(job: str, out: str) -> list[Verdict]:
    TABLES.clear()
    return verify.main(job, out, look=look)


def elements_of(plan: ReshardPlan) -> dict[str, int]:
    """Return the elements that a rank moves, by sender and receiver.

    Live parameters of FSDP2 are neighbours in memory, so their transfers are joined.
    """
    elements: Counter[str] = Counter()
    for transfer in plan.transfers():
        elements[f"{transfer.src_rank} to {transfer.dst_rank}"] += transfer.numel
    return dict(elements)


def look(worker: ActorHybridWorker) -> dict[str, int]:
    return elements_of(worker.sharding.plan)


def planned(cases: Sequence[Case], num_ranks: int) -> list[list[dict[str, int]]]:
    """Return the elements of each case's plan by rank, without the ranks."""
    from hybrid_engine.tools.plan.cluster_plan import plan_job

    jobs = [plan_job(case.config(num_ranks), num_ranks) for case in cases]
    return [[elements_of(job.plan_of(rank)) for rank in range(num_ranks)] for job in jobs]


@pytest.mark.engines
def test_models_without_a_table_switch_bitwise_as_planned(tmp_path: Path, engines: Ranks) -> None:
    cases = cases_of(FEW, tmp_path)
    (plans,) = engines.launch(planned, 1, cases, 2)
    for verdict, plan in zip(verdicts_of(cases, tmp_path, engines), plans, strict=True):
        assert verdict.seen == plan, verdict.name
        assert all(plan)


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.timeout(1200)
def test_all_models_without_a_table_switch_bitwise(tmp_path: Path, engines: Ranks) -> None:
    cases = cases_of(dict.fromkeys(SMALL.keys() - EXCLUDED.keys(), TENSOR), tmp_path)
    verdicts_of(cases, tmp_path, engines)


if __name__ == "__main__":
    verify_derived(*sys.argv[1:])

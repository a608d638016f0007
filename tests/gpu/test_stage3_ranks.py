"""Stage 3, two or more GPUs: layouts, experts, NCCL, the order of ranks, and reads from GPU to GPU.

Each layout is a case of `verify` on new ranks: every vLLM parameter equals bitwise that of vLLM's
loader, and both engines compute the same as transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pull_figures as pulls
from benchmarks.targets import target_named
from benchmarks.timings import Timing
from hybrid_engine.tools.verify.cases import Case, case_of
from hybrid_engine.tools.verify.verify import run_cases
from tests.gpu.conftest import Note
from tests.gpu.sizes import MEMORY_SHARE, sizes_of
from tests.gpu.test_stage1_memory import REPEAT, judge, pulled
from tests.harness.values import Values
from tests.zoo.families import write_config
from tests.zoo.published_configs import QWEN3_8B, QWEN3_30B_A3B

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

LAYERS = 2
SECONDS = 840.0
"""Maximum time of a layout, less than its check's timeout, so that ranks report their state."""


@dataclass(frozen=True)
class Layouts:
    """Keys of `actor_config` and `generate_config`, and the model to derive a small one from."""

    actor: Mapping[str, Any]
    generate: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=lambda: QWEN3_8B)
    num_ranks: int = 2

    def case(self, vllm: Mapping[str, Any], directory: Path) -> Case:
        model = write_config(directory / "model", self.model)
        memory = {
            "gpu_memory_utilization": MEMORY_SHARE,
            "kv_cache_mb": sizes_of("cuda").kv_cache_mb,
        }
        generate = {"enforce_eager": True, "vllm": dict(vllm), **memory, **self.generate}
        actor = {"params_dtype": sizes_of("cuda").params_dtype, **self.actor}
        return case_of("", model, directory / "small", self.num_ranks, actor, generate, LAYERS)


TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
INFER_TP2 = {"infer_tensor_parallel_size": 2}
GRAPHS = {"enforce_eager": False}
BY_READING = Layouts(TP2, {"transport": "shared_memory"})
LAYOUTS = {
    "TP 2 to 1, NCCL": Layouts(TP2, {"transport": "collective"}),
    "TP 2 to 1, communicators suspended": Layouts(TP2, {"suspend_communicators": True}),
    "PP 2 to TP 2, CUDA graphs": Layouts(PP2, {**INFER_TP2, **GRAPHS}),
    "experts, EP 2 to TP 2": Layouts(EP2, INFER_TP2, QWEN3_30B_A3B),
    "experts, EP 2 to EP 2": Layouts(
        EP2, {**INFER_TP2, "infer_expert_parallel_size": 2}, QWEN3_30B_A3B
    ),
    "ranks out of order, CUDA graphs": Layouts(
        {**TP2, **PP2}, {"infer_tensor_parallel_size": 4, **GRAPHS}, num_ranks=4
    ),
}


def verify(layouts: Layouts, vllm: Mapping[str, Any], directory: Path, note: Note) -> None:
    (verdict,) = run_cases([layouts.case(vllm, directory)], layouts.num_ranks, SECONDS)
    seconds = verdict.seconds
    note(f"{verdict.num_parameters} parameters bitwise in {seconds:.0f} s", seconds=seconds)
    assert not verdict.faults


@pytest.mark.gpu(2)
class TestReading:
    """Reads of another GPU's memory; skipped if impossible, as ranks then send messages."""

    @pytest.fixture(scope="class")
    def figures(self) -> dict[str, Timing]:
        sizes = sizes_of("cuda")
        return pulled(
            pulls.PullTask(
                ("cuda:0", "cuda:1"), sizes.layers_read, sizes.flat_bucket_nbytes, REPEAT
            )
        )

    @pytest.mark.parametrize("name", [pulls.COPIES, pulls.WITH_MAPPING])
    def test_rate(self, name: str, figures: dict[str, Timing], note: Note) -> None:
        with target_named("cuda:0") as target:
            judge(figures[name], target, note)

    def test_layout(
        self, figures: dict[str, Timing], vllm_arguments: Values, tmp_path: Path, note: Note
    ) -> None:
        verify(BY_READING, vllm_arguments, tmp_path, note)


class TestLayouts:
    @pytest.mark.parametrize(
        "layouts",
        [
            pytest.param(case, id=name, marks=pytest.mark.gpu(case.num_ranks))
            for name, case in LAYOUTS.items()
        ],
    )
    def test_layout(
        self, layouts: Layouts, vllm_arguments: Values, tmp_path: Path, note: Note
    ) -> None:
        verify(layouts, vllm_arguments, tmp_path, note)

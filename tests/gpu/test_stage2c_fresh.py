"""Stage 2: a vLLM of its own, which loads the checkpoint that both engines saved, says what they said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.assembly import inference_settings
from hybrid_engine.backends.vllm.fresh_engine import fresh_completions
from tests.gpu.small_job import GREEDY, SmallJob, differences

pytestmark = [pytest.mark.engines, pytest.mark.slow]


def compare(job: SmallJob) -> None:
    """The kernels are the same, so is every token."""
    if not job.answers.is_file():
        pytest.skip("both engines left no completions: see test_stage2b_together.py")
    found = fresh_completions(inference_settings(job.config(), 1), str(job.checkpoint), job.prompts(), GREEDY)
    assert not differences(json.loads(job.answers.read_text()), found)


class TestEager:
    def test_the_same_completions(self, device: str, shared: Path, vllm_arguments: dict[str, Any]) -> None:
        compare(SmallJob(shared, device, eager=True, vllm=vllm_arguments))


@pytest.mark.gpu
class TestGraphs:
    def test_the_same_completions(self, device: str, shared: Path, vllm_arguments: dict[str, Any]) -> None:
        compare(SmallJob(shared, device, eager=False, vllm=vllm_arguments))

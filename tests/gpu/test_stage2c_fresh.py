"""Stage 2: a vLLM of its own, which loads the checkpoint that both engines saved, says what they said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.assembly import inference_settings
from hybrid_engine.backends.vllm.arguments import llm_arguments
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings, Sampling
from hybrid_engine.backends.vllm.isolation import set_environment
from hybrid_engine.backends.vllm.requests import sampling_params
from hybrid_engine.backends.vllm.version import require_vllm
from tests.gpu.small_job import GREEDY, SmallJob, differences

pytestmark = [pytest.mark.engines, pytest.mark.slow]


_OURS = ("distributed_executor_backend", "worker_cls", "hf_overrides", "load_format", "enable_sleep_mode")


def fresh_completions(
    settings: InferenceSettings, checkpoint: str, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[list[int]]:
    """The first completion of each prompt, from a vLLM that is built here and loads `checkpoint` as it always does.

    Not beside another vLLM in this process. Of `settings` everything counts that a server of this model would be given
    too; one rank.
    """
    require_vllm(allow_version=settings.generate.allow_version)
    set_environment(settings, 0)
    from vllm import LLM
    from vllm.platforms import current_platform

    settings = replace(settings, model_dir=checkpoint)
    arguments: dict[str, Any] = llm_arguments(settings, current_platform.device_type)
    llm = LLM(**{name: value for name, value in arguments.items() if name not in _OURS})
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(requests, sampling_params(sampling), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def differences_of(job: SmallJob) -> str:
    """Where a fresh vLLM says something else than both engines did; the kernels are the same, so is every token."""
    expected = [answer.tokens for answer in job.read_answers()]
    found = fresh_completions(inference_settings(job.config(), 1), str(job.checkpoint), job.prompts(), GREEDY)
    return differences(found, expected)


class TestEager:
    def test_the_same_completions(self, device: str, shared: Path, vllm_arguments: dict[str, Any]) -> None:
        assert differences_of(SmallJob(shared, device, eager=True, vllm=vllm_arguments)) == ""


@pytest.mark.gpu
class TestGraphs:
    def test_the_same_completions(self, device: str, shared: Path, vllm_arguments: dict[str, Any]) -> None:
        assert differences_of(SmallJob(shared, device, eager=False, vllm=vllm_arguments)) == ""

"""Stage 2: a separate vLLM that loads the checkpoint of both engines has the same completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_engine.assembly import inference_settings
from hybrid_engine.backends.vllm.arguments import llm_arguments
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings, Sampling
from hybrid_engine.backends.vllm.isolation import set_environment
from hybrid_engine.backends.vllm.requests import sampling_params
from hybrid_engine.backends.vllm.version import require_vllm
from tests.gpu.small_job import GREEDY, SmallJob, differences
from tests.harness.values import Values

pytestmark = [pytest.mark.engines, pytest.mark.slow]


_OURS = (
    "distributed_executor_backend",
    "worker_cls",
    "hf_overrides",
    "load_format",
    "enable_sleep_mode",
)


def fresh_completions(
    settings: InferenceSettings,
    checkpoint: str,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
) -> list[list[int]]:
    """Build a vLLM that loads `checkpoint` by its own loader; return the first completion of each
    prompt.

    There must be no other vLLM in this process. Uses the `settings` that also a server of this
    model would get, and one rank.
    """
    require_vllm(allow_version=settings.generate.allow_version)
    set_environment(settings, 0)
    from vllm import LLM
    from vllm.platforms import current_platform

    settings = replace(settings, model_dir=checkpoint)
    arguments = llm_arguments(settings, current_platform.device_type)
    llm = LLM(**{name: value for name, value in arguments.items() if name not in _OURS})
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(requests, sampling_params(sampling), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def differences_of(job: SmallJob) -> str:
    """Return the first difference from both engines' completions; the kernels are the same."""
    expected = [answer.tokens for answer in job.read_answers()]
    completions = fresh_completions(
        inference_settings(job.config(), 1), str(job.checkpoint), job.prompts(), GREEDY
    )
    return differences(completions, expected)


class TestEager:
    def test_the_same_completions(self, device: str, shared: Path, vllm_arguments: Values) -> None:
        assert differences_of(SmallJob(shared, device, eager=True, vllm=vllm_arguments)) == ""


@pytest.mark.gpu
class TestGraphs:
    def test_the_same_completions(self, device: str, shared: Path, vllm_arguments: Values) -> None:
        assert differences_of(SmallJob(shared, device, eager=False, vllm=vllm_arguments)) == ""

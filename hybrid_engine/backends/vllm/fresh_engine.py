"""A vLLM of its own that loads a checkpoint by itself: what a colocated engine's completions are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybrid_engine.backends.vllm.acceptance import require_vllm
from hybrid_engine.backends.vllm.arguments import llm_arguments
from hybrid_engine.backends.vllm.engine_settings import InferenceSettings, Sampling
from hybrid_engine.backends.vllm.generation.sampling_params import sampling_params
from hybrid_engine.backends.vllm.process.isolation import set_environment

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

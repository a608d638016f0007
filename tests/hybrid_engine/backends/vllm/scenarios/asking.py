"""An engine of a small model, and what it is asked in every scenario."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings, Sampling
from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.ranks.job import Job
from tests.zoo.checkpoint_shapes import checkpoint_dtypes, checkpoint_shapes

Drawn = list[list[tuple[int, ...]]]
"""Token ids by prompt and completion."""

SMALL_BLOCKS: dict[str, Any] = {"vllm": {"block_size": 32}}
"""Of the KV cache, so that each of LONG fills one and the prefix cache has something to keep."""

PROMPTS = [[2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12]]
LONG = [list(range(index, index + 40)) for index in range(3)]

SAMPLING = Sampling(n=2, max_tokens=8, ignore_eos=True)
GREEDY = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)


@dataclass(frozen=True)
class Scored:
    """A greedy completion with the log-probability of each token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Answers:
    """Of PROMPTS: greedy completions, and log-probabilities of the prompts themselves."""

    completions: list[Scored]
    prompts: list[list[float]]


@dataclass(frozen=True)
class Refusal:
    """The error of a call."""

    kind: str
    message: str


@functools.cache
def job() -> Job:
    """Of this process, for everything that runs in it. Collective at the first call."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Job.join(600)


def build(directory: str, config: Mapping[str, Any], **settings: Any) -> InferenceEngine:
    """An engine for the model in `directory`, with keys of `generate_config` or other settings. Collective."""
    keys = {name: settings.pop(name) for name in GenerateConfig.model_fields.keys() & settings.keys() - {"dtype"}}
    generate = GenerateConfig(max_model_len=64, max_num_seqs=8, kv_cache_mb=16, **keys)
    chosen = InferenceSettings(directory, generate=generate, **settings)
    return InferenceEngine(chosen, checkpoint_shapes(config), job(), dtypes=checkpoint_dtypes(config))


def sizes(**chosen: Any) -> InferenceParallelism:
    """Parallel sizes over all ranks."""
    return InferenceParallelism(job().world_size, **chosen)


def answers_of(engine: InferenceEngine) -> Answers:
    return Answers(greedy(engine, PROMPTS), [row.tolist() for row in engine.prompt_logprobs(PROMPTS)])


def greedy(engine: InferenceEngine, prompts: list[list[int]]) -> list[Scored]:
    return [Scored(row[0].token_ids, row[0].logprobs) for row in engine.generate(prompts, GREEDY)]


def drawn(engine: InferenceEngine, seed: int | None = None) -> Drawn:
    """Samples of PROMPTS; from the start of the generator with a seed."""
    if seed is not None:
        engine.manual_seed(seed)
    return [[completion.token_ids for completion in row] for row in engine.generate(PROMPTS, SAMPLING)]


def refusal_of(call: Callable[[], Any]) -> Refusal:
    """How a call is refused; "no error" where it is not."""
    try:
        call()
    except HybridEngineError as error:
        return Refusal(type(error).__name__, str(error))
    return Refusal("no error", "")


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The greatest difference of two tensors' elements."""
    return (one - other).abs().max().item()

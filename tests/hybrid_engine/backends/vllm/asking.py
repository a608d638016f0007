"""Engines of small models, standard prompts, and injected failures."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings, Sampling
from hybrid_engine.backends.vllm.process_state import random_state_kept, seeded_state
from hybrid_engine.config import GenerateConfig
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.ranks.job import Job
from tests.zoo.checkpoint_shapes import checkpoint_dtypes, checkpoint_shapes

# Token ids by prompt and completion.
Drawn = list[list[tuple[int, ...]]]

# KV cache blocks so small that each of LONG fills one, which the prefix cache then keeps.
SMALL_BLOCKS: dict[str, Any] = {"vllm": {"block_size": 32}}

PROMPTS = [[2, 3, 4, 5], [6, 7], [8, 9, 10, 11, 12]]
LONG = [list(range(index, index + 40)) for index in range(3)]

SAMPLING = Sampling(n=2, max_tokens=8, ignore_eos=True)
GREEDY = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)


@dataclass(frozen=True)
class Scored:
    """A greedy completion with its log-probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Answers:
    """Greedy completions of PROMPTS, and log-probabilities of the prompts."""

    completions: list[Scored]
    prompts: list[list[float]]


@functools.cache
def job() -> Job:
    """Return the job of this process. Collective at the first call."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Job.join(600)


def build(directory: str, config: Mapping[str, Any], **settings: Any) -> InferenceEngine:
    """Build an engine for the model in `directory`. Collective.

    Args:
        settings: keys of `generate_config` and fields of `InferenceSettings`.
    """
    keys = {
        name: settings.pop(name)
        for name in GenerateConfig.model_fields.keys() & settings.keys() - {"dtype"}
    }
    generate = GenerateConfig(max_model_len=64, max_num_seqs=8, kv_cache_mb=16, **keys)
    engine_settings = InferenceSettings(directory, generate=generate, **settings)
    return InferenceEngine(
        engine_settings, checkpoint_shapes(config), job(), dtypes=checkpoint_dtypes(config)
    )


def sizes(**chosen: Any) -> InferenceParallelism:
    """Return parallel sizes over all ranks."""
    return InferenceParallelism(job().world_size, **chosen)


def answers_of(engine: InferenceEngine) -> Answers:
    return Answers(
        greedy(engine, PROMPTS), [row.tolist() for row in engine.prompt_logprobs(PROMPTS)]
    )


def greedy(engine: InferenceEngine, prompts: list[list[int]]) -> list[Scored]:
    return [Scored(row[0].token_ids, row[0].logprobs) for row in engine.generate(prompts, GREEDY)]


def drawn(engine: InferenceEngine, seed: int | None = None) -> Drawn:
    """Sample completions of PROMPTS; a seed restarts the generator first."""
    if seed is not None:
        restart(engine, seed)
    return [
        [completion.token_ids for completion in row] for row in engine.generate(PROMPTS, SAMPLING)
    ]


def restart(engine: InferenceEngine, seed: int) -> None:
    """Restart the generator of requests without a seed."""
    with random_state_kept():
        engine._generator_state = seeded_state(seed)


def gap(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest absolute difference of two tensors."""
    return (left - right).abs().max().item()


@contextlib.contextmanager
def failing(owner: Any, method: str, error: type[BaseException], after: int) -> Iterator[None]:
    """Make `method` raise `error` after `after` calls; KeyboardInterrupt comes as SIGINT."""
    original = getattr(owner, method)
    calls = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= after:
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise error("no memory")
        return original(*args, **kwargs)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    was_set = method in vars(owner)
    setattr(owner, method, call)
    try:
        yield
    finally:
        setattr(owner, method, original) if was_set else delattr(owner, method)
        signal.signal(signal.SIGINT, handler)


def error_of(call: Callable[[], Any]) -> str | None:
    """Return the class name of any exception that a call raises, or None."""
    try:
        call()
    except BaseException as error:
        return type(error).__name__
    return None

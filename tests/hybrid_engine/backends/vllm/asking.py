"""An engine of a small model, and what it is asked in every scenario."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import InferenceEngine, InferenceSettings, Sampling
from hybrid_engine.backends.vllm.arguments import CPU_WORKER
from hybrid_engine.backends.vllm.cpu.shm_cleanup import ENGINE_TOKEN
from hybrid_engine.backends.vllm.isolation import destroy_groups
from hybrid_engine.backends.vllm.process_state import random_state_kept, seeded_state
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
    code: str


@functools.cache
def job() -> Job:
    """Of this process, for everything that runs in it. Collective at the first call."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return Job.join(600)


def build(
    directory: str, config: Mapping[str, Any], more: Mapping[str, tuple[int, ...]] | None = None, **settings: Any
) -> InferenceEngine:
    """An engine for the model in `directory`, with keys of `generate_config` or other settings. Collective.

    `more`: shapes of tensors that models with this config do not have.
    """
    keys = {name: settings.pop(name) for name in GenerateConfig.model_fields.keys() & settings.keys() - {"dtype"}}
    generate = GenerateConfig(max_model_len=64, max_num_seqs=8, kv_cache_mb=16, **keys)
    chosen = InferenceSettings(directory, generate=generate, **settings)
    shapes = checkpoint_shapes(config) | dict(more or {})
    return InferenceEngine(chosen, shapes, job(), dtypes=checkpoint_dtypes(config))


@contextlib.contextmanager
def plain_llm(checkpoint: str, **arguments: Any) -> Iterator[Any]:
    """A vLLM over all ranks in which nothing is ours but names of shared memory, and that loads by itself."""
    from vllm import LLM

    os.environ[ENGINE_TOKEN] = job().agreement.gather(secrets.token_hex(8), str, "naming shared memory")[0]
    llm = LLM(
        checkpoint,
        skip_tokenizer_init=True,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=job().world_size,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=8,
        max_logprobs=-1,
        kv_cache_memory_bytes=16 << 20,
        worker_cls=CPU_WORKER,
        **arguments,
    )
    del os.environ[ENGINE_TOKEN]
    llm.llm_engine.engine_core._finalizer.detach()  # at collection it would end the default process group
    yield llm
    destroy_groups()


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
        restart(engine, seed)
    return [[completion.token_ids for completion in row] for row in engine.generate(PROMPTS, SAMPLING)]


def restart(engine: InferenceEngine, seed: int) -> None:
    """Start the generator of requests without a seed anew."""
    with random_state_kept():
        engine._generator_state = seeded_state(seed)


def refusal_of(call: Callable[[], Any]) -> Refusal:
    """How a call is refused; "no error" where it is not."""
    try:
        call()
    except HybridEngineError as error:
        return Refusal(type(error).__name__, str(error), error.code)
    return Refusal("no error", "", "")


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """The greatest difference of two tensors' elements."""
    return (one - other).abs().max().item()


@contextlib.contextmanager
def failing(owner: Any, method: str, error: type[BaseException], after: int) -> Iterator[None]:
    """Inside, `method` does its work so many times; then it raises, or this process gets the signal of Ctrl-C."""
    original, counted = getattr(owner, method), itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(counted) >= after:
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise error("no memory")
        return original(*args, **kwargs)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    had_own = method in vars(owner)
    setattr(owner, method, call)
    try:
        yield
    finally:
        setattr(owner, method, original) if had_own else delattr(owner, method)
        signal.signal(signal.SIGINT, handler)


def error_of(call: Callable[[], Any]) -> str | None:
    """The class of the error that a call raises, of any kind."""
    try:
        call()
    except BaseException as error:
        return type(error).__name__
    return None

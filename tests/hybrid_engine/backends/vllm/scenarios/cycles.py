"""Three switches with changing weights on one engine, after a native engine lived in the same process."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import InferenceEngine, internals
from hybrid_engine.backends.vllm.cpu.shm_cleanup import nbytes_needed
from hybrid_engine.backends.vllm.requests import require_answers
from hybrid_engine.backends.vllm.weights import loader
from hybrid_engine.ports import NearEnd
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.scenarios.asking import (
    LONG,
    PROMPTS,
    SAMPLING,
    SMALL_BLOCKS,
    Answers,
    Drawn,
    Refusal,
    Scored,
    answers_of,
    build,
    drawn,
    greedy,
    job,
    refusal_of,
    sizes,
)

SEED = 5


@dataclass(frozen=True)
class Failed:
    """A call that ended half-way, and what new calls answered then."""

    raised: str | None
    drawn: Drawn
    long: list[Scored]
    answers: Answers


@dataclass(frozen=True)
class LeftOver:
    """What the engine said to a request that somebody added to vLLM past it, to blocks taken, to missing results."""

    generate: Refusal
    reset_caches: Refusal
    release: Refusal
    blocks: Refusal
    no_results: Refusal


@dataclass(frozen=True)
class Refused:
    """Calls at the wrong time, or with what cannot be."""

    never_filled: Refusal
    prompts: Refusal
    released: Refusal
    not_allocated: Refusal
    partly_filled: Refusal
    shut_down: Refusal
    other_thread: Refusal


@dataclass(frozen=True)
class Memory:
    """Bytes of weights: of all of them, after a switch, and after a release."""

    total: int
    resident: int
    released: int


@dataclass(frozen=True)
class Shared:
    """What the engine had mapped from /dev/shm: what still had a name, sizes, and the sizes that were computed."""

    named: list[str]
    nbytes: list[int]
    computed: list[int]


@dataclass(frozen=True)
class Cycles:
    """What one rank brought back.

    Attributes:
        tp_rank: which shard it took.
        differences: parameters with other bits than vLLM loads itself, over three switches.
        native, answers, answers_again: of a natively loaded vLLM, after the switches, and after a release and another.
        drawn, drawn_again: samples from one seed.
        long: greedy completions that fill blocks of the KV cache.
        empty: completions of no prompts.
        failed: by place.
        random_state_kept, process_as_before: whether training would notice.
        is_collective: whether ranks wait for each other in commits.
    """

    tp_rank: int
    differences: list[str]
    native: Answers
    answers: Answers
    answers_again: Answers
    drawn: Drawn
    drawn_again: Drawn
    long: list[Scored]
    empty: list[Any]
    failed: dict[str, Failed]
    left_over: LeftOver
    refused: Refused
    memory: Memory
    shared: Shared
    random_state_kept: bool
    process_as_before: bool
    is_collective: bool


def run(directory: str, num_tp: int) -> Cycles:
    """All of it."""
    job()
    world, set_num_threads = dist.group.WORLD, torch.set_num_threads
    base, config = Path(directory), support.QWEN3
    weights = [support.random_weights(config, seed) for seed in range(3)]
    checkpoints = [support.write_checkpoint(base / f"weights{i}", config, each) for i, each in enumerate(weights)]
    native = _native_answers(checkpoints[2], num_tp)
    torch.manual_seed(7)
    random_state = torch.get_rng_state()
    before = shared_mappings()  # of the native engine: vLLM keeps them as long as the process lives
    # Against the order of the native engine: where gathers must follow the positions, not the ranks.
    order = tuple(reversed(range(num_tp)))
    engine = build(checkpoints[0], config, sizes=sizes(tensor=num_tp, rank_order=order), **SMALL_BLOCKS)
    shared = {name: nbytes for name, nbytes in shared_mappings().items() if name not in before}
    never_filled = refusal_of(lambda: drawn(engine))

    differences = []
    for values, checkpoint in zip(weights, checkpoints, strict=True):
        filled = support.fill_by_records(engine.adaptor, values)
        engine.reset_caches()
        differences += support.differences(filled, support.native_parameters(engine, checkpoint))
    answers, first, long = answers_of(engine), drawn(engine, SEED), greedy(engine, LONG)
    again, other_thread = _draw_in_two_threads(engine)
    failed, left_over = _fail_everywhere(engine), _leave_something(engine)
    empty = engine.generate([], SAMPLING)
    prompts = refusal_of(lambda: engine.generate([[], [1] * 60, [500]], SAMPLING))

    resident, tp_rank = engine.adaptor.resident_nbytes(), engine.tp_rank
    is_collective = engine.adaptor._processed.gate.is_collective
    engine.release()
    memory = Memory(engine.adaptor.nbytes, resident, engine.adaptor.resident_nbytes())
    released = refusal_of(lambda: drawn(engine))
    groups = sorted({buffer.group for buffer in engine.adaptor.layout().buffers.values()})
    not_allocated = refusal_of(lambda: engine.adaptor.commit(groups[:1]))
    engine.adaptor.allocate(groups)
    engine.adaptor.commit(groups[:-1])
    partly_filled = refusal_of(lambda: drawn(engine))
    support.fill_by_records(engine.adaptor, weights[2])
    engine.reset_caches()
    answers_again = answers_of(engine)
    random_state_kept = torch.equal(random_state, torch.get_rng_state())

    engine.shutdown()
    engine.shutdown()
    shut_down = refusal_of(lambda: drawn(engine))
    dist.barrier()
    result = Cycles(
        tp_rank=tp_rank,
        differences=differences,
        native=native,
        answers=answers,
        answers_again=answers_again,
        drawn=first,
        drawn_again=again,
        long=long,
        empty=empty,
        failed=failed,
        left_over=left_over,
        refused=Refused(*(never_filled, prompts, released, not_allocated, partly_filled, shut_down, other_thread)),
        memory=memory,
        shared=Shared(
            [name for name in shared if not name.endswith("(deleted)")],
            sorted(nbytes for name, nbytes in shared.items() if "cpushm" in name),
            [nbytes_needed(engine.settings)] * num_tp if num_tp > 1 else [],
        ),
        random_state_kept=random_state_kept,
        process_as_before=dist.group.WORLD is world and torch.set_num_threads is set_num_threads,
        is_collective=is_collective,
    )
    dist.barrier()  # before the next function makes an engine
    return result


def _draw_in_two_threads(engine: InferenceEngine) -> tuple[Drawn, Refusal]:
    """What a call draws, and how another thread's is refused that comes when it has begun."""
    refusals: list[Refusal] = []

    def call_in_thread() -> None:
        thread = threading.Thread(target=lambda: refusals.append(refusal_of(lambda: drawn(engine))))
        thread.start()
        thread.join()

    engine.near_end = NearEnd(1.0, call_in_thread)
    try:
        found = drawn(engine, SEED)
    finally:
        engine.near_end = None
    return found, refusals[0]


def _native_answers(checkpoint: str, num_tp: int) -> Answers:
    """Of a vLLM in this process that loads the checkpoint itself, and then ends."""
    engine = _native_engine(checkpoint, num_tp)
    engine.adaptor.require_ready = lambda: None  # type: ignore[method-assign]
    answers = answers_of(engine)
    engine.shutdown()
    return answers


def _native_engine(checkpoint: str, num_tp: int) -> InferenceEngine:
    """An InferenceEngine around vLLM's own loader: its weights come from the checkpoint."""
    from vllm.model_executor.model_loader import DefaultModelLoader

    capturing_loader = loader._loader_class()

    class NativeLoader(capturing_loader):
        """Captures, then loads the checkpoint as vLLM does."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            self.load_config.load_format = "safetensors"
            DefaultModelLoader(self.load_config).load_weights(model, model_config)

    original, loader._loader_class = loader._loader_class, lambda: NativeLoader
    formats = internals.LOADERS.load()
    formats.pop(loader.LOAD_FORMAT, None)
    try:
        return build(checkpoint, support.QWEN3, sizes=sizes(tensor=num_tp), **SMALL_BLOCKS)
    finally:
        loader._loader_class = original
        formats.pop(loader.LOAD_FORMAT, None)


def _fail_everywhere(engine: InferenceEngine) -> dict[str, Failed]:
    """Calls that end half-way, at several depths of vLLM and by Ctrl-C; after each, what new calls answer.

    Every rank fails at the same place; alone it would leave the others of its replica waiting.
    """
    core, runner = internals.core_of(engine.llm), internals.model_runner_of(engine.llm)
    places: dict[str, tuple[Any, str, type[BaseException]]] = {
        "adding": (core, "add_request", MemoryError),
        "step": (engine.llm.llm_engine, "step", MemoryError),
        "forward": (runner.model, "forward", MemoryError),
        "sampling": (runner, "sample_tokens", MemoryError),
        "bookkeeping": (core.scheduler, "update_from_output", MemoryError),
        "Ctrl-C": (core.scheduler, "schedule", KeyboardInterrupt),
    }
    result = {}
    for name, (owner, method, error) in places.items():
        engine.manual_seed(SEED)
        with failing(owner, method, error, after=2 if name != "forward" else 0):
            raised = error_of(lambda: engine.generate(LONG, SAMPLING))
        fresh = drawn(engine)
        long = greedy(engine, LONG)  # not from blocks that the failed call was to compute
        engine.reset_caches()
        result[name] = Failed(raised, fresh, long, answers_of(engine))
    return result


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


def _leave_something(engine: InferenceEngine) -> LeftOver:
    """Leave a foreign request, then blocks of the KV cache; in the end nothing."""
    from vllm import SamplingParams

    engine.llm.llm_engine.add_request("foreign", {"prompt_token_ids": [1, 2]}, SamplingParams(detokenize=False))
    generate = refusal_of(lambda: engine.generate(PROMPTS, SAMPLING))
    reset_caches, release = refusal_of(engine.reset_caches), refusal_of(engine.release)
    engine.abandon_requests()
    engine.reset_caches()
    pool = internals.core_of(engine.llm).scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(2)
    blocks = refusal_of(engine.reset_caches)
    pool.free_blocks(taken)
    return LeftOver(generate, reset_caches, release, blocks, refusal_of(lambda: require_answers([], PROMPTS, 1)))


def shared_mappings() -> dict[str, int]:
    """What this process has mapped from /dev/shm: name -> bytes. The kernel adds "(deleted)" to a name taken away."""
    mapped: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        if name.startswith("/dev/shm/"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            mapped[name] = mapped.get(name, 0) + end - start
    return mapped

"""Switches of a real vLLM, alone and over two ranks, compared bitwise with vLLM's own load.

Three switches with changing weights on one engine. The matrix (tools/verify) compares answers with
transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.backends.vllm import InferenceEngine, internals
from hybrid_engine.backends.vllm.cpu.shm_cleanup import nbytes_needed
from hybrid_engine.backends.vllm.requests import require_answers
from hybrid_engine.errors import ArgumentError, StateError
from tests.harness.errors import refused, violations_of
from tests.harness.launch import of_all_ranks, on_engines
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import (
    LONG,
    PROMPTS,
    SAMPLING,
    SMALL_BLOCKS,
    Answers,
    Drawn,
    answers_of,
    build,
    drawn,
    error_of,
    failing,
    greedy,
    job,
    restart,
    sizes,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = 5


@on_engines({1: ["alone"], 2: ["tp2"]}, timeout=600)
def test_switches_equal_native_loads_and_keep_process_state(tmp_path: Path, case: str) -> None:
    job()
    check_switches(tmp_path, dist.get_world_size())


def check_switches(base: Path, num_tp: int) -> None:
    job()
    world = dist.group.WORLD
    set_num_threads = torch.set_num_threads
    config = support.QWEN3
    weights = [support.random_weights(config, seed) for seed in range(3)]
    checkpoints = [
        support.write_checkpoint(base / f"weights{i}", config, values)
        for i, values in enumerate(weights)
    ]
    torch.manual_seed(7)
    random_state = torch.get_rng_state()
    before = shared_mappings()  # those of an earlier engine stay until the process ends
    # In the reverse order gathers must follow positions instead of ranks.
    order = tuple(reversed(range(num_tp)))
    engine = build(
        checkpoints[0], config, sizes=sizes(tensor=num_tp, rank_order=order), **SMALL_BLOCKS
    )
    _check_shared_memory(engine, before, num_tp)
    with refused(StateError, "weights-uncommitted"):
        drawn(engine)

    for values, checkpoint in zip(weights, checkpoints, strict=True):
        filled = support.fill_by_records(engine.adaptor, values)
        engine.reset_caches()
        assert support.differences(filled, support.native_parameters(engine, checkpoint)) == []
    answers = answers_of(engine)
    first = drawn(engine, SEED)
    assert all(other == first for other in of_all_ranks(first))
    assert len(set(first[0])) == 2, "completions of one prompt are equal"
    long = greedy(engine, LONG)
    assert _draw_in_two_threads(engine) == first
    for name in PLACES:
        _fail_at(engine, name, first, long, answers)
    _leave_unfinished_state(engine)
    assert engine.generate([], SAMPLING) == []
    with pytest.raises(ArgumentError) as caught:
        engine.generate([[], [1] * 60, [500]], SAMPLING)
    assert [key for key, _ in violations_of(caught.value)] == [
        "prompts[0]",
        "prompts[1]",
        "prompts[2]",
    ]

    adaptor = engine.adaptor
    assert engine.place.tp_rank == num_tp - 1 - job().rank
    assert adaptor.resident_nbytes() == adaptor.nbytes > 0
    assert not adaptor._processed.barrier.is_collective, (
        "vLLM's processing on CPU must not communicate"
    )
    engine.release()
    assert adaptor.resident_nbytes() == 0
    with refused(StateError, "weights-released"):
        drawn(engine)
    support.fill_by_records(adaptor, weights[0])
    engine.reset_caches()
    assert answers_of(engine) != answers
    support.fill_by_records(adaptor, weights[2])
    engine.reset_caches()
    assert answers_of(engine) == answers
    assert torch.equal(random_state, torch.get_rng_state()), (
        "vLLM changed the random state of training"
    )

    engine.shutdown()
    engine.shutdown()
    with refused(StateError, "engine-is-closed"):
        drawn(engine)
    assert dist.group.WORLD is world
    assert torch.set_num_threads is set_num_threads
    dist.barrier()  # ranks leave together, before another engine is built


def _check_shared_memory(engine: InferenceEngine, before: dict[str, int], num_tp: int) -> None:
    """Check that shared memory is unnamed and has the computed size."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.distributed.parallel_state import get_tp_group

    # Named memory would stay in /dev/shm if all ranks were killed.
    shared = {name: nbytes for name, nbytes in shared_mappings().items() if name not in before}
    assert [name for name in shared if not name.endswith("(deleted)")] == []
    nbytes = sorted(nbytes for name, nbytes in shared.items() if "cpushm" in name)
    communicator = get_tp_group().device_communicator
    assert (communicator is None) == (num_tp == 1)
    is_used = isinstance(getattr(communicator, "dist_module", None), _CPUSHMDistributed)
    needed = nbytes_needed(engine.settings)  # 0 without a kernel for this CPU
    assert (needed > 0) == is_used
    assert nbytes == ([needed] * num_tp if is_used else [])


def _draw_in_two_threads(engine: InferenceEngine) -> Drawn:
    """Draw, and check that a call of another thread is refused meanwhile."""

    step = engine.llm.llm_engine.step

    def step_and_call_in_thread() -> Any:
        with ThreadPoolExecutor(1) as threads, refused(StateError, "another-thread-generates"):
            threads.submit(drawn, engine).result()
        return step()

    with mock.patch.object(engine.llm.llm_engine, "step", step_and_call_in_thread):
        return drawn(engine, SEED)


# name -> (owner of the failing method, method, error)
PLACES: dict[str, tuple[Callable[[InferenceEngine], Any], str, type[BaseException]]] = {
    "adding": (lambda engine: internals.core_of(engine.llm), "add_request", MemoryError),
    "step": (lambda engine: engine.llm.llm_engine, "step", MemoryError),
    "forward": (lambda engine: internals.model_runner_of(engine.llm).model, "forward", MemoryError),
    "sampling": (
        lambda engine: internals.model_runner_of(engine.llm),
        "sample_tokens",
        MemoryError,
    ),
    "bookkeeping": (
        lambda engine: internals.core_of(engine.llm).scheduler,
        "update_from_output",
        MemoryError,
    ),
    "Ctrl-C": (
        lambda engine: internals.core_of(engine.llm).scheduler,
        "schedule",
        KeyboardInterrupt,
    ),
}


def _fail_at(
    engine: InferenceEngine, place: str, first: Drawn, long: Any, answers: Answers
) -> None:
    """End a call half-way, inside vLLM or by Ctrl-C; later calls must be unaffected."""
    owner, method, error = PLACES[place]
    restart(engine, SEED)
    # All ranks fail here: ranks of a replica would wait for each other.
    with failing(owner(engine), method, error, after=2 if place != "forward" else 0):
        assert error_of(lambda: engine.generate(LONG, SAMPLING)) == error.__name__, place
    assert drawn(engine) == first, place
    assert greedy(engine, LONG) == long, f"{place}: blocks of the failed call were reused"
    engine.reset_caches()
    assert answers_of(engine) == answers, place


def _leave_unfinished_state(engine: InferenceEngine) -> None:
    """Leave a foreign request, then blocks of the KV cache; clean up at the end."""
    from vllm import SamplingParams

    engine.llm.llm_engine.add_request(
        "foreign", {"prompt_token_ids": [1, 2]}, SamplingParams(detokenize=False)
    )
    for call in (lambda: engine.generate(PROMPTS, SAMPLING), engine.reset_caches, engine.release):
        with refused(StateError, "unfinished-requests", "1 ", "abandon_requests()"):
            call()
    engine.abandon_requests()
    engine.reset_caches()
    pool = internals.core_of(engine.llm).scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(2)
    with refused(StateError, "prefix-cache-in-use", "2 blocks"):
        engine.reset_caches()
    pool.free_blocks(taken)
    with refused(StateError, "mixed-up-requests", "0 results for 3 prompts"):
        require_answers([], PROMPTS, [1, 1, 1])


def shared_mappings() -> dict[str, int]:
    """Return name -> bytes of mappings of /dev/shm; the kernel marks unlinked names "(deleted)"."""
    mapped: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        if name.startswith("/dev/shm/"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            mapped[name] = mapped.get(name, 0) + end - start
    return mapped

"""Tensors that live as long as the process are in torch's ordinary memory, not in the pool in use
at their creation.

vLLM loads weights in a pool whose memory is released when it sleeps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.weights.weight_memory import prepare_allocator, without_what_stays
from hybrid_engine.ranks import digests

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def in_new_thread() -> Iterator[Callable[[Callable[[], int]], int]]:
    """Return a function that runs in a new thread: torch has workspaces per thread."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda action: thread.submit(action).result()


def digest_in_a_pool() -> int:
    """Return the bytes still allocated in a pool after all tensors created in it are gone."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        digests.box_digest(torch.ones(2**20, dtype=torch.uint8, device=DEVICE))
    return sum(segment["allocated_size"] for segment in pool.snapshot())


@pytest.mark.parametrize("has_own_stream", [False, True])
def test_a_first_digest_leaves_nothing_in_the_pool(
    in_new_thread: Callable[[Callable[[], int]], int], has_own_stream: bool
) -> None:
    """vLLM loads on its current stream, which is a separate one with tensor parallelism."""
    digests._factors_by_device.clear()

    def load() -> int:
        with torch.cuda.stream(torch.cuda.Stream(DEVICE) if has_own_stream else None):
            return without_what_stays(lambda worker: digest_in_a_pool())(
                SimpleNamespace(device=DEVICE)
            )

    assert in_new_thread(load) == 0


def test_without_the_function_a_digest_leaves_memory_in_the_pool(
    in_new_thread: Callable[[Callable[[], int]], int],
) -> None:
    """This shows that the software GPU has the behaviour that the test above depends on."""
    assert in_new_thread(digest_in_a_pool) > 0


@pytest.mark.slow  # Imports vLLM.
def test_an_engine_that_never_sleeps_leaves_no_tensor_of_a_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise memory of a module that vLLM has imported would prevent the next engine."""
    module = ModuleType("imported_while_weights_are_loaded")
    allocator = internals.CUMEM_ALLOCATOR.get_instance()

    def load(_worker: object) -> None:
        with allocator.use_memory_pool(tag="weights"):
            monkeypatch.setitem(sys.modules, module.__name__, module)
            module.table = torch.arange(8, device=DEVICE)  # type: ignore[attr-defined]

    without_what_stays(load)(SimpleNamespace(device=DEVICE))
    allocator.release_pools()  # As at the end of vLLM's worker.
    prepare_allocator()
    assert module.table.tolist() == [*range(8)]

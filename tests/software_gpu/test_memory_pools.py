"""What stays for as long as the process lies in torch's ordinary memory, whichever pool is in use when it is made.

vLLM loads weights within a pool whose memory goes in its sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from hybrid_engine.backends.vllm.weights.weight_memory import after_workspaces
from hybrid_engine.ranks import digests

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def in_new_thread() -> Iterator[Callable[[Callable[[], int]], int]]:
    """A thread in which there was no matrix product, as torch counts workspaces by threads."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda action: thread.submit(action).result()


def digest_in_a_pool() -> int:
    """Bytes that the pool has to give after all tensors made within it are gone."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        digests.box_digest(torch.ones(2**20, dtype=torch.uint8, device=DEVICE))
    return sum(segment["allocated_size"] for segment in pool.snapshot())


@pytest.mark.parametrize("has_own_stream", [False, True])
def test_a_first_digest_leaves_nothing_in_the_pool(
    in_new_thread: Callable[[Callable[[], int]], int], has_own_stream: bool
) -> None:
    """On the stream that is current when vLLM loads: with tensor parallelism one of its own."""
    digests._made_factors.clear()

    def load() -> int:
        with torch.cuda.stream(torch.cuda.Stream(DEVICE) if has_own_stream else None):
            return after_workspaces(lambda worker: digest_in_a_pool())(SimpleNamespace(device=DEVICE))

    assert in_new_thread(load) == 0


def test_without_a_workspace_it_would(in_new_thread: Callable[[Callable[[], int]], int]) -> None:
    """So the software GPU has what the test above is about."""
    assert in_new_thread(digest_in_a_pool) > 0

"""A kernel is pending until it has been computed, for all threads but its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from software_gpu_operators import register_kernels  # type: ignore[import-not-found]

SECONDS = 0.5
WAITS: dict[str, Callable[[], None]] = {
    "stream": lambda: torch.cuda.current_stream().synchronize(),
    "event": lambda: torch.cuda.current_stream().record_event().synchronize(),
    "device": torch.cuda.synchronize,
}


@pytest.fixture(scope="module")
def slow_fill() -> Iterator[Callable[[torch.Tensor, Callable[[], None]], None]]:
    """Return a kernel that calls its second argument at its start, and then slowly writes ones."""
    within = mock.Mock()

    def compute(values: torch.Tensor) -> None:
        within()
        time.sleep(SECONDS)
        values.fill_(1)

    library = torch.library.Library("software_gpu_tests", "DEF")
    library.define("slow_fill(Tensor(a!) values) -> ()")
    library.impl("slow_fill", lambda values: None, "CUDA")  # A kernel for CUDA, which is replaced.
    register_kernels("software_gpu_tests", {"slow_fill": compute})

    def fill(values: torch.Tensor, call: Callable[[], None]) -> None:
        within.side_effect = call
        torch.ops.software_gpu_tests.slow_fill(values)

    yield fill
    library._destroy()


@pytest.mark.parametrize("how", [*WAITS])
def test_another_thread_waits_for_the_end(how: str, slow_fill: Callable[..., None]) -> None:
    values = torch.zeros(8, device="cuda")
    has_begun = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        launch = thread.submit(slow_fill, values, has_begun.set)
        assert has_begun.wait(60)
        assert not torch.cuda.current_stream().query()
        WAITS[how]()
        assert torch.cuda.current_stream().query()
        launch.result()
    assert values.tolist() == [1] * 8


@pytest.mark.parametrize("how", [*WAITS])
def test_a_kernel_does_not_wait_for_itself(how: str, slow_fill: Callable[..., None]) -> None:
    values = torch.zeros(8, device="cuda")
    slow_fill(values, WAITS[how])
    assert values.tolist() == [1] * 8


def test_a_kernel_of_another_thread_runs_after_it(slow_fill: Callable[..., None]) -> None:
    values = torch.zeros(8, device="cuda")
    has_begun = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        launch = thread.submit(slow_fill, values, has_begun.set)
        assert has_begun.wait(60)
        values.add_(1)
        launch.result()
    assert values.tolist() == [2] * 8


def test_a_graph_is_pending_until_its_kernels_are_computed(slow_fill: Callable[..., None]) -> None:
    values = torch.zeros(8, device="cuda")
    has_begun = threading.Event()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slow_fill(values, has_begun.set)
    has_begun.clear()
    with ThreadPoolExecutor(1) as thread:
        launch = thread.submit(graph.replay)
        assert has_begun.wait(60)
        torch.cuda.synchronize()
        assert values.cpu().tolist() == [1] * 8
        launch.result()

"""The checker of order reports accesses and releases without a wait, and nothing else.

One test for each rule. The waits of the product are the cases of test_mutants.py.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from software_gpu_operators import register_kernels  # type: ignore[import-not-found]

from hybrid_engine.memory.cuda_driver import driver_of
from hybrid_engine.memory.device_pages import tensor_over
from tests.software_gpu.device import Reports

NUMEL = 10_000
SECONDS = 0.5


def wait_for_a_query(stream: torch.cuda.Stream) -> None:
    while not stream.query():
        pass


def wait_over_a_third(stream: torch.cuda.Stream) -> None:
    third = torch.cuda.Stream()
    third.wait_stream(stream)
    torch.cuda.current_stream().wait_stream(third)


WAITS: Mapping[str, Callable[[torch.cuda.Stream], object]] = {
    "the host, for the stream": torch.cuda.Stream.synchronize,
    "the host, for an event": lambda stream: stream.record_event().synchronize(),
    "the host, for the device": lambda _: torch.cuda.synchronize(),
    "the host, by queries": wait_for_a_query,
    "a stream": lambda stream: torch.cuda.current_stream().wait_stream(stream),
    "a stream, for an event": lambda stream: torch.cuda.current_stream().wait_event(
        stream.record_event()
    ),
    "a stream, for a third": wait_over_a_third,
}


@pytest.fixture
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def queue_copy(stream: torch.cuda.Stream) -> tuple[torch.Tensor, torch.Tensor]:
    """Queue a copy of ones to the device; return the tensors of the device and of the host."""
    on_host = torch.ones(NUMEL, pin_memory=True)
    on_device = torch.zeros(NUMEL, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_device.copy_(on_host, non_blocking=True)
    return on_device, on_host


@pytest.mark.parametrize("how", WAITS)
def test_a_copy_is_over_after_a_wait(how: str, stream: torch.cuda.Stream) -> None:
    on_device, _kept = queue_copy(stream)
    WAITS[how](stream)
    assert on_device.sum().item() == NUMEL


def test_a_copy_is_late_without_a_wait(stream: torch.cuda.Stream, reports: Reports) -> None:
    """An event that was recorded before the copy does not order it."""
    event = stream.record_event()
    on_device, _kept = queue_copy(stream)
    torch.cuda.current_stream().wait_event(event)
    assert on_device.sum().item() == 0
    text = reports.new()
    assert "aten::sum" in text
    assert "nothing there waits for a copy to" in text
    torch.cuda.synchronize()


@pytest.mark.parametrize("waits", [False, True])
def test_addresses_of_the_same_memory_conflict(
    waits: bool, stream: torch.cuda.Stream, reports: Reports
) -> None:
    driver = driver_of(0)
    assert driver is not None
    nbytes = driver.granularity()
    with ExitStack() as undo:
        memory = driver.create(nbytes)
        undo.callback(driver.release, memory)
        views = []
        for address in (driver.reserve(nbytes), driver.reserve(nbytes)):
            driver.map(address, nbytes, memory)
            undo.callback(driver.unreserve, address, nbytes)
            undo.callback(driver.unmap, address, nbytes)
            views.append(tensor_over(address, nbytes, driver.device, None))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.empty_like(views[0], device="cpu", pin_memory=True).copy_(
                views[0], non_blocking=True
            )
        if waits:
            torch.cuda.current_stream().wait_stream(stream)
        views[1].zero_()
        assert ("RACE" in reports.new()) is not waits
        torch.cuda.synchronize()


@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_is_reused_too_early_unless_its_stream_is_recorded(
    is_recorded: bool, stream: torch.cuda.Stream, reports: Reports
) -> None:
    values = torch.ones(NUMEL, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    on_host = torch.zeros(NUMEL, pin_memory=True)
    with torch.cuda.stream(stream):
        on_host.copy_(values, non_blocking=True)
    assert values.sum().item() == NUMEL, "two streams may read the same memory"
    if is_recorded:
        values.record_stream(stream)
    del values
    torch.full((NUMEL,), 7.0, device="cuda")
    assert ("RACE" in reports.new()) is not is_recorded
    torch.cuda.synchronize()
    assert not is_recorded or on_host.sum().item() == NUMEL


# -- kernels and graphs ----------------------------------------------------------------------------


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


def test_a_kernel_is_pending_for_other_threads_until_it_has_been_computed(
    slow_fill: Callable[..., None],
) -> None:
    """Its own thread does not wait for it within it."""
    values = torch.zeros(8, device="cuda")
    has_begun = threading.Event()

    def begin() -> None:
        torch.cuda.synchronize()
        has_begun.set()

    with ThreadPoolExecutor(1) as thread:
        launch = thread.submit(slow_fill, values, begin)
        assert has_begun.wait(60)
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert torch.cuda.current_stream().query()
        launch.result()
    assert values.tolist() == [1] * 8


@triton.jit
def increment(values, numel: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, numel)
    tl.store(values + offsets, tl.load(values + offsets) + 1)


def add_by_triton(values: torch.Tensor) -> None:
    increment[(1,)](values, 1024)


def add_by_torch(values: torch.Tensor) -> None:
    values.add_(1)


@pytest.mark.parametrize("add_one", [add_by_torch, add_by_triton])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_branches_of_a_graph_must_be_ordered(
    is_ordered: bool, add_one: Callable[[torch.Tensor], None], reports: Reports
) -> None:
    values = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    # Two streams of torch's pool, which it gives out in turn.
    main = torch.cuda.Stream()
    side = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=main):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            add_one(values)
        if is_ordered:
            main.wait_stream(side)
        values.mul_(2)
        main.wait_stream(side)
    assert not values.any(), "the capture has run the work"
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    text = reports.new()
    assert text.count("RACE") == (not is_ordered)
    assert "aten::mul_" in text or values.tolist() == [6] * 1024


def test_a_wait_of_the_host_invalidates_a_capture() -> None:
    values = torch.ones(8, device="cuda")
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            values.nonzero()
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graph.capture_end()


def test_a_graph_with_released_memory_is_an_error(reports: Reports) -> None:
    """Addresses in a graph must be mapped when it runs."""
    code = (
        "import torch\n"
        "from hybrid_engine.memory.elastic import ElasticBuffer\n"
        "buffer = ElasticBuffer(1024, torch.float32, device=torch.device('cuda', 0))\n"
        "buffer.restore()\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    buffer.tensor.add_(1)\n"
        "buffer.release()\n"
        "graph.replay()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "illegal memory access" in result.stderr
    assert "ILLEGAL ADDRESS" in reports.new()

"""The checker of order reports accesses and releases without a wait, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch

from hybrid_engine.memory.cuda_driver import driver_of
from hybrid_engine.memory.device_pages import tensor_over
from tests.software_gpu.device import Reports

NUMEL = 10_000


@pytest.fixture
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def queued_copy(stream: torch.cuda.Stream) -> tuple[torch.Tensor, torch.Tensor]:
    """Queue a copy of ones to the device; return the tensors of the device and of the host."""
    on_host = torch.ones(NUMEL, pin_memory=True)
    on_device = torch.zeros(NUMEL, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_device.copy_(on_host, non_blocking=True)
    return on_device, on_host


def test_a_copy_is_late_without_a_wait(stream: torch.cuda.Stream, reports: Reports) -> None:
    on_device, _kept = queued_copy(stream)
    assert on_device.sum().item() == 0
    text = reports.new()
    assert "aten::sum" in text
    assert "nothing there waits for a copy to" in text
    torch.cuda.synchronize()


def test_a_stream_waits_for_another(stream: torch.cuda.Stream) -> None:
    on_device, _kept = queued_copy(stream)
    torch.cuda.current_stream().wait_stream(stream)
    assert on_device.sum().item() == NUMEL


def test_an_event_orders_earlier_work(stream: torch.cuda.Stream) -> None:
    on_device, _kept = queued_copy(stream)
    event = stream.record_event()
    torch.cuda.current_stream().wait_event(event)
    assert on_device.sum().item() == NUMEL


def test_an_event_does_not_order_later_work(stream: torch.cuda.Stream, reports: Reports) -> None:
    event = stream.record_event()
    on_device, _kept = queued_copy(stream)
    torch.cuda.current_stream().wait_event(event)
    on_device.add_(1)
    assert "RACE" in reports.new()
    torch.cuda.synchronize()


@pytest.mark.parametrize("how", ["stream", "event", "device", "query"])
def test_the_host_waits(how: str, stream: torch.cuda.Stream) -> None:
    on_device, on_host = queued_copy(stream)
    if how == "stream":
        stream.synchronize()
    elif how == "event":
        stream.record_event().synchronize()
    elif how == "device":
        torch.cuda.synchronize()
    else:
        while not stream.query():
            pass
    del on_host
    assert on_device.sum().item() == NUMEL


@pytest.mark.parametrize("waits", [False, True])
def test_addresses_of_the_same_memory_conflict(waits: bool, stream: torch.cuda.Stream, reports: Reports) -> None:
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
            torch.empty_like(views[0], device="cpu", pin_memory=True).copy_(views[0], non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_stream(stream)
        views[1].zero_()
        assert ("RACE" in reports.new()) is not waits
        torch.cuda.synchronize()


def test_order_is_transitive_over_a_third_stream(stream: torch.cuda.Stream) -> None:
    on_device, _kept = queued_copy(stream)
    third = torch.cuda.Stream()
    third.wait_stream(stream)
    torch.cuda.current_stream().wait_stream(third)
    assert on_device.sum().item() == NUMEL


def test_two_streams_may_read_the_same_memory(stream: torch.cuda.Stream) -> None:
    values = torch.ones(NUMEL, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first = values + 1
    second = values + 2
    torch.cuda.synchronize()
    assert first.sum().item() + 1 * NUMEL == second.sum().item()


def test_memory_reused_too_early_is_reported(stream: torch.cuda.Stream, reports: Reports) -> None:
    """Without record_stream, memory is reused while another stream reads it."""
    values = torch.ones(NUMEL, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    on_host = torch.zeros(NUMEL, pin_memory=True)
    with torch.cuda.stream(stream):
        on_host.copy_(values, non_blocking=True)
    del values
    torch.full((NUMEL,), 7.0, device="cuda")
    assert "RACE" in reports.new()
    torch.cuda.synchronize()


def test_memory_of_a_recorded_stream_is_not_reused(stream: torch.cuda.Stream) -> None:
    values = torch.ones(NUMEL, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    on_host = torch.zeros(NUMEL, pin_memory=True)
    with torch.cuda.stream(stream):
        on_host.copy_(values, non_blocking=True)
    values.record_stream(stream)
    del values
    torch.full((NUMEL,), 7.0, device="cuda")
    torch.cuda.synchronize()
    assert on_host.sum().item() == NUMEL


def test_a_graph_replays_captured_work() -> None:
    values = torch.ones(8, device="cuda")
    result = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(values * 3 + 1)
    assert result.sum().item() == 0, "the capture has run the work"
    for factor in (1, 2, 5):
        values.fill_(factor)
        graph.replay()
        assert result.tolist() == [3 * factor + 1] * 8


def test_a_graph_with_released_memory_is_an_error(reports: Reports) -> None:
    """Addresses in a graph must be mapped when it runs."""
    code = (
        "import torch\n"
        "from hybrid_engine.memory.elastic import ElasticBuffer\n"
        "buffer = ElasticBuffer(1024, torch.float32, device=torch.device('cuda', 0))\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    buffer.tensor.add_(1)\n"
        "buffer.release()\n"
        "graph.replay()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "illegal memory access" in result.stderr
    assert "ILLEGAL ADDRESS" in reports.new()

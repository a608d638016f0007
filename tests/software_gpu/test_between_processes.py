"""A process may read another's memory only after the owner's host has waited for all writes."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.memory.elastic import ElasticBuffer, reading
from tests.software_gpu.device import Reports

NUMEL = 1_000_000


@pytest.fixture(scope="module", autouse=True)
def _resource_tracker() -> None:
    """Start Python's resource tracker, which stays, before leftovers are counted."""
    resource_tracker.ensure_running()


def new_buffer() -> ElasticBuffer:
    """Return a buffer. pytest would hold a fixture during the check for leftovers."""
    buffer = ElasticBuffer(NUMEL, torch.float32, device=torch.device("cuda", 0))
    buffer.restore()
    return buffer


def send_sum(handle: Any, connection: Connection) -> None:
    """Read the buffer, in another process."""
    with reading(handle, "cuda:0") as values:
        connection.send(values.sum().item())


def sum_of_peer(buffer: ElasticBuffer) -> float:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_sum, args=(buffer.export(), sender))
    process.start()
    try:
        return float(receiver.recv())
    finally:
        process.join()


def fill_late(buffer: ElasticBuffer, stream: torch.cuda.Stream) -> torch.Tensor:
    """Queue a copy of ones into the buffer; return their tensor, which must outlive the copy."""
    ones = torch.ones(NUMEL, pin_memory=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        buffer.tensor.copy_(ones, non_blocking=True)
    return ones


def hold(handle: Any, connection: Connection) -> None:
    """Map the buffer until the next message, in another process."""
    with suppress(TransportError), reading(handle, "cuda:0"):  # The owner releases it meanwhile.
        connection.send("mapped")
        connection.recv()
    connection.send("unmapped")
    connection.recv()


def test_memory_is_taken_while_any_process_maps_it() -> None:
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    buffer = new_buffer()
    process = context.Process(target=hold, args=(buffer.export(), child), daemon=True)
    process.start()
    assert parent.recv() == "mapped"
    free_before = torch.cuda.mem_get_info()[0]
    nbytes = buffer.resident_nbytes()
    buffer.release()
    assert torch.cuda.mem_get_info()[0] == free_before
    parent.send("unmap")
    assert parent.recv() == "unmapped"
    assert torch.cuda.mem_get_info()[0] == free_before + nbytes
    parent.send("end")
    process.join()
    parent.close()
    child.close()


@pytest.mark.parametrize(
    ("is_exported_before", "waits"), [(False, True), (True, False), (False, False)]
)
def test_a_peer_that_reads_too_early_is_reported(
    is_exported_before: bool, waits: bool, reports: Reports
) -> None:
    stream = torch.cuda.Stream()
    buffer = new_buffer()
    if is_exported_before:
        buffer.export()
    _kept = fill_late(buffer, stream)
    if waits:
        stream.synchronize()
    assert (sum_of_peer(buffer) == NUMEL) is waits
    assert ("has not waited for a copy to, which writes" in reports.new()) is not waits
    stream.synchronize()

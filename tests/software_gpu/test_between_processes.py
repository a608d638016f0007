"""What a process reads of another's memory must be over there: the owner's host has waited for it."""

from __future__ import annotations

import multiprocessing
from contextlib import AbstractContextManager, closing
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from hybrid_engine.memory.elastic import ElasticBuffer, reading
from tests.software_gpu.device import Reports

NUMEL = 1_000_000


@pytest.fixture(scope="module", autouse=True)
def _resource_tracker() -> None:
    """Start Python's helper of processes, which stays, before anything is counted."""
    resource_tracker.ensure_running()


def new_buffer() -> AbstractContextManager[ElasticBuffer]:
    """A buffer for the block, not a fixture: pytest would hold it while the test looks for what is left."""
    return closing(ElasticBuffer(NUMEL, torch.float32, device=torch.device("cuda", 0)))


def send_sum(handle: Any, connection: Connection) -> None:
    """In another process: read the buffer."""
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
    """Queue ones to be copied into the buffer; the returned tensor must live as long."""
    ones = torch.ones(NUMEL, pin_memory=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        buffer.tensor.copy_(ones, non_blocking=True)
    return ones


def test_a_peer_reads_what_the_owner_has_waited_for() -> None:
    stream = torch.cuda.Stream()
    with new_buffer() as buffer:
        _kept = fill_late(buffer, stream)
        stream.synchronize()
        assert sum_of_peer(buffer) == NUMEL


@pytest.mark.parametrize("is_exported_before", [True, False])
def test_a_peer_that_reads_too_early_is_reported(is_exported_before: bool, reports: Reports) -> None:
    stream = torch.cuda.Stream()
    with new_buffer() as buffer:
        if is_exported_before:
            buffer.export()
        _kept = fill_late(buffer, stream)
        assert sum_of_peer(buffer) != NUMEL
        assert "has not waited for a copy to, which writes" in reports.new()
        stream.synchronize()

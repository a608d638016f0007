"""What a process reads of another's memory must be over there: the owner's host has waited for it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.memory.cuda_driver import driver_of
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


def hold(handle: Any, connection: Connection) -> None:
    """In another process: have the buffer mapped until told."""
    with suppress(TransportError), reading(handle, "cuda:0"):  # the owner releases it meanwhile
        connection.send("mapped")
        connection.recv()
    connection.send("unmapped")
    connection.recv()


def test_memory_is_taken_as_long_as_any_process_has_it_mapped() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with new_buffer() as buffer:
        process = context.Process(target=hold, args=(buffer.export(), there), daemon=True)
        process.start()
        assert here.recv() == "mapped"
        free_before, nbytes = torch.cuda.mem_get_info()[0], buffer.resident_nbytes()
        buffer.release()
        assert torch.cuda.mem_get_info()[0] == free_before
        here.send("unmap")
        assert here.recv() == "unmapped"
        assert torch.cuda.mem_get_info()[0] == free_before + nbytes
    here.send("end")
    process.join()
    here.close()
    there.close()


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


def test_memory_is_taken_as_long_as_a_descriptor_of_it_is_open() -> None:
    """Also if it was released meanwhile, whoever has the descriptor; it can still be imported."""
    driver = driver_of(0)
    assert driver is not None
    nbytes = driver.granularity()

    def free_nbytes() -> int:
        return torch.cuda.mem_get_info(0)[0]

    free_before = free_nbytes()
    handle = driver.create(nbytes)
    descriptor = driver.export_descriptor(handle)
    driver.release(handle)
    assert free_nbytes() == free_before - nbytes
    driver.release(driver.import_descriptor(descriptor))
    assert free_nbytes() == free_before - nbytes
    with descriptor_in_a_child(descriptor):
        os.close(descriptor)
        assert free_nbytes() == free_before - nbytes, "the child has it open"
    assert free_nbytes() == free_before


@contextmanager
def descriptor_in_a_child(descriptor: int) -> Iterator[None]:
    """Have a process that is no process of the device keep it open for the block."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[descriptor])
    try:
        yield
    finally:
        child.communicate()

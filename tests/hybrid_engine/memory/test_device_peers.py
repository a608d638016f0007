"""Elastic buffers in device memory that other processes read."""

from __future__ import annotations

import multiprocessing
import os
import pickle

import pytest
import torch

from hybrid_engine.errors import StateError, TransportError
from hybrid_engine.memory import device_pages
from hybrid_engine.memory.elastic import ElasticBuffer, export_tensor, map_peer, open_peer
from hybrid_engine.planning.plan import Bucket, Link, Transfer
from hybrid_engine.records.layout import BufferId, Extent, Place
from hybrid_engine.transports.pull import SharedMemoryTransport
from tests.hybrid_engine.memory.device_rig import CHUNK, Rig


def test_peer_reads_and_keeps_nothing_mapped(rig: Rig):
    buffer = ElasticBuffer(CHUNK, torch.int32, device="cuda:0")
    buffer.tensor.copy_(torch.arange(CHUNK))
    own = rig.cuda.mapped()
    peer = open_peer(pickle.loads(pickle.dumps(export_tensor(buffer.tensor[100:]))))
    for start, stop in [(0, CHUNK - 100), (5, 6), (CHUNK // 4, CHUNK // 2 + 7)]:
        with peer.mapped([Extent(start, stop)]) as flat:
            assert torch.equal(flat[start:stop], torch.arange(100, CHUNK, dtype=torch.int32)[start:stop])
            assert len(rig.cuda.mapped()) > len(own)
        assert rig.cuda.mapped() == own
    for start, stop in [(0, CHUNK), (CHUNK, CHUNK + 1)]:
        with pytest.raises(ValueError, match=f"of a tensor of {CHUNK - 100}"), peer.mapped([Extent(start, stop)]):
            pass
    with pytest.raises(StateError, match="mapped already"), peer.mapped(), peer.mapped():
        pass
    assert rig.cuda.mapped() == own
    peer.close()
    peer.close()
    with pytest.raises(StateError, match="closed"), peer.mapped():
        pass
    del flat


def test_a_reader_waits_for_its_copies_before_it_looks_and_unmaps(rig: Rig):
    buffer = rig.buffer(2 * CHUNK)
    peer = open_peer(buffer.export())
    maps_a_chunk = ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemRelease"]
    rig.driver.calls.clear()
    with peer.mapped([Extent(0, CHUNK)], keep={0}):
        assert rig.driver.calls == maps_a_chunk
    assert rig.driver.calls == [*maps_a_chunk, "finish_stream"], "the owner may release it once this is over"
    rig.driver.calls.clear()
    with pytest.raises(RuntimeError, match="mine"), peer.mapped([Extent(0, 2 * CHUNK)], keep={0}):
        raise RuntimeError("mine")
    assert rig.driver.calls == [*maps_a_chunk, "finish_stream", "cuMemUnmap", "cuMemUnmap"]
    rig.driver.calls.clear()
    with peer.mapped([Extent(0, CHUNK)], keep={0}):
        pass
    for _ in range(2):
        peer.unmap()
    assert rig.driver.calls == [*maps_a_chunk, "finish_stream", "finish_stream", "cuMemUnmap"]


def test_chunk_that_came_back_is_found_by_peers(rig: Rig):
    buffer = rig.buffer(3 * CHUNK)
    peer = open_peer(buffer.export())
    for value in range(3):
        buffer.tensor.fill_(value)
        with peer.mapped() as flat:
            assert bool((flat == value).all())
        buffer.release(CHUNK)
        with pytest.raises(TransportError, match=r"released chunks \[1, 2\] of its buffer"), peer.mapped():
            pass
        with peer.mapped([Extent(0, CHUNK)]) as flat:
            assert bool((flat[:CHUNK] == value).all())
        buffer.restore()
    del flat


@pytest.mark.parametrize("comes_back", [True, False])
def test_release_while_a_peer_reads_is_an_error_at_the_peer(rig: Rig, comes_back: bool):
    buffer = rig.buffer(3 * CHUNK)
    buffer.tensor.fill_(1)
    peer = open_peer(buffer.export())
    with (
        pytest.raises(TransportError, match="released chunks of its buffer while they were read"),
        peer.mapped() as flat,
    ):
        buffer.release()
        assert bool((flat == 1).all())  # not garbage: the mapping keeps it
        if comes_back:
            buffer.restore()
    del flat


def test_closed_buffer_cannot_be_read(rig: Rig):
    buffer = rig.buffer(CHUNK)
    handle, peer = buffer.export(), open_peer(buffer.export())
    buffer.close()
    with pytest.raises(TransportError, match="released chunks"), peer.mapped():
        pass
    with pytest.raises(TransportError, match=r"its process ended or closed it|exchange them again"):
        open_peer(handle)
    with pytest.raises(TransportError, match=r"use open_peer\(handle\).mapped"):
        map_peer(handle)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (1, r"not permitted\..*ptrace_scope 0 or 1.*SYS_PTRACE.*collective transport"),
        (9, "the owner released the chunk meanwhile"),
        (12, "Cannot allocate memory"),
    ],
)
def test_descriptor_that_cannot_be_copied(rig: Rig, monkeypatch: pytest.MonkeyPatch, code: int, message: str):
    buffer = rig.buffer(CHUNK)
    peer = open_peer(buffer.export())
    monkeypatch.setattr(device_pages, "_pidfd_getfd", lambda pidfd, descriptor: (-1, code))
    message = rf"pidfd_getfd of descriptor \d+ of process {os.getpid()}: {message}"
    with pytest.raises(TransportError, match=message), peer.mapped():
        pass


def read_in_a_process(connection) -> None:
    """Also owns a buffer, until it ends without a word."""
    with pytest.MonkeyPatch.context() as patch:
        own = Rig(patch).buffer(CHUNK)
        peer = open_peer(connection.recv())
        own.tensor.fill_(5)
        connection.send(own.export())
        while connection.recv() == "read":
            try:
                with peer.mapped() as flat:
                    answer = flat.sum().item()
            except TransportError as error:
                answer = str(error)
            connection.send(answer)
        os._exit(0)


@pytest.mark.slow
def test_processes_read_each_other(rig: Rig):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=read_in_a_process, args=(there,))
    process.start()
    there.close()
    buffer = ElasticBuffer(CHUNK, torch.float32, device="cuda:0")
    here.send(buffer.export())
    peer = open_peer(here.recv())

    def read() -> object:
        here.send("read")
        return here.recv()

    for value in (1, 2):
        buffer.tensor.fill_(value)
        assert read() == value * CHUNK
        buffer.release(0, 2 * CHUNK)
        assert "released chunks [0, 1]" in read()
        buffer.restore()
    with peer.mapped() as flat:
        assert bool((flat == 5).all())
        here.send("end")
        process.join()
        assert bool((flat == 5).all())  # the mapping keeps it
    with pytest.raises(TransportError, match="the owner ended"), peer.mapped():
        pass
    assert process.exitcode == 0
    here.close()
    process.close()


def test_a_chunk_is_mapped_once_for_all_buckets_that_read_it(rig: Rig):
    buffer = ElasticBuffer(2 * CHUNK // 4, torch.float32, device="cuda:0")
    source, elements = BufferId(0, "src"), CHUNK // 4

    def read(start: int) -> Transfer:
        places = Place(source, start, (1,)), Place(BufferId(1, "dst"), 0, (1,))
        return Transfer("t", (4,), *places, 16, Link.HOST)

    first_chunk, both, second_chunk = read(0), read(elements - 2), read(elements)
    buckets = [Bucket(index, (), (one,), (), 16) for index, one in enumerate([first_chunk, both, second_chunk])]
    transport = SharedMemoryTransport(1, {source: buffer.export()}, buckets)
    own, destination = rig.cuda.mapped(), {"dst": torch.zeros(4)}
    for value in range(2):  # the second time with memory that is new
        buffer.tensor.fill_(value)
        rig.driver.calls.clear()
        num_mapped = []
        for bucket in buckets:
            transport.run(bucket.index, bucket.transfers, {}, destination)
            assert destination["dst"].tolist() == [value] * 4
            num_mapped.append(len(rig.cuda.mapped()) - len(own))
        assert num_mapped == [1, 1, 0]
        assert rig.driver.calls.count("cuMemMap") == 2
        buffer.release()
        buffer.restore()
    transport.run(0, buckets[0].transfers, {}, destination)
    buffer.release()
    buffer.restore()
    buffer.tensor.fill_(7)
    transport.run(1, buckets[1].transfers, {}, destination)  # what was kept is outdated, and mapped anew
    assert destination["dst"].tolist() == [7] * 4
    transport.abandon(2, buckets[2].transfers, "")
    assert len(rig.cuda.mapped()) == len(own)
    transport.run(0, buckets[0].transfers, {}, destination)
    transport.trim()
    assert len(rig.cuda.mapped()) == len(own)
    transport.run(0, buckets[0].transfers, {}, destination)
    transport.close()


def test_the_transport_leaves_alone_what_lies_between(rig: Rig):
    buffer = ElasticBuffer(3 * CHUNK, torch.float32, device="cuda:0")
    buffer.tensor.fill_(1)
    source, elements = BufferId(0, "src"), buffer.granularity // 4
    transport = SharedMemoryTransport(1, {source: buffer.export()})
    places = Place(source, 0, (2 * elements, 1)), Place(BufferId(1, "dst"), 0, (3, 1))
    destination = {"dst": torch.zeros(6)}
    buffer.release(buffer.granularity, 2 * buffer.granularity)
    transport.run(0, [Transfer("t", (2, 3), *places, 24, Link.HOST)], {}, destination)
    assert bool((destination["dst"] == 1).all())
    transport.close()

"""Elastic buffers in device memory, over the driver of tests/software_gpu."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hybrid_engine.errors import DeviceMemoryError, MessageError, TransportError
from hybrid_engine.memory import device_pages
from hybrid_engine.memory.elastic import (
    ElasticBuffer,
    allocate_elastic,
    export_tensor,
    exported_buffer_of,
    open_peer,
    reserve_elastic,
    restore_elastic,
)
from hybrid_engine.planning.plan import Link, Transfer
from hybrid_engine.records.layout import BufferId, Extent, Place
from hybrid_engine.transports import pull
from hybrid_engine.transports.pull import SharedMemoryTransport
from megatron_patches.optimizers import OptimizerTensor, _BufferPlace
from tests.harness.errors import refused
from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.memory.device_rig import CHUNK, Rig
from tests.software_gpu.device import (
    GARBAGE,
    GRANULE,
    NOT_SUPPORTED,
    failing,
    limit,
    mapped,
    virtual_memory,
)

MIB = 2**20


def test_a_release_waits_once_for_the_stream(rig: Rig):
    buffer = rig.buffer(3 * CHUNK)
    calls = rig.driver.calls
    calls.clear()
    buffer.release(CHUNK)
    assert calls == ["finish_stream", "cuMemUnmap", "cuMemUnmap"]
    calls.clear()
    buffer.release()
    buffer.release()
    assert calls == ["finish_stream", "cuMemUnmap"], "the second release has nothing to wait for"
    buffer.restore()
    calls.clear()
    del buffer
    gc.collect()  # a buffer without references is freed
    assert calls == ["synchronize", *["cuMemUnmap"] * 3, "cuMemAddressFree"]


def optimizer_state(rig: Rig, count: int) -> list[OptimizerTensor]:
    """Return moments of one chunk each, numbered, in device memory."""
    numel = CHUNK // 4
    tensors = [
        allocate_elastic(numel, torch.float32, "cuda:0", "old").fill_(number)
        for number in range(count)
    ]
    return [
        OptimizerTensor(f"param {number}", "moment", "exp_avg", tensor)
        for number, tensor in enumerate(tensors)
    ]


def on_device(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Allocate on the device, although the tensors' device is the CPU."""
    return lambda numel, dtype, device, kind: allocate(numel, dtype, "cuda:0", kind)


def test_optimizer_state_is_gathered_with_one_spare_chunk(rig: Rig):
    state = optimizer_state(rig, 6)
    home = _BufferPlace()
    limit(7 * CHUNK)  # six chunks are in use
    with refused(DeviceMemoryError, "driver-call-failed", "OUT_OF_MEMORY"):
        home.adopt(state, "", on_device(allocate_elastic), lambda flat, stop: None)
    home.adopt(state, "", on_device(reserve_elastic), restore_elastic)
    (flat,) = home.flats
    assert home.without(state) == []
    assert [float(moment.tensor.sum()) for moment in state] == [
        number * CHUNK / 4 for number in range(6)
    ]
    assert virtual_memory().nbytes == 6 * CHUNK == exported_buffer_of(flat).resident_nbytes()


def test_gathering_continues_after_out_of_memory(rig: Rig):
    state = optimizer_state(rig, 4)
    home = _BufferPlace()
    kept = [moment.tensor.view(-1) for moment in state]  # views keep the old memory
    limit(5 * CHUNK)
    with refused(DeviceMemoryError, "driver-call-failed", "OUT_OF_MEMORY"):
        home.adopt(state, "", on_device(reserve_elastic), restore_elastic)
    assert [float(moment.tensor[0]) for moment in state] == [0, 1, 2, 3]
    limit(8 * CHUNK)
    home.adopt(state, "", on_device(reserve_elastic), restore_elastic)
    assert (len(state), home.without(state)) == (4, [])
    assert [float(moment.tensor[0]) for moment in state] == [0, 1, 2, 3]
    assert [float(view[0]) for view in kept] == [0, 1, 2, 3]


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data(), nbytes=st.integers(1, 7 * CHUNK), is_exported=st.booleans())
def test_any_sequence_of_releases_and_restores(data: st.DataObject, nbytes: int, is_exported: bool):
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(patch)
        buffer = rig.buffer(nbytes)
        granule = buffer.granularity
        address = buffer.address
        num_chunks = -(-nbytes // granule)
        if is_exported:
            buffer.export()
        contents: dict[int, int] = dict.fromkeys(range(num_chunks), GARBAGE)  # resident
        for number in range(data.draw(st.integers(1, 8))):
            start, stop = sorted(
                data.draw(st.tuples(st.integers(0, nbytes), st.integers(0, nbytes)))
            )
            if data.draw(st.booleans()):
                buffer.release(start, stop)
                for chunk in range(num_chunks):
                    last = min((chunk + 1) * granule, nbytes)
                    if start <= chunk * granule and last <= stop and start < stop:
                        contents.pop(chunk, None)
            else:
                buffer.restore(start, stop)
                for chunk in range(num_chunks):
                    if start < stop and chunk * granule < stop and start < (chunk + 1) * granule:
                        contents.setdefault(chunk, GARBAGE)
            sizes = {
                chunk: min(granule, -(-nbytes // GRANULE) * GRANULE - chunk * granule)
                for chunk in contents
            }
            assert mapped() == [
                (address + chunk * granule, sizes[chunk]) for chunk in sorted(contents)
            ]
            assert buffer.resident_nbytes() == virtual_memory().nbytes == sum(sizes.values())
            for chunk, value in contents.items():
                chunk_bytes = slice(chunk * granule, (chunk + 1) * granule)
                assert bool((buffer.tensor[chunk_bytes] == value).all())
                contents[chunk] = number
                buffer.tensor[chunk_bytes].fill_(number)
        del buffer
        rig.assert_empty()


def chunk_descriptors() -> list[int]:
    """Return this process's descriptors of chunks; the software GPU uses memory files."""
    fds = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor
            fds += [int(name)] * ("software_gpu.device" in os.readlink(f"/proc/self/fd/{name}"))
    return fds


def test_a_forked_child_keeps_no_descriptor_and_does_not_affect_its_parent(rig: Rig):
    before = len(chunk_descriptors())
    buffer = rig.buffer(4 * CHUNK)
    num_of_driver = len(chunk_descriptors()) - before
    peer = open_peer(buffer.export())
    if not (child := os.fork()):
        kept = len(chunk_descriptors()) - before
        del buffer
        gc.collect()
        os._exit(kept)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(chunk_descriptors()) - before - num_of_driver == 4
    with peer.mapped() as flat:
        assert bool((flat == GARBAGE).all())


@pytest.mark.slow
def test_a_process_with_live_tensors_exits_cleanly():
    code = """
import pytest, torch
from tests.hybrid_engine.memory.device_rig import CHUNK, Rig

MIB = 2**20
rig = Rig(pytest.MonkeyPatch())
torch.kept = rig.buffer(3 * CHUNK).tensor
kept = rig.buffer(CHUNK).tensor.float().requires_grad_()
torch.graph = (kept * kept).sum()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_is_freed_with_the_last_tensor(rig: Rig):
    buffer = rig.buffer(3 * CHUNK)
    view = buffer.tensor[5:].view(torch.uint8).fill_(3)
    buffer.release(CHUNK, 2 * CHUNK)
    del buffer
    gc.collect()
    assert bool((view[2 * CHUNK :] == 3).all())
    assert virtual_memory().num_mappings == 2


def test_restore_without_enough_memory_can_be_continued(rig: Rig):
    limit(4 * CHUNK)
    buffer = rig.buffer(3 * CHUNK)
    buffer.export()
    buffer.release()
    other = rig.buffer(2 * CHUNK)
    values = ("cuMemCreate(131072, 0)", "device 0", "OUT_OF_MEMORY")
    with refused(DeviceMemoryError, "driver-call-failed", *values) as failure:
        buffer.restore()
    assert failure.value.is_out_of_memory
    del failure  # the traceback keeps the buffer alive
    assert buffer.resident_nbytes() == 2 * CHUNK
    with pytest.raises(DeviceMemoryError):
        rig.buffer(CHUNK)
    assert virtual_memory().num_reservations == 2
    del other
    buffer.restore()
    assert buffer.resident_nbytes() == 3 * CHUNK


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle"])
def test_a_failed_driver_call_leaves_the_chunk_released(rig: Rig, call: str):
    buffer = rig.buffer(3 * CHUNK)
    buffer.export()
    buffer.release()
    code = "cannot-export" if call == "cuMemExportToShareableHandle" else "driver-call-failed"
    with (
        failing(call, error=NOT_SUPPORTED),
        refused(DeviceMemoryError, code, call, "NOT_SUPPORTED"),
    ):
        buffer.restore()
    assert buffer.resident_nbytes() == virtual_memory().nbytes == 0
    buffer.restore()
    assert buffer.resident_nbytes() == 3 * CHUNK


def test_a_peer_reads_and_keeps_nothing_mapped(rig: Rig):
    buffer = ElasticBuffer(CHUNK, torch.int32, device="cuda:0")
    buffer.restore()
    buffer.tensor.copy_(torch.arange(CHUNK))
    own_mappings = mapped()
    handle = pickle.loads(pickle.dumps(export_tensor(buffer.tensor[100:])))
    peer = open_peer(handle)
    for start, stop in [(0, CHUNK - 100), (5, 6), (CHUNK // 4, CHUNK // 2 + 7)]:
        with peer.mapped(handle.chunks([Extent(start, stop)])) as flat:
            assert torch.equal(
                flat[start:stop], torch.arange(100, CHUNK, dtype=torch.int32)[start:stop]
            )
            assert len(mapped()) > len(own_mappings)
        assert mapped() == own_mappings
    peer.close()
    peer.close()
    del flat


def test_a_reader_waits_for_its_copies_before_it_unmaps(rig: Rig):
    buffer = rig.buffer(2 * CHUNK)
    peer = open_peer(buffer.export())
    maps_a_chunk = ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemRelease"]
    rig.driver.calls.clear()
    with peer.mapped([0]):
        assert rig.driver.calls == maps_a_chunk
    assert rig.driver.calls == [*maps_a_chunk, "finish_stream", "cuMemUnmap"]
    rig.driver.calls.clear()
    with pytest.raises(RuntimeError, match="mine"), peer.mapped([0, 1]):
        raise RuntimeError("mine")
    assert rig.driver.calls == [*maps_a_chunk * 2, "finish_stream", "cuMemUnmap", "cuMemUnmap"]


def test_restored_chunks_are_read_by_peers(rig: Rig):
    buffer = rig.buffer(3 * CHUNK)
    peer = open_peer(buffer.export())
    for value in range(3):
        buffer.tensor.fill_(value)
        with peer.mapped() as flat:
            buffer.export()  # for another peer; what is exported stays so
            assert bool((flat == value).all())
        buffer.release(CHUNK)
        with refused(TransportError, "chunks-are-released", "[1, 2]"), peer.mapped():
            pass
        with peer.mapped([0]) as flat:
            assert bool((flat[:CHUNK] == value).all())
        buffer.restore()
    del flat


@pytest.mark.parametrize("comes_back", [True, False])
def test_release_while_a_peer_reads_is_an_error_at_the_peer(rig: Rig, comes_back: bool):
    buffer = rig.buffer(3 * CHUNK)
    buffer.tensor.fill_(1)
    peer = open_peer(buffer.export())
    with (
        refused(TransportError, "chunks-are-released"),
        peer.mapped() as flat,
    ):
        buffer.release()
        assert bool((flat == 1).all())  # not garbage, because the mapping keeps the memory
        if comes_back:
            buffer.restore()
    del flat


def test_a_freed_buffer_cannot_be_read(rig: Rig):
    buffer = rig.buffer(CHUNK)
    handle = buffer.export()
    peer = open_peer(buffer.export())
    del buffer
    gc.collect()
    with refused(TransportError, "chunks-are-released", "[0]"), peer.mapped():
        pass
    with refused(TransportError, "owner-is-gone", handle.table.address):
        open_peer(handle)


def test_a_chunk_released_before_its_descriptor_is_fetched_is_an_error(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
):
    buffer = rig.buffer(2 * CHUNK)
    peer = open_peer(buffer.export())
    fetch = device_pages.fetch

    def release_and_fetch(*arguments: Any) -> list[int]:
        buffer.release(0, CHUNK)
        return fetch(*arguments)

    monkeypatch.setattr(device_pages, "fetch", release_and_fetch)
    with refused(TransportError, "owner-is-gone", "released"), peer.mapped():
        pass


@pytest.mark.parametrize("forks", [False, True])
def test_a_descriptor_being_sent_is_closed_by_a_release_and_in_a_forked_child(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, forks: bool
):
    buffer = rig.buffer(CHUNK)
    send = socket.send_fds
    begins = threading.Event()
    table = buffer.export().table
    (descriptor,) = buffer.memory._descriptors.values()
    descriptor = weakref.ref(descriptor)

    def slow(*arguments: Any) -> int:
        begins.set()
        time.sleep(0.3)  # the release or the fork happens meanwhile
        return send(*arguments)

    def fetch_chunk() -> None:
        os.close(device_pages.fetch(table.address, [f"{table.token}/1"])[0])

    monkeypatch.setattr(socket, "send_fds", slow)
    peer = threading.Thread(target=fetch_chunk)
    peer.start()
    assert begins.wait(10)
    if not forks:
        buffer.release()
        assert descriptor() is None
    elif not (child := os.fork()):
        os._exit(descriptor() is not None)
    else:
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    peer.join()


def test_the_chunks_of_a_bucket_are_found_once(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    buffer = ElasticBuffer(2 * CHUNK // 4, torch.float32, device="cuda:0")
    buffer.restore()
    source = BufferId(0, "src")
    places = Place(source, CHUNK // 4 - 2, (1,)), Place(BufferId(1, "dst"), 0, (1,))
    transport = SharedMemoryTransport(1, {source: buffer.export()})
    copies = transport.prepare([Transfer("t", (4,), *places, 16, Link.HOST)])  # of both chunks
    own_mappings = mapped()
    destination = {"dst": torch.zeros(4)}
    for value in range(2):  # the second time with restored memory
        buffer.tensor.fill_(value)
        transport.run(0, copies, {}, destination)
        assert destination["dst"].tolist() == [value] * 4
        assert mapped() == own_mappings
        buffer.release()
        buffer.restore()
        monkeypatch.setattr(pull, "source_extents", None)
    transport.close()


def test_the_transport_does_not_map_gaps_between_rows(rig: Rig):
    buffer = ElasticBuffer(3 * CHUNK, torch.float32, device="cuda:0")
    buffer.restore()
    buffer.tensor.fill_(1)
    source = BufferId(0, "src")
    elements = buffer.granularity // 4
    transport = SharedMemoryTransport(1, {source: buffer.export()})
    places = Place(source, 0, (2 * elements, 1)), Place(BufferId(1, "dst"), 0, (3, 1))
    destination = {"dst": torch.zeros(6)}
    buffer.release(buffer.granularity, 2 * buffer.granularity)
    copies = transport.prepare([Transfer("t", (2, 3), *places, 24, Link.HOST)])
    transport.run(0, copies, {}, destination)
    assert bool((destination["dst"] == 1).all())
    transport.close()


def test_a_handle_outside_its_range_is_refused(rig: Rig):
    handle = rig.buffer(3 * CHUNK).export()
    for name, values in {
        "offset": (-CHUNK, 1 - handle.numel, handle.reserved_nbytes),
        "numel": (-1, 0, handle.numel + handle.reserved_nbytes),
        "reserved_nbytes": (-1, 0, 2 * CHUNK, 2**40),
        "chunk_nbytes": (-CHUNK, 0, 1, 2**40),
        "dtype": ("nn", "float31"),
        "table": (replace(handle.table, numel=2), replace(handle.table, dtype="uint8")),
    }.items():
        for value in values:
            with refused(MessageError, "malformed-handle"):
                replace(handle, **{name: value})

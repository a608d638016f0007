"""Elastic buffers in device memory, over the driver of tests/software_gpu; tests/gpu has what a GPU is asked."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
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

from hybrid_engine.errors import DeviceMemoryError, MessageError, StateError, TransportError
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
from hybrid_engine.planning.plan import Bucket, Link, Transfer
from hybrid_engine.records.layout import BufferId, Extent, Place
from hybrid_engine.transports.pull import SharedMemoryTransport
from megatron_patches.optimizers import OptimizerTensor, _BufferPlace
from tests.harness.errors import has_code
from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.memory.device_rig import CHUNK, Rig
from tests.software_gpu.device import GARBAGE, GRANULE, NOT_SUPPORTED, failing, limit, mapped, virtual_memory

MIB = 2**20


@pytest.mark.parametrize(
    ("nbytes", "chunk", "chunk_if_whole"),
    [
        (1, GRANULE, GRANULE),
        (33 * MIB, 32 * MIB, 32 * MIB),
        (2048 * MIB, 32 * MIB, 32 * MIB),
        (4096 * MIB, 32 * MIB, 64 * MIB),
        (device_pages.MAX_CHUNKS * 64 * MIB, 64 * MIB, device_pages.MAX_CHUNKS * MIB),
    ],
)
def test_what_leaves_whole_has_fewer_chunks(nbytes: int, chunk: int, chunk_if_whole: int):
    """Each takes a call of the driver to release, and one to take again."""
    assert device_pages.chunk_nbytes_for(nbytes, GRANULE) == chunk
    assert device_pages.chunk_nbytes_for(nbytes, GRANULE, in_parts=False) == chunk_if_whole


def test_chunks_go_after_one_wait_for_what_uses_them(rig: Rig):
    buffer, calls = rig.buffer(3 * CHUNK), rig.driver.calls
    calls.clear()
    buffer.release(CHUNK)
    assert calls == ["finish_stream", *["cuMemUnmap", "cuMemRelease"] * 2]
    calls.clear()
    buffer.release()
    buffer.release()
    assert calls == ["finish_stream", "cuMemUnmap", "cuMemRelease"], "nothing is waited for where nothing goes"
    buffer.restore()
    calls.clear()
    del buffer
    gc.collect()
    assert calls == ["synchronize", *["cuMemUnmap", "cuMemRelease"] * 3, "cuMemAddressFree"]


def optimizer_state(rig: Rig, count: int) -> list[OptimizerTensor]:
    """Moments of one chunk each, numbered, in memory of the device."""
    numel = CHUNK // 4
    tensors = [allocate_elastic(numel, torch.float32, "cuda:0", "old").fill_(number) for number in range(count)]
    return [OptimizerTensor(f"param {number}", "moment", "exp_avg", each) for number, each in enumerate(tensors)]


def on_device(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The tensors say that they are on the CPU."""
    return lambda numel, dtype, device, kind: allocate(numel, dtype, "cuda:0", kind)


def test_optimizer_state_is_gathered_in_the_memory_that_it_takes(rig: Rig):
    state, home = optimizer_state(rig, 6), _BufferPlace()
    limit(7 * CHUNK)  # of which six are taken
    with pytest.raises(DeviceMemoryError, check=has_code("driver-call-failed", "OUT_OF_MEMORY")):
        home.adopt(state, "", on_device(allocate_elastic), lambda flat, stop: None)
    home.adopt(state, "", on_device(reserve_elastic), restore_elastic)
    (flat,) = home.flats
    assert home.without(state) == []
    assert [float(found.tensor.sum()) for found in state] == [number * CHUNK / 4 for number in range(6)]
    assert virtual_memory().nbytes == 6 * CHUNK == exported_buffer_of(flat).resident_nbytes()


def test_gathering_goes_on_where_memory_ended(rig: Rig):
    state, home = optimizer_state(rig, 4), _BufferPlace()
    kept = [found.tensor.view(-1) for found in state]  # somebody refers to it: no memory goes
    limit(5 * CHUNK)
    with pytest.raises(DeviceMemoryError, check=has_code("driver-call-failed", "OUT_OF_MEMORY")):
        home.adopt(state, "", on_device(reserve_elastic), restore_elastic)
    assert [float(found.tensor[0]) for found in state] == [0, 1, 2, 3]
    limit(8 * CHUNK)
    home.adopt(state, "", on_device(reserve_elastic), restore_elastic)
    assert (len(state), home.without(state)) == (4, [])
    assert [float(found.tensor[0]) for found in state] == [0, 1, 2, 3]
    assert [float(one[0]) for one in kept] == [0, 1, 2, 3]


@settings(max_examples=settings().max_examples // 2)
@given(data=st.data(), nbytes=st.integers(1, 7 * CHUNK), is_exported=st.booleans())
def test_any_sequence_of_releases_and_restores(data: st.DataObject, nbytes: int, is_exported: bool):
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(patch)
        buffer = rig.buffer(nbytes)
        granule, address = buffer.granularity, buffer.address
        num_chunks = -(-nbytes // granule)
        if is_exported:
            buffer.export()
        contents: dict[int, int] = dict.fromkeys(range(num_chunks), GARBAGE)  # of the chunks that are there
        for number in range(data.draw(st.integers(1, 8))):
            start, stop = sorted(data.draw(st.tuples(st.integers(0, nbytes), st.integers(0, nbytes))))
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
            sizes = {chunk: min(granule, -(-nbytes // GRANULE) * GRANULE - chunk * granule) for chunk in contents}
            assert mapped() == [(address + chunk * granule, sizes[chunk]) for chunk in sorted(contents)]
            assert buffer.resident_nbytes() == virtual_memory().nbytes == sum(sizes.values())
            for chunk, value in contents.items():
                chunk_bytes = slice(chunk * granule, (chunk + 1) * granule)
                assert bool((buffer.tensor[chunk_bytes] == value).all())
                contents[chunk] = number
                buffer.tensor[chunk_bytes].fill_(number)
        del buffer
        rig.assert_nothing_is_left()


def test_released_range_must_not_be_touched(rig: Rig):
    """It ends the process, as CUDA ends its context."""
    buffer = rig.buffer(3 * CHUNK)
    buffer.release(CHUNK, 2 * CHUNK)
    assert bool((buffer.tensor[:CHUNK] == GARBAGE).all() and (buffer.tensor[2 * CHUNK :] == GARBAGE).all())
    if not (child := os.fork()):
        faulthandler.disable()
        buffer.tensor[CHUNK:].sum()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGSEGV


def chunk_descriptors() -> list[int]:
    """Of this process: here those of memory files."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found += [int(name)] * ("software_gpu.device" in os.readlink(f"/proc/self/fd/{name}"))
    return found


def test_a_forked_child_keeps_no_descriptor_and_leaves_the_parents_alone(rig: Rig):
    before = len(chunk_descriptors())
    buffer = rig.buffer(4 * CHUNK)
    of_the_driver = len(chunk_descriptors()) - before
    peer = open_peer(buffer.export())
    if not (child := os.fork()):
        kept = len(chunk_descriptors()) - before
        buffer.close()  # what a collection does, with all that refers to it
        os._exit(kept)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(chunk_descriptors()) - before - of_the_driver == 4
    with peer.mapped() as flat:
        assert bool((flat == GARBAGE).all())


@pytest.mark.slow
def test_process_that_ends_with_live_tensors_ends_well():
    code = """
import pytest, torch
from tests.hybrid_engine.memory.device_rig import CHUNK, Rig

MIB = 2**20
rig = Rig(pytest.MonkeyPatch())
torch.kept = rig.buffer(3 * CHUNK).tensor
kept = rig.buffer(CHUNK).tensor.float().requires_grad_()
torch.graph = (kept * kept).sum()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_ends_with_the_last_tensor(rig: Rig):
    buffer = rig.buffer(3 * CHUNK)
    view = buffer.tensor[5:].view(torch.uint8).fill_(3)
    buffer.release(CHUNK, 2 * CHUNK)
    buffer.close()
    buffer.close()
    for action in (ElasticBuffer.release, ElasticBuffer.restore, ElasticBuffer.export, ElasticBuffer.resident_nbytes):
        with pytest.raises(StateError, check=has_code("buffer-is-closed")):
            action(buffer)
    del buffer
    gc.collect()
    assert bool((view[2 * CHUNK :] == 3).all())
    assert exported_buffer_of(view) is None
    assert virtual_memory().num_mappings == 2


def test_restore_without_enough_memory_can_be_continued(rig: Rig):
    limit(4 * CHUNK)
    buffer = rig.buffer(3 * CHUNK)
    buffer.export()
    buffer.release()
    other = rig.buffer(2 * CHUNK)
    refused = has_code("driver-call-failed", "cuMemCreate(131072, 0)", "device 0", "OUT_OF_MEMORY")
    with pytest.raises(DeviceMemoryError, check=refused) as failure:
        buffer.restore()
    assert failure.value.is_out_of_memory
    del failure  # its traceback holds the buffer
    assert buffer.resident_nbytes() == 2 * CHUNK
    with pytest.raises(DeviceMemoryError):
        rig.buffer(CHUNK)
    assert virtual_memory().num_reservations == 2
    del other
    buffer.restore()
    assert buffer.resident_nbytes() == 3 * CHUNK


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle"])
def test_a_call_that_fails_leaves_the_chunk_away(rig: Rig, call: str):
    buffer = rig.buffer(3 * CHUNK)
    buffer.export()
    buffer.release()
    code = "cannot-export" if call == "cuMemExportToShareableHandle" else "driver-call-failed"
    refused = has_code(code, call, "NOT_SUPPORTED")
    with failing(call, error=NOT_SUPPORTED), pytest.raises(DeviceMemoryError, check=refused):
        buffer.restore()
    assert buffer.resident_nbytes() == virtual_memory().nbytes == 0
    buffer.restore()
    assert buffer.resident_nbytes() == 3 * CHUNK


def test_peer_reads_and_keeps_nothing_mapped(rig: Rig):
    buffer = ElasticBuffer(CHUNK, torch.int32, device="cuda:0")
    buffer.tensor.copy_(torch.arange(CHUNK))
    own = mapped()
    peer = open_peer(pickle.loads(pickle.dumps(export_tensor(buffer.tensor[100:]))))
    for start, stop in [(0, CHUNK - 100), (5, 6), (CHUNK // 4, CHUNK // 2 + 7)]:
        with peer.mapped([Extent(start, stop)]) as flat:
            assert torch.equal(flat[start:stop], torch.arange(100, CHUNK, dtype=torch.int32)[start:stop])
            assert len(mapped()) > len(own)
        assert mapped() == own
    for start, stop in [(0, CHUNK), (CHUNK, CHUNK + 1)]:
        with pytest.raises(ValueError, match=f"{CHUNK - 100}"), peer.mapped([Extent(start, stop)]):
            pass
    with pytest.raises(StateError, check=has_code("already-mapped")), peer.mapped(), peer.mapped():
        pass
    assert mapped() == own
    peer.close()
    peer.close()
    with pytest.raises(StateError, check=has_code("peer-is-closed")), peer.mapped():
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
    assert rig.driver.calls == [*maps_a_chunk, "finish_stream", "cuMemUnmap"]


def test_chunk_that_came_back_is_found_by_peers(rig: Rig):
    buffer = rig.buffer(3 * CHUNK)
    peer = open_peer(buffer.export())
    for value in range(3):
        buffer.tensor.fill_(value)
        with peer.mapped() as flat:
            assert bool((flat == value).all())
        buffer.release(CHUNK)
        with pytest.raises(TransportError, check=has_code("chunks-are-released", "[1, 2]")), peer.mapped():
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
        pytest.raises(TransportError, check=has_code("chunks-are-released")),
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
    with pytest.raises(TransportError, check=has_code("chunks-are-released", "[0]")), peer.mapped():
        pass
    with pytest.raises(TransportError, check=has_code("owner-is-gone", handle.table.address)):
        open_peer(handle)


def test_chunk_that_went_before_its_descriptor_was_fetched(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    buffer = rig.buffer(2 * CHUNK)
    peer, fetch = open_peer(buffer.export()), device_pages.fetch

    def late(*arguments: Any) -> list[int]:
        buffer.release(0, CHUNK)
        return fetch(*arguments)

    monkeypatch.setattr(device_pages, "fetch", late)
    with pytest.raises(TransportError, check=has_code("owner-is-gone", "released")), peer.mapped():
        pass


@pytest.mark.parametrize("forks", [False, True])
def test_what_is_being_sent_is_closed_by_a_release_and_in_a_forked_child(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, forks: bool
):
    buffer, send, begins = rig.buffer(CHUNK), socket.send_fds, threading.Event()
    table, (descriptor,) = buffer.export().table, buffer._memory._chunks._descriptors.values()
    descriptor = weakref.ref(descriptor)

    def slow(*arguments: Any) -> int:
        begins.set()
        time.sleep(0.3)
        return send(*arguments)

    def ask() -> None:
        os.close(device_pages.fetch(table.address, [f"{table.token}/1"])[0])

    monkeypatch.setattr(socket, "send_fds", slow)
    peer = threading.Thread(target=ask)
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
    with pytest.raises(TransportError, check=has_code("owner-is-gone")), peer.mapped():
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
    own, destination = mapped(), {"dst": torch.zeros(4)}
    for value in range(2):  # the second time with memory that is new
        buffer.tensor.fill_(value)
        rig.driver.calls.clear()
        num_mapped = []
        for bucket in buckets:
            transport.run(bucket.index, bucket.transfers, {}, destination)
            assert destination["dst"].tolist() == [value] * 4
            num_mapped.append(len(mapped()) - len(own))
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
    assert len(mapped()) == len(own)
    transport.run(0, buckets[0].transfers, {}, destination)
    transport.trim()
    assert len(mapped()) == len(own)
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


def test_a_handle_of_what_is_not_in_its_range_is_no_message(rig: Rig):
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
            with pytest.raises(MessageError, check=has_code("malformed-handle")):
                replace(handle, **{name: value})

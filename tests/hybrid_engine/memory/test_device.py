"""Elastic buffers in device memory, over a model of the driver on the CPU; with the driver itself where a GPU is."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_engine.errors import DeviceMemoryError, StateError, TransportError
from hybrid_engine.memory import cuda_driver, device_pages, device_peers, elastic
from hybrid_engine.memory.cuda_driver import CudaDriver
from hybrid_engine.memory.elastic import (
    ElasticBuffer,
    allocate_elastic,
    export_tensor,
    exported_buffer_of,
    map_peer,
    open_peer,
)
from hybrid_engine.planning.plan import Link, Transfer
from hybrid_engine.records.layout import BufferId, Extent, Place
from hybrid_engine.transports import SharedMemoryTransport
from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.memory.fake_cuda_driver import GARBAGE, FakeCudaDriver
from tests.hybrid_engine.memory.test_elastic import num_open_fds

GRANULE = 65536
CHUNK = 2 * GRANULE


class Rig:
    """The model of the driver in the place of the driver; tensors over its memory are on the CPU."""

    def __init__(self, patch: pytest.MonkeyPatch, **settings: object) -> None:
        self.fake = FakeCudaDriver(granule=GRANULE, **settings)
        self.driver = CudaDriver(self.fake, torch.device("cpu"))
        patch.setattr(elastic, "driver_of", lambda ordinal: self.driver)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(device_pages, "CHUNK_NBYTES", CHUNK)

    def buffer(self, nbytes: int) -> ElasticBuffer:
        return ElasticBuffer(nbytes, torch.uint8, device="cuda:0")

    def assert_nothing_is_left(self) -> None:
        gc.collect()
        assert self.fake.leaks() == {"handles": 0, "mappings": 0, "ranges": 0}


@pytest.fixture
def rig() -> Iterator[Rig]:
    gc.collect()
    resource_tracker.ensure_running()  # multiprocessing's, which stays: it has a descriptor
    fds = num_open_fds()
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(patch)
        yield rig
        rig.assert_nothing_is_left()
    assert num_open_fds() == fds


def test_is_an_exportable_buffer_with_memory_for_all(rig: Rig):
    buffer = ElasticBuffer(CHUNK, torch.float32, device="cuda:0")
    assert buffer.tensor.shape == (CHUNK,) and buffer.tensor.dtype == torch.float32
    assert (buffer.nbytes, buffer.granularity, buffer.resident_nbytes()) == (4 * CHUNK, CHUNK, 4 * CHUNK)
    assert buffer.tensor.data_ptr() == buffer.address
    assert buffer.tensor.untyped_storage().nbytes() == 4 * CHUNK
    assert bool((buffer.tensor.view(torch.uint8) == GARBAGE).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_any_dtype_and_a_size_that_is_no_whole_granule(rig: Rig, dtype: torch.dtype):
    flat = allocate_elastic(12345, dtype, "cuda:0", "param")
    assert flat.dtype == dtype and flat.shape == (12345,) and not flat.view(torch.uint8).any()
    assert exported_buffer_of(flat[5:]).nbytes == 12345 * dtype.itemsize
    assert rig.fake.taken_nbytes() == -(-12345 * dtype.itemsize // GRANULE) * GRANULE


@settings(max_examples=25)
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
            assert rig.fake.mapped() == [(address + chunk * granule, sizes[chunk]) for chunk in sorted(contents)]
            assert buffer.resident_nbytes() == rig.fake.taken_nbytes() == sum(sizes.values())
            for chunk, value in contents.items():
                chunk_bytes = slice(chunk * granule, (chunk + 1) * granule)
                assert bool((buffer.tensor[chunk_bytes] == value).all())
                contents[chunk] = number
                buffer.tensor[chunk_bytes].fill_(number)
        del buffer
        rig.assert_nothing_is_left()


def test_released_range_must_not_be_touched():
    """The model ends the process, as CUDA ends its context."""
    code = """
import pytest, torch
from tests.hybrid_engine.memory.test_device import CHUNK, Rig
rig = Rig(pytest.MonkeyPatch())
buffer = rig.buffer(3 * CHUNK)
buffer.release(CHUNK, 2 * CHUNK)
print(buffer.tensor[:CHUNK].sum().item(), buffer.tensor[2 * CHUNK:].sum().item(), flush=True)
buffer.tensor[CHUNK:].sum()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == 2 * [str(GARBAGE * CHUNK)], done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_process_that_ends_with_live_tensors_ends_well():
    code = """
import pytest, torch
from tests.hybrid_engine.memory.test_device import CHUNK, Rig
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
        with pytest.raises(StateError, match="closed"):
            action(buffer)
    del buffer
    gc.collect()
    assert bool((view[2 * CHUNK :] == 3).all()) and exported_buffer_of(view) is None
    assert rig.fake.leaks()["mappings"] == 2


def test_restore_without_enough_memory_can_be_continued():
    with pytest.MonkeyPatch.context() as patch:
        rig = Rig(patch, total_nbytes=4 * CHUNK)
        buffer = rig.buffer(3 * CHUNK)
        buffer.export()
        buffer.release()
        other = rig.buffer(2 * CHUNK)
        with pytest.raises(DeviceMemoryError, match=r"cuMemCreate\(131072, 0\) on device 0 .*OUT_OF_MEMORY") as failure:
            buffer.restore()
        assert failure.value.is_out_of_memory
        del failure  # its traceback holds the buffer
        assert buffer.resident_nbytes() == 2 * CHUNK
        with pytest.raises(DeviceMemoryError):
            rig.buffer(CHUNK)
        assert rig.fake.leaks()["ranges"] == 2
        del other
        buffer.restore()
        assert buffer.resident_nbytes() == 3 * CHUNK
        del buffer
        rig.assert_nothing_is_left()


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess", "cuMemExportToShareableHandle"])
def test_a_call_that_fails_leaves_the_chunk_away(rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str):
    buffer = rig.buffer(3 * CHUNK)
    buffer.export()
    buffer.release()
    with monkeypatch.context() as broken:
        broken.setattr(rig.fake, call, lambda *_: (rig.fake.CUresult.CUDA_ERROR_NOT_SUPPORTED, 0))
        with pytest.raises(DeviceMemoryError, match=f"{call}.*NOT_SUPPORTED"):
            buffer.restore()
    assert buffer.resident_nbytes() == 0 and rig.fake.leaks()["handles"] == 0
    buffer.restore()
    assert buffer.resident_nbytes() == 3 * CHUNK


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(1, 2), (3, 4), (32, 32), (10 * 1024, 40), (1024, 32), (64 * 1024 + 1, 258)],
)
def test_chunks_are_few_and_small_buffers_take_little(nbytes: int, expected: int):
    mib = 2**20
    assert device_pages.chunk_nbytes_for(nbytes * mib, 2 * mib) == expected * mib


def test_the_model_keeps_the_rules(rig: Rig):
    """Each broken rule is an error, or the tests above would prove little."""
    fake, driver = rig.fake, rig.driver
    address, handle = driver.reserve(4 * GRANULE), driver.create(2 * GRANULE)
    for name, wrong in {
        "cuMemAddressReserve": lambda: driver.reserve(GRANULE + 1),
        "cuMemCreate": lambda: driver.create(GRANULE // 2),
        "cuMemMap": lambda: driver.map(address + 3 * GRANULE, 2 * GRANULE, handle),
        "cuMemUnmap": lambda: driver.unmap(address, 2 * GRANULE),
        "cuMemAddressFree": lambda: driver.unreserve(address, GRANULE),
        "cuMemRelease": lambda: driver.release(handle + 1),
    }.items():
        with pytest.raises(DeviceMemoryError, match=f"{name}.*INVALID_VALUE"):
            wrong()
    assert fake.cuMemMap(address, 2 * GRANULE, 0, handle, 0) == (fake.CUresult.CUDA_SUCCESS,)
    assert fake.mapped() == []  # no access yet
    driver.unmap(address, 2 * GRANULE)
    driver.map(address, 2 * GRANULE, handle)
    for wrong in (
        lambda: driver.map(address, 2 * GRANULE, handle),
        lambda: driver.unmap(address, GRANULE),
        lambda: driver.unreserve(address, 4 * GRANULE),
    ):
        with pytest.raises(DeviceMemoryError):
            wrong()
    driver.release(handle)
    assert fake.taken_nbytes() == 2 * GRANULE  # the mapping keeps it
    assert fake.leaks() == {"handles": 0, "mappings": 1, "ranges": 1}
    driver.unmap(address, 2 * GRANULE)
    driver.unreserve(address, 4 * GRANULE)


# The choice.


def test_without_the_driver_a_line_says_what_is_lost(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cuda_driver.driver_of.cache_clear()
    try:
        assert cuda_driver.driver_of(0) is None and cuda_driver.driver_of(0) is None
    finally:
        cuda_driver.driver_of.cache_clear()
    assert len(caplog.messages) == 1
    assert "cuda-bindings is missing (pip install cuda-bindings" in caplog.text and "ordinary tensors" in caplog.text


def test_without_the_driver_there_is_an_ordinary_tensor(monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr(elastic, "driver_of", lambda ordinal: None)
    monkeypatch.setattr(torch, "zeros", lambda *arguments, **options: made.append(options["device"]))
    allocate_elastic(10, torch.float32, "cuda:0", "param")
    assert made == [torch.device("cuda:0")]
    with pytest.raises(StateError, match="on CUDA they need pip install cuda-bindings"):
        ElasticBuffer(10, torch.float32, device="cuda:0")


def test_device_without_virtual_memory():
    fake = FakeCudaDriver(unsupported=frozenset({"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"}))
    reason = CudaDriver(fake, torch.device("cpu")).why_unsupported()
    assert reason == "device 0 has no CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"


def test_the_model_has_the_bindings_names():
    """Where cuda-bindings is installed (no GPU needed)."""
    api = pytest.importorskip("cuda.bindings.driver")
    fake = FakeCudaDriver()
    for name in dir(fake):
        if name.startswith(("cu", "CU")):
            assert hasattr(api, name), name
            for member in vars(getattr(fake, name)) if not callable(getattr(fake, name)) else ():
                assert hasattr(getattr(api, name), member), member
    properties = api.CUmemAllocationProp()
    properties.allocFlags.gpuDirectRDMACapable = 1
    properties.location.id = 3
    assert (properties.allocFlags.gpuDirectRDMACapable, properties.location.id) == (1, 3)
    assert {"CUDA_SUCCESS", "CUDA_ERROR_OUT_OF_MEMORY"} <= set(api.CUresult.__members__)


# Peers.


def test_peer_reads_and_keeps_nothing_mapped(rig: Rig):
    buffer = ElasticBuffer(CHUNK, torch.int32, device="cuda:0")
    buffer.tensor.copy_(torch.arange(CHUNK))
    own = rig.fake.mapped()
    peer = open_peer(pickle.loads(pickle.dumps(export_tensor(buffer.tensor[100:]))))
    for start, stop in [(0, CHUNK - 100), (5, 6), (CHUNK // 4, CHUNK // 2 + 7)]:
        with peer.mapped([Extent(start, stop)]) as flat:
            assert torch.equal(flat[start:stop], torch.arange(100, CHUNK, dtype=torch.int32)[start:stop])
            assert len(rig.fake.mapped()) > len(own)
        assert rig.fake.mapped() == own
    for start, stop in [(0, CHUNK), (CHUNK, CHUNK + 1)]:
        with pytest.raises(ValueError, match=f"of a tensor of {CHUNK - 100}"), peer.mapped([Extent(start, stop)]):
            pass
    with pytest.raises(StateError, match="mapped already"), peer.mapped(), peer.mapped():
        pass
    assert rig.fake.mapped() == own
    peer.close()
    peer.close()
    with pytest.raises(StateError, match="closed"), peer.mapped():
        pass
    del flat


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


def test_error_of_the_reader_is_not_hidden(rig: Rig):
    buffer = rig.buffer(3 * CHUNK)
    peer = open_peer(buffer.export())
    with pytest.raises(RuntimeError, match="mine"), peer.mapped():
        raise RuntimeError("mine")
    with peer.mapped():
        pass


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
        (1, r"not permitted\..*ptrace_scope=0.*SYS_PTRACE.*collective transport"),
        (9, "the owner released the chunk meanwhile"),
        (12, "Cannot allocate memory"),
    ],
)
def test_descriptor_that_cannot_be_copied(rig: Rig, monkeypatch: pytest.MonkeyPatch, code: int, message: str):
    buffer = rig.buffer(CHUNK)
    peer = open_peer(buffer.export())
    monkeypatch.setattr(device_peers, "_pidfd_getfd", lambda pidfd, descriptor: (-1, code))
    message = rf"pidfd_getfd of descriptor \d+ of process {os.getpid()}: {message}"
    with pytest.raises(TransportError, match=message), peer.mapped():
        pass


def read_in_a_process(connection) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Rig(patch)
        peer = open_peer(connection.recv())
        while connection.recv() == "read":
            try:
                with peer.mapped() as flat:
                    answer = flat.sum().item()
            except TransportError as error:
                answer = str(error)
            connection.send(answer)


def test_another_process_follows_the_owner(rig: Rig):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=read_in_a_process, args=(there,))
    process.start()
    buffer = ElasticBuffer(CHUNK, torch.float32, device="cuda:0")
    here.send(buffer.export())

    def read() -> object:
        here.send("read")
        return here.recv()

    for value in (1, 2):
        buffer.tensor.fill_(value)
        assert read() == value * CHUNK
        buffer.release(0, 2 * CHUNK)
        assert "released chunks [0, 1]" in read()
        buffer.restore()
    here.send("end")
    process.join()
    assert process.exitcode == 0
    for end in (here, there, process):
        end.close()


def test_the_transport_maps_a_peer_for_a_bucket_only(rig: Rig):
    buffer = ElasticBuffer(CHUNK, torch.float32, device="cuda:0")
    source, name = BufferId(0, "src"), "dst"
    own = rig.fake.mapped()
    transport = SharedMemoryTransport(1, {source: buffer.export()})
    destination = {name: torch.zeros(2)}
    places = Place(source, 7, (CHUNK // 4,)), Place(BufferId(1, name), 0, (1,))
    transfers = [Transfer("t", (2,), *places, 8, Link.HOST)]
    for value in (1, 2):
        buffer.tensor.fill_(value)
        transport.run(0, transfers, {}, destination)
        assert destination[name].tolist() == [value, value] and rig.fake.mapped() == own
        buffer.release()
        with pytest.raises(TransportError, match=r"bucket 5, phase read, peer 0.*released chunks"):
            transport.run(5, transfers, {}, destination)
        buffer.restore()
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


# With a GPU. Never run yet.


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    driver = cuda_driver.driver_of(0)
    assert driver is not None, "cuda-bindings is missing"
    numel = 3 * device_pages.CHUNK_NBYTES // 4 + 5
    free = torch.cuda.mem_get_info()[0]
    flat = allocate_elastic(numel, torch.float32, "cuda:0", "param")
    buffer = exported_buffer_of(flat)
    assert flat.is_cuda and not flat.any()
    flat.copy_(torch.arange(numel))
    address = flat.data_ptr()
    with open_peer(buffer.export()).mapped() as peer:
        assert torch.equal(peer, flat)
    kept = flat[: buffer.granularity // 4].clone()
    buffer.release(buffer.granularity)
    assert buffer.resident_nbytes() == buffer.granularity
    assert free - torch.cuda.mem_get_info()[0] < 2 * buffer.granularity + 2**21
    buffer.restore()
    assert flat.data_ptr() == address and torch.equal(flat[: kept.numel()], kept)
    flat.fill_(2)
    assert flat.sum().item() == pytest.approx(2 * numel)

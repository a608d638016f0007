"""Elastic buffers: stable addresses, released and restored pages, and peers on the host."""

from __future__ import annotations

import gc
import os
import time
from weakref import WeakSet

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import TransportError
from hybrid_engine.memory import descriptors
from hybrid_engine.memory.elastic import (
    ElasticBuffer,
    allocate_elastic,
    export_tensor,
    exported_buffer_of,
    reading,
)
from hybrid_engine.memory.host_pages import map_pages
from tests.harness.errors import refused

PAGE = os.sysconf("SC_PAGE_SIZE")


def num_open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("hybrid_engine." in line for line in maps)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.float8_e4m3fn]
)
def test_any_dtype_and_size_is_allocated(dtype: torch.dtype):
    buffer = ElasticBuffer(12345, dtype)  # no whole number of pages
    assert buffer.resident_nbytes() == 0
    assert not buffer.tensor.view(torch.uint8).any()
    assert buffer.tensor.dtype == dtype
    assert buffer.tensor.untyped_storage().nbytes() == buffer.nbytes == 12345 * dtype.itemsize


def whole_pages(start: int, stop: int, nbytes: int) -> tuple[int, int]:
    """Return the bytes of whole pages in a range; the buffer's partial last page counts too."""
    first = -(-start // PAGE) * PAGE
    last = nbytes if stop == nbytes else stop // PAGE * PAGE
    return first, max(first, last)


@given(data=st.data(), nbytes=st.integers(1, 5 * PAGE))
def test_a_release_takes_only_whole_pages_inside_and_restored_ones_are_zero(
    data: st.DataObject, nbytes: int
):
    buffer = ElasticBuffer(nbytes, torch.uint8)
    assert buffer.granularity == PAGE
    expected = torch.zeros(nbytes, dtype=torch.uint8)
    ends = st.just(nbytes) | st.integers(0, nbytes)
    for number in range(1, data.draw(st.integers(2, 5))):
        buffer.tensor.fill_(number)
        expected.fill_(number)
        start, stop = sorted(data.draw(st.tuples(ends, ends)))
        buffer.release(start, stop)
        first, last = whole_pages(start, stop, nbytes)
        num_released = -(-last // PAGE) - first // PAGE
        assert buffer.resident_nbytes() == (-(-nbytes // PAGE) - num_released) * PAGE
        expected[first:last] = 0
        for _ in range(2):
            buffer.restore(*sorted(data.draw(st.tuples(ends, ends))))
        assert torch.equal(buffer.tensor, expected)


def test_nothing_leaks():
    gc.collect()
    fds = num_open_fds()
    mappings = num_mappings()
    for _ in range(20):
        buffer = ElasticBuffer(PAGE, torch.float32)
        peer = map_pages(buffer.export())
        tensor = allocate_elastic(PAGE, torch.float32, "cpu", "grad")
    assert num_mappings() > mappings
    del buffer, peer, tensor  # the last references
    assert num_mappings() == mappings
    deadline = time.monotonic() + 10
    while num_open_fds() > fds and time.monotonic() < deadline:  # of the server
        time.sleep(0.01)
    assert num_open_fds() <= fds


def test_the_buffer_of_any_view_is_found():
    buffer = ElasticBuffer(100, torch.float32)
    parameter = torch.nn.Parameter(buffer.tensor[10:40].view(5, 6).t())
    assert exported_buffer_of(parameter) is buffer
    assert exported_buffer_of(torch.zeros(3)) is None
    assert exported_buffer_of(map_pages(buffer.export())) is None


def test_an_allocated_buffer_lives_as_long_as_its_storage():
    tensor = allocate_elastic(3 * PAGE, torch.uint8, torch.device("cpu"), "param")
    view = tensor[PAGE:]
    del tensor
    gc.collect()
    buffer = exported_buffer_of(view)
    view.fill_(1)
    assert buffer.resident_nbytes() == 2 * PAGE
    buffer.release()
    assert not view.any()
    with open("/proc/self/maps") as maps:
        assert "hybrid_engine.param." in maps.read()


def test_a_peer_maps_a_slice_with_another_dtype():
    buffer = ElasticBuffer(1000, torch.uint8)
    part = buffer.tensor[100:300].view(torch.int32)
    part.copy_(torch.arange(50))
    assert torch.equal(map_pages(export_tensor(part)), torch.arange(50, dtype=torch.int32))
    assert export_tensor(torch.zeros(3)) is None
    with pytest.raises(ValueError, match=r"\(3, 2\)"):  # not contiguous
        export_tensor(buffer.tensor[:6].view(2, 3).t())


def test_restored_host_pages_are_read_by_the_same_handle():
    buffer = ElasticBuffer(1000, torch.float32)
    handle = export_tensor(buffer.tensor[10:])
    for value in range(3):
        buffer.tensor.fill_(value)
        with reading(handle) as flat:
            assert flat.shape == (990,)
            assert bool((flat == value).all())
        buffer.release()
        buffer.restore()


def test_a_freed_buffer_cannot_be_mapped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_servers", WeakSet())  # this process may have other buffers
    buffer = ElasticBuffer(10, torch.float32)
    other = ElasticBuffer(10, torch.float32)
    handle = buffer.export()
    other_handle = other.export()
    map_pages(handle)
    del buffer
    map_pages(other_handle)
    with refused(TransportError, "owner-is-gone", "released"):
        map_pages(handle)
    del other
    with refused(TransportError, "owner-is-gone", other_handle.address):
        map_pages(other_handle)

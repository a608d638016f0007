"""Refusals of hardware, one test each: kernels on memory of others, forked children, unlike
collectives.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from hybrid_engine.errors import DeviceMemoryError
from hybrid_engine.memory.cuda_driver import driver_of
from hybrid_engine.memory.elastic import ElasticBuffer
from tests.harness.launch import REPO_ROOT
from tests.software_gpu.device import Reports, library
from tests.software_gpu.launcher import Machine, environment_of

NUMEL = 256
NOT_INITIALIZED = 3
_REGISTERED = """
import torch

class OnDevice:
    def __init__(self, tensor):
        pointer = (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = dict(
            shape=tuple(tensor.shape), typestr="<f4", data=pointer, version=3
        )

torch.cuda.init()
host = torch.ones(1024)
assert torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0) == 0
values = torch.as_tensor(OnDevice(host), device="cuda")
values.add_(1)
torch.cuda.synchronize()
assert torch.cuda.cudart().cudaHostUnregister(host.data_ptr()) == 0
assert torch.equal(host.cuda().cpu(), host), "copies need no registration"
print("registered")
values.add_(1)
torch.cuda.synchronize()
"""


# -- memory ----------------------------------------------------------------------------------------


@triton.jit
def copy_kernel(src, dst, numel: tl.constexpr):
    offsets = tl.arange(0, numel)
    tl.store(dst + offsets, tl.load(src + offsets))


def read_on(device: int, src: torch.Tensor) -> float:
    """Return the sum of the first elements, read by a kernel on this device."""
    torch.cuda.synchronize(src.device)
    with torch.cuda.device(device):
        dst = torch.empty(NUMEL, device="cuda")
        try:
            copy_kernel[(1,)](src, dst, NUMEL)
            return dst.sum().item()
        finally:
            torch.cuda.synchronize()


def grant_to_second(buffer: ElasticBuffer, flags: str) -> None:
    from cuda.bindings import driver as api

    right = api.CUmemAccessDesc()
    right.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    right.location.id = 1
    right.flags = getattr(api.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_{flags}")
    (code,) = api.cuMemSetAccess(buffer.address, buffer.granularity, [right], 1)
    assert code == api.CUresult.CUDA_SUCCESS


def test_mapped_memory_is_accessible_to_the_listed_devices_only() -> None:
    """The driver grants access per device; a buffer is mapped for its own device only."""
    buffer = ElasticBuffer(NUMEL, torch.float32, device="cuda:0")
    buffer.restore()
    flat = buffer.tensor.fill_(1)
    for flags in ("", "PROT_READWRITE", "PROT_NONE"):
        if flags:
            grant_to_second(buffer, flags)
        if flags == "PROT_READWRITE":
            assert read_on(1, flat) == NUMEL
        else:
            with pytest.raises(InterpreterError, match="illegal memory access"):
                read_on(1, flat)
        assert read_on(0, flat) == NUMEL, "the first device has no access"


def map_for_the_second() -> None:
    """Map memory of the first device for the second, and unmap it."""
    owner = driver_of(0)
    user = driver_of(1)
    assert owner is not None
    assert user is not None
    nbytes = owner.granularity()
    handle = owner.create(nbytes)
    address = user.reserve(nbytes)
    try:
        user.map(address, nbytes, handle)
        user.unmap(address, nbytes)
    finally:
        user.unreserve(address, nbytes)
        owner.release(handle)


def require_no_peers() -> None:
    """Check that only copies reach the other device, through the host."""
    ones = torch.ones(NUMEL, device="cuda:0")
    assert read_on(0, ones) == NUMEL
    with pytest.raises(InterpreterError, match="illegal memory access"):
        read_on(1, ones)
    with pytest.raises(DeviceMemoryError, match=r"cuMemSetAccess.*INVALID_DEVICE"):
        map_for_the_second()
    assert ones.to("cuda:1").sum().item() == NUMEL


def test_only_peers_read_each_other() -> None:
    assert read_on(1, torch.ones(NUMEL, device="cuda:0")) == NUMEL
    map_for_the_second()
    code = f"from {__name__} import require_no_peers; require_no_peers()"
    with environment_of(Machine(2, are_peers=False)) as variables:
        environment = {**os.environ, **variables}
        result = subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPO_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stderr


def test_a_kernel_reads_registered_host_memory_only(reports: Reports) -> None:
    """Uses another process, because the error persists until its end."""
    result = subprocess.run(
        [sys.executable, "-c", _REGISTERED], capture_output=True, text=True, check=False
    )
    assert result.stdout == "registered\n", result.stderr
    assert "illegal memory access" in result.stderr
    assert "ILLEGAL ADDRESS" in reports.new()
    assert result.returncode != 0


# -- forks -----------------------------------------------------------------------------------------


_IN_A_CHILD: Mapping[str, Callable[[], int]] = {
    "initialization": lambda: library().cuInit(0),
    "a kernel": lambda: library().software_gpu_begin_kernel(None, b"a kernel of a child"),
}


@pytest.mark.parametrize("name", _IN_A_CHILD)
def test_a_forked_child_has_no_driver(name: str) -> None:
    torch.zeros(1, device="cuda")
    child = os.fork()
    if not child:
        os._exit(_IN_A_CHILD[name]())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == NOT_INITIALIZED


def test_a_child_forked_before_the_first_use_has_a_driver() -> None:
    code = (
        "import os, torch\nif os.fork(): os.wait()\nprint(torch.ones(8, "
        "device='cuda').sum().item())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == 2 * "8.0\n"


# -- NCCL ------------------------------------------------------------------------------------------


INT32, FLOAT32 = 2, 7
SUM = 0
INVALID_USAGE = 5
SECONDS = 20


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


@contextmanager
def communicators(nccl: ctypes.CDLL) -> Iterator[tuple[ctypes.c_void_p, ctypes.c_void_p]]:
    """Yield the communicators of two ranks in this process."""
    pair = (ctypes.c_void_p(), ctypes.c_void_p())
    unique_id = UniqueId()
    assert nccl.ncclGetUniqueId(ctypes.byref(unique_id)) == 0
    assert nccl.ncclGroupStart() == 0
    for rank, communicator in enumerate(pair):
        with torch.cuda.device(rank):
            assert nccl.ncclCommInitRank(ctypes.byref(communicator), 2, unique_id, rank) == 0
    assert nccl.ncclGroupEnd() == 0
    yield pair
    for rank, communicator in enumerate(pair):
        nccl.ncclCommAbort(communicator)
        torch.cuda.synchronize(rank)


@pytest.mark.parametrize(
    ("others", "texts"),
    [
        ((1000, FLOAT32, SUM), ()),
        ((1000, INT32, SUM), ("1000 float32", "1000 int32")),
        ((999, FLOAT32, SUM), ("1000 float32", "999 float32")),
    ],
)
def test_a_mismatch_of_ranks_is_reported_to_both(
    others: tuple[int, int, int], texts: tuple[str, ...], reports: Reports
) -> None:
    nccl = ctypes.CDLL("libnccl.so.2")
    values = [torch.full((1000,), rank + 1.0, device=f"cuda:{rank}") for rank in range(2)]
    streams = [torch.cuda.Stream(rank) for rank in range(2)]
    for rank in range(2):
        torch.cuda.synchronize(rank)
    with communicators(nccl) as pair:
        for rank, (count, dtype, operation) in enumerate([(1000, FLOAT32, SUM), others]):
            address = ctypes.c_void_p(values[rank].data_ptr())
            stream = ctypes.c_void_p(streams[rank].cuda_stream)
            arguments = (
                address,
                address,
                ctypes.c_size_t(count),
                dtype,
                operation,
                pair[rank],
                stream,
            )
            assert nccl.ncclAllReduce(*arguments) == 0
        deadline = time.monotonic() + SECONDS
        while not all(stream.query() for stream in streams):
            assert time.monotonic() < deadline, "a hang"
        text = reports.new()
        for rank, communicator in enumerate(pair):
            error = ctypes.c_int()
            assert nccl.ncclCommGetAsyncError(communicator, ctypes.byref(error)) == 0
            assert error.value == (INVALID_USAGE if texts else 0)
            assert (f"rank {rank} calls" in text) == bool(texts)
        assert all(part in text for part in texts)
        assert texts or [flat.mean().item() for flat in values] == [3, 3]

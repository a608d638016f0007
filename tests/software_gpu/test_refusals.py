"""Refusals of hardware: kernels on ordinary host memory, untimed events, forked children."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest
import torch

from tests.software_gpu.device import Reports, library

_REGISTERED = """
import ctypes, torch

class OnDevice:
    def __init__(self, tensor):
        pointer = (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = dict(shape=tuple(tensor.shape), typestr="<f4", data=pointer, version=3)

torch.cuda.init()
host = torch.ones(1024)
assert torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0) == 0
values = torch.as_tensor(OnDevice(host), device="cuda")
assert values.data_ptr() == host.data_ptr()
"""
_TWICE = """
run()
torch.cuda.synchronize()
assert torch.cuda.cudart().cudaHostUnregister(host.data_ptr()) == 0
assert torch.equal(host.cuda().cpu(), host), "copies need no registration"
print("registered")
run()
torch.cuda.synchronize()
"""
_KERNELS = {
    "torch": """
def run():
    values.add_(1)
""",
    "triton": """
import triton, triton.language as tl

@triton.jit
def increment(values, numel: tl.constexpr):
    offsets = tl.arange(0, numel)
    tl.store(values + offsets, tl.load(values + offsets) + 1)

def run():
    increment[(1,)](values, 1024)
""",
    "nccl": """
class Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]

nccl, unique_id, communicator = ctypes.CDLL("libnccl.so.2"), Id(), ctypes.c_void_p()
assert nccl.ncclGetUniqueId(ctypes.byref(unique_id)) == 0
assert nccl.ncclCommInitRank(ctypes.byref(communicator), 1, unique_id, 0) == 0
address = ctypes.c_void_p(host.data_ptr())
FLOAT, SUM = 7, 0

def run():
    assert nccl.ncclAllReduce(address, address, ctypes.c_size_t(1024), FLOAT, SUM, communicator, None) == 0
""",
}


@pytest.mark.parametrize("name", [*_KERNELS])
def test_a_kernel_reads_registered_host_memory_only(name: str, reports: Reports) -> None:
    """Uses another process, because the error persists until its end."""
    code = f"{_REGISTERED}{_KERNELS[name]}{_TWICE}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "registered\n", result.stderr
    assert "illegal memory access" in result.stderr
    assert "ILLEGAL ADDRESS" in reports.new()
    assert result.returncode != 0


INVALID_HANDLE = 400
NOT_READY = 600
NOT_INITIALIZED = 3
UNTIMED = 2
"""Flag of an event without time."""


def new_event(flags: int, *, is_recorded: bool) -> ctypes.c_void_p:
    event = ctypes.c_void_p()
    assert library().cuEventCreate(ctypes.byref(event), flags) == 0
    if is_recorded:
        assert library().cuEventRecord(event, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)) == 0
    return event


@pytest.mark.parametrize(
    ("flags", "is_recorded", "is_waited_for", "error"),
    [
        (0, True, True, 0),
        (0, True, False, NOT_READY),
        (0, False, True, INVALID_HANDLE),
        (UNTIMED, True, True, INVALID_HANDLE),
    ],
)
def test_time_between_events(flags: int, is_recorded: bool, is_waited_for: bool, error: int) -> None:
    first = new_event(0, is_recorded=True)
    second = new_event(flags, is_recorded=is_recorded)
    if is_waited_for:
        torch.cuda.synchronize()
    milliseconds = ctypes.c_float(-1)
    assert library().cuEventElapsedTime_v2(ctypes.byref(milliseconds), first, second) == error
    assert (milliseconds.value >= 0) == (not error)
    torch.cuda.synchronize()
    for event in (first, second):
        library().cuEventDestroy_v2(event)


def error_of_runtime() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    return int(ctypes.CDLL("libcudart.so.13").cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)))


def error_of_kernel() -> int:
    return int(library().software_gpu_begin_kernel(None, b"a kernel of a child"))


_IN_A_CHILD: Mapping[str, Callable[[], int]] = {
    "initialization": lambda: library().cuInit(0),
    "a call of the driver": lambda: library().cuCtxSynchronize(),
    "a call of the runtime": error_of_runtime,
    "a kernel": error_of_kernel,
}


@pytest.mark.parametrize("name", [*_IN_A_CHILD])
def test_a_forked_child_has_no_driver(name: str) -> None:
    torch.zeros(1, device="cuda")
    child = os.fork()
    if not child:
        os._exit(_IN_A_CHILD[name]())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == NOT_INITIALIZED


def test_a_child_forked_before_the_first_use_has_a_driver() -> None:
    code = "import os, torch\nif os.fork(): os.wait()\nprint(torch.ones(8, device='cuda').sum().item())\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == 2 * "8.0\n"

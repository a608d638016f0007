"""Private names of torch used below the backends, and a context with torch's default modes.

Each backend has a similar module `internals` for its library. Tests look up every name in the
installed version, so after an upgrade a missing name is reported together with its reason.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as tree_leaves

TensorDict = dict[str, torch.Tensor]
"""Tensors by name."""

Tensors = Mapping[str, torch.Tensor]
"""Tensors by name, which stay the same ones."""

_MAX_GROUP_CALLS = 8
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True)
class PrivateName:
    """Undocumented name of a library.

    Attributes:
        target: ``module:attr.path``; the attribute may be set by the class's constructor.
        reason: purpose for which no public name exists.
        since: first version of the library with the name, if a supported version lacks it.
    """

    target: str
    reason: str
    since: str = ""


PRIVATE_NAMES = (
    PrivateName(
        "torch.distributed.distributed_c10d:_world.pg_map",
        "lists the process groups that are alive: destroying one twice, as after the end of the "
        "job, raises, and destroying one in a forked child waits for threads of its parent",
    ),
    PrivateName(
        "torch.distributed.distributed_c10d:_get_default_store",
        "returns the job's store, by which ranks exchange failures while they wait; publicly it is "
        "available only to the code that created the process group",
    ),
    PrivateName(
        "torch.distributed:ProcessGroup._get_backend",
        "returns the owner of a group's communicator, which can release its memory; the group "
        "itself has no such method",
    ),
    PrivateName(
        "torch.distributed:ProcessGroup._end_coalescing",
        "ends a batch of messages that failed to start, which torch leaves open: later calls of "
        "the thread, in any group, would wait in NCCL for the end of the batch",
    ),
    PrivateName(
        "torch._C._distributed_c10d:Backend.suspend",
        "releases the memory of an NCCL communicator; looked up before use, because an older torch "
        "lacks it",
    ),
    PrivateName(
        "torch:UntypedStorage._cdata",
        "identifies a storage: data_ptr() is 0 for all meta and released storages, and Python "
        "objects are transient",
    ),
    PrivateName(
        "torch._C:_construct_storage_from_data_pointer",
        "makes a storage over memory that torch did not allocate, on any device, also where no "
        "memory is mapped yet; torch.from_blob exists in C++ only, and other ways read the address",
    ),
    PrivateName(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
        "detects tensors that only wrap others: their storage does not contain the data",
    ),
    PrivateName(
        "torch.utils._python_dispatch:TorchDispatchMode",
        "intercepts the operations of a loader, a constructor or a conversion",
    ),
    PrivateName(
        "torch.utils._pytree:tree_leaves",
        "lists the tensors among an operation's arguments, and in a layer's cache",
    ),
    PrivateName(
        "torch:Tensor._version",
        "counts the writes to a tensor: writing equal bytes leaves no other trace",
    ),
    PrivateName(
        "torch:_foreach_copy_",
        "copies many boxes in one call: on the CPU without Python in between, on CUDA in one "
        "kernel if possible",
    ),
    PrivateName(
        "torch:_int_mm",
        "multiplies 8-bit integers exactly, on CUDA at the speed of memory, as no public operator "
        "does",
    ),
)


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """Return True if a process group exists and was not destroyed; False for None."""
    return group in dist.distributed_c10d._world.pg_map


def nccl_of(group: dist.ProcessGroup | None) -> Any:
    """Return the NCCL backend of a process group; None without one, or for a destroyed group."""
    if group is None or not is_alive(group) or "nccl" not in dist.get_backend_config(group):
        return None
    return group._get_backend(torch.device("cuda"))


@contextmanager
def without_watchdog() -> Iterator[None]:
    """Let NCCL groups created inside the block report errors only to waiting threads.

    By default a thread of torch, the watchdog, looks for errors of NCCL as well. If it finds an
    error first it ends the process, before training state is back on the device. Groups read the
    variable once, when they are created.
    """
    previous = os.environ.get(_ERROR_HANDLING)
    try:
        os.environ[_ERROR_HANDLING] = "0"
        yield
    finally:
        os.environ.pop(_ERROR_HANDLING, None)
        if previous is not None:
            os.environ[_ERROR_HANDLING] = previous


def abort_group(group: dist.ProcessGroup) -> None:
    """Abort operations of an NCCL group, so that ranks stop waiting for them. Never raises."""
    with suppress(RuntimeError):
        group.abort()


def end_batch(group: dist.ProcessGroup, device: torch.device) -> None:
    """End a batch of NCCL messages that failed to start. Never raises: the failure is known.

    torch has left one or several nested groups of calls open.
    """
    # The end of the outermost group raises the error of its call, which leaves the loop.
    with suppress(RuntimeError):
        for _ in range(_MAX_GROUP_CALLS):
            group._end_coalescing(device)


def can_suspend() -> bool:
    """Return True if the backends of this torch can release the memory of communicators."""
    return hasattr(torch._C._distributed_c10d.Backend, "suspend")


def num_writes(tensor: torch.Tensor) -> int:
    """Return how often torch has written to a tensor or a view of it; 0 if torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def groups_and_stores() -> dict[dist.ProcessGroup, Any]:
    """Return every process group of torch that is alive, with its backend and store."""
    return dict(dist.distributed_c10d._world.pg_map)


def job_store() -> dist.Store:
    """Return a new connection to the store of the default process group.

    Waits on other connections do not block it.
    """
    return _get_default_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that is unique among existing storages, with memory or without."""
    return storage._cdata


def storage_over(address: int, nbytes: int, device: torch.device) -> Any:
    """Return a storage over memory that torch did not allocate, and will not free."""
    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


def copy_each(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its destination, casting; on CUDA the copies are queued."""
    torch._foreach_copy_(destinations, sources)  # type: ignore[arg-type]  # stub: lists


def int8_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return [m, k] int8 times [k, n] int8 as [m, n] int32, which is exact for k below 2**17.

    On CUDA, cuBLAS requires m > 16, k and n divisible by 8, and `right` in column-major order.
    """
    return torch._int_mm(left, right)


def make_workspaces(device: torch.device) -> None:
    """Make torch allocate the cuBLAS workspaces of this thread and stream, which it keeps forever.

    Otherwise the first matrix product allocates them from the memory pool in use at that time, and
    kernels of later products write to them even after the pool was released.
    """
    ones = torch.ones(32, 32, dtype=torch.bfloat16, device=device)
    torch.mm(ones, ones)  # cuBLAS
    torch.addmm(ones[0], ones, ones)  # cuBLASLt, which may have a separate workspace
    int8_product(ones.to(torch.int8), ones.to(torch.int8).t())


def wrapped_tensors(tensor: torch.Tensor) -> TensorDict:
    """Return the inner tensors of a wrapper subclass, by attribute; empty for other tensors."""
    wrapper: Any = tensor
    names = wrapper.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(wrapper) else ()
    return {name: getattr(tensor, name) for name in names}


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Disable `torch.autocast` and `torch.inference_mode`; use torch's default dtype and device.

    Code whose result must not depend on the caller's modes runs inside: vLLM's construction and
    generation, sums of weights, and a switch, whose tensors outlive the caller's modes. The
    caller's modes are restored at the end. Also usable as a decorator.
    """
    with ExitStack() as ends:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                ends.enter_context(torch.autocast(device_type, enabled=False))
        if torch.is_inference_mode_enabled():
            ends.enter_context(torch.inference_mode(False))
        if torch.get_default_device().type != "cpu":
            ends.enter_context(torch.device("cpu"))
        if (dtype := torch.get_default_dtype()) is not torch.float32:
            ends.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        yield


@contextmanager
def torch_modes_kept() -> Iterator[None]:
    """Restore torch's default dtype, device and gradient mode, and the filters of warnings.

    A caller's code sets them. A default device is restored to the caller's own, or to none.
    """
    # `catch_warnings` would forget which warnings were shown, so that each comes again.
    filters = warnings.filters[:]
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        warnings.filters = filters
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)

"""Private names of torch below the backends, the record of such a name, and torch's modes as in a new process.

Each backend has a module `internals` of the same kind for its library. Tests look every name up in the installed
version, so an upgrade that lost one says so at once, by name and reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True)
class PrivateName:
    """A name that a library does not document.

    Attributes:
        target: ``module:attr.path``; the attribute may be one that the class's constructor sets.
        reason: what it is needed for, where no public name serves.
        since: the version of the library that brought it, if a supported one lacks it.
    """

    target: str
    reason: str
    since: str = ""


PRIVATE_NAMES = (
    PrivateName(
        "torch.distributed.distributed_c10d:_world.pg_map",
        "says which process groups are alive: destroying one that is gone, as after the job's end, raises, and what "
        "happens to one in a forked child waits for threads of its parent",
    ),
    PrivateName(
        "torch.distributed.distributed_c10d:_get_default_store",
        "the job's store, through which ranks hear of each other while they wait; whoever made the process group was "
        "the only one to get it by a public name",
    ),
    PrivateName(
        "torch:UntypedStorage._cdata",
        "identifies a storage: data_ptr() is 0 for all meta and released storages, and Python objects are transient",
    ),
    PrivateName(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
        "tells tensors that only wrap others, whose own storage is not where the data is",
    ),
    PrivateName(
        "torch:Tensor._version",
        "counts the writes to a tensor: one that writes the bytes that are there leaves no other trace",
    ),
    PrivateName(
        "torch:_foreach_copy_",
        "copies many boxes in one call: on the CPU without Python in between, on CUDA in one kernel where it can",
    ),
    PrivateName(
        "torch:_int_mm",
        "multiplies 8-bit integers exactly, on CUDA as fast as memory gives them: no public operator does",
    ),
)


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """Whether a process group exists and was not destroyed; False for None."""
    return group in dist.distributed_c10d._world.pg_map


def num_writes(tensor: torch.Tensor) -> int:
    """Return how often torch has written a tensor, or a view of it; 0 for those of which it does not count that."""
    return 0 if tensor.is_inference() else tensor._version


def groups_and_stores() -> dict[dist.ProcessGroup, Any]:
    """Every process group of torch's that is alive, with its backend and store."""
    return dict(dist.distributed_c10d._world.pg_map)


def job_store() -> dist.Store:
    """A connection of its own to the store of the default process group: waits over others do not hold it up."""
    return _get_default_store().clone()  # type: ignore[attr-defined]  # not in torch's stubs


def storage_id(storage: torch.UntypedStorage) -> int:
    """Number that tells a storage from every other that exists now, with memory or without."""
    return storage._cdata


def copy_each(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into the destination at its position, casting; on CUDA the copies are queued."""
    torch._foreach_copy_(destinations, sources)  # type: ignore[arg-type]  # its stub wants lists or tuples


def int8_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[m, k] int8 times [k, n] int8: [m, n] int32, exact below k = 2**17.

    On CUDA m > 16, 8 divides k and n, and `right` is stored column by column: cuBLAS supports no other layout.
    """
    return torch._int_mm(left, right)


def make_workspaces(device: torch.device) -> None:
    """Have torch take the memory that it gives cuBLAS on this thread and stream, unless it has; it keeps it for good.

    Otherwise it is taken at the first matrix product, from the memory pool that is in use just then. Kernels of later
    products write to it, also once the pool has no memory any more.
    """
    ones = torch.ones(32, 32, dtype=torch.bfloat16, device=device)
    torch.mm(ones, ones)  # cuBLAS
    torch.addmm(ones[0], ones, ones)  # cuBLASLt, which may have a workspace of its own
    int8_product(ones.to(torch.int8), ones.to(torch.int8).t())


def wrapped_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """By attribute, the tensors that hold the data of a tensor subclass which only wraps them; empty for all others."""
    wrapper: Any = tensor
    names = wrapper.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(wrapper) else ()
    return {name: getattr(tensor, name) for name in names}


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Compute as outside `torch.autocast` and `torch.inference_mode`, with the default dtype and device of torch.

    For what must give the same bits wherever it is called: vLLM's construction and its answers, sums of weights, and a
    switch, whose tensors outlive the caller's modes. A decorator too. What holds outside is back at the end.
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

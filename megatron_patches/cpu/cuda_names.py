"""Substitutes for CUDA names that let code run on CPU, visible to megatron alone.

Code names CUDA in two ways:

- through the module: ``torch.cuda.current_device()``, ``torch.zeros(1, device="cuda")``.
  Megatron's modules get `torch_on_cpu` as their global ``torch``, a namespace that forwards all
  but a few names.
- through a tensor: ``tensor.cuda()``, ``tensor.type() == "torch.cuda.FloatTensor"``. A namespace
  cannot intercept these, so the few functions that use them run under `CudaSpelling`.

The few `torch.distributed` calls that gloo does not support (torch 2.13) are built from others.
torch itself is never changed: other code in this process imports the original.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron_patches.errors import CpuUnsupportedError
from megatron_patches.patch import Function, around


def new_group(*args: Any, **kwargs: Any) -> Any:
    """Create a group without NCCL: its options are ignored, and "nccl" is the default backend."""
    if kwargs.get("backend") == "nccl":
        kwargs["backend"] = None
    kwargs["pg_options"] = None
    return dist.new_group(*args, **kwargs)


def all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Run `dist.all_gather`, also of tensors that differ in their first dim (MoE dispatch).

    NCCL allows these. Uneven parts are padded to the longest, which takes group size times the
    longest part in extra memory.
    """
    longest = max(part.shape[0] if part.dim() else 0 for part in tensor_list)
    if all(part.shape == tensor_list[0].shape for part in tensor_list):
        return dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)
    _refuse_async(async_op, "all_gather")
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    received = [torch.empty_like(padded) for _ in tensor_list]
    dist.all_gather(received, padded, group=group)
    for part, full in zip(tensor_list, received, strict=True):
        part.copy_(full[: part.shape[0]])
    return None


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Run `dist.reduce_scatter`, also of parts that differ in their first dim.

    Uneven parts are all-reduced as one tensor, of which this rank keeps its part. That takes the
    volume of all parts in extra memory.
    """
    if all(part.shape == input_list[0].shape for part in input_list):
        return dist.reduce_scatter(output, list(input_list), op=op, group=group, async_op=async_op)
    _refuse_async(async_op, "reduce_scatter")
    reduced = torch.cat(list(input_list))
    dist.all_reduce(reduced, op=op, group=group)
    output.copy_(reduced.split([part.shape[0] for part in input_list])[dist.get_rank(group)])
    return None


def _refuse_async(async_op: bool, name: str) -> None:
    if async_op:
        raise CpuUnsupportedError(f"{name} of uneven parts on gloo requires async_op=False")


OVERRIDES = {"new_group": new_group, "all_gather": all_gather, "reduce_scatter": reduce_scatter}
"""Names of `torch.distributed` that are replaced for megatron's modules."""


CPU = torch.device("cpu")

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
"""Functions of torch that take a device."""


class Namespace(ModuleType):
    """Module with some names overridden.

    Reads return the override if there is one, else the live attribute of `base`. Writes go to
    `base`.
    """

    def __init__(self, base: ModuleType, overrides: Mapping[str, Any]) -> None:
        super().__init__(base.__name__, f"{base.__name__}, as megatron sees it on CPU")
        vars(self).update(overrides)
        vars(self)["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._base, name, value)

    def __dir__(self) -> Iterable[str]:
        return dir(self._base)


class CudaSpelling(TorchFunctionMode):
    """Mode in which CPU tensors have the names of CUDA tensors.

    ``tensor.cuda(...)`` returns the tensor itself and ``tensor.type()`` returns
    ``torch.cuda.…Tensor``. Active in the current thread, between enter and exit; nesting has no
    further effect.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return f"torch.cuda.{result.rpartition('.')[2]}"
        return result


@around
def under_cuda_spelling(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Run `original` under `CudaSpelling`."""
    with CudaSpelling():
        return original(*args, **kwargs)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class CpuEvent:
    """Event that has already occurred."""

    __init__ = record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True


class Stream:
    """Stream of a CPU, on which work is complete when the call returns."""

    __init__ = wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        return event or CpuEvent()

    def query(self) -> bool:
        return True


_THE_STREAM = Stream()


def _the_stream(device: Any = None) -> Stream:
    return _THE_STREAM


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """Return the state of the CPU's only generator, uint8 of shape (5056,)."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the CPU's generator."""
    # `torch.manual_seed` would also seed CUDA's.
    torch.default_generator.manual_seed(int(seed))


def _device_context(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _to_cpu_device(device: Any) -> Any:
    """Return `device`, or the CPU if it names CUDA."""
    # A bare index is a CUDA device.
    if isinstance(device, int):
        return CPU
    if isinstance(device, (str, torch.device)) and str(device).startswith("cuda"):
        return CPU
    return device


@around
def _create_on_cpu(factory: Function, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("device") is not None:
        kwargs["device"] = _to_cpu_device(kwargs["device"])
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return factory(*args, **kwargs)


def _device_on_cpu(device: Any, index: int | None = None) -> torch.device:
    """Return `torch.device` of the arguments, with the CPU in place of CUDA."""
    redirected = _to_cpu_device(device)
    if redirected is CPU:
        return CPU
    return torch.device(redirected) if index is None else torch.device(redirected, index)


def _autocast_on_cpu(device_type: str, *args: Any, **kwargs: Any) -> torch.autocast:
    return torch.autocast(str(_to_cpu_device(device_type)), *args, **kwargs)


def _cuda_on_cpu() -> Namespace:
    rng = {
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": manual_seed,
    }
    seeds = {
        **rng,
        "manual_seed_all": manual_seed,
        "seed": _nothing,
        "initial_seed": torch.initial_seed,
    }
    streams = {
        "Stream": Stream,
        "Event": CpuEvent,
        "stream": _device_context,
        "current_stream": _the_stream,
        "default_stream": _the_stream,
        "set_stream": _nothing,
    }
    nothing = (
        "set_device",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "ipc_collect",
        "init",
        "_lazy_init",
    )
    overrides = {
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "memory_stats": lambda device=None: defaultdict(int),
        "device": _device_context,
        "nvtx": SimpleNamespace(
            range_push=_nothing, range_pop=_nothing, mark=_nothing, range=_device_context
        ),
        "random": Namespace(torch.cuda.random, seeds),
        **seeds,
        **streams,
        **dict.fromkeys(nothing, _nothing),
    }
    return Namespace(torch.cuda, overrides)


def torch_on_cpu(original: ModuleType) -> ModuleType | Namespace:
    """Return the global ``torch`` of megatron's modules.

    Another object of that name (a submodule) is returned unchanged.
    """
    if original is not torch:
        return original
    overrides: dict[str, Any] = {
        name: _create_on_cpu(getattr(original, name)) for name in _FACTORIES
    }
    overrides["cuda"] = _cuda_on_cpu()
    overrides["device"] = _device_on_cpu
    overrides["autocast"] = _autocast_on_cpu
    overrides["distributed"] = Namespace(original.distributed, OVERRIDES)
    return Namespace(original, overrides)

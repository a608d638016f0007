"""Megatron's flat parameter and gradient buffers: contents and allocation.

Megatron's DDP keeps the parameters and gradients of one dtype in one or two flat 1-D tensors per
`_ParamAndGradBuffer`. Each parameter is a view, in reverse order of the model, with padding between
and after them:

    param_data  | p9 |pad| p8 |pad..| p7 ...|     distributed optimizer only
    grad_data   | g9 |pad| g8 |pad..| g7 ...|     always
                0    start   end                  units: elements

`iter_buffers` reads the buffers; `set_buffer_allocator` replaces the allocation of the flat
tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.overrides import TorchFunctionMode

from megatron_patches.errors import BufferAllocationError, UnsupportedModelError
from megatron_patches.patch import Function, Patch, around, hooks_applied

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

BufferKind = Literal["dense", "expert"]
TensorKind = Literal["param", "grad"]


@dataclass(frozen=True, eq=False)
class ParamSlot:
    """Location of a parameter in its buffer.

    Attributes:
        name: from ``chunk.named_parameters()``, with the wrappers' ``module.`` prefixes.
        param: the live parameter; with the distributed optimizer a view of
            ``param_data[start:end]``.
        start: first element within the buffer.
        end: the element after the last; ``end - start == param.numel()``.
    """

    name: str
    param: torch.nn.Parameter
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class BufferRecord:
    """`_ParamAndGradBuffer` of a model chunk, with its live tensors.

    Attributes:
        chunk_index: position in the list of model chunks (the virtual pipeline stage).
        kind: "dense", or "expert" for parameters that expert parallelism splits (reduced over
            another group).
        index: position among the buffers of this chunk and kind (one per parameter dtype).
        param_data: 1-D; None without the distributed optimizer and with
            `reuse_grad_buf_for_mxfp8_param_ag`, where every parameter owns its storage.
        grad_data: 1-D with as many elements, including padding. `param.main_grad` are its views,
            except for `extra_grads`.
        slots: in buffer order. Gaps between them are padding, which the model never reads.
        extra_grads: gradients that Megatron accumulates in float32 outside `grad_data`, if
            configured (since 0.17: `param_name_patterns_for_fp32_local_accumulation`). They then
            are `param.main_grad`.
    """

    chunk_index: int
    kind: BufferKind
    index: int
    param_data: torch.Tensor | None
    grad_data: torch.Tensor
    slots: tuple[ParamSlot, ...]
    extra_grads: tuple[torch.Tensor, ...]


def iter_buffers(model_chunks: Sequence[DistributedDataParallel]) -> list[BufferRecord]:
    """Return a record of every buffer, by chunk, dense before expert, then by position.

    Only reads, needs no patch, and may be called at any time after DDP has wrapped the chunks.

    Raises:
        UnsupportedModelError: a chunk is not wrapped in megatron's DistributedDataParallel.
    """
    from megatron.core.distributed import DistributedDataParallel

    wrong = [
        f"chunk {index} is a {type(chunk).__name__}"
        for index, chunk in enumerate(model_chunks)
        if not isinstance(chunk, DistributedDataParallel)
    ]
    if wrong:
        raise UnsupportedModelError(
            f"{'; '.join(wrong)}: only chunks wrapped in megatron.core's DistributedDataParallel "
            "have flat buffers"
        )
    records = []
    for chunk_index, chunk in enumerate(model_chunks):
        names = {param: name for name, param in chunk.named_parameters()}
        for index, buffer in enumerate(chunk.buffers):
            records.append(_buffer_record(chunk_index, "dense", index, buffer, names))
        for index, buffer in enumerate(chunk.expert_parallel_buffers):
            records.append(_buffer_record(chunk_index, "expert", index, buffer, names))
    return records


def _buffer_record(
    chunk_index: int,
    kind: BufferKind,
    index: int,
    buffer: Any,
    names: Mapping[torch.nn.Parameter, str],
) -> BufferRecord:
    slots = [
        ParamSlot(names[param], param, start, end)
        for param, (start, end, _) in buffer.param_index_map.items()
    ]
    slots.sort(key=lambda slot: slot.start)
    # megatron-core before 0.17 has none.
    extra_grads = tuple(getattr(buffer, "extra_main_grads", ()))
    param_data = buffer.param_data
    # Otherwise a parameter at another address was moved by somebody, which a switch refuses.
    if param_data is not None and buffer.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
        first = param_data.data_ptr() + slots[0].start * param_data.element_size()
        if data_of(slots[0].param).data_ptr() != first:
            param_data = None
    return BufferRecord(
        chunk_index, kind, index, param_data, buffer.grad_data, tuple(slots), extra_grads
    )


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose memory holds the data, which usually is `tensor` itself.

    Transformer Engine's `GroupedTensor`, several experts in one parameter, has no memory and wraps
    a flat tensor. Its quantised tensors wrap their elements, uint8.
    """
    for attribute in ("rowwise_data", "_rowwise_data", "_data"):
        wrapped = getattr(tensor, attribute, None)
        if isinstance(wrapped, torch.Tensor):
            return wrapped
    return tensor


class BufferAllocator(Protocol):
    """Allocator of the flat tensors of Megatron's buffers.

    `_ParamAndGradBuffer.__init__` calls it once per flat tensor: "param" (only with the distributed
    optimizer), then "grad". It returns a contiguous 1-D tensor of `numel` elements of `dtype` on
    `device`, filled with zeros. Padding is reduced and gathered like data, but zeros are not
    checked, because a check would touch every page. Megatron keeps the tensor for the life of the
    model and makes all its views from it.
    """

    def __call__(
        self, numel: int, dtype: torch.dtype, device: torch.device, kind: TensorKind
    ) -> torch.Tensor: ...


_allocator: BufferAllocator | None = None


def set_buffer_allocator(allocate: BufferAllocator | None) -> None:
    """Use `allocate` for the flat tensors of every buffer built from now on.

    None restores Megatron's own allocation. Existing buffers do not change.

    Raises:
        BufferAllocationError: the "hooks" patches are not applied, so Megatron would not call
            `allocate`.
    """
    global _allocator
    if allocate is not None and not hooks_applied():
        raise BufferAllocationError(
            "Megatron would not call the allocator: call megatron_patches.apply() first"
        )
    _allocator = allocate


@contextlib.contextmanager
def buffer_allocator(allocate: BufferAllocator) -> Iterator[None]:
    """Set a buffer allocator within a with block, around the construction of DDP."""
    before = _allocator
    set_buffer_allocator(allocate)
    try:
        yield
    finally:
        set_buffer_allocator(before)


class _Redirected(TorchFunctionMode):
    """Redirection of a buffer's flat ``torch.zeros`` to the allocator during its construction."""

    def __init__(self, buffer: Any, allocate: BufferAllocator) -> None:
        super().__init__()
        self._buffer = buffer
        self._allocate = allocate
        self._allocated: list[TensorKind] = []
        self._is_shared = False

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Only the flat tensors of a buffer have exactly `numel` elements, passed by position.
        if func is torch.zeros and args == (getattr(self._buffer, "numel", None),):
            # Megatron passes the number of the current GPU.
            device = kwargs["device"]
            kind = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            return self._flat_tensor(kwargs["dtype"], kind)
        return func(*args, **kwargs)

    def _expected(self) -> list[TensorKind]:
        # Without the distributed optimizer every parameter owns its storage.
        has_params = self._buffer.ddp_config.use_distributed_optimizer and not self._is_shared
        return ["param", "grad"] if has_params else ["grad"]

    def _flat_tensor(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._buffer.nccl_ub:
            raise BufferAllocationError(
                "nccl_ub registers megatron's own allocation; turn it off to use an allocator"
            )
        if not self._allocated and self._buffer.param_dtype is torch.uint8:
            # MXFP8 parameters own their storage, and are gathered in the memory of gradients.
            self._is_shared = dtype is not torch.uint8
        if len(self._allocated) == len(self._expected()):
            raise BufferAllocationError(
                f"unexpected flat tensor of {self._buffer.numel} elements of {dtype} after "
                f"{self._allocated}: this buffer cannot use an allocator"
            )
        kind = self._expected()[len(self._allocated)]
        tensor = self._allocate(self._buffer.numel, dtype, device, kind)
        check_flat(
            f"the buffer allocator, for {kind} data,", tensor, self._buffer.numel, dtype, device
        )
        self._allocated.append(kind)
        return tensor

    def check_complete(self) -> None:
        """Raise BufferAllocationError unless the allocator has made all flat tensors."""
        if self._allocated != self._expected():
            raise BufferAllocationError(
                f"megatron allocated {self._allocated} through the allocator, expected "
                f"{self._expected()}"
            )


def check_flat(
    allocator: str, tensor: torch.Tensor, numel: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise BufferAllocationError unless `tensor` fits the request.

    Args:
        allocator: subject of the message.
        tensor: tensor that it returned.
        numel, dtype, device: of the request.
    """
    returned = (tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.is_contiguous())
    expected = ((numel,), dtype, device.type, True)
    if returned != expected:
        raise BufferAllocationError(
            f"{allocator} returned (shape, dtype, device, contiguous) {returned}, expected "
            f"{expected}"
        )


@around
def _construct(original: Function, buffer: Any, *args: Any, **kwargs: Any) -> None:
    if _allocator is None:
        original(buffer, *args, **kwargs)
        return
    with _Redirected(buffer, _allocator) as redirected:
        original(buffer, *args, **kwargs)
    redirected.check_complete()


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="hooks.buffer_allocator",
        group="hooks",
        target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__",
        reason="puts the flat buffers into chosen memory (elastic, shared) at a fixed address",
        remove_when="megatron-core takes an allocator for its parameter and gradient buffers",
        build=_construct,
    ),
)

"""State of Megatron's optimizers: its tensors, step counts, and a flat memory for it.

Megatron optimizer            parameters of the torch optimizer  `optimizer_tensors` lists
DistributedOptimizer, bf16    fp32 copies of this rank's shards  main_param + moments
DistributedOptimizer, fp32    views of the model's parameters    moments
Float16Optimizer…             fp32 copies of whole parameters    main_param + moments
FP32Optimizer                 the model's parameters             moments
ChainedOptimizer              those of its members (may nest)    those of its members

`gather_state` moves these tensors into one flat tensor per optimizer and dtype:

    before   main_param a, main_param b, exp_avg a, exp_avg b, ...   one allocation each
    after    |main_param a|main_param b|exp_avg a|exp_avg b| ...     views of one flat tensor

The tensor objects stay (``tensor.data = view``), and with them all references: the torch
optimizer's groups and state, megatron's shard lists, ``param.main_param``. The caller's allocator
chooses the memory of the flat tensor, as for the buffers of `buffers.py`.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_patches.buffers import check_flat, data_of
from megatron_patches.errors import UnsupportedOptimizerError

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer


OptimizerTensorKind = Literal["main_param", "main_grad", "moment", "state"]

_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
_MASTER_WEIGHTS = frozenset({"master_param"})


@dataclass(frozen=True, eq=False)
class OptimizerTensor:
    """Tensor of an optimizer, outside the memory of the model.

    Attributes:
        path: location of its parameter, a Python expression from the outermost optimizer, such as
            ``chained_optimizers[0].optimizer.param_groups[1]['params'][3]``.
        kind: "main_param" fp32 copy of (a shard of) a parameter; "main_grad" gradient converted for
            it; "moment" of Adam or SGD; "state" another tensor with dims in the optimizer's state.
        key: name within the state (``exp_avg``), or "param" / "grad" / "decoupled_grad".
        tensor: the live tensor.
    """

    path: str
    kind: OptimizerTensorKind
    key: str
    tensor: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


def optimizer_tensors(optimizer: MegatronOptimizer) -> list[OptimizerTensor]:
    """Return the tensors of `optimizer` that are worth offloading, in the order of its parameters.

    Views of the model's parameters and gradients (FP32Optimizer; fp32 parameters of the others) are
    left out, because `iter_buffers` lists them. So is zero-dim state (Adam's ``step``, the grad
    scaler's scalars), because its memory is negligible. Moments exist only after the first step or
    a loaded checkpoint.

    Raises:
        UnsupportedOptimizerError: a member has an unknown type. Raised before anything is listed.
    """
    tensors: list[OptimizerTensor] = []
    for path, member in optimizer_members(optimizer):
        tensors += member_tensors(path, member)
    return tensors


def optimizer_members(optimizer: MegatronOptimizer) -> list[tuple[str, MegatronOptimizer]]:
    """Return (path, optimizer) of the optimizers inside `optimizer` that hold tensors themselves.

    A path is empty or ends in a dot. A member without parameters, as on a frozen stage, holds no
    tensors.

    Raises:
        UnsupportedOptimizerError: naming all members of unknown types.
    """
    members = list(_members(optimizer, ""))
    problems = [_problem(path, member) for path, member in members]
    if any(problems):
        raise UnsupportedOptimizerError("; ".join(filter(None, problems)))
    return members


def _members(optimizer: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, optimizer) of all members of nested ChainedOptimizers that have parameters."""
    from megatron.core.optimizer import ChainedOptimizer

    if isinstance(optimizer, ChainedOptimizer):
        for index, member in enumerate(optimizer.chained_optimizers):
            yield from _members(member, f"{path}chained_optimizers[{index}].")
    # A stub has no parameters, as on a frozen stage.
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield path, optimizer


def _problem(path: str, optimizer: Any) -> str:
    """Return why the tensors of `optimizer` cannot be listed, with a remedy; "" if they can."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    name = path.rstrip(".") or "the optimizer"
    supported = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    if not isinstance(optimizer, supported):
        return (
            f"{name} is of unsupported type {type(optimizer).__name__}; use DistributedOptimizer, "
            "Float16OptimizerWithFloat16Params, FP32Optimizer, or a ChainedOptimizer of these"
        )
    if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        return f"{name} already keeps its state on the host; turn optimizer_cpu_offload off"
    if optimizer.config.use_precision_aware_optimizer:
        return (
            f"{name} is precision-aware: Transformer Engine's FusedAdam has its own format for "
            "main params and moments; turn use_precision_aware_optimizer off"
        )
    if isinstance(optimizer, DistributedOptimizer) and optimizer.ddp_config.use_megatron_fsdp:
        return (
            f"{name} belongs to Megatron-FSDP, which has no flat buffers; "
            "turn use_megatron_fsdp off"
        )
    return ""


def member_tensors(path: str, optimizer: MegatronOptimizer) -> Iterator[OptimizerTensor]:
    """Yield the tensors of a member of `optimizer_members`, as `optimizer_tensors` does."""
    # Views of the model's memory are parameters of some optimizers; `iter_buffers` lists them.
    model_storages = {_storage(tensor) for tensor in _model_tensors(optimizer)}
    inner = optimizer.optimizer
    for group_index, group in enumerate(inner.param_groups):
        for index, param in enumerate(group["params"]):
            param_path = f"{path}optimizer.param_groups[{group_index}]['params'][{index}]"
            for tensor in _param_tensors(param_path, param, inner.state.get(param, {})):
                if _storage(tensor.tensor) not in model_storages:
                    yield tensor


@dataclass(frozen=True, eq=False)
class SteppedPart:
    """Tensor that a torch optimizer steps on, for a parameter of the model or a part of it.

    Attributes:
        param: the model's parameter.
        tensor: what is stepped: flat elements of the parameter from `start` on, perhaps in float32,
            or the parameter itself.
        optimizer: torch's.
    """

    param: torch.Tensor
    tensor: torch.Tensor
    start: int
    optimizer: torch.optim.Optimizer


def stepped_parts(optimizer: MegatronOptimizer) -> Iterator[SteppedPart]:
    """Yield what the torch optimizers inside `optimizer` step on, on this rank.

    With a distributed optimizer a rank steps on parts of some parameters. Raises as
    `optimizer_members`.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer

    for _, member in optimizer_members(optimizer):
        if isinstance(member, DistributedOptimizer):
            params = [*member.model_float16_groups, *member.model_fp32_groups]
            tensors = [*member.shard_fp32_from_float16_groups, *member.shard_fp32_groups]
        elif isinstance(member, FP32Optimizer):
            params = tensors = [group["params"] for group in member.optimizer.param_groups]
        else:
            params = [*member.float16_groups, *member.fp32_from_fp32_groups]
            tensors = [*member.fp32_from_float16_groups, *member.fp32_from_fp32_groups]
        pairs = zip(itertools.chain(*params), itertools.chain(*tensors), strict=True)
        for param, tensor in pairs:
            start = 0
            if isinstance(member, DistributedOptimizer):
                start = member._get_model_param_range_map(param)["param"].start
            yield SteppedPart(param, tensor, start, member.optimizer)


def _param_tensors(
    path: str, param: torch.Tensor, state: dict[str, Any]
) -> Iterator[OptimizerTensor]:
    """Yield the parameter, its gradients and its state, also those in the memory of the model."""
    yield OptimizerTensor(path, "main_param", "param", param)
    for key in ("grad", "decoupled_grad"):
        gradient = gradient_of(param, key)
        if gradient is not None:
            yield OptimizerTensor(path, "main_grad", key, gradient)
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            yield OptimizerTensor(path, _state_kind(key), key, value)


def _state_kind(key: str) -> OptimizerTensorKind:
    if key in _MASTER_WEIGHTS:
        return "main_param"
    return "moment" if key in _MOMENTS else "state"


def _model_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the model's parameters that `optimizer` updates, and their gradients."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import FP32Optimizer

    if isinstance(optimizer, FP32Optimizer):
        groups = [group["params"] for group in optimizer.optimizer.param_groups]
    elif isinstance(optimizer, DistributedOptimizer):
        groups = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
    else:
        groups = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
    for param in itertools.chain(*groups):
        yield param
        for key in ("main_grad", "grad"):
            gradient = gradient_of(param, key)
            if gradient is not None:
                yield gradient


def gradient_of(param: torch.Tensor, key: str = "grad") -> torch.Tensor | None:
    """Return a gradient attribute of `param`, or None if it has none."""
    # The distributed optimizer sets gradients of views of fp32 parameters. Views are not leaves of
    # the autograd graph, so torch warns at every read.
    if param.is_leaf:
        return getattr(param, key, None)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The .grad attribute of a Tensor that is not a leaf"
        )
        return getattr(param, key, None)


def _storage(tensor: torch.Tensor) -> int:
    return data_of(tensor).untyped_storage().data_ptr()


_num_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""torch optimizer inside Megatron's -> number of its steps."""
_first_versions: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Megatron's optimizer -> version before the first counted step."""


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _num_steps[optimizer] = _num_steps.get(optimizer, 0) + 1


register_optimizer_step_post_hook(_count_step)


def weight_version(optimizer: MegatronOptimizer) -> int:
    """Return the number of steps of the weights of `optimizer`, added to `set_weight_version`.

    Steps are counted since the import of this package, by torch's post-step hook. Skipped steps
    (inf or nan gradients under a grad scaler) do not count, because Megatron does not call torch's
    optimizer then. A rank without trained weights takes no steps. With overlap_param_gather a step
    returns, and counts, before the shards of other ranks have arrived.
    """
    return _first_versions.get(optimizer, 0) + _steps_of(optimizer)


def set_weight_version(optimizer: MegatronOptimizer, version: int) -> None:
    """Continue counting from `version`, for weights that were restored from a checkpoint.

    Raises:
        ValueError: `version` is negative.
    """
    if version < 0:
        raise ValueError(f"weight version must be >= 0, got {version}")
    # Version 100 after 3 steps in this process counts from 97.
    _first_versions[optimizer] = version - _steps_of(optimizer)


def _steps_of(optimizer: MegatronOptimizer) -> int:
    # Members step together, so a step of all counts as one.
    steps = [0]
    for _, member in _members(optimizer, ""):
        inner = getattr(member, "optimizer", None)
        if inner is not None:
            steps.append(_num_steps.get(inner, 0))
    return max(steps)


StateAllocator = Callable[[int, torch.dtype, torch.device, str], torch.Tensor]
"""Function (number of elements, dtype, device, "optimizer") -> flat contiguous tensor."""

MemoryGiver = Callable[[torch.Tensor, int], None]
"""Function (flat tensor of a `StateAllocator`, n) that gives memory to its first n elements."""

_MAX_CACHED_NBYTES = 2**28
"""Freed bytes after which torch's CUDA allocator must return its cached memory."""

_ALIGNMENT = 256
"""Alignment of tensors in a flat tensor, in bytes, as CUDA's own allocator aligns them."""


@dataclass(frozen=True, eq=False)
class StateBuffer:
    """Flat tensor with main params and moments of an optimizer.

    Attributes:
        path: location of the optimizer in the outermost one, such as ``chained_optimizers[0].``;
            empty for the outermost one.
        tensor: 1-D. The tensors in it start at multiples of 256 bytes, and the contents of the gaps
            are unspecified.
    """

    path: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class GatheredState:
    """Memory of an optimizer's state after `gather_state`.

    Attributes:
        buffers: flat tensors, by member and in the order of their allocation.
        outside: tensors of the optimizer in none of them: gradients, and tensors that cannot move.
    """

    buffers: tuple[StateBuffer, ...]
    outside: tuple[OptimizerTensor, ...]


def _has_memory(flat: torch.Tensor, stop: int) -> None:
    """Do nothing, because the allocator has given memory to the whole tensor."""


def gather_state(
    optimizer: MegatronOptimizer, allocate: StateAllocator, give_memory: MemoryGiver = _has_memory
) -> GatheredState:
    """Move main params and moments into flat tensors of `allocate`. Idempotent.

    An optimizer without moments stays unchanged until it has some, so that all its state is
    contiguous. State that a checkpoint has replaced is copied to the place of the old state; new
    state gets another flat tensor. Gradients do not move, and neither do tensors without memory at
    the moment (resized to 0 bytes), non-contiguous tensors and tensor subclasses.

    Memory: tensors are copied in the order of their addresses, and the old memory of each is freed
    after its copy. If `allocate` only reserves addresses and `give_memory` adds the memory, S bytes
    of state never take much more than S; otherwise they take 2 S.

    Raises:
        UnsupportedOptimizerError: as from `optimizer_tensors`; no tensor has moved.
        BufferAllocationError: `allocate` returned a wrong tensor; no tensor has moved.
        Exception: raised by `give_memory`. Every tensor is valid, some have moved, and the next
            call moves the rest.
    """
    buffers: list[StateBuffer] = []
    outside: list[OptimizerTensor] = []
    for path, member in optimizer_members(optimizer):
        home = _homes.setdefault(member, _BufferPlace())
        tensors = list(member_tensors(path, member))
        if member.optimizer.state:
            movable = [tensor for tensor in tensors if _is_movable(tensor)]
            home.adopt(movable, path, allocate, give_memory)
        buffers += [StateBuffer(path, flat) for flat in home.flats]
        outside += home.without(tensors)
    return GatheredState(tuple(buffers), tuple(outside))


@dataclass
class _BufferPlace:
    """Flat tensors of an optimizer.

    Attributes:
        flats: the flat tensors, in the order of their allocation.
        slots: (path, key) of a tensor of the optimizer -> its part of a flat tensor.
    """

    flats: list[torch.Tensor] = field(default_factory=list)
    slots: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def without(self, tensors: Iterable[OptimizerTensor]) -> list[OptimizerTensor]:
        """Return the tensors that are in none of the flat tensors."""
        storages = {flat.untyped_storage().data_ptr() for flat in self.flats}
        return [
            item for item in tensors if item.tensor.untyped_storage().data_ptr() not in storages
        ]

    @torch.no_grad()
    def adopt(
        self,
        tensors: Iterable[OptimizerTensor],
        path: str,
        allocate: StateAllocator,
        give_memory: MemoryGiver,
    ) -> None:
        """Move every tensor from outside into its slot, and add missing slots.

        They move in the order of their addresses. torch's allocator caches freed memory, and can
        return a block only when all tensors in it are freed.
        """
        outside = self.without(tensors)
        outside.sort(key=lambda item: item.tensor.data_ptr())
        new = [item for item in outside if not self._has_slot(item, path)]
        self._make_slots(new, path, allocate)
        flats = {flat.untyped_storage().data_ptr(): flat for flat in self.flats}
        freed_nbytes = 0
        for item in outside:
            slot = self.slots[_name(item, path)]
            flat = flats[slot.untyped_storage().data_ptr()]
            # New slots have the order of the copies, so the memory grows by what is copied next.
            give_memory(flat, int(slot.storage_offset()) + slot.numel())
            slot.copy_(item.tensor.reshape(-1))
            item.tensor.data = slot.view(item.tensor.shape)
            freed_nbytes += item.tensor.nbytes
            if slot.is_cuda and freed_nbytes >= _MAX_CACHED_NBYTES:
                torch.cuda.empty_cache()
                freed_nbytes = 0

    def _has_slot(self, item: OptimizerTensor, path: str) -> bool:
        slot = self.slots.get(_name(item, path))
        # A checkpoint may have replaced the tensor by one of another size, dtype or device.
        return slot is not None and (slot.numel(), slot.dtype, slot.device) == (
            item.tensor.numel(),
            item.tensor.dtype,
            item.tensor.device,
        )

    def _make_slots(
        self, tensors: Iterable[OptimizerTensor], path: str, allocate: StateAllocator
    ) -> None:
        """Allocate a flat tensor per dtype and device, and a slot in it for each tensor."""
        groups: dict[tuple[torch.dtype, torch.device], list[OptimizerTensor]] = {}
        for item in tensors:
            groups.setdefault((item.tensor.dtype, item.tensor.device), []).append(item)
        for (dtype, device), group in groups.items():
            # float32: a step of 64 elements, so 100 elements take 128.
            step = _ALIGNMENT // dtype.itemsize
            sizes = [-(-item.tensor.numel() // step) * step for item in group]  # rounded up
            numel = sum(sizes)
            flat = allocate(numel, dtype, device, "optimizer")
            check_flat("the state allocator", flat, numel, dtype, device)
            self.flats.append(flat)
            for item, part in zip(group, flat.split(sizes), strict=True):
                self.slots[_name(item, path)] = part[: item.tensor.numel()]


_homes: weakref.WeakKeyDictionary[Any, _BufferPlace] = weakref.WeakKeyDictionary()


def _name(item: OptimizerTensor, path: str) -> tuple[str, str]:
    """Return the location of a tensor in its own optimizer, independent of chains around it."""
    return item.path.removeprefix(path), item.key


def _is_movable(item: OptimizerTensor) -> bool:
    tensor = item.tensor
    return (
        item.kind != "main_grad"
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() > 0
    )

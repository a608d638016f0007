"""Megatron's optimizers: which tensors they hold, how many steps they have taken, and one flat memory for their state.

Megatron optimizer            parameters of the torch optimizer  `optimizer_tensors` lists
DistributedOptimizer, bf16    fp32 copies of this rank's shards  main_param + moments
DistributedOptimizer, fp32    views of the model's parameters    moments
Float16Optimizer…             fp32 copies of whole parameters    main_param + moments
FP32Optimizer                 the model's parameters             moments
ChainedOptimizer              those of its members (may nest)    all of theirs

`gather_state` moves these into one flat tensor per optimizer and dtype:

    before   main_param a, main_param b, exp_avg a, exp_avg b, ...   one allocation each
    after    |main_param a|main_param b|exp_avg a|exp_avg b| ...     one flat tensor; each of them is a view of it

The tensor objects stay (``tensor.data = view``), and with them everything that refers to one: the torch optimizer's
groups and state, megatron's shard lists, ``param.main_param``. The allocator decides what memory the
flat tensor lies in, as for the buffers of `buffers.py`.
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
    """One tensor that an optimizer holds, in memory of its own.

    Attributes:
        path: of the parameter it belongs to, a Python expression from the outermost optimizer, such as
            ``chained_optimizers[0].optimizer.param_groups[1]['params'][3]``.
        kind: "main_param" fp32 copy of (a shard of) a parameter; "main_grad" gradient converted for it;
            "moment" of Adam or SGD; "state" anything else of one dim or more in the optimizer's state.
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
    """Every tensor worth offloading that `optimizer` holds now, in the order of its parameters.

    Left out are views of the model's parameters and gradients (FP32Optimizer; fp32 parameters of the others), which
    `iter_buffers` lists, and zero-dim state (Adam's ``step``, the grad scaler's scalars), which takes no memory to
    speak of. Moments exist only after the first step or a loaded checkpoint.

    Raises:
        UnsupportedOptimizerError: when a member has an unknown type, before anything is listed.
    """
    return [tensor for path, member in optimizer_members(optimizer) for tensor in member_tensors(path, member)]


def optimizer_members(optimizer: MegatronOptimizer) -> list[tuple[str, MegatronOptimizer]]:
    """The optimizers inside `optimizer` that hold tensors themselves, each with its path: empty, or ending in a dot.

    A member without parameters, as on a stage that is frozen, holds no tensors.

    Raises:
        UnsupportedOptimizerError: naming all members of unknown types.
    """
    members = list(_members(optimizer, ""))
    problems = [problem for path, member in members for problem in [_problem(path, member)] if problem]
    if problems:
        raise UnsupportedOptimizerError("; ".join(problems))
    return members


def _members(optimizer: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The optimizers inside nested ChainedOptimizers that hold tensors themselves, with their paths."""
    from megatron.core.optimizer import ChainedOptimizer

    if isinstance(optimizer, ChainedOptimizer):
        for index, member in enumerate(optimizer.chained_optimizers):
            yield from _members(member, f"{path}chained_optimizers[{index}].")
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield path, optimizer


def _problem(path: str, optimizer: Any) -> str | None:
    """Why the tensors of `optimizer` cannot be listed, with the remedy; None when they can."""
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    where = path.rstrip(".") or "the optimizer"
    if not isinstance(optimizer, (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)):
        return (
            f"{where} is of unsupported type {type(optimizer).__name__}; use DistributedOptimizer, "
            "Float16OptimizerWithFloat16Params, FP32Optimizer, or a ChainedOptimizer of these"
        )
    if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        return f"{where} already keeps its state on the host; turn optimizer_cpu_offload off"
    if optimizer.config.use_precision_aware_optimizer:
        return (
            f"{where} is precision-aware: Transformer Engine's FusedAdam has its own format for main params and "
            "moments; turn use_precision_aware_optimizer off"
        )
    if isinstance(optimizer, DistributedOptimizer) and optimizer.ddp_config.use_megatron_fsdp:
        return f"{where} belongs to Megatron-FSDP, which has no flat buffers; turn use_megatron_fsdp off"
    return None


def member_tensors(path: str, optimizer: MegatronOptimizer) -> Iterator[OptimizerTensor]:
    """`optimizer_tensors` of one of `optimizer_members`."""
    model_storages = {_storage(tensor) for tensor in _model_tensors(optimizer)}
    for group_index, group in enumerate(optimizer.optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            where = f"{path}optimizer.param_groups[{group_index}]['params'][{index}]"
            for found in _param_tensors(where, param, optimizer.optimizer.state.get(param, {})):
                if _storage(found.tensor) not in model_storages:
                    yield found


def _param_tensors(path: str, param: torch.Tensor, state: dict[str, Any]) -> Iterator[OptimizerTensor]:
    """The parameter itself, its gradients and its state, wherever their memory lies."""
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
    """The model's parameters and gradients that `optimizer` works on."""
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
    """A gradient attribute of `param`, if it has one.

    The distributed optimizer gives gradients to views of fp32 parameters, which are not leaves of the autograd graph,
    so torch warns on every read.
    """
    if param.is_leaf:
        return getattr(param, key, None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        return getattr(param, key, None)


def _storage(tensor: torch.Tensor) -> int:
    return data_of(tensor).untyped_storage().data_ptr()


_num_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""torch's optimizer, inside Megatron's -> steps it has taken."""
_first_versions: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Megatron's optimizer -> its version before the first of these steps."""


def _count_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _num_steps[optimizer] = _num_steps.get(optimizer, 0) + 1


register_optimizer_step_post_hook(_count_step)


def weight_version(optimizer: MegatronOptimizer) -> int:
    """Number of steps that the weights of `optimizer` have taken, on top of `set_weight_version`; 0 without any.

    Counted since this package was imported, by torch's own post-step hook. Skipped steps (inf or nan gradients under a
    grad scaler) do not count, for Megatron does not call torch's optimizer then. A rank that trains no weights takes no
    steps. With overlap_param_gather a step returns, and counts, before the shards of other ranks have arrived.
    """
    return _first_versions.get(optimizer, 0) + _steps_of(optimizer)


def set_weight_version(optimizer: MegatronOptimizer, version: int) -> None:
    """Continue counting from `version`, for weights that were restored from a checkpoint.

    Raises:
        ValueError: when `version` is negative.
    """
    if version < 0:
        raise ValueError(f"weight version must be >= 0, got {version}")
    _first_versions[optimizer] = version - _steps_of(optimizer)


def _steps_of(optimizer: MegatronOptimizer) -> int:
    """Steps of all members at once count as one."""
    inner = (getattr(member, "optimizer", None) for _, member in _members(optimizer, ""))
    return max((_num_steps.get(each, 0) for each in inner if each is not None), default=0)


StateAllocator = Callable[[int, torch.dtype, torch.device, str], torch.Tensor]
"""(number of elements, dtype, device, "optimizer") -> flat contiguous tensor."""

MemoryGiver = Callable[[torch.Tensor, int], None]
"""(flat tensor of a `StateAllocator`, number of elements): from then on its first elements have memory."""

_MOST_KEPT_NBYTES = 2**28
"""Memory of tensors that have moved which torch's CUDA allocator may keep while others move."""

_ALIGNMENT = 256  # bytes between the starts of two tensors in a flat one: what CUDA's own allocator gives


@dataclass(frozen=True, eq=False)
class StateBuffer:
    """One flat tensor with main params and moments of one optimizer.

    Attributes:
        path: of that optimizer, from the outermost one, such as ``chained_optimizers[0].``; empty for itself.
        tensor: 1-D; the tensors in it start at multiples of 256 bytes, the contents of the gaps are unspecified.
    """

    path: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class GatheredState:
    """What `gather_state` made of an optimizer's memory.

    Attributes:
        buffers: the flat tensors, by member and in the order they were made.
        outside: the optimizer's tensors that lie in none of them: gradients, and what cannot be moved.
    """

    buffers: tuple[StateBuffer, ...]
    outside: tuple[OptimizerTensor, ...]


def _has_memory(flat: torch.Tensor, stop: int) -> None:
    """For allocators that give it all at once."""


def gather_state(
    optimizer: MegatronOptimizer, allocate: StateAllocator, give_memory: MemoryGiver = _has_memory
) -> GatheredState:
    """Move main params and moments into flat tensors of `allocate`. Idempotent.

    An optimizer without moments is left alone until it has some, so that all of its state lies together. State that a
    checkpoint replaced is copied to where the old one was; new state gets a flat tensor of its own. Gradients stay
    where they are, and so do tensors without memory at the moment (resized to 0 bytes), non-contiguous tensors and
    tensor subclasses.

    Memory: tensors are copied in the order in which they lie, and each one's old memory is freed once it is copied.
    Where `allocate` only reserves addresses and `give_memory` has memory behind them, S bytes of state never take much
    more than S; with memory at once they take 2 S.

    Raises:
        UnsupportedOptimizerError: as `optimizer_tensors` does; nothing is moved.
        BufferAllocationError: for a wrong tensor from `allocate`; nothing is moved.
        Exception: that of `give_memory`: every tensor is valid, some have moved, and the next call moves the rest.
    """
    buffers: list[StateBuffer] = []
    outside: list[OptimizerTensor] = []
    for path, member in optimizer_members(optimizer):
        home = _homes.setdefault(member, _Home())
        tensors = list(member_tensors(path, member))
        if member.optimizer.state:
            home.adopt([found for found in tensors if _is_movable(found)], path, allocate, give_memory)
        buffers += [StateBuffer(path, flat) for flat in home.flats]
        outside += home.without(tensors)
    return GatheredState(tuple(buffers), tuple(outside))


@dataclass
class _Home:
    """The flat tensors of one optimizer.

    Attributes:
        slots: the part of a flat tensor that belongs to the optimizer's tensor of this (path, key).
    """

    flats: list[torch.Tensor] = field(default_factory=list)
    slots: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def without(self, tensors: Iterable[OptimizerTensor]) -> list[OptimizerTensor]:
        """Those that lie in none of the flat tensors."""
        addresses = {flat.untyped_storage().data_ptr() for flat in self.flats}
        return [found for found in tensors if found.tensor.untyped_storage().data_ptr() not in addresses]

    @torch.no_grad()
    def adopt(
        self, tensors: Iterable[OptimizerTensor], path: str, allocate: StateAllocator, give_memory: MemoryGiver
    ) -> None:
        """Move every tensor that is outside into its slot; make slots for those that have none.

        In order of their addresses: torch's allocator has memory to give back only where all neighbours are gone. It
        keeps what is freed, and is made to give it back as it comes together.
        """
        outside = self.without(tensors)
        outside.sort(key=lambda found: found.tensor.data_ptr())
        self._make_slots([found for found in outside if not self._has_slot(found, path)], path, allocate)
        flats = {flat.untyped_storage().data_ptr(): flat for flat in self.flats}
        freed_nbytes = 0
        while outside:
            found = outside.pop(0)
            slot = self.slots[_name(found, path)]
            give_memory(flats[slot.untyped_storage().data_ptr()], int(slot.storage_offset()) + slot.numel())
            slot.copy_(found.tensor.reshape(-1))
            found.tensor.data = slot.view(found.tensor.shape)
            freed_nbytes += found.tensor.nbytes
            if slot.is_cuda and freed_nbytes >= _MOST_KEPT_NBYTES:
                torch.cuda.empty_cache()
                freed_nbytes = 0

    def _has_slot(self, found: OptimizerTensor, path: str) -> bool:
        slot, tensor = self.slots.get(_name(found, path)), found.tensor
        wanted = (tensor.numel(), tensor.dtype, tensor.device)
        return slot is not None and (slot.numel(), slot.dtype, slot.device) == wanted

    def _make_slots(self, tensors: Iterable[OptimizerTensor], path: str, allocate: StateAllocator) -> None:
        """One flat tensor per dtype and device."""
        groups: dict[tuple[torch.dtype, torch.device], list[OptimizerTensor]] = {}
        for found in tensors:
            groups.setdefault((found.tensor.dtype, found.tensor.device), []).append(found)
        for (dtype, device), group in groups.items():
            step = _ALIGNMENT // dtype.itemsize
            sizes = [-(-found.tensor.numel() // step) * step for found in group]  # rounded up to the alignment
            flat = allocate(sum(sizes), dtype, device, "optimizer")
            check_flat("the state allocator", flat, sum(sizes), dtype, device)
            self.flats.append(flat)
            for found, part in zip(group, flat.split(sizes), strict=True):
                self.slots[_name(found, path)] = part[: found.tensor.numel()]


_homes: weakref.WeakKeyDictionary[Any, _Home] = weakref.WeakKeyDictionary()


def _name(found: OptimizerTensor, path: str) -> tuple[str, str]:
    """The tensor's place in its own optimizer: the same whether that is asked itself or a chain around it."""
    return found.path.removeprefix(path), found.key


def _is_movable(found: OptimizerTensor) -> bool:
    tensor = found.tensor
    return (
        found.kind != "main_grad"
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and tensor.untyped_storage().nbytes() > 0
    )

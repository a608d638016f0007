"""The optimizers' own memory, gathered into one flat tensor per optimizer and dtype.

    before   main_param a, main_param b, exp_avg a, exp_avg b, ...   one allocation each
    after    |main_param a|main_param b|exp_avg a|exp_avg b| ...     one flat tensor; each of them is a view of it

The tensor objects stay (``tensor.data = view``), and with them everything that refers to one: the torch optimizer's
groups and state, megatron's shard lists, ``param.main_param``. The allocator decides what memory the
flat tensor lies in, as for the buffers of `buffers.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_patches.buffers import check_flat
from megatron_patches.optimizers import OptimizerTensor, member_tensors, optimizer_members

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

StateAllocator = Callable[[int, torch.dtype, torch.device, str], torch.Tensor]
"""(number of elements, dtype, device, "optimizer") -> flat contiguous tensor."""

MemoryGiver = Callable[[torch.Tensor, int], None]
"""(flat tensor of a `StateAllocator`, number of elements): from then on its first elements have memory."""

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
        outside += [found for found in tensors if not home.holds(found.tensor)]
    return GatheredState(tuple(buffers), tuple(outside))


@dataclass
class _Home:
    """The flat tensors of one optimizer.

    Attributes:
        slots: the part of a flat tensor that belongs to the optimizer's tensor of this (path, key).
    """

    flats: list[torch.Tensor] = field(default_factory=list)
    slots: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for flat in self.flats)

    @torch.no_grad()
    def adopt(
        self, tensors: Iterable[OptimizerTensor], path: str, allocate: StateAllocator, give_memory: MemoryGiver
    ) -> None:
        """Move every tensor that is outside into its slot; make slots for those that have none.

        In order of their addresses: torch's allocator has memory to give back only where all neighbours are gone.
        """
        outside = [found for found in tensors if not self.holds(found.tensor)]
        outside.sort(key=lambda found: found.tensor.data_ptr())
        self._make_slots([found for found in outside if not self._has_slot(found, path)], path, allocate)
        flats = {flat.untyped_storage().data_ptr(): flat for flat in self.flats}
        while outside:
            found = outside.pop(0)
            slot = self.slots[_name(found, path)]
            give_memory(flats[slot.untyped_storage().data_ptr()], int(slot.storage_offset()) + slot.numel())
            slot.copy_(found.tensor.reshape(-1))
            found.tensor.data = slot.view(found.tensor.shape)

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

"""What vLLM made of a group's weights after loading them, and how the same is made of new ones.

    with derivation.as_loaded(tensors):   its modules are as the loader left them, and hold these tensors
        ... vLLM's own processing ...     what it wrote is written again
    here                                  its modules are as before

Where the addresses of what vLLM computes with must stay (captured graphs, compiled code), the results are copied into
the tensors that are live, and the modules get back what they held. Elsewhere the results stay where they are, and
nothing is copied.

vLLM's own layerwise reload (model_loader/reload) does the first for parameters and buffers of one layer. Here it is
done for everything that a group reaches, so also for tensors in methods, kernels and attention; flags that keep the
processing from running twice need no list of names, for what it wrote is taken back before; and the memory in which
weights pass through loader layout is that of one group, not of all layers whose weights have come in part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from hybrid_engine.backends.vllm.weights.held import Table, display
from hybrid_engine.backends.vllm.weights.storages import WeightStorage, flat_view
from hybrid_engine.records.regions import StridedView

ABSENT = object()
"""What a table has where it has no entry."""


@dataclass(frozen=True)
class LoaderView:
    """A tensor over a storage in loader layout."""

    storage: WeightStorage
    view: StridedView

    def over(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The same of other tensors, by storage; empty ones stay empty."""
        tensor = tensors[self.storage.name]
        if self.view == self.storage.view or not tensor.numel():
            return tensor
        return flat_view(tensor).as_strided(self.view.shape, self.view.strides, self.view.offset)


@dataclass(frozen=True)
class Change:
    """What the processing wrote over.

    Attributes:
        table: where; of a list, all of it.
        key: of the entry.
        loaded: what was there before: a value, a `LoaderView`, or `ABSENT`.
    """

    table: Table
    key: object
    loaded: object

    def current(self) -> object:
        """What is there now."""
        return list(self.table) if isinstance(self.table, list) else self.table.get(self.key, ABSENT)

    def put(self, value: object) -> None:
        """Let it be there."""
        if isinstance(self.table, list):
            assert isinstance(value, list)
            self.table[:] = value
        elif value is ABSENT:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = value


@dataclass(frozen=True)
class Constant:
    """A tensor that no loader fills, and its value on the host."""

    tensor: torch.Tensor
    value: torch.Tensor

    def restore(self) -> None:
        """Give the tensor this value."""
        _copy(self.tensor, self.value)

    def is_as_it_was(self) -> bool:
        """Whether the tensor has this value."""
        return same_bytes(self.tensor.cpu(), self.value)


@dataclass(frozen=True)
class Derivation:
    """Of one group.

    Attributes:
        methods: modules whose quantisation method has to process its weights again.
        attention: attention layers that have to process the weights inside them again, after that.
        reached: all modules that these hold things in.
        changes: what their processing wrote over.
        known: keys of storages that are live, or were there before.
        results: path -> tensor that it made, and that vLLM computes with.
        numbers: path -> number that is there beside them; captured graphs hold its value.
    """

    methods: tuple[str, ...]
    attention: tuple[str, ...]
    reached: tuple[str, ...]
    changes: tuple[Change, ...]
    known: frozenset[int]
    results: Mapping[str, torch.Tensor]
    numbers: Mapping[str, float]

    @property
    def first(self) -> str:
        """The module that stands for it in messages."""
        return (*self.methods, *self.attention)[0]

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the modules be as the loader left them; these tensors, by storage, take the place of those that it wrote,
        and of views of them."""
        for change in self.changes:
            change.put(_over(change.loaded, tensors))

    @contextlib.contextmanager
    def as_loaded(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Within this context the modules are as after `load`, and then as before."""
        present = [change.current() for change in self.changes]
        self.load(tensors)
        try:
            yield
        finally:
            for change, value in zip(self.changes, present, strict=True):
                change.put(value)

    def misfits(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Why what the processing made this time, by path, cannot be copied into the results; in words."""
        faults = [f"{display(path)} is not there again" for path in self.results.keys() - tensors.keys()]
        for path in self.results.keys() & tensors.keys():
            old, new = self.results[path], tensors[path]
            if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
                faults.append(f"{display(path)} is {_form(new)}, where it was {_form(old)}")
        return sorted(faults)

    def strays(self, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, float]) -> list[str]:
        """What the processing made of other weights, by path, beside what is copied; in words."""
        faults = [f"{display(path)} is there in addition" for path in tensors.keys() - self.results.keys()]
        faults += [
            f"{display(path)} is a number that depends on the weights ({number}, then {numbers[path]})"
            for path, number in self.numbers.items()
            if not same_number(numbers.get(path, number), number)
        ]
        return sorted(faults)

    def renew(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what the processing made of new weights into the tensors that are live."""
        done = set()
        for path, result in self.results.items():
            place = (result.data_ptr(), result.shape, result.stride(), result.dtype)
            if place not in done:
                done.add(place)
                _copy(result.detach(), tensors[path].detach())


def _over(loaded: object, tensors: Mapping[str, torch.Tensor]) -> object:
    if isinstance(loaded, list):
        return [_over(part, tensors) for part in loaded]
    return loaded.over(tensors) if isinstance(loaded, LoaderView) else loaded


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy into a tensor that may repeat its elements along some dims; then the source must do so too."""
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def same_number(one: object, other: object) -> bool:
    """Whether two numbers are the same, or both none."""
    return one == other or (one != one and other != other)

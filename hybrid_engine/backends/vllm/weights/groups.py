"""Which modules must be committed at once: those that share a storage (a tied head), derive from each other (MLA), or
are written by one staged tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.storages import WeightStorage
from hybrid_engine.backends.vllm.weights.traced_layout import STAGED
from hybrid_engine.backends.vllm.weights.tracing import Trace


@dataclass(frozen=True)
class CommitGroup:
    """What is committed at once; all names in the model's order.

    Attributes:
        storages: names of its storages.
        staged: canonical tensors that the model's own loader writes into them.
        methods: modules whose quantisation method processes its weights after loading.
        attention: attention layers that process weights after that.
    """

    storages: tuple[str, ...]
    staged: tuple[str, ...]
    methods: tuple[str, ...]
    attention: tuple[str, ...]

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the flat buffers to fill."""
        return (*self.storages, *(STAGED + name for name in self.staged))


def find_groups(model: torch.nn.Module, storages: Sequence[WeightStorage], trace: Trace) -> dict[str, CommitGroup]:
    """Groups by name, which is that of their first module."""
    modules = dict(model.named_modules())
    joined = _DisjointSets(modules)
    for storage in storages:
        joined.join(binding.module for binding in storage.bindings)
    attention = postload.deriving_attention(model, storages)
    for name, owners in attention.items():
        joined.join((name, *owners))
    staged_in = _join_staged(joined, storages, trace)

    def gathered(names: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
        """Pairs (module, name) -> the names in each group."""
        found: dict[str, tuple[str, ...]] = {}
        for module, name in names:
            first = joined.first(module)
            found[first] = (*found.get(first, ()), name)
        return found

    storages_of = gathered((storage.bindings[0].module, storage.name) for storage in storages)
    staged_of = gathered((staged_in[name], name) for name in trace.staged)
    attention_of = gathered((name, name) for name in attention)
    methods_of = gathered(
        (name, name)
        for name, module in modules.items()
        if joined.first(name) in storages_of and postload.post_load_method(module) is not None
    )
    return {
        first: CommitGroup(names, staged_of.get(first, ()), methods_of.get(first, ()), attention_of.get(first, ()))
        for first, names in storages_of.items()
    }


def _join_staged(joined: _DisjointSets, storages: Sequence[WeightStorage], trace: Trace) -> Mapping[str, str]:
    """Join what one staged tensor reaches; returns one of these modules for every staged tensor."""
    owner = {storage.key: storage.bindings[0].module for storage in storages}
    staged_in: dict[str, str] = {}
    for write in trace.staged_writes:
        if write.storage in owner:
            touched = [owner[write.storage], *(staged_in[name] for name in write.tensors if name in staged_in)]
            joined.join(touched)
            staged_in.update(dict.fromkeys(write.tensors, owner[write.storage]))
    return staged_in


class _DisjointSets:
    """Names in an order; `join` merges the sets of some, `first` is the earliest name of a set."""

    def __init__(self, names: Iterable[str]) -> None:
        self._order = {name: index for index, name in enumerate(names)}
        self._parent = {name: name for name in self._order}

    def first(self, name: str) -> str:
        while self._parent[name] != name:
            name = self._parent[name]
        return name

    def join(self, names: Iterable[str]) -> None:
        roots = sorted({self.first(name) for name in names}, key=self._order.__getitem__)
        for root in roots[1:]:
            self._parent[root] = roots[0]

"""Commit groups: which modules are committed at once, and the state of each group.

Modules belong together that share a storage (a tied head), derive from each other (MLA), or are written by one staged
tensor. A group has one of four states, and one table says what may happen to it:

                 ALLOCATE     COMMIT       FAIL         VOID         RELEASE
    RELEASED     filling      refused      refused      released     released
    FILLING      filling      committed    released     released     released
    COMMITTED    filling      refused      refused      void         released
    VOID         filling      refused      refused      void         released

What is refused raises and changes nothing: every other group named in the same call stays where it was, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.tracing import Trace, WeightStorage
from hybrid_engine.errors import StateError, first_of

STAGED = "staged:"
"""Prefix of buffers that hold a whole canonical tensor for the model's own loader."""


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


# -- states ------------------------------------------------------------------------------------------------------------


class GroupState(Enum):
    """What a group holds.

    Live storages, those that vLLM computes with as its loader filled them, keep their memory in every state unless all
    weights were released, and so does on a GPU what vLLM derives from others; elsewhere that is in memory as the state
    says.
    """

    RELEASED = "released"
    """Nothing derived, nothing to fill."""
    FILLING = "filling"
    """Tensors in loader layout, for transports to write."""
    COMMITTED = "committed"
    """The weights that vLLM computes with."""
    VOID = "void"
    """As COMMITTED, but the values are of no use: zeros, as built, or weights that were given up in place."""


HOLDING = (GroupState.COMMITTED, GroupState.VOID)
"""States in which what vLLM made of a group's weights is in memory."""


class Event(Enum):
    """What happens to groups; the value completes a message when it is refused."""

    ALLOCATE = "allocated"
    COMMIT = "committed before they were allocated"
    FAIL = "cleaned up after a failure that they had no part in"
    VOID = "declared void"
    RELEASE = "released"


TRANSITIONS = {
    **{(state, Event.ALLOCATE): GroupState.FILLING for state in GroupState},
    (GroupState.FILLING, Event.COMMIT): GroupState.COMMITTED,
    (GroupState.FILLING, Event.FAIL): GroupState.RELEASED,
    (GroupState.RELEASED, Event.VOID): GroupState.RELEASED,
    (GroupState.FILLING, Event.VOID): GroupState.RELEASED,
    (GroupState.COMMITTED, Event.VOID): GroupState.VOID,
    (GroupState.VOID, Event.VOID): GroupState.VOID,
    **{(state, Event.RELEASE): GroupState.RELEASED for state in GroupState},
}
"""State and event -> the state after it; what is not in here is refused."""


class GroupStates:
    """The state of every commit group of one rank; VOID at first, as vLLM has processed a model full of zeros."""

    def __init__(self, groups: Iterable[str]) -> None:
        self._states = dict.fromkeys(groups, GroupState.VOID)

    def advance(self, event: Event, groups: Collection[str] | None = None) -> None:
        names = self._states if groups is None else groups
        self.require(event, names)
        self._states |= {name: TRANSITIONS[self._states[name], event] for name in names}

    def require(self, event: Event, names: Collection[str]) -> None:
        """Raise StateError naming each group that is unknown, or in a state in which `event` is refused."""
        if unknown := [name for name in names if name not in self._states]:
            raise StateError(f"no such groups in this rank's layout: {', '.join(unknown)}")
        if refused := [name for name in names if (self._states[name], event) not in TRANSITIONS]:
            raise StateError(f"{event.value}: {', '.join(refused)}")

    def among(self, *states: GroupState) -> list[str]:
        return [name for name, state in self._states.items() if state in states]

    def require_committed(self) -> None:
        """Raise StateError unless all groups are committed."""
        missing = sorted(self.among(GroupState.RELEASED, GroupState.FILLING, GroupState.VOID))
        if missing and len(self.among(GroupState.RELEASED)) == len(self._states):
            raise StateError("the inference weights are released: reshard (allocate, fill, commit) before generating")
        if missing:
            raise StateError(
                f"{len(missing)} of {len(self._states)} module groups hold no committed weights "
                f"({first_of(missing, 3)}): finish the reshard before generating"
            )

"""Commit groups: the modules that are committed together, and the state of each group.

Modules share a group if they share a storage (a tied head), derive from each other (MLA), or are
written by one staged tensor. A group is in one of four states. This table gives the transitions:

                 ALLOCATE     COMMIT       FAIL         VOID         RELEASE
    RELEASED     filling      refused      refused      released     released
    FILLING      filling      committed    released     released     released
    COMMITTED    filling      refused      refused      void         released
    VOID         filling      refused      refused      void         released

A refused event raises and changes nothing: the other groups named in the same call keep their
states as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from hybrid_engine.backends.vllm.weights import postload
from hybrid_engine.backends.vllm.weights.tracing import Trace, WeightStorage
from hybrid_engine.errors import StateError, first_of

Names = tuple[str, ...]
"""Names in the order of the model."""

STAGED = "staged:"
"""Prefix of buffers that hold a whole canonical tensor for the model's own loader."""


@dataclass(frozen=True)
class CommitGroup:
    """A unit of commit. All names are in the model's order.

    Attributes:
        storages: names of its storages.
        staged: canonical tensors that the model's own loader writes into them.
        methods: modules whose quantisation method processes its weights after loading.
        attention: attention layers that process weights after the methods.
    """

    storages: Names
    staged: Names
    methods: Names
    attention: Names

    @property
    def buffers(self) -> Names:
        """Names of the flat buffers to fill."""
        return (*self.storages, *(STAGED + name for name in self.staged))


def find_groups(
    model: torch.nn.Module,
    storages: Sequence[WeightStorage],
    trace: Trace,
) -> dict[str, CommitGroup]:
    """Return the commit groups of a model; a group has the name of its first module."""
    modules = dict(model.named_modules())
    sets = _DisjointSets(modules)
    for storage in storages:
        # A tied head shares its storage with the embedding.
        sets.join(binding.module for binding in storage.bindings)
    attention = postload.deriving_attention(model, storages)
    for name, owners in attention.items():
        # MLA derives `W_UV` from the weights of `kv_b_proj`.
        sets.join((name, *owners))
    # The loader writes a staged tensor into all its modules in one call.
    staged_in = _join_staged(sets, storages, trace)

    def by_group(pairs: Iterable[tuple[str, str]]) -> dict[str, Names]:
        """Collect the names of (module, name) pairs by the module's group."""
        names: dict[str, Names] = {}
        for module, name in pairs:
            group = sets.first(module)
            names[group] = (*names.get(group, ()), name)
        return names

    storages_of = by_group((storage.bindings[0].module, storage.name) for storage in storages)
    staged_of = by_group((staged_in[name], name) for name in trace.staged)
    attention_of = by_group((name, name) for name in attention)
    methods_of = by_group(
        (name, name)
        for name, module in modules.items()
        if sets.first(name) in storages_of and postload.post_load_method(module) is not None
    )
    return {
        group: CommitGroup(
            storages=names,
            staged=staged_of.get(group, ()),
            methods=methods_of.get(group, ()),
            attention=attention_of.get(group, ()),
        )
        for group, names in storages_of.items()
    }


def _join_staged(
    sets: _DisjointSets,
    storages: Sequence[WeightStorage],
    trace: Trace,
) -> Mapping[str, str]:
    """Join the modules that a staged tensor reaches; return one of them for every staged tensor."""
    owners = {storage.key: storage.bindings[0].module for storage in storages}
    staged_in: dict[str, str] = {}
    for write in trace.staged_writes:
        owner = owners.get(write.storage)
        # A temporary of the loader is not in the inventory.
        if owner is None:
            continue
        # A tensor that is written into two modules joins them. Tensors of one computed write are in
        # its module together.
        earlier = [staged_in[name] for name in write.tensors if name in staged_in]
        sets.join([owner, *earlier])
        staged_in.update(dict.fromkeys(write.tensors, owner))
    return staged_in


class _DisjointSets:
    """Disjoint sets of ordered names; the first name of a set, in that order, represents it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._order = {name: index for index, name in enumerate(names)}
        self._parent = {name: name for name in self._order}

    def first(self, name: str) -> str:
        while self._parent[name] != name:
            name = self._parent[name]
        return name

    def join(self, names: Iterable[str]) -> None:
        firsts = {self.first(name) for name in names}
        roots = sorted(firsts, key=self._order.__getitem__)
        for root in roots[1:]:
            # The earliest name stays the root, so `first` needs no search for it.
            self._parent[root] = roots[0]


# -- states ----------------------------------------------------------------------------------------


class GroupState(Enum):
    """State of a group's weights.

    Live storages, which vLLM computes with as its loader filled them, keep their memory in every
    state unless all weights were released. On a GPU the same holds for tensors that vLLM derives
    from others; on a CPU the state decides whether those are in memory.
    """

    RELEASED = "released"
    """No derived tensors, and no tensors to fill."""
    FILLING = "filling"
    """Tensors in loader layout, for transports to write."""
    COMMITTED = "committed"
    """The weights that vLLM computes with."""
    VOID = "void"
    """Same memory as COMMITTED, with useless values: zeros, or weights given up in place."""


HOLDING = (GroupState.COMMITTED, GroupState.VOID)
"""States in which the tensors that vLLM derived from a group's weights are in memory."""


class GroupEvent(Enum):
    """Event of a group; the value completes the message of a refused event."""

    ALLOCATE = "allocated"
    COMMIT = "committed before they were allocated"
    FAIL = "cleaned up after a failure that did not involve them"
    VOID = "declared void"
    RELEASE = "released"


TRANSITIONS = {
    **{(state, GroupEvent.ALLOCATE): GroupState.FILLING for state in GroupState},
    (GroupState.FILLING, GroupEvent.COMMIT): GroupState.COMMITTED,
    (GroupState.FILLING, GroupEvent.FAIL): GroupState.RELEASED,
    (GroupState.RELEASED, GroupEvent.VOID): GroupState.RELEASED,
    (GroupState.FILLING, GroupEvent.VOID): GroupState.RELEASED,
    (GroupState.COMMITTED, GroupEvent.VOID): GroupState.VOID,
    (GroupState.VOID, GroupEvent.VOID): GroupState.VOID,
    **{(state, GroupEvent.RELEASE): GroupState.RELEASED for state in GroupState},
}
"""(state, event) -> next state; a pair that is missing here is refused."""


class GroupStates:
    """States of all commit groups of one rank, at first VOID: vLLM has processed a zeroed model."""

    def __init__(self, groups: Iterable[str]) -> None:
        self._states = dict.fromkeys(groups, GroupState.VOID)

    def advance(self, event: GroupEvent, groups: Collection[str] | None = None) -> None:
        """Apply `event` to these groups, by default to all. Raises as `require` does."""
        names = self._states if groups is None else groups
        # All groups are checked before any of them changes.
        self.require(event, names)
        self._states |= {name: TRANSITIONS[self._states[name], event] for name in names}

    def require(self, event: GroupEvent, names: Collection[str]) -> None:
        """Raise StateError naming the groups that are unknown, or whose state refuses `event`."""
        unknown = [name for name in names if name not in self._states]
        if unknown:
            raise StateError(
                f"no such groups in this rank's layout: {', '.join(unknown)}", code="unknown-group"
            )
        refused = [name for name in names if (self._states[name], event) not in TRANSITIONS]
        if refused:
            raise StateError(f"{event.value}: {', '.join(refused)}", code="event-refused")

    def among(self, *states: GroupState) -> list[str]:
        return [name for name, state in self._states.items() if state in states]

    def require_committed(self) -> None:
        """Raise StateError unless all groups are committed."""
        missing = sorted(self.among(GroupState.RELEASED, GroupState.FILLING, GroupState.VOID))
        if missing and len(self.among(GroupState.RELEASED)) == len(self._states):
            raise StateError(
                "the inference weights are released: "
                "reshard (allocate, fill, commit) before generating",
                code="weights-released",
            )
        if missing:
            raise StateError(
                f"{len(missing)} of {len(self._states)} module groups hold no committed weights "
                f"({first_of(missing, 3)}): finish the reshard before generating",
                code="weights-uncommitted",
            )

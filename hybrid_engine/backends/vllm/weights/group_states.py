"""Where each commit group stands: one state a group, one table of what may happen to it.

                 ALLOCATE     COMMIT       FAIL         VOID         RELEASE
    RELEASED     filling      refused      refused      released     released
    FILLING      filling      committed    released     released     released
    COMMITTED    filling      refused      refused      void         released
    VOID         filling      refused      refused      void         released

What is refused raises and changes nothing: every other group named in the same call stays where it was, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import Enum

from hybrid_engine.errors import StateError


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

_NUM_NAMED = 3
"""Groups that a message names."""


class GroupStates:
    """The state of every commit group of one rank; VOID at first, as vLLM has processed a model full of zeros."""

    def __init__(self, groups: Iterable[str]) -> None:
        self._states = dict.fromkeys(groups, GroupState.VOID)

    def advance(self, event: Event, groups: Collection[str] | None = None) -> None:
        """Move these groups, or all of them. Raises as `require`."""
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
        """The groups that are in one of these states."""
        return [name for name, state in self._states.items() if state in states]

    def require_committed(self) -> None:
        """Raise StateError unless all groups are committed."""
        missing = sorted(self.among(GroupState.RELEASED, GroupState.FILLING, GroupState.VOID))
        if missing and len(self.among(GroupState.RELEASED)) == len(self._states):
            raise StateError("the inference weights are released: reshard (allocate, fill, commit) before generating")
        if missing:
            raise StateError(
                f"{len(missing)} of {len(self._states)} module groups hold no committed weights "
                f"({', '.join(missing[:_NUM_NAMED])}, …): finish the reshard before generating"
            )

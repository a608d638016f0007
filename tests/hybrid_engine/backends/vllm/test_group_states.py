"""Every event in every state: what it leads to, or an error that changes nothing."""

from __future__ import annotations

import itertools

import pytest

from hybrid_engine.backends.vllm.weights.group_states import TRANSITIONS, Event, GroupState, GroupStates
from hybrid_engine.errors import StateError

PATHS = {
    GroupState.VOID: (),
    GroupState.FILLING: (Event.ALLOCATE,),
    GroupState.COMMITTED: (Event.ALLOCATE, Event.COMMIT),
    GroupState.RELEASED: (Event.RELEASE,),
}
"""State -> events that lead there from the first one."""

PAIRS = list(itertools.product(GroupState, Event))


def groups_in(state: GroupState, *names: str) -> GroupStates:
    states = GroupStates(names)
    for event in PATHS[state]:
        states.advance(event)
    assert states.among(state) == list(names)
    return states


def snapshot(states: GroupStates) -> dict[GroupState, list[str]]:
    return {state: states.among(state) for state in GroupState}


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if pair in TRANSITIONS])
def test_what_is_allowed_moves_the_groups_that_are_named(state: GroupState, event: Event) -> None:
    states = groups_in(state, "a", "b", "c")
    states.advance(event, ["a", "c"])
    moved = {"a", "c"} if TRANSITIONS[state, event] is not state else set()
    assert set(states.among(TRANSITIONS[state, event])) >= {"a", "c"}
    assert set(states.among(state)) == {"a", "b", "c"} - moved


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if pair not in TRANSITIONS])
def test_what_is_refused_names_the_group_and_moves_none(state: GroupState, event: Event) -> None:
    states = groups_in(state, "a", "b", "c")
    allowed = next(before for before, other in TRANSITIONS if other is event)
    for step in PATHS[allowed]:
        states.advance(step, ["a"])
    before = snapshot(states)
    with pytest.raises(StateError, match=f"^{event.value}: b, c$"):
        states.advance(event, ["a", "b", "c"])
    assert snapshot(states) == before


@pytest.mark.parametrize("event", Event)
def test_an_unknown_group_is_refused_whatever_happens(event: Event) -> None:
    states = groups_in(GroupState.FILLING, "a")
    with pytest.raises(StateError, match="no such groups in this rank's layout: x, y"):
        states.advance(event, ["a", "x", "y"])
    assert states.among(GroupState.FILLING) == ["a"]


def test_only_filled_groups_are_committed_and_only_they_fail() -> None:
    """The table, said in the other direction."""
    sources = {event: {state for state, other in TRANSITIONS if other is event} for event in Event}
    assert sources[Event.COMMIT] == sources[Event.FAIL] == {GroupState.FILLING}
    assert sources[Event.ALLOCATE] == sources[Event.RELEASE] == sources[Event.VOID] == set(GroupState)


@pytest.mark.parametrize("state", [state for state in GroupState if state is not GroupState.COMMITTED])
def test_nothing_computes_while_a_group_is_not_committed(state: GroupState) -> None:
    states = groups_in(GroupState.COMMITTED, "a", "b", "c")
    states.require_committed()
    for event in (Event.RELEASE, *PATHS[state]) if state is not GroupState.VOID else (Event.VOID,):
        states.advance(event, ["b"])
    with pytest.raises(StateError, match=r"1 of 3 module groups hold no committed weights \(b, …\)"):
        states.require_committed()


def test_released_weights_are_told_from_unfinished_ones() -> None:
    states = groups_in(GroupState.RELEASED, "a", "b")
    with pytest.raises(StateError, match="are released: reshard"):
        states.require_committed()
    states.advance(Event.ALLOCATE, ["a"])
    with pytest.raises(StateError, match="2 of 2 module groups"):
        states.require_committed()


def test_a_rank_without_weights_is_always_ready() -> None:
    states = GroupStates(())
    states.advance(Event.RELEASE)
    states.require_committed()

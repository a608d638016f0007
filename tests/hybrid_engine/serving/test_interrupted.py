"""Recovery from Ctrl-C on a trainer during a switch with a server, and from refused calls.

Every rank must resume within seconds, without loss. The trainers, the publisher and a server's
worker are real; the engines on both sides are fakes (test_off_policy.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hybrid_engine.errors import HybridEngineError, StateError
from hybrid_engine.memory.offload_items import Kind
from hybrid_engine.serving.invitation import Invitation
from hybrid_engine.serving.publisher import WeightPublisher
from hybrid_engine.switch.states import State
from tests.harness.launch import of_all_ranks
from tests.hybrid_engine.serving.test_off_policy import (
    NUM_TRAINERS,
    Trainers,
    on_trainers,
    state_with,
)

SOON = 20.0
"""Seconds within which ranks must recover; the job's timeout is 60."""
MOST_TRIES = 3
"""Tries of a call until the ranks are in step again."""
ALL = -1
"""Instead of a rank: Ctrl-C in a terminal reaches every process."""


def interrupt(owner: object, name: str, before: bool) -> None:
    """Make a method raise KeyboardInterrupt once, before or after its work."""
    original = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        delattr(owner, name)
        if not before:
            original(*args, **kwargs)
        raise KeyboardInterrupt

    object.__setattr__(owner, name, interrupted)  # the owner can be frozen


def enter(publisher: WeightPublisher, target: State) -> int:
    """Retry until the switch succeeds. Returns the number of tries."""
    failures = []
    for number in range(1, MOST_TRIES + 1):
        try:
            publisher.enter(target)
        except HybridEngineError as error:
            assert publisher.job.agreement.lost is None
            failures.append(str(error))
        else:
            return number
    raise AssertionError("\n".join(failures))


MOMENTS: dict[str, Callable[[Trainers, WeightPublisher], None]] = {
    "starting": lambda trainers, publisher: interrupt(publisher, "_start_update", before=False),
    "switch": lambda trainers, publisher: trainers.script.arm(
        "offload optimizer", KeyboardInterrupt()
    ),
    "fill": lambda trainers, publisher: trainers.script.arm("offload part", KeyboardInterrupt()),
    "ending": lambda trainers, publisher: interrupt(publisher, "_end_update", before=True),
    "ended": lambda trainers, publisher: interrupt(publisher, "_end_update", before=False),
}
"""Moments of a publish -> function that arranges Ctrl-C for a trainer then."""


@pytest.mark.parametrize(
    ("releases", "rank"),
    [
        (True, 0),
        (False, 1),
        (True, ALL),
        pytest.param(True, 1, marks=pytest.mark.long),
        pytest.param(False, 0, marks=pytest.mark.long),
    ],
)
@on_trainers
def test_ranks_recover_from_an_interrupt(trainers: Trainers, releases: bool, rank: int) -> None:
    """Ranks agree on the bound of the server's lag, and the server is filled again."""
    is_interrupted = rank in (ALL, trainers.job.rank)
    with closing(trainers.publisher(release_weights=releases)) as publisher:
        enter(publisher, State.INFER)
        for name, arm in MOMENTS.items():
            enter(publisher, State.TRAIN)
            assert trainers.step(publisher) == ""
            if is_interrupted:
                arm(trainers, publisher)
            trainers.job.agreement.conclude("armed")
            started = time.monotonic()
            # the other ranks may have completed the switch
            with (
                pytest.raises(KeyboardInterrupt) if is_interrupted else suppress(HybridEngineError)
            ):
                publisher.enter(State.INFER)
            enter(publisher, State.TRAIN)
            trainers.training.assert_unchanged()
            lag = publisher.served, _refusal(publisher)
            assert of_all_ranks(lag) == [lag] * NUM_TRAINERS, name
            enter(publisher, State.INFER)
            assert time.monotonic() - started < SOON, name
            expected = state_with(trainers.training.version)
            assert trainers.observe() == {**expected, "keeps": not releases}, name


def _refusal(publisher: WeightPublisher) -> str:
    try:
        publisher.require_step()
    except StateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("call", ["update", "pause"])
@on_trainers
def test_a_refused_call_fails_at_once(trainers: Trainers, call: str) -> None:
    with closing(trainers.publisher()) as publisher:
        assert trainers.publish(publisher) == ""
        assert trainers.step(publisher) == ""
        trainers.arm("server", call)
        started = time.monotonic()
        assert f"no memory in {call}" in trainers.publish(publisher)
        assert time.monotonic() - started < SOON
        assert trainers.publish(publisher) == ""
        assert trainers.observe() == state_with(1)


@pytest.mark.parametrize("what", ["start hook", "end hook", "store"])
@on_trainers
def test_a_failure_of_one_trainer_reaches_all(trainers: Trainers, what: str) -> None:
    """Fail on one trainer in a call that succeeds on the other; then publish without a failure."""
    fails = trainers.job.rank == 1

    def fail(*_: object) -> None:
        if fails:
            raise MemoryError(f"no memory for the {what}")

    with closing(trainers.publisher()) as publisher, ExitStack() as undo:
        if what == "start hook":
            undo.callback(publisher.remove_hook, publisher.on_reshard_start(fail))
        elif what == "end hook":
            undo.callback(publisher.remove_hook, publisher.on_reshard_end(fail))
        elif fails:
            undo.enter_context(mock.patch.object(Invitation, "world", fail))
        started = time.monotonic()
        with pytest.raises((MemoryError, HybridEngineError), match=f"no memory for the {what}"):
            publisher.publish()
        assert time.monotonic() - started < SOON
        undo.close()
        enter(publisher, State.INFER)
        assert trainers.observe() == state_with(0)


@on_trainers
def test_training_state_returns_after_servers_release_weights(trainers: Trainers) -> None:
    """Switch with servers that hold weights where training state belongs; a withdraw fails.

    Training state can return to the device only once the server has released its weights.
    """
    onload = trainers.offloader.onload

    def onload_if_free(kinds: Iterable[Kind], **options: Any) -> Any:
        kinds = set(kinds)
        if kinds and server_weights.exists():
            raise MemoryError("the server has its weights on the device")
        return onload(kinds, **options)

    trainers.offloader.onload = onload_if_free  # type: ignore[method-assign]
    server_weights = Path(trainers.path).with_suffix(".held")
    with closing(trainers.publisher(release_weights=True)) as publisher:
        for fault in ("refused", "interrupted", "all interrupted"):
            assert enter(publisher, State.INFER) == 1
            if fault == "all interrupted":  # after the fill, before the end of the publish
                enter(publisher, State.TRAIN)
                interrupt(publisher, "_end_update", before=True)
                with pytest.raises(KeyboardInterrupt):
                    publisher.enter(State.INFER)
            trainers.arm("server" if fault == "refused" else "nobody", "pause")
            if fault == "interrupted" and trainers.job.rank == 1:
                publisher.state = State.INTERRUPTED  # as by Ctrl-C after the publish
            assert enter(publisher, State.TRAIN) <= 2
            trainers.training.assert_unchanged()
            state = trainers.observe()
            assert (state["version"], state["weights"]) == (None, {})
        publisher.publish()
    assert (publisher.state, publisher._manager) == (State.TRAIN, None)
    state = trainers.observe()
    assert (state["version"], state["weights"]) == (None, {})

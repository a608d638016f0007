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
from tests.harness.launch import Ranks
from tests.hybrid_engine.serving.test_off_policy import NUM_TRAINERS, Trainers, run_with_server, state_with

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
    "switch": lambda trainers, publisher: trainers.script.arm("offload optimizer", KeyboardInterrupt()),
    "fill": lambda trainers, publisher: trainers.script.arm("offload part", KeyboardInterrupt()),
    "ending": lambda trainers, publisher: interrupt(publisher, "_end_update", before=True),
    "ended": lambda trainers, publisher: interrupt(publisher, "_end_update", before=False),
}
"""Moments of a publish -> function that arranges Ctrl-C for a trainer then."""


def interrupt_at_each_moment(trainers: Trainers, releases: bool, rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
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
            with pytest.raises(KeyboardInterrupt) if is_interrupted else suppress(HybridEngineError):
                publisher.enter(State.INFER)
            enter(publisher, State.TRAIN)
            trainers.training.assert_unchanged()
            served = publisher.served
            refused = _refusal(publisher)
            enter(publisher, State.INFER)
            seconds = time.monotonic() - started
            version = trainers.training.version
            results[name] = (version, seconds, served, refused, trainers.observe())
    return results


def _refusal(publisher: WeightPublisher) -> str:
    try:
        publisher.require_step()
    except StateError as error:
        return str(error)
    return ""


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
def test_ranks_recover_from_an_interrupt(ranks: Ranks, tmp_path: Path, releases: bool, rank: int) -> None:
    """Ranks agree on the bound of the server's lag, and the server is filled again."""
    arguments = (str(tmp_path / "server"), interrupt_at_each_moment, releases, rank)
    first, second, _ = ranks.launch(run_with_server, NUM_TRAINERS + 1, *arguments, timeout=400)
    for name, (version, seconds, served, refused, state) in first.items():
        assert state == {**state_with(version), "keeps": not releases}, name
        assert seconds < SOON, name
        assert second[name][2:4] == (served, refused), name


def refuse(trainers: Trainers, call: str) -> tuple[str, float, Any]:
    with closing(trainers.publisher()) as publisher:
        assert trainers.publish(publisher) == ""
        assert trainers.step(publisher) == ""
        trainers.arm("server", call)
        started = time.monotonic()
        error = trainers.publish(publisher)
        seconds = time.monotonic() - started
        assert trainers.publish(publisher) == ""
        return error, seconds, trainers.observe()


@pytest.mark.parametrize("call", ["update", "pause"])
def test_a_refused_call_fails_at_once(ranks: Ranks, tmp_path: Path, call: str) -> None:
    first, second, _ = ranks.launch(run_with_server, NUM_TRAINERS + 1, str(tmp_path / "server"), refuse, call)
    for error, seconds, _ in (first, second):
        assert f"no memory in {call}" in error
        assert seconds < SOON
    assert first[2] == state_with(1)


def fail_alone(trainers: Trainers, what: str) -> tuple[list[tuple[str, float]], Any]:
    """Fail on one trainer in a call that succeeds on the other; then publish without a failure."""
    fails = trainers.job.rank == 1
    errors = []

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
        try:
            publisher.publish()
        except Exception as error:
            errors.append((str(error), time.monotonic() - started))
        undo.close()
        enter(publisher, State.INFER)
        return errors, trainers.observe()


@pytest.mark.parametrize("what", ["start hook", "end hook", "store"])
def test_a_failure_of_one_trainer_reaches_all(ranks: Ranks, tmp_path: Path, what: str) -> None:
    first, second, _ = ranks.launch(run_with_server, NUM_TRAINERS + 1, str(tmp_path / "server"), fail_alone, what)
    for ((error, seconds),), _ in (first, second):
        assert f"no memory for the {what}" in error
        assert seconds < SOON
    assert first[1] == state_with(0)


def share_a_device(trainers: Trainers) -> list[Any]:
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
    observations = []
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
            tries = enter(publisher, State.TRAIN)
            trainers.training.assert_unchanged()
            observations.append((tries, trainers.observe()))
        publisher.publish()
    assert (publisher.state, publisher._manager) == (State.TRAIN, None)
    return [*observations, (1, trainers.observe())]


def test_training_state_returns_after_servers_release_weights(ranks: Ranks, tmp_path: Path) -> None:
    first, *_ = ranks.launch(run_with_server, NUM_TRAINERS + 1, str(tmp_path / "server"), share_a_device, timeout=200)
    for tries, state in first:
        assert tries <= 2
        assert (state["version"], state["weights"]) == (None, {})

"""Ctrl-C on one trainer in a switch with a server, and servers that refuse a call: all go on, soon, and lose nothing.

The trainers, the publisher and a server's worker are real; the engines on both sides are fakes (test_off_policy.py).
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
from tests.hybrid_engine.serving.test_off_policy import NUM_TRAINERS, Trainers, whole, with_a_server

SOON = 20.0
"""Seconds, of the 60 for which a rank is waited for."""
MOST_TRIES = 3
"""Of a call, until the ranks have found each other."""
ALL = -1
"""In the place of a trainer's rank: Ctrl-C in a terminal comes to each."""


def interrupt(owner: object, name: str, before: bool) -> None:
    """Let a method raise KeyboardInterrupt once, before or after it has done its work."""
    original = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        delattr(owner, name)
        if not before:
            original(*args, **kwargs)
        raise KeyboardInterrupt

    object.__setattr__(owner, name, interrupted)


def enter(publisher: WeightPublisher, target: State) -> int:
    """Try until it succeeds; returns how often."""
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
    "asking": lambda trainers, publisher: interrupt(publisher, "_start_update", before=False),
    "switch": lambda trainers, publisher: trainers.script.arm("offload optimizer", KeyboardInterrupt()),
    "fill": lambda trainers, publisher: trainers.script.arm("offload part", KeyboardInterrupt()),
    "ending": lambda trainers, publisher: interrupt(publisher, "_end_update", before=True),
    "ended": lambda trainers, publisher: interrupt(publisher, "_end_update", before=False),
}
"""In a publish, at which Ctrl-C comes to one trainer."""


def interrupt_each(trainers: Trainers, releases: bool, who: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    is_interrupted = who in (ALL, trainers.job.rank)
    with closing(trainers.publisher(release_weights=releases)) as publisher:
        enter(publisher, State.INFER)
        for name, arm in MOMENTS.items():
            enter(publisher, State.TRAIN)
            assert trainers.step(publisher) == ""
            if is_interrupted:
                arm(trainers, publisher)
            trainers.job.agreement.conclude("armed")
            started = time.monotonic()
            # the others may have come to the end
            with pytest.raises(KeyboardInterrupt) if is_interrupted else suppress(HybridEngineError):
                publisher.enter(State.INFER)
            enter(publisher, State.TRAIN)
            trainers.training.assert_unchanged()
            served, refused = publisher.served, _refusal(publisher)
            enter(publisher, State.INFER)
            seconds = time.monotonic() - started
            found[name] = (trainers.training.version, seconds, served, refused, trainers.look())
    return found


def _refusal(publisher: WeightPublisher) -> str:
    try:
        publisher.require_step()
    except StateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("releases", "who"),
    [
        (True, 0),
        (False, 1),
        (True, ALL),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((True, 1), (False, 0))),
    ],
)
def test_after_an_interrupt_ranks_find_each_other(ranks: Ranks, tmp_path: Path, releases: bool, who: int) -> None:
    """Soon, with the same bound on the server's lag on all; and the server is filled again."""
    arguments = (str(tmp_path / "server"), interrupt_each, releases, who)
    first, second, _ = ranks.launch(with_a_server, NUM_TRAINERS + 1, *arguments, timeout=400)
    for name, (version, seconds, served, refused, look) in first.items():
        assert look == {**whole(version), "keeps": not releases}, name
        assert seconds < SOON, name
        assert second[name][2:4] == (served, refused), name


def refuse(trainers: Trainers, call: str) -> tuple[str, float, Any]:
    with closing(trainers.publisher()) as publisher:
        assert trainers.publish(publisher) == ""
        assert trainers.step(publisher) == ""
        trainers.arm("server", call)
        started = time.monotonic()
        said = trainers.publish(publisher)
        seconds = time.monotonic() - started
        assert trainers.publish(publisher) == ""
        return said, seconds, trainers.look()


@pytest.mark.parametrize("call", ["update", "pause"])
def test_a_refusal_is_heard_at_once(ranks: Ranks, tmp_path: Path, call: str) -> None:
    first, second, _ = ranks.launch(with_a_server, NUM_TRAINERS + 1, str(tmp_path / "server"), refuse, call)
    for said, seconds, _ in (first, second):
        assert f"no memory in {call}" in said
        assert seconds < SOON
    assert first[2] == whole(1)


def fail_alone(trainers: Trainers, what: str) -> tuple[list[tuple[str, float]], Any]:
    """One trainer fails where the other has nothing to complain of; then none does."""
    is_one, said = trainers.job.rank == 1, []

    def fail(*_: object) -> None:
        if is_one:
            raise MemoryError(f"no memory for the {what}")

    with closing(trainers.publisher()) as publisher, ExitStack() as undo:
        if what == "start hook":
            undo.callback(publisher.remove_hook, publisher.on_reshard_start(fail))
        elif what == "end hook":
            undo.callback(publisher.remove_hook, publisher.on_reshard_end(fail))
        elif is_one:
            undo.enter_context(mock.patch.object(Invitation, "world", fail))
        started = time.monotonic()
        try:
            publisher.publish()
        except Exception as error:
            said.append((str(error), time.monotonic() - started))
        undo.close()
        enter(publisher, State.INFER)
        return said, trainers.look()


@pytest.mark.parametrize("what", ["start hook", "end hook", "store"])
def test_what_one_trainer_fails_in_all_hear_of(ranks: Ranks, tmp_path: Path, what: str) -> None:
    first, second, _ = ranks.launch(with_a_server, NUM_TRAINERS + 1, str(tmp_path / "server"), fail_alone, what)
    for ((said, seconds),), _ in (first, second):
        assert f"no memory for the {what}" in said
        assert seconds < SOON
    assert first[1] == whole(0)


def share_a_device(trainers: Trainers) -> list[Any]:
    """Training state has room on the device only where the server has no weights; a withdraw that it refuses."""
    onload = trainers.offloader.onload

    def onload_where_there_is_room(kinds: Iterable[Kind], **options: Any) -> Any:
        kinds = set(kinds)
        if kinds and holding.exists():
            raise MemoryError("the server has its weights on the device")
        return onload(kinds, **options)

    trainers.offloader.onload = onload_where_there_is_room  # type: ignore[method-assign]
    holding = Path(trainers.path).with_suffix(".held")
    seen = []
    with closing(trainers.publisher(release_weights=True)) as publisher:
        for fault in ("refused", "interrupted", "all interrupted"):
            assert enter(publisher, State.INFER) == 1
            if fault == "all interrupted":  # once servers were filled, before the publish has ended
                enter(publisher, State.TRAIN)
                interrupt(publisher, "_end_update", before=True)
                with pytest.raises(KeyboardInterrupt):
                    publisher.enter(State.INFER)
            trainers.arm("server" if fault == "refused" else "nobody", "pause")
            if fault == "interrupted" and trainers.job.rank == 1:
                publisher.state = State.INTERRUPTED  # as by Ctrl-C once the publish has ended
            tries = enter(publisher, State.TRAIN)
            trainers.training.assert_unchanged()
            seen.append((tries, trainers.look()))
        publisher.publish()
    assert (publisher.state, publisher._manager) == (State.TRAIN, None)
    return [*seen, (1, trainers.look())]


def test_training_state_does_not_come_back_before_servers_give_way(ranks: Ranks, tmp_path: Path) -> None:
    first, *_ = ranks.launch(with_a_server, NUM_TRAINERS + 1, str(tmp_path / "server"), share_a_device, timeout=200)
    for tries, look in first:
        assert tries <= 2
        assert (look["draws"], look["found"]) == (None, {})

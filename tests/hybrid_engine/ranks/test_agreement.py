"""Ranks leave a phase together: in one process, and on two ranks that fail, stay silent or end."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import (
    DifferentCallsError,
    GenerationError,
    LostRankError,
    MessageError,
    PeerTransportError,
    RemoteError,
    ReshardError,
    StateError,
    WeightError,
)
from hybrid_engine.ranks.agreement import Agreement, _agreed_error
from hybrid_engine.ranks.job import Job
from tests.harness.errors import failing, has_code, refused
from tests.harness.launch import on_ranks

SILENCE_SECONDS = 4.0  # timeout of the agreement with a silent peer
LOST_SECONDS = 60.0  # timeout with a peer that ends, which is noticed long before


def outcome_of(call: Callable[[], object], expected: type[Exception] = Exception) -> str:
    try:
        return f"returned {call()}"
    except expected as error:
        return f"{type(error).__name__}: {error}"


def fail_in_phase(agreement: Agreement, error: Exception | None) -> None:
    with agreement.phase("commit"):
        if error is not None:
            raise error


@pytest.fixture
def alone(job: None) -> Agreement:
    return Job.join(30).agreement


def test_phases_succeed_on_one_rank(alone: Agreement):
    for number in (True, 0):
        with alone.phase("first") as ballot:
            ballot.number = number
        assert ballot.number == number
    alone.conclude("second")
    assert alone.total(-7) == -7


def test_rounds_continue_until_all_steps_are_done(
    alone: Agreement, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hybrid_engine.ranks.agreement.ROUND_INTERVAL", 0.0)  # a step a round
    done = []

    def steps() -> Iterator[None]:
        for number in range(3):
            done.append(number)
            yield
        if len(done) == 6:
            raise StateError("the last", code="last")

    alone.rounds("work", steps())
    assert done == [0, 1, 2]
    alone.rounds("nothing to do", ())
    with refused(StateError, "last"):
        alone.rounds("work", steps())


def test_a_closed_agreement_is_refused(alone: Agreement):
    alone.close()
    alone.close()
    for call in (
        lambda: alone.total(1),
        lambda: alone.gather(1, int),
        lambda: alone.conclude("phase"),
    ):
        with refused(StateError, "agreement-is-closed"):
            call()


@pytest.mark.parametrize(
    "error", [StateError("not now"), WeightError(["a: NaN", "b: NaN"]), RemoteError("far away")]
)
def test_errors_of_the_engine_are_not_wrapped(alone: Agreement, error: Exception):
    with pytest.raises(type(error)) as by_phase, alone.phase("check"):
        raise error
    with pytest.raises(type(error)) as by_conclude:
        alone.conclude("check", error)
    assert by_phase.value is error
    assert by_conclude.value is error


def test_foreign_errors_become_reshard_errors_on_the_failing_rank(alone: Agreement):
    cause = MemoryError("no memory for 3 GB")
    expected = ("unexpected-error", "prepare", "MemoryError: no memory for 3 GB")
    with refused(ReshardError, *expected) as failure, alone.phase("prepare"):
        raise cause
    assert not isinstance(failure.value, RemoteError)
    assert failure.value.__cause__ is cause
    with refused(GenerationError, *expected), alone.phase("prepare", kind=GenerationError):
        raise cause
    with alone.phase("afterwards"):
        pass


def test_a_peer_error_keeps_its_code_and_names_the_cause() -> None:
    error = PeerTransportError("bucket 0, peer 1: it failed", code="peer-failed")
    failures = [("PeerTransportError: bucket 0", True), ("OSError: disk on fire", False)]
    agreed = _agreed_error("fill", error, failures, ReshardError)
    assert isinstance(agreed, PeerTransportError)
    assert has_code("peer-failed", "bucket 0, peer 1", "rank 1: OSError: disk on fire")(agreed)


def test_an_interrupt_is_not_delayed(alone: Agreement):
    with pytest.raises(KeyboardInterrupt), alone.phase("prepare"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_an_error_of_a_signal_handler_in_a_collective_is_named(
    alone: Agreement, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
):
    def interrupted(values: object) -> None:
        raise kind("time is up")

    monkeypatch.setattr(alone._tree, "maximum", interrupted)
    with refused(LostRankError, "ranks-parted", f"commit: {kind.__name__}: time is up") as caught:
        alone.conclude("commit")
    assert isinstance(caught.value.__cause__, kind)
    with refused(StateError, "ranks-parted"):
        alone.conclude("next")


Call = Callable[[Agreement], object]

# Texts of the message, call of rank 0, call of rank 1. Unchecked, gloo would abort both processes.
DIFFERENT_CALLS: list[tuple[tuple[str, str], Call, Call]] = [
    (
        ("update on rank 0", "score on rank 1"),
        lambda agreement: agreement.conclude("update"),
        lambda agreement: agreement.conclude("score"),
    ),
    (
        ("compare (3 numbers) on rank 0", "compare (1 numbers) on rank 1"),
        lambda agreement: agreement.is_same([1, 2, 3], "compare"),
        lambda agreement: agreement.is_same([1], "compare"),
    ),
    (
        ("layouts (gather) on rank 0", "skipped (2 flags) on rank 1"),
        lambda agreement: agreement.gather("y" * 1000, str, "layouts"),
        lambda agreement: agreement.any_of([True, False], "skipped"),
    ),
]


@contextmanager
def of_two() -> Iterator[tuple[Agreement, int]]:
    """Yield an agreement of two ranks, which stays usable, and this rank."""
    with closing(Job.join(60)) as job:
        job.agreement.conclude("before")
        yield job.agreement, job.rank
        job.agreement.conclude("after")


@on_ranks(2)
def test_all_ranks_raise_when_one_fails() -> None:
    known = StateError("not now")
    with of_two() as (agreement, rank):
        with failing(ReshardError, "unexpected-error", "commit.*OSError: disk on fire", on=0):
            fail_in_phase(agreement, OSError("disk on fire") if rank == 0 else None)
        with failing(
            StateError, "", "^not now$" if rank == 1 else "rank 1: StateError: not now", on=1
        ):
            fail_in_phase(agreement, known if rank == 1 else None)
        with failing(
            StateError, "", "^not now$" if rank == 0 else "fill.*rank 0: StateError: not now", on=0
        ):
            agreement.conclude("fill", known if rank == 0 else None)
        with failing(ReshardError, "unexpected-error", "x{99000}", on=1):
            fail_in_phase(agreement, ValueError("x" * 100_000) if rank == 1 else None)


@on_ranks(2)
def test_each_rank_raises_its_own_error_when_both_fail() -> None:
    with of_two() as (agreement, rank):
        if rank == 0:
            with pytest.raises(ReshardError, match="OSError: disk on fire"):
                fail_in_phase(agreement, OSError("disk on fire"))
        else:
            with pytest.raises(StateError, match="not now"):
                fail_in_phase(agreement, StateError("not now"))


@on_ranks(2)
def test_different_calls_are_named_on_both_ranks() -> None:
    with of_two() as (agreement, rank):
        for names, *calls in DIFFERENT_CALLS:
            with refused(DifferentCallsError, "different-calls", *names):
                calls[rank](agreement)


@on_ranks(2)
def test_an_interrupt_is_delivered_after_a_collective() -> None:
    """Rank 0 is interrupted while it waits for the other in each collective."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
    with of_two() as (agreement, rank):
        for call, result in (
            (lambda: agreement.any_of([True, False], "flags"), [True, False]),
            (lambda: agreement.is_same([1, 2, 3], "numbers"), True),
            (lambda: agreement.gather("y", str, "layouts"), ["y", "y"]),
        ):
            if rank == 0:
                timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    call()
                timer.join()
            else:
                time.sleep(0.4)
                assert call() == result


@on_ranks(2)
def test_gather_and_total() -> None:
    with of_two() as (agreement, rank):
        gathered = agreement.gather(
            {"rank": rank, "payload": "y" * (10 + 1000 * rank)}, dict[str, int | str]
        )
        assert gathered == [
            {"rank": number, "payload": "y" * (10 + 1000 * number)} for number in (0, 1)
        ]
        assert [agreement.total(rank + 1), agreement.total(2**40)] == [3, 2**41]  # beyond 32 bits
        compared = ([5, -7], [5, -rank], [5, None if rank else -3])
        assert [agreement.is_same(values, "compare") for values in compared] == [True, False, True]


@on_ranks(2)
def test_equal_messages_are_shared_once() -> None:
    with of_two() as (agreement, rank):
        indices, messages = agreement.share([b"of all", b"of rank %d" % rank, b""][: 3 - rank])
        assert messages == [b"of all", b"of rank 0", b"", b"of rank 1"]
        assert indices == [[0, 1, 2], [0, 3]]
        with (
            mock.patch("hybrid_engine.ranks.agreement.MAX_SHARED_NBYTES", 5),
            refused(MessageError, "message-too-long", "6", "5"),
        ):
            agreement.share([b"123456"])


def _empty_without_memory(
    nbytes: int, empty: Callable[..., torch.Tensor] = torch.empty, **settings: Any
) -> torch.Tensor:
    if nbytes == len(b"data"):
        raise MemoryError("full")
    return empty(nbytes, **settings)


@on_ranks(2)
def test_a_failure_to_share_is_raised_on_all_ranks() -> None:
    module = "hybrid_engine.ranks.agreement"
    with of_two() as (agreement, rank):
        digests = [b"right", b"damaged" if rank == 1 else b"right"]
        damaged = failing(
            MessageError, "malformed-message", "MessageError: " if rank == 0 else "", on=1
        )
        with mock.patch(f"{module}.content_digest", side_effect=digests), damaged:
            agreement.share([b"right"])
        is_full = (
            mock.patch.object(torch, "empty", _empty_without_memory) if rank else nullcontext()
        )
        with is_full, failing(ReshardError, "unexpected-error", "MemoryError: full", on=1):
            agreement.share([b"data"])
        with failing(MessageError, "not-encodable", "MessageError: " if rank == 0 else "", on=1):
            agreement.gather("\udc80" if rank == 1 else "", str)
        # A long message is clipped on the other rank.
        clipped = "x{80}" if rank else "(?<!x)x{80,99}(?!x)"
        with (
            mock.patch(f"{module}.LIMIT", 8 * 2 * 100),
            failing(ReshardError, "unexpected-error", clipped, on=1),
        ):
            fail_in_phase(agreement, ValueError("x" * 1000) if rank == 1 else None)


LOST_CALLS: dict[str, Callable[[Agreement], object]] = {
    "fill": lambda agreement: agreement.conclude("fill"),
    "fill: OSError: disk on fire": lambda agreement: agreement.conclude(
        "fill", OSError("disk on fire")
    ),
    "gather": lambda agreement: agreement.gather("here", str),
    "total": lambda agreement: agreement.total(1),
}
"""Text of the message -> call."""


@on_ranks(2)
def test_a_lost_rank_ends_every_wait() -> None:
    """Rank 1 stays silent, then leaves."""
    dist.init_process_group("gloo")
    silent = Job.join(SILENCE_SECONDS).agreement
    agreements = [Job.join(LOST_SECONDS).agreement for _ in LOST_CALLS]  # losses are final
    if dist.get_rank() == 1:
        time.sleep(3 * SILENCE_SECONDS)
        dist.destroy_process_group()
        return
    calls = [(silent, f"fill.*{SILENCE_SECONDS:g} s", LOST_CALLS["fill"])]
    calls += [
        (agreement, text, call)
        for agreement, (text, call) in zip(agreements, LOST_CALLS.items(), strict=True)
    ]
    for agreement, text, call in calls:
        started = time.monotonic()
        with pytest.raises(LostRankError, match=text) as caught:
            call(agreement)
        seconds = time.monotonic() - started
        assert 0.9 * SILENCE_SECONDS * (agreement is silent) <= seconds < LOST_SECONDS / 2, text
        assert not re.search("gloo|GLHF", str(caught.value)), "parts of torch's own error text"
    dist.destroy_process_group()

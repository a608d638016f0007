"""Ranks leave a phase together: in one process, and on two ranks that fail, stay silent or end."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import (
    GenerationError,
    HybridEngineError,
    LostRankError,
    PeerTransportError,
    RemoteError,
    ReshardError,
    StateError,
    WeightError,
)
from hybrid_engine.ranks.agreement import Agreement, _agreed_error
from hybrid_engine.ranks.job import Job
from tests.harness.errors import has_code
from tests.harness.launch import Ranks

SILENCE_SECONDS = 4.0  # timeout of the agreement with a silent peer
LOST_SECONDS = 60.0  # timeout with a peer that ends, which is noticed long before


def outcome_of(call: Callable[[], object], expected: type[Exception] = Exception) -> str:
    try:
        return f"returned {call()}"
    except expected as error:
        return f"{type(error).__name__}: {error}"


def code_of(call: Callable[[], object]) -> str:
    """Return type, code and message of this project's error raised by `call`, or its result."""
    try:
        return f"returned {call()}"
    except HybridEngineError as error:
        return f"{type(error).__name__} {error.code}: {error}"


def refusal_of(call: Callable[[], object]) -> str:
    """Return the outcome of `call`; other errors than this project's are not caught."""
    return outcome_of(call, HybridEngineError)


@pytest.fixture
def alone(job: None) -> Agreement:
    return Job.join(30).agreement


def test_phases_succeed_on_one_rank(alone: Agreement):
    done = []
    for number in (True, 0):
        with alone.phase("first") as ballot:
            ballot.number = number
        assert ballot.number == number
    done.append("first")
    alone.conclude("second")
    assert done == ["first"]
    assert alone.gather({"rank": 0}, dict[str, int]) == [{"rank": 0}]
    assert alone.total(-7) == -7
    assert alone.is_same([3, -2], "shapes")


def test_rounds_continue_until_all_steps_are_done(alone: Agreement, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hybrid_engine.ranks.agreement.SECONDS_OF_A_ROUND", 0.0)  # a step a round
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
    with pytest.raises(StateError, check=has_code("last")):
        alone.rounds("work", steps())


def test_a_closed_agreement_is_refused(alone: Agreement):
    alone.close()
    alone.close()
    for call in (lambda: alone.total(1), lambda: alone.gather(1, int), lambda: alone.conclude("phase")):
        with pytest.raises(StateError, check=has_code("agreement-is-closed")):
            call()


@pytest.mark.parametrize("error", [StateError("not now"), WeightError(["a: NaN", "b: NaN"]), RemoteError("far away")])
def test_errors_of_the_engine_are_not_wrapped(alone: Agreement, error: Exception):
    with pytest.raises(type(error)) as by_phase, alone.phase("check"):
        raise error
    with pytest.raises(type(error)) as by_conclude:
        alone.conclude("check", error)
    assert by_phase.value is error
    assert by_conclude.value is error


def test_foreign_errors_become_reshard_errors_on_the_failing_rank(alone: Agreement):
    cause = MemoryError("no memory for 3 GB")
    foreign = has_code("unexpected-error", "prepare", "MemoryError: no memory for 3 GB")
    with pytest.raises(ReshardError, check=foreign) as failure, alone.phase("prepare"):
        raise cause
    assert not isinstance(failure.value, RemoteError)
    assert failure.value.__cause__ is cause
    with pytest.raises(GenerationError, check=foreign), alone.phase("prepare", kind=GenerationError):
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
    lost = has_code("ranks-parted", f"commit: {kind.__name__}: time is up")
    with pytest.raises(LostRankError, check=lost) as caught:
        alone.conclude("commit")
    assert isinstance(caught.value.__cause__, kind)
    with pytest.raises(StateError, check=has_code("ranks-parted")):
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

COLLECTIVES: list[Callable[[Agreement], object]] = [
    lambda agreement: agreement.any_of([True, False], "flags"),
    lambda agreement: agreement.is_same([1, 2, 3], "numbers"),
    lambda agreement: agreement.gather("y", str, "layouts"),
]


def phase_outcome(agreement: Agreement, error: Exception | None) -> str:
    def run() -> None:
        with agreement.phase("commit"):
            if error is not None:
                raise error

    return outcome_of(run)


def _share_without_memory(agreement: Agreement, rank: int) -> object:
    """Share a message while rank 1 has no memory to receive it."""
    empty = torch.empty
    message = b"data"

    def full(nbytes: int, **arguments: object) -> torch.Tensor:
        if nbytes == len(message):
            raise MemoryError("full")
        return empty(nbytes, **arguments)

    with mock.patch.object(torch, "empty", full) if rank else nullcontext():
        return agreement.share([message])


def _call_interrupted(agreement: Agreement) -> list[str]:
    """Interrupt this rank while it waits for the other in each collective."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
    outcomes = []
    for call in COLLECTIVES:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            outcomes.append(outcome_of(lambda call=call: call(agreement)))
        except KeyboardInterrupt:
            outcomes.append("KeyboardInterrupt")
        timer.join()
    return outcomes


def _call_late(agreement: Agreement) -> list[str]:
    outcomes = []
    for call in COLLECTIVES:
        time.sleep(0.4)  # the other rank is interrupted after 0.1 s
        outcomes.append(outcome_of(lambda call=call: call(agreement)))
    return outcomes


def fail_on_rank() -> dict[object, object]:
    """Fail on one rank or both in every way; the agreement stays usable."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    agreement = Job.join(60).agreement
    foreign = OSError("disk on fire")
    known = StateError("not now")
    results: dict[object, object] = {"both well": phase_outcome(agreement, None)}
    results["rank 0, foreign"] = phase_outcome(agreement, foreign if rank == 0 else None)
    results["rank 1, known"] = phase_outcome(agreement, known if rank == 1 else None)
    results["both"] = phase_outcome(agreement, foreign if rank == 0 else known)
    results["conclude"] = outcome_of(lambda: agreement.conclude("fill", known if rank == 0 else None))
    results["long text"] = len(phase_outcome(agreement, ValueError("x" * 100_000) if rank == 1 else None)) >= 100_000
    results["gather"] = agreement.gather({"rank": rank, "payload": "y" * (10 + 1000 * rank)}, dict[str, int | str])
    results["share"] = agreement.share([b"of all", b"of rank %d" % rank, b""][: 3 - rank])
    with mock.patch("hybrid_engine.ranks.agreement.MOST_SHARED", 5):
        results["too much"] = code_of(lambda: agreement.share([b"123456"]))
    digest = b"damaged" if rank == 1 else b"right"
    with mock.patch("hybrid_engine.ranks.agreement.content_digest", side_effect=[b"right", digest]):
        results["damaged"] = code_of(lambda: agreement.share([b"right"]))
    results["no memory"] = code_of(lambda: _share_without_memory(agreement, rank))
    results["not encodable"] = code_of(lambda: agreement.gather("\udc80" if rank == 1 else "", str))
    with mock.patch("hybrid_engine.ranks.agreement.LIMIT", 8 * 2 * 100):
        results["clipped"] = phase_outcome(agreement, ValueError("x" * 1000) if rank == 1 else None)
    results["same"] = [
        agreement.is_same(values, "compare") for values in ([5, -7], [5, -rank], [5, None if rank else -3])
    ]
    results["total"] = [agreement.total(rank + 1), agreement.total(2**40)]  # beyond 32 bits
    for names, *calls in DIFFERENT_CALLS:
        results[names] = code_of(lambda run=calls[rank]: run(agreement))
    results["interrupted"] = _call_interrupted(agreement) if rank == 0 else _call_late(agreement)
    results["both well again"] = phase_outcome(agreement, None)
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def failures(ranks: Ranks) -> list[dict[str, object]]:
    return ranks.launch(fail_on_rank, 2, timeout=120)


def test_all_ranks_raise_when_one_fails(failures: list[dict[str, object]]):
    of_rank_0, of_rank_1 = failures
    for results in failures:
        assert results["both well"] == results["both well again"] == "returned None"
        assert results["long text"] is True
    assert of_rank_0["rank 0, foreign"].startswith("ReshardError: ")
    assert of_rank_1["rank 0, foreign"].startswith("RemoteError: ")
    for results in failures:
        assert "commit" in results["rank 0, foreign"]
        assert "OSError: disk on fire" in results["rank 0, foreign"]
    assert of_rank_1["rank 1, known"] == "StateError: not now"
    assert of_rank_0["rank 1, known"].startswith("RemoteError: ")
    assert "rank 1: StateError: not now" in of_rank_0["rank 1, known"]
    assert of_rank_0["conclude"] == "StateError: not now"
    assert "fill" in of_rank_1["conclude"]
    assert "rank 0: StateError: not now" in of_rank_1["conclude"]


def test_each_rank_raises_its_own_error_when_both_fail(failures: list[dict[str, object]]):
    of_rank_0, of_rank_1 = failures
    assert of_rank_0["both"].startswith("ReshardError: ")
    assert "OSError: disk on fire" in of_rank_0["both"]
    assert of_rank_1["both"] == "StateError: not now"


@pytest.mark.parametrize("names", [names for names, *_ in DIFFERENT_CALLS])
def test_different_calls_are_named_on_both_ranks(failures: list[dict[object, str]], names: tuple[str, str]):
    for results in failures:
        assert results[names].startswith("DifferentCallsError different-calls: ")
        assert all(name in results[names] for name in names), results[names]


def test_an_interrupt_is_delivered_after_a_collective(failures: list[dict[str, object]]):
    of_rank_0, of_rank_1 = failures
    assert of_rank_0["interrupted"] == ["KeyboardInterrupt"] * 3
    assert of_rank_1["interrupted"] == ["returned [True, False]", "returned True", "returned ['y', 'y']"]


def test_gather_and_total(failures: list[dict[str, object]]):
    for results in failures:
        assert [value["rank"] for value in results["gather"]] == [0, 1]
        assert [len(value["payload"]) for value in results["gather"]] == [10, 1010]
        assert results["total"] == [3, 2**41]
        assert results["same"] == [True, False, True]


def test_equal_messages_are_shared_once(failures: list[dict[str, object]]) -> None:
    for results in failures:
        indices, messages = results["share"]
        assert messages == [b"of all", b"of rank 0", b"", b"of rank 1"]
        assert indices == [[0, 1, 2], [0, 3]]
        assert results["too much"].startswith("MessageError message-too-long: ")
        assert all(number in results["too much"] for number in "65"), results["too much"]


def test_a_failure_to_share_is_raised_on_all_ranks(failures: list[dict[str, object]]) -> None:
    for name, kind, cause in (
        ("damaged", "MessageError malformed-message: ", "MessageError: "),
        ("no memory", "ReshardError unexpected-error: ", "MemoryError: full"),
        ("not encodable", "MessageError not-encodable: ", "MessageError: "),
        ("clipped", "ReshardError: ", "x" * 80),
    ):
        remote, local = (results[name] for results in failures)
        assert local.startswith(kind), local
        assert re.match(r"RemoteError( rank-failed)?: ", remote), remote
        assert cause in remote, remote
    assert "x" * 100 not in failures[0]["clipped"]


LOST_CALLS: dict[str, Callable[[Agreement], object]] = {
    "conclude": lambda agreement: agreement.conclude("fill"),
    "conclude with an error": lambda agreement: agreement.conclude("fill", OSError("disk on fire")),
    "gather": lambda agreement: agreement.gather("here", str),
    "total": lambda agreement: agreement.total(1),
}


def lose_rank_1() -> dict[str, tuple[str, float]]:
    """Rank 1 stays silent, then leaves; rank 0 returns the outcome and seconds of each call."""
    dist.init_process_group("gloo")
    silent = Job.join(SILENCE_SECONDS).agreement
    agreements = {name: Job.join(LOST_SECONDS).agreement for name in LOST_CALLS}  # losses are final
    if dist.get_rank() == 1:
        time.sleep(3 * SILENCE_SECONDS)
        dist.destroy_process_group()
        return {}
    calls = {"silent": lambda: silent.conclude("fill")}
    calls |= {name: lambda name=name: LOST_CALLS[name](agreements[name]) for name in LOST_CALLS}
    results = {}
    for name, call in calls.items():
        started = time.monotonic()
        results[name] = outcome_of(call), time.monotonic() - started
    dist.destroy_process_group()
    return results


def test_a_lost_rank_ends_every_wait(ranks: Ranks):
    results, _ = ranks.launch(lose_rank_1, 2, timeout=200)
    assert set(results) == {"silent", *LOST_CALLS}
    for name, (outcome, seconds) in results.items():
        assert outcome.startswith("LostRankError: "), (name, outcome)
        assert "gloo" not in outcome, outcome
        assert "GLHF" not in outcome, outcome  # part of torch's own error text
        assert seconds < LOST_SECONDS / 2, (name, seconds)
    assert "fill: OSError: disk on fire" in results["conclude with an error"][0]
    assert f"{SILENCE_SECONDS:g} s" in results["silent"][0]
    assert "fill" in results["silent"][0]
    assert results["silent"][1] >= 0.9 * SILENCE_SECONDS

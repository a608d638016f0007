"""Agreement of all ranks at the end of each phase: all ranks succeeded, or all ranks raise.

    with agreement.phase("commit"):
        ...                             # may fail on a single rank
    # Here on every rank. Otherwise the failed rank raises its error and the others RemoteError.

If one rank fails while the others wait for it inside a library, a collective cannot bring them back
together. Every rank then learns of the failure (ranks/failure_watch.py), every wait has an end, and
the agreement is over:

    the failed rank     waits for the others for its patience or the timeout, then raises alone
    the other ranks     return by its closed connections, the library's timeout, or the watch

`Pace` limits how far hosts drift apart in a phase of many steps that has no other synchronization:

    step        0 … 7 | 8 … 15 | 16 … 23 | …
    a host passes step 8 (k + 1) once all hosts have reached step 8 k

Without it, a host with less work would reach the end, or a message that it shares with a slow host,
long before that host. Such a wait may last at most `timeout_seconds`, but the slow host's work may
take longer. With it, no wait for another host lasts longer than 16 of that host's steps, and a host
that waits here would have waited later anyway. At each step a rank also learns of failures of ranks
that send it no messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.errors import (
    DifferentCallsError,
    HybridEngineError,
    LostRankError,
    MessageError,
    PeerTransportError,
    RemoteError,
    ReshardError,
    StateError,
    TransportError,
    clipped,
)
from hybrid_engine.messages import LIMIT, content_digest, decode, encode, require_size
from hybrid_engine.ranks.digests import are_same, extremes_of, text_digest
from hybrid_engine.ranks.failure_watch import FailureWatch
from hybrid_engine.ranks.groups import is_lost_connection, plain_text
from hybrid_engine.ranks.rank_tree import RankTree, TreeShape
from hybrid_engine.ranks.signals_and_forks import signals_held
from hybrid_engine.ranks.world import World

BUILD_TIMEOUT = 300.0
"""Shortest timeout while engines are built: imports take up to a minute on a busy host, and differ
between ranks."""

ROUND_INTERVAL = 5.0
"""Interval between agreements of ranks that work for an unknown time (`Agreement.rounds`)."""

SHORT_PATIENCE = 30.0
"""Seconds that a failed rank waits for ranks that cannot return, because a library waits for it."""

PATIENCE_AFTER_INTERRUPT = 1.0
"""The same after Ctrl-C or SystemExit, which end the job: torchrun kills all ranks after 30 s."""

MAX_SHARED_NBYTES = 2**31
"""Limit of `Agreement.share` in bytes over all ranks. FSDP2's ranks hold different shards: 2,048
ranks with a dense 70B model send 195 MB. DeepSeek-V3 in Megatron's layouts takes 17 MB for any
number of ranks."""

_MAX_TEXT_LENGTH = 100_000
"""Characters of an error's message that are sent to the other ranks."""

_SECONDHAND = (RemoteError, LostRankError)
"""Errors that report the failure of another rank, not of the rank that raises them."""

_FOREIGN = "unexpected-error"
"""Code of an error that was converted from one of another library."""

_Failure = tuple[str, bool] | None
"""Failure of one rank in a phase: `described` error, and whether it is `_SECONDHAND`."""

_Outcome = tuple[_Failure, str]
"""Message of one rank after a failed phase: its failure, and the call that it made."""


@dataclass
class Ballot:
    """A number that a rank may set in a phase; after the phase, the largest of all ranks."""

    number: int = 0


class Agreement:
    """Tells every rank whether any rank failed, by one small maximum over all ranks if none did.

    It has its own connections, so it works alongside NCCL and shares no traffic with it. After a
    LostRankError the ranks can no longer agree, and every call raises StateError.

    Args:
        world: the ranks. Creation is collective.
        hosts: host of each rank, by rank.
        timeout_seconds: longest wait for a peer before LostRankError.

    Attributes:
        world_size: number of ranks.
        lost: the LostRankError that ended the agreement; None while the ranks are connected.
        has_left: this rank leaves because of its own error, and the others do not wait for it.
        nbytes_received: bytes received so far in gathers, maxima not included.
    """

    def __init__(self, world: World, hosts: Sequence[str], timeout_seconds: float) -> None:
        self._world = world
        self._rank = world.rank
        self.world_size = world.size
        self._hosts = hosts
        self._shape = TreeShape(hosts)
        self.timeout_seconds = timeout_seconds
        self.lost: LostRankError | None = None
        self.has_left = False
        self.nbytes_received = 0
        self._agreed: Exception | None = None  # raised here when all ranks raised last
        self._watch = FailureWatch(world, timeout_seconds)
        self._tree: RankTree | None = None
        try:
            self._tree = self._connect()
        except BaseException:
            self._watch.close()
            raise

    def pace(self) -> Pace:
        """Return a new `Pace` for one phase of many steps."""
        host = self._hosts[self._rank]
        is_first = self._hosts.index(host) == self._rank
        return Pace(
            self._watch,
            len(set(self._hosts)),
            is_first=is_first,
            timeout_seconds=self.timeout_seconds,
        )

    def close(self) -> None:
        """Close the connections once no agreement is needed any more; idempotent."""
        self._watch.close()
        self._disconnect()

    def _connect(self) -> RankTree:
        with self._watch.inside("connecting"), self._connected("connecting"):
            return RankTree(self._world, self._shape, self.timeout_seconds, self._watch.ended)

    def _disconnect(self) -> None:
        tree = self._tree
        self._tree = None
        if tree is not None:
            tree.close()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Run the set-up with a timeout of at least `BUILD_TIMEOUT`. Collective."""
        tree = self._connections()
        seconds = self.timeout_seconds
        self.timeout_seconds = max(seconds, BUILD_TIMEOUT)
        self._watch.set_silence(self.timeout_seconds)
        try:
            # Timeouts of connections are fixed when they are made: these are for the set-up only.
            self._tree = self._connect()
            with self._watch.inside("building"):
                yield
        except BaseException as error:
            if error is not self._agreed and error is not self.lost:
                is_interrupt = not isinstance(error, Exception)
                patience = PATIENCE_AFTER_INTERRUPT if is_interrupt else SHORT_PATIENCE
                self._watch.report("building", described(error), patience)
            raise
        finally:
            self._disconnect()
            self.timeout_seconds = seconds
            self._watch.set_silence(seconds)
            self._tree = tree
            if self.lost is not None:
                self._disconnect()

    def is_broken(self) -> bool:
        """Return whether a rank is known to have failed or ended; from any thread."""
        return self.lost is not None or bool(self._watch.known_failures())

    @contextmanager
    def phase(
        self,
        name: str,
        patience: float | None = None,
        waiting: Collection[int] | None = None,
        kind: type[HybridEngineError] = ReshardError,
    ) -> Iterator[Ballot]:
        """Leave the block on all ranks, or raise on all ranks.

        Yields a number that costs no further exchange. The block must not call other collectives of
        this agreement unless all ranks do.

        Args:
            name: name of the phase in messages.
            patience: seconds that a failed rank waits for the ranks in `waiting`; default: the
                timeout. Shorter if they cannot return by themselves, because they wait for the
                failed rank in a library.
            waiting: ranks to which `patience` applies; default: all. The others have the timeout.
            kind: type that a foreign error is converted to.
        """
        self._connections()
        error: Exception | None = None
        self._agreed = None
        ballot = Ballot()
        try:
            with self._watch.inside(name):
                yield ballot
        except Exception as caught:
            # Raised by a phase within this one: all ranks have raised already.
            if caught is self._agreed or caught is self.lost:
                raise
            error = self._explained(name, caught)
        except BaseException as interrupt:  # passed on at once, but reported to the others
            seconds = self.timeout_seconds
            if patience is not None:  # the others wait for this rank in a library
                seconds = min(patience, PATIENCE_AFTER_INTERRUPT)
            self._watch.report(name, described(interrupt), seconds, waiting)
            raise
        self.conclude(name, error, patience, waiting, kind, ballot=ballot)

    def rounds(self, name: str, steps: Iterable[object]) -> None:
        """Run this rank's `steps`, agreeing every few seconds until all ranks have finished theirs.

        No wait is longer than a round and one step, and a failure on one rank is raised on all.
        """
        remaining = iter(steps)
        seconds = min(ROUND_INTERVAL, self.timeout_seconds / 4)
        goes_on = True
        while goes_on:
            with self.phase(name):
                end = time.monotonic() + seconds
                has_more = False
                for _ in remaining:  # an iterator: the next round goes on behind this step
                    if time.monotonic() > end:
                        has_more = True
                        break
            (goes_on,) = self.any_of([has_more], name)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Run work of all ranks without an agreement at its end.

        A failure is raised on this rank only, and reported to the others. Raises LostRankError if a
        library lost its connection to a rank that failed or ended.
        """
        self._connections()
        try:
            with self._watch.inside(name):
                yield
        except Exception as caught:
            if caught is self._agreed:  # raised by a phase within this call, on all ranks
                raise
            error = self._explained(name, caught)
            if not isinstance(error, LostRankError):
                self._watch.report(name, described(error), self.timeout_seconds)
            if error is caught:
                raise
            raise error from caught
        except BaseException as interrupt:
            self._watch.report(name, described(interrupt), self.timeout_seconds)
            raise

    @contextmanager
    def without_collective(self, name: str) -> Iterator[Callable[[], str]]:
        """Wait for other ranks by the job's store, without a collective.

        Yields a function that returns which ranks have ended or left, as text. A LostRankError
        raised in the block ends this agreement.
        """
        self._connections()
        with self._watch.inside(name):
            try:
                yield lambda: self._watch.ended() or self._watch.left()
            except LostRankError as error:
                self._part(name, error)
                raise

    def leave(self, error: BaseException) -> None:
        """Report that this rank leaves because of `error`, which was raised outside of any phase.

        Does not wait for them. Reports nothing if all ranks raised the error, or if it is
        secondhand.
        """
        self.has_left = True
        is_known = error is self._agreed or isinstance(error, _SECONDHAND)
        if self._tree is not None and not is_known:
            with self._watch.inside("leaving"):
                self._watch.report("leaving", described(error), self.timeout_seconds)

    def conclude(
        self,
        phase: str,
        error: Exception | None = None,
        patience: float | None = None,
        waiting: Collection[int] | None = None,
        kind: type[HybridEngineError] = ReshardError,
        *,
        what_follows: str = "",
        ballot: Ballot | None = None,
    ) -> None:
        """End a phase: return if no rank failed, else raise on every rank. Collective.

        `ballot` then has the largest number of all ranks.

        Without an `error` on any rank it is a barrier. `what_follows` describes the collective that
        comes next, and must be equal on all ranks: gloo aborts the process if sizes differ.

        Raises:
            `error`: on the rank that failed, converted to `kind` if it is foreign.
            RemoteError: on the other ranks, with the messages of the ranks that failed. Also if
                `error` is a RemoteError that this rank received during the phase.
            LostRankError: if a rank does not come; with this rank's own error if it has one.
            DifferentCallsError: if no rank failed, but ranks end different phases or differ in
                `what_follows`; names the call of each rank.
        """
        # The tree is not kept in a local variable: an error's traceback would keep it connected.
        self._connections()
        with self._watch.arrived(phase):
            if error is not None and not self._report(phase, error, patience, waiting):
                raise self._part(phase, error) from error
            # One maximum finds both a failure on any rank and ranks that make different calls.
            digest = text_digest(phase, what_follows)
            ballot = ballot or Ballot()
            flags = [error is not None, digest, -digest, ballot.number]
            extremes = torch.tensor(flags, dtype=torch.int64)
            with signals_held():
                with self._connected(phase, error):
                    self._connections().maximum(extremes)
                has_failed, highest, negated_lowest, ballot.number = extremes.tolist()
                if not has_failed and highest == -negated_lowest:  # 5 and 7 make 7 and -5
                    return
                # Texts of all ranks must fit into one message, and a character has up to 4 bytes.
                most = min(_MAX_TEXT_LENGTH, LIMIT // (8 * self.world_size))
                failure: _Failure = None
                if error is not None:
                    failure = clipped(described(error), most), isinstance(error, _SECONDHAND)
                message = encode((failure, f"{phase}{what_follows}"))
                received = self._gather(message, phase, error)
                outcomes = [decode(outcome, _Outcome) for outcome in received]
        failures = [failure for failure, _ in outcomes]
        agreed: HybridEngineError
        if has_failed:
            agreed = _agreed_error(phase, error, failures, kind)
        else:  # only then: a failed rank ends an outer phase, which is not a different call
            agreed = _different_calls([call for _, call in outcomes])
        first = failures[0]
        agreed.cause_on_rank_0 = ""
        # A rank without an error of its own has nothing to add to that of rank 0.
        if failures[self._rank] in (None, first):
            agreed.cause_on_rank_0 = first[0] if first else described(agreed)
        self._agreed = agreed
        raise agreed from (error if error is not agreed else agreed.__cause__)

    @signals_held()
    def gather(
        self, value: object, kind: Any, phase: str = "gather", limit: int = LIMIT
    ) -> list[Any]:
        """Return `value` of every rank, by rank. Collective; for set-up and results, not switches.

        Args:
            value: small, because every rank receives the values of all ranks.
            kind: type of the value for `messages.decode`, such as `list[str]`.
            phase: name in messages.
            limit: limit of all ranks' encoded values together, in bytes.

        Raises RemoteError; MessageError if a value cannot be encoded, has another type, or is too
        long.
        """
        data = b""
        error: Exception | None = None
        try:
            data = encode(value, limit)
        except MessageError as caught:
            error = caught
        # A rank that failed before it came here concludes now, and never takes part in this gather.
        self.conclude(phase, error, what_follows=" (gather)")
        received = self._gather(data, phase, limit=limit)
        with self.call(phase):
            return [decode(message, kind, limit) for message in received]

    @signals_held()
    def share(
        self, messages: Sequence[bytes], phase: str = "share"
    ) -> tuple[list[list[int]], list[bytes]]:
        """Send every rank's messages to all ranks, and equal messages only once. Collective.

        Returns the numbers of each rank's messages, by rank, and the messages by number. Messages
        are numbered in the order of ranks.

        Raises RemoteError; MessageError on all ranks if the messages together exceed
        `MAX_SHARED_NBYTES`.
        """
        own_digests = [(content_digest(message), len(message)) for message in messages]
        digests_by_rank = self.gather(own_digests, list[tuple[bytes, int]], phase)
        numbers: dict[tuple[bytes, int], int] = {}
        # A message is new if no rank before had one with this digest and length.
        numbers_by_rank = [
            [numbers.setdefault(key, len(numbers)) for key in digests]
            for digests in digests_by_rank
        ]
        sizes = [size for _, size in numbers]
        total = sum(sizes)
        # Each message is sent by the first rank that has it.
        sent_by_rank = first_to_have(numbers_by_rank)
        with self.phase(phase):
            require_size(total, MAX_SHARED_NBYTES)
            by_number = dict(zip(numbers_by_rank[self._rank], messages, strict=True))
            sent = sent_by_rank[self._rank]
            data = b"".join(by_number[number] for number in sent)
            # Taken inside the phase, so that a rank without memory fails before it receives.
            room = torch.empty(total, dtype=torch.uint8)
        with self._connected(phase):
            sent_nbytes = [sum(map(sizes.__getitem__, sent)) for sent in sent_by_rank]
            received = self._exchange(data, sent_nbytes, room)
        with self.phase(phase):
            shared = [b""] * len(sizes)
            for sent, view in zip(sent_by_rank, received, strict=True):
                start = 0
                for number in sent:
                    stop = start + sizes[number]
                    shared[number] = view[start:stop].tobytes()
                    start = stop
            for message, (digest, _) in zip(shared, numbers, strict=True):
                if content_digest(message) != digest:
                    raise MessageError(
                        f"{phase}: a received message does not match the digest of its sender",
                        code="malformed-message",
                    )
        return numbers_by_rank, shared

    def total(self, value: int) -> int:
        """Return the sum of `value` over all ranks. Raises RemoteError. Collective."""
        return sum(self.gather(value, int, "total"))

    @signals_held()
    def any_of(self, flags: Sequence[bool], phase: str) -> list[bool]:
        """Return, flag by flag, True if any rank passes True. Collective.

        All ranks pass the same number of flags. Raises RemoteError.
        """
        self.conclude(phase, what_follows=f" ({len(flags)} flags)")
        raised = torch.tensor(flags, dtype=torch.uint8)
        with self._connected(phase):
            self._connections().maximum(raised)
        return [bool(flag) for flag in raised.tolist()]

    @signals_held()
    def is_same(self, values: Sequence[int | None], phase: str) -> bool:
        """Return True if all ranks pass equal numbers. Collective.

        All ranks pass as many. A None takes no part: the numbers of the other ranks are compared at
        its position. Raises RemoteError.
        """
        self.conclude(phase, what_follows=f" ({len(values)} numbers)")
        extremes = extremes_of(values)
        with self._connected(phase):
            self._connections().maximum(extremes)
        return are_same(extremes)

    def _gather(
        self, data: bytes, phase: str, error: Exception | None = None, limit: int = LIMIT
    ) -> list[memoryview]:
        """Return the messages of all ranks, by rank.

        Raises MessageError on all ranks if the messages together are longer than `limit` bytes.
        """
        with self._connected(phase, error):
            length = len(data).to_bytes(8, "little")
            lengths = self._exchange(length, [8] * self.world_size)  # receivers need them
            sizes = [int.from_bytes(length, "little") for length in lengths]
            require_size(sum(sizes), limit)
            return self._exchange(data, sizes)

    def _exchange(
        self, message: bytes, sizes: Sequence[int], room: torch.Tensor | None = None
    ) -> list[memoryview]:
        self.nbytes_received += self._shape.received_nbytes(self._rank, sizes)
        return self._connections().gather(message, sizes, room)

    def _connections(self) -> RankTree:
        """Return the connections. Raises StateError if the agreement is over."""
        if self.lost is not None:
            raise StateError(
                f"the ranks have parted, end the job: {self.lost}", code="ranks-parted"
            ) from self.lost
        if self._tree is None:
            raise StateError(
                "the agreement of the ranks is closed, because its owner was shut down",
                code="agreement-is-closed",
            )
        return self._tree

    def _report(
        self, phase: str, error: Exception, patience: float | None, waiting: Collection[int] | None
    ) -> bool:
        """Report `error` to the other ranks. Returns False if they do not come to the agreement."""
        if isinstance(error, _SECONDHAND):
            return True  # they know of it already
        patience = min(patience or self.timeout_seconds, self.timeout_seconds)
        self._watch.report(phase, described(error), patience, waiting)
        return patience == self.timeout_seconds or self._watch.have_arrived(waiting, patience)

    def _explained(self, phase: str, error: Exception) -> Exception:
        """Return LostRankError for a lost connection with a known reason, else `error`."""
        reasons = self._watch.reasons() if is_lost_connection(error) else []
        if not reasons:
            return error
        lost = LostRankError(_parted(phase, None, reasons), code="ranks-parted")
        lost.__cause__ = error
        lost.is_explained = True
        return lost

    @contextmanager
    def _connected(self, phase: str, error: Exception | None = None) -> Iterator[None]:
        """End the agreement if a collective in the block fails. `error` is this rank's own error.

        Usually torch.distributed raises because a rank is gone, but a signal handler may raise,
        too.
        """
        try:
            yield
        except MessageError:  # raised on all ranks
            raise
        except Exception as broken:
            if error is None and not is_lost_connection(broken):
                error = broken
                self._watch.report(phase, described(broken), self.timeout_seconds)
            parted = self._part(phase, error)
            raise parted from (parted.__cause__ or error or broken)
        except BaseException as interrupt:  # outside the main thread, where signals are not held
            # The other ranks may be in a collective that this rank has not joined.
            if self.world_size > 1:
                self._watch.report(phase, described(interrupt), PATIENCE_AFTER_INTERRUPT)
                self._part(phase, None)
            raise

    def _part(self, phase: str, error: Exception | None) -> LostRankError:
        """End this agreement, and return the error to raise.

        The connections close, so that no other rank waits for this one.
        """
        if not isinstance(error, LostRankError):
            unknown = "they ended, or wait for this rank in a library"
            if error is None:
                unknown = (
                    f"a rank exited or did not respond within {self.timeout_seconds:g} s; "
                    "see the other logs"
                )
            reasons = self._watch.reasons()
            message = _parted(phase, error, reasons or [unknown])
            error = LostRankError(message, code="ranks-parted")
            error.is_explained = bool(reasons)
        self.lost = error
        self._disconnect()
        return error


def first_to_have(numbers_by_rank: Sequence[Collection[int]]) -> list[list[int]]:
    """Return, by rank, the numbers that no rank before it has."""
    known: set[int] = set()
    first = []
    for numbers in numbers_by_rank:
        # Without duplicates, but in the order of the rank's messages.
        distinct = dict.fromkeys(numbers)
        first.append([number for number in distinct if number not in known])
        known.update(numbers)
    return first


def _parted(phase: str, error: Exception | None, reasons: list[str]) -> str:
    """Return the message of a LostRankError."""
    known = "\n".join(reasons)
    if error is None:
        return f"{phase}: {known}. The job cannot go on"
    own = described(error)
    return f"{phase}: {own}\nThe other ranks did not come: {known}. The job cannot go on"


def _agreed_error(
    phase: str,
    error: Exception | None,
    failures: Sequence[_Failure],
    kind: type[HybridEngineError],
) -> HybridEngineError:
    """Return the error that this rank raises. `error` is its own; `failures` are by rank."""
    texts = {}
    firsthand = {}
    for rank, failure in enumerate(failures):
        if failure is not None:
            text, is_secondhand = failure
            texts[rank] = text
            if not is_secondhand:
                firsthand[rank] = text
    texts = firsthand or texts
    causes = "\n".join(f"rank {rank}: {text}" for rank, text in texts.items())
    # A library reported a lost rank, but all ranks have come: only the firsthand errors matter.
    is_refuted = firsthand and isinstance(error, LostRankError)
    if error is None or is_refuted:
        return RemoteError(f"{phase} failed on {len(texts)} rank(s):\n{causes}", code="rank-failed")
    # Such an error, of a peer that failed, names the peer, but not why it failed.
    if firsthand and isinstance(error, RemoteError):
        return type(error)(f"{error}\n{causes}", code=error.code)
    if isinstance(error, HybridEngineError):
        return error
    return kind(f"{phase}: {described(error)}", code=_FOREIGN)


def _different_calls(calls: Sequence[str]) -> DifferentCallsError:
    """Return the error of every rank if ranks make different calls, given the calls by rank."""
    first_ranks: dict[str, int] = {}
    for rank, call in enumerate(calls):
        first_ranks.setdefault(call, rank)
    places = "; ".join(f"{call} on rank {rank}" for call, rank in first_ranks.items())
    return DifferentCallsError(
        f"ranks make different calls: {places}. Make the same calls in the same order on every "
        "rank",
        code="different-calls",
    )


def described(error: BaseException) -> str:
    """Return the type and message of an error in the form that other ranks receive."""
    text = plain_text(error) if is_lost_connection(error) else str(error)
    name = type(error).__name__
    return f"{name}: {text}" if text else name


NUM_STEPS = 8
"""Steps between two marks of `Pace`. More steps need fewer requests to the job's store, but a host
must finish twice as many within the timeout."""

_POLL_INTERVAL = 0.1


class Pace:
    """Progress of one rank in a phase of many steps, bounded by the progress of other hosts.

    Ranks of the same host stay in step by other means.

    Args:
        watch: failure watch of the agreement to which the phase belongs.
        num_hosts: number of hosts of the job; with one host, nothing is done.
        is_first: this rank represents its host.
        timeout_seconds: longest wait for another host.
    """

    def __init__(
        self, watch: FailureWatch, num_hosts: int, *, is_first: bool, timeout_seconds: float
    ) -> None:
        self._watch = watch
        self._num_hosts = num_hosts
        self._is_first = is_first
        self._timeout_seconds = timeout_seconds

    def reach(self, step: int) -> None:
        """Wait until this rank may start `step`. Called for every step, from 0.

        Raises PeerTransportError if another rank failed, TransportError if a host does not come.
        """
        if self._num_hosts == 1:
            return
        self._raise_failures()
        number, remainder = divmod(step, NUM_STEPS)
        if self._is_first and not remainder:
            self._watch.num_at(f"pace/{number}", arriving=True)
            if number:  # mark 0 has no mark before it
                # At step 16 (mark 2) all hosts must have reached step 8 (mark 1), not 16, so that a
                # host waits only for one that is at least 8 steps behind.
                self._await_hosts(number - 1)

    def ended(self) -> str:
        """Return which ranks are known to have ended, as text; "" if none."""
        return self._watch.ended()

    def _await_hosts(self, number: int) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while (num_there := self._watch.num_at(f"pace/{number}")) not in (self._num_hosts, None):
            self._raise_failures()
            if time.monotonic() > deadline:
                raise TransportError(
                    f"only {num_there} of {self._num_hosts} hosts reached step "
                    f"{number * NUM_STEPS} within {self._timeout_seconds:g} s; raise "
                    "generate_config.timeout_seconds if they are only slow",
                    code="hosts-are-missing",
                )
            time.sleep(_POLL_INTERVAL)

    def _raise_failures(self) -> None:
        if failures := self._watch.known_failures():
            raise PeerTransportError("\n".join(map(str, failures)), code="peer-failed")

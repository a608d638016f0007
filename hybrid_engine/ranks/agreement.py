"""All ranks leave a phase together: either all succeeded or all raise.

    with agreement.phase("commit"):
        ...                             # may fail on one rank only
    # here on every rank, or an error on every rank: the own one where it happened, RemoteError elsewhere

Ranks part ways where a phase waits for others inside a library: one fails, the others wait there for what never comes.
All of them know of it at once (ranks/failure_watch.py), every wait has an end, and then the agreement is over:

    the rank that failed      waits for the others to arrive, for its patience or the timeout, then raises alone
    the others                are ended by that rank's closed connections, by their library's timeout, or by the watch

`Pace` keeps hosts near each other in a phase of many steps, where nothing else lets one wait for another:

    step        0 … 7 | 8 … 15 | 16 … 23 | …
    a host goes past 8 (k + 1) when all hosts have come to 8 k

A host that has less to do would otherwise be at the end, or at a message it shares with another host, long before that
one: waits last `timeout_seconds` at most, and a long piece of work may take longer. So no wait for another host, at the
end of the work either, lasts longer than 16 steps of that host. Whoever is held here had to wait later anyhow. A rank
also hears here, at every step, of failures elsewhere, though no message comes to it from there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from hybrid_engine.ranks.process import signals_held
from hybrid_engine.ranks.rank_tree import RankTree, TreeShape
from hybrid_engine.ranks.world import World

SECONDS_TO_BUILD = 300.0
"""Floor of the longest wait while engines are built: ranks of a busy host import for a minute, and not at one speed."""

SECONDS_OF_A_ROUND = 5.0
"""Between two agreements of ranks that work for as long as it takes (`Agreement.rounds`)."""

SHORT_PATIENCE = 30.0
"""Seconds for which a rank that failed waits for others that cannot come back, since they wait for it in a library."""

_LONGEST_TEXT = 100_000
"""Characters of an error that others hear of."""

MOST_SHARED = 2**31
"""Bytes of all messages that ranks share. FSDP2's ranks all hold something else: 2,048 of a dense 70B model say 195 MB,
while DeepSeek-V3 in Megatron's layouts takes 17 MB for any number of ranks."""

PATIENCE_AFTER_INTERRUPT = 1.0
"""In its place after Ctrl-C or SystemExit, which ends a job: torchrun kills after 30 s."""


_Said = tuple[tuple[str, bool] | None, str]
"""What a rank says where a phase failed: its error and whether it is secondhand, and what it called."""


class Agreement:
    """Lets every rank know whether any rank failed. One small maximum over all ranks when all is well.

    Args:
        world: the ranks.
        hosts: by rank.
        timeout_seconds: longest wait for a peer, then LostRankError.

    Has connections of its own, so that it works beside NCCL and never mixes with other traffic; `close` ends them.
    Collective. After a LostRankError the ranks have no agreement any more: every call raises.

    Attributes:
        world_size: number of ranks.
        lost: that error; None as long as the ranks are together.
        nbytes_received: of what the ranks told each other, in all; without maxima.
    """

    def __init__(self, world: World, hosts: Sequence[str], timeout_seconds: float) -> None:
        self._world, self._rank, self.world_size = world, world.rank, world.size
        self._hosts, self._shape = hosts, TreeShape(hosts)
        self.timeout_seconds = timeout_seconds
        self.lost: LostRankError | None = None
        self.nbytes_received = 0
        self._agreed: Exception | None = None  # what this rank raised when all ranks raised last
        self._watch = FailureWatch(world, timeout_seconds)
        self._tree: RankTree | None = None
        try:
            self._tree = self._connect()
        except BaseException:
            self._watch.close()
            raise

    def pace(self) -> Pace:
        """Return what keeps hosts near each other within a phase of many steps."""
        is_first = self._hosts.index(self._hosts[self._rank]) == self._rank
        return Pace(self._watch, len(set(self._hosts)), is_first=is_first, timeout_seconds=self.timeout_seconds)

    def close(self) -> None:
        """End the connections, when there is nothing more to agree on; idempotent."""
        self._watch.close()
        self._disconnect()

    def _connect(self) -> RankTree:
        with self._watch.inside("connecting"), self._connected("connecting"):
            return RankTree(self._world, self._shape, self.timeout_seconds, self._watch.ended)

    def _disconnect(self) -> None:
        tree, self._tree = self._tree, None
        if tree is not None:
            tree.close()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Set-up: the longest wait is `SECONDS_TO_BUILD`, or the timeout if that is longer. Collective."""
        tree, seconds = self._connections(), self.timeout_seconds
        self.timeout_seconds = max(seconds, SECONDS_TO_BUILD)
        self._watch.set_silence(self.timeout_seconds)
        try:
            self._tree = self._connect()
            with self._watch.inside("building"):
                yield
        except BaseException as error:
            if error is not self._agreed and error is not self.lost:
                self._watch.tell("building", described(error), _patience_after(error, SHORT_PATIENCE))
            raise
        finally:
            self._disconnect()
            self.timeout_seconds = seconds
            self._watch.set_silence(seconds)
            self._tree = tree
            if self.lost is not None:
                self._disconnect()

    @contextmanager
    def phase(
        self,
        name: str,
        patience: float | None = None,
        waiting: Collection[int] | None = None,
        kind: type[HybridEngineError] = ReshardError,
    ) -> Iterator[None]:
        """Leave the block on all ranks or raise on all ranks. No other collective of this group inside.

        Args:
            name: in messages.
            patience: seconds for which a rank that failed waits for those in `waiting`; default: the timeout. Shorter
                where they cannot come back by themselves, since they wait for this rank in a library.
            waiting: those ranks; default: all. The others have the timeout.
            kind: what an error that is not this project's becomes.
        """
        self._connections()
        error, self._agreed = None, None
        try:
            with self._watch.inside(name):
                yield
        except Exception as caught:
            if caught is self._agreed or caught is self.lost:  # of a phase within this one: all ranks have raised
                raise
            error = self._in_our_words(name, caught)
        except BaseException as interrupt:  # not held back, but the others hear of it
            seconds = self.timeout_seconds if patience is None else _patience_after(interrupt, patience)
            self._watch.tell(name, described(interrupt), seconds, waiting)
            raise
        self.conclude(name, error, patience, waiting, kind)

    def rounds(self, name: str, steps: Iterable[object]) -> None:
        """Go through this rank's steps, for as long as all ranks need; they meet every few seconds.

        So no wait is longer than a round and one step, and what fails on one rank is raised on all.
        """
        remaining, goes_on = iter(steps), True
        seconds = min(SECONDS_OF_A_ROUND, self.timeout_seconds / 4)
        while goes_on:
            with self.phase(name):
                end, has_more = time.monotonic() + seconds, False
                for _ in remaining:
                    if time.monotonic() > end:
                        has_more = True
                        break
            (goes_on,) = self.any_of([has_more], name)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Work of all ranks without an agreement at its end. What fails here is raised here; the others hear of it.

        Raises LostRankError where a library lost its connection to a rank that failed or ended.
        """
        self._connections()
        try:
            with self._watch.inside(name):
                yield
        except Exception as caught:
            if caught is self._agreed:  # of a phase within this: all ranks have raised
                raise
            error = self._in_our_words(name, caught)
            if not isinstance(error, LostRankError):
                self._watch.tell(name, described(error), self.timeout_seconds)
            if error is caught:
                raise
            raise error from caught
        except BaseException as interrupt:
            self._watch.tell(name, described(interrupt), self.timeout_seconds)
            raise

    @contextmanager
    def by_the_store(self, name: str) -> Iterator[Callable[[], str]]:
        """A wait for other ranks without a collective; yields what says which are known to have ended or left.

        A LostRankError in it ends this agreement.
        """
        self._connections()
        with self._watch.inside(name):
            try:
                yield lambda: self._watch.ended() or self._watch.left()
            except LostRankError as error:
                self._part(name, error)
                raise

    def leave(self, error: BaseException) -> None:
        """Let the others hear why this rank goes, for an `error` outside of any phase. Waits for nobody.

        Says nothing of what all ranks have raised, or of what this one heard from another.
        """
        is_known = error is self._agreed or (isinstance(error, Exception) and _is_secondhand(error))
        if self._tree is not None and not is_known:
            with self._watch.inside("leaving"):
                self._watch.tell("leaving", described(error), self.timeout_seconds)

    def conclude(
        self,
        phase: str,
        error: Exception | None = None,
        patience: float | None = None,
        waiting: Collection[int] | None = None,
        kind: type[HybridEngineError] = ReshardError,
        *,
        what_follows: str = "",
    ) -> None:
        """End a phase: return when no rank failed. Otherwise raise on all of them. Without an `error`, a barrier.

        Where it happened: `error` itself if it is one of this project's, else one of `kind` from it. Elsewhere:
        RemoteError with the messages of the ranks that failed; so does a RemoteError of which this rank came to know
        inside the block. LostRankError, with this rank's own error if it has one, when a rank does not come.
        StateError, naming what each called, where no rank failed and ranks end different phases, or differ in
        `what_follows`: what must be the same of the collective that comes next, for gloo aborts where sizes differ.
        """
        self._connections()  # never kept in a variable: an error's traceback would keep its connections open
        with self._watch.arrived(phase):
            if error is not None and not self._tell(phase, error, patience, waiting):
                raise self._part(phase, error) from error
            number = text_digest(phase, what_follows)
            met = torch.tensor([error is not None, number, -number], dtype=torch.int64)
            with signals_held():
                with self._connected(phase, error):
                    self._maximum(met)
                has_failed, highest, negated_lowest = met.tolist()
                if not has_failed and highest == -negated_lowest:
                    return
                # so short that all ranks' together are no longer than a message may be: a character has 4 bytes at most
                most = min(_LONGEST_TEXT, LIMIT // (8 * self.world_size))
                told = None if error is None else (clipped(described(error), most), _is_secondhand(error))
                said = self._gather(encode((told, f"{phase}{what_follows}")), phase, error)
                messages, called = zip(*(decode(each, _Said) for each in said), strict=True)
        # a rank that failed ends an outer phase, which is no other call
        agreed = _agreed_error(phase, error, messages, kind) if has_failed else _different_calls(called)
        agreed.cause_on_rank_0 = ""
        if messages[self._rank] in (None, messages[0]):  # a rank with no error of its own adds nothing
            agreed.cause_on_rank_0 = messages[0][0] if messages[0] else described(agreed)
        self._agreed = agreed
        raise self._agreed from (None if error is None else error if error is not self._agreed else error.__cause__)

    @signals_held()
    def gather(self, value: object, kind: Any, phase: str = "gather", limit: int = LIMIT) -> list[Any]:
        """`value` of every rank, by rank; for set-up and results, not for switches.

        Args:
            value: small: every rank receives that of all.
            kind: its type as `messages.decode` takes it, e.g. `list[str]`.
            phase: in messages.
            limit: most bytes of all ranks' together.

        Raises RemoteError, and MessageError for what cannot be told, is not of this type, or is too long.
        """
        data, error = b"", None
        try:
            data = encode(value, limit)
        except MessageError as caught:
            error = caught
        # a rank that failed on its way here concludes that, and never meets this gather
        self.conclude(phase, error, what_follows=" (gather)")
        told = self._gather(data, phase, limit=limit)
        with self.call(phase):
            return [decode(each, kind, limit) for each in told]

    @signals_held()
    def share(self, messages: Sequence[bytes], phase: str = "share") -> tuple[list[list[int]], list[bytes]]:
        """What all ranks have to say, where many say the same: each message comes once, whoever has it.

        Returns for every rank the numbers of its messages, and the messages by number, in the order of ranks.
        Raises RemoteError, and MessageError on all ranks where all of them together are longer than `MOST_SHARED`.
        """
        own = [(content_digest(message), len(message)) for message in messages]
        numbers: dict[tuple[bytes, int], int] = {}
        told = [
            [numbers.setdefault(each, len(numbers)) for each in of_rank]
            for of_rank in self.gather(own, list[tuple[bytes, int]], phase)
        ]
        nbytes = [size for _, size in numbers]
        lent = first_to_have(told)
        with self.phase(phase):
            require_size(sum(nbytes), MOST_SHARED)
            by_number = dict(zip(told[self._rank], messages, strict=True))
            joined = b"".join(by_number[number] for number in lent[self._rank])
            room = torch.empty(sum(nbytes), dtype=torch.uint8)  # a rank that has no memory says so before it is told
        with self._connected(phase):
            said = self._tell_all(joined, [sum(nbytes[number] for number in of_rank) for of_rank in lent], room)
        with self.phase(phase):
            found = [b""] * len(nbytes)
            for of_rank, text in zip(lent, said, strict=True):
                ends = itertools.accumulate((nbytes[number] for number in of_rank), initial=0)
                for number, (start, stop) in zip(of_rank, itertools.pairwise(ends), strict=True):
                    found[number] = text[start:stop].tobytes()
            if any(content_digest(message) != digest for message, (digest, _) in zip(found, numbers, strict=True)):
                raise MessageError(f"{phase}: a message is not what the rank that sent it says it is")
        return told, found

    def total(self, value: int) -> int:
        """Sum over all ranks. Raises RemoteError."""
        return sum(self.gather(value, int, "total"))

    @signals_held()
    def any_of(self, flags: Sequence[bool], phase: str) -> list[bool]:
        """Flag by flag, whether any rank raises it; all ranks give as many. Raises RemoteError."""
        self.conclude(phase, what_follows=f" ({len(flags)} flags)")
        raised = torch.tensor(flags, dtype=torch.uint8)
        with self._connected(phase):
            self._maximum(raised)
        return [bool(flag) for flag in raised.tolist()]

    @signals_held()
    def is_same(self, values: Sequence[int | None], phase: str) -> bool:
        """Whether all ranks give the same numbers, as many each. Raises RemoteError.

        In the place of a None the others' numbers are compared.
        """
        self.conclude(phase, what_follows=f" ({len(values)} numbers)")
        extremes = extremes_of(values)
        with self._connected(phase):
            self._maximum(extremes)
        return are_same(extremes)

    def _maximum(self, values: torch.Tensor) -> None:
        """Over all ranks, in place."""
        self._connections().maximum(values)

    def _gather(self, data: bytes, phase: str, error: Exception | None = None, limit: int = LIMIT) -> list[memoryview]:
        """The messages of all ranks, by rank. Raises MessageError on all of them where they are longer than `limit`."""
        with self._connected(phase, error):
            nbytes = self._tell_all(len(data).to_bytes(8, "little"), [8] * self.world_size)
            sizes = [int.from_bytes(each, "little") for each in nbytes]
            require_size(sum(sizes), limit)
            return self._tell_all(data, sizes)

    def _tell_all(self, message: bytes, sizes: Sequence[int], room: torch.Tensor | None = None) -> list[memoryview]:
        self.nbytes_received += self._shape.received_nbytes(self._rank, sizes)
        return self._connections().gather(message, sizes, room)

    def _connections(self) -> RankTree:
        if self.lost is not None:
            raise StateError(f"the ranks have parted, end the job: {self.lost}") from self.lost
        if self._tree is None:
            raise StateError("there is nothing to agree on any more: what used this was shut down")
        return self._tree

    def _tell(self, phase: str, error: Exception, patience: float | None, waiting: Collection[int] | None) -> bool:
        """Let the others know; whether to go on and meet them."""
        if _is_secondhand(error):
            return True  # they know of that one
        patience = min(patience or self.timeout_seconds, self.timeout_seconds)
        self._watch.tell(phase, described(error), patience, waiting)
        return patience == self.timeout_seconds or self._watch.have_arrived(waiting, patience)

    def _in_our_words(self, phase: str, error: Exception) -> Exception:
        """`error`, or a LostRankError where a library lost its connection and the reason is known."""
        reasons = self._watch.reasons() if is_lost_connection(error) else []
        if not reasons:
            return error
        lost = LostRankError(_parted(phase, None, reasons))
        lost.__cause__ = error
        lost.is_explained = True
        return lost

    @contextmanager
    def _connected(self, phase: str, error: Exception | None = None) -> Iterator[None]:
        """Raise what ends a collective in our words; `error` is this rank's own.

        Mostly torch.distributed says that a rank is gone; but a signal's handler may raise here, too.
        """
        try:
            yield
        except MessageError:  # of all ranks
            raise
        except Exception as broken:
            if error is None and not is_lost_connection(broken):
                error = broken
                self._watch.tell(phase, described(broken), self.timeout_seconds)
            parted = self._part(phase, error)
            raise parted from (parted.__cause__ or error or broken)
        except BaseException as interrupt:  # from outside the main thread, where no signal is held
            if self.world_size > 1:  # the others may be at a collective that this rank did not come to
                self._watch.tell(phase, described(interrupt), PATIENCE_AFTER_INTERRUPT)
                self._part(phase, None)
            raise

    def _part(self, phase: str, error: Exception | None) -> LostRankError:
        """The error that ends this agreement. Its connections close, so that nobody waits for this rank."""
        if not isinstance(error, LostRankError):
            unknown = "they ended, or wait for this rank in a library"
            if error is None:
                unknown = f"a rank exited or did not respond within {self.timeout_seconds:g} s; see the other logs"
            reasons = self._watch.reasons()
            error = LostRankError(_parted(phase, error, reasons or [unknown]))
            error.is_explained = bool(reasons)
        self.lost = error
        self._disconnect()
        return error


def first_to_have(told: Sequence[Collection[int]]) -> list[list[int]]:
    """By rank, those of its messages that no rank before it has; `told`: all numbers of each."""
    had: set[int] = set()
    first = []
    for numbers in told:
        first.append([number for number in dict.fromkeys(numbers) if number not in had])
        had.update(numbers)
    return first


def _parted(phase: str, error: Exception | None, reasons: list[str]) -> str:
    """The text of a LostRankError."""
    known = "\n".join(reasons)
    if error is None:
        return f"{phase}: {known}. The job cannot go on"
    return f"{phase}: {described(error)}\nThe other ranks did not come: {known}. The job cannot go on"


def _agreed_error(
    phase: str,
    error: Exception | None,
    messages: Sequence[tuple[str, bool] | None],
    kind: type[HybridEngineError],
) -> HybridEngineError:
    """The error of a rank when all know what each has to tell: by rank, (text, whether it is secondhand), or None."""
    firsthand = {rank: told[0] for rank, told in enumerate(messages) if told and not told[1]}
    texts = firsthand or {rank: told[0] for rank, told in enumerate(messages) if told}
    causes = "\n".join(f"rank {rank}: {text}" for rank, text in texts.items())
    if error is None or (firsthand and isinstance(error, LostRankError)):  # lost by a library: all ranks are here
        return RemoteError(f"{phase} failed on {len(texts)} rank(s):\n{causes}")
    if firsthand and isinstance(error, RemoteError):
        return type(error)(f"{error}\n{causes}")
    return error if isinstance(error, HybridEngineError) else kind(f"{phase}: {described(error)}")


def _different_calls(called: Sequence[str]) -> DifferentCallsError:
    """Error of every rank where ranks make different calls; `called`: by rank."""
    calls = "; ".join(f"{call} on rank {called.index(call)}" for call in dict.fromkeys(called))
    return DifferentCallsError(
        f"ranks make different calls: {calls}. Make the same calls in the same order on every rank"
    )


def described(error: BaseException) -> str:
    """Type and text of an error, as other ranks hear of it."""
    text = plain_text(error) if is_lost_connection(error) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _patience_after(error: BaseException, patience: float) -> float:
    return patience if isinstance(error, Exception) else min(patience, PATIENCE_AFTER_INTERRUPT)


def _is_secondhand(error: Exception) -> bool:
    """Whether this rank came to know of another's failure, and has none of its own."""
    return isinstance(error, (RemoteError, LostRankError))


NUM_STEPS = 8
"""Between two marks: few questions to the job's store, and a host has that many times 2 within the timeout."""
_SECONDS_BETWEEN_LOOKS = 0.1


class Pace:
    """One rank's steps in one phase; the ranks of a host keep in step by other means.

    Args:
        watch: of the agreement to which the phase belongs.
        num_hosts: of the job; nothing is done for a single one.
        is_first: whether this rank stands for its host.
        timeout_seconds: longest wait for another host.
    """

    def __init__(self, watch: FailureWatch, num_hosts: int, *, is_first: bool, timeout_seconds: float) -> None:
        self._watch = watch
        self._num_hosts = num_hosts
        self._is_first = is_first
        self._timeout_seconds = timeout_seconds

    def reach(self, step: int) -> None:
        """Call at each step, from 0. Raises PeerTransportError when another rank failed, TransportError when a host
        does not come."""
        if self._num_hosts == 1:
            return
        self._heed()
        number, remainder = divmod(step, NUM_STEPS)
        if self._is_first and not remainder:
            self._watch.num_at(f"pace/{number}", arriving=True)
            if number:
                self._await_hosts(number - 1)

    def ended(self) -> str:
        """Which ranks are known to have ended, in words."""
        return self._watch.ended()

    def _await_hosts(self, number: int) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while (num_there := self._watch.num_at(f"pace/{number}")) not in (self._num_hosts, None):
            self._heed()
            if time.monotonic() > deadline:
                raise TransportError(
                    f"only {num_there} of {self._num_hosts} hosts came to step {number * NUM_STEPS} within "
                    f"{self._timeout_seconds:g} s; raise generate_config.timeout_seconds if they are only slow"
                )
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _heed(self) -> None:
        if failures := self._watch.heard():
            raise PeerTransportError("\n".join(map(str, failures)))

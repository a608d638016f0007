"""All ranks leave a phase together: either all succeeded or all raise.

with agreement.phase("commit"):
    ...                             # may fail on one rank only
# here on every rank, or an error on every rank: the own one where it happened, RemoteError elsewhere

Ranks part ways where a phase waits for others inside a library: one fails, the others wait there for what never comes.
All of them know of it at once (failure_watch.py), and every wait has an end:

    the rank that failed      waits `patience` for the others to arrive, then raises its own error alone
    the others                are ended by that rank's closed connections, by their library's timeout, or by the watch
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hybrid_engine.errors import HybridEngineError, LostRankError, RemoteError, ReshardError, StateError, TransportError
from hybrid_engine.failure_watch import FailureWatch
from hybrid_engine.process_groups import end_groups, is_lost_connection

SECONDS_TO_BUILD = 300.0
"""Floor of the longest wait while engines are built: ranks of a busy host import for a minute, and not at one speed."""

SHORT_PATIENCE = 30.0
"""Seconds for which a rank waits for the others where its failure is the end of what they do together."""


class Agreement:
    """Lets every rank know whether any rank failed. One small all-reduce when all is well.

    Args:
        timeout_seconds: longest wait for a peer, then LostRankError.

    Creates a gloo group of its own, so that it works beside NCCL and never mixes with other traffic; `close` ends it.
    Collective.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.group: dist.ProcessGroup | None = _new_group(timeout_seconds)
        self._patience = timeout_seconds
        self._agreed: Exception | None = None  # what all ranks raised last, each its own
        self._watch = FailureWatch(timeout_seconds)

    def close(self) -> None:
        """End the group, when there is nothing more to agree on; idempotent."""
        self._watch.close()
        group, self.group = self.group, None
        end_groups(group)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Set-up: a wait is `SECONDS_TO_BUILD` or the timeout, whichever is longer, and patience is short, since what
        fails on one rank fails for all. Collective."""
        seconds, patience, group = self.timeout_seconds, self._patience, self._open_group()
        self.timeout_seconds, self._patience = max(seconds, SECONDS_TO_BUILD), SHORT_PATIENCE
        self.group = _new_group(self.timeout_seconds)
        try:
            yield
        except BaseException as error:
            if error is not self._agreed:
                self._watch.tell("building", error, SHORT_PATIENCE)
            raise
        finally:
            end_groups(self.group)
            self.group, self.timeout_seconds, self._patience = group, seconds, patience

    @contextmanager
    def phase(self, name: str, patience: float | None = None) -> Iterator[None]:
        """Leave the block on all ranks or raise on all ranks. No other collective of this group inside.

        Args:
            name: in messages.
            patience: seconds for which a rank that failed waits for the others; default: the timeout. Shorter where
                the others cannot come back, since they wait for this rank.
        """
        error: Exception | None = None
        try:
            with self._watch.inside(name):
                yield
        except Exception as caught:
            error = caught
            if is_lost_connection(caught):
                error = self._lost(name)
                error.__cause__ = caught
        except BaseException as interrupt:  # not held back, but the others hear of it
            self._watch.tell(name, interrupt, patience or self._patience)
            raise
        self.settle(name, error, patience)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Work of all ranks without an agreement at its end. What fails here is raised here; the others hear of it.

        Raises LostRankError where a library lost its connection to a rank that failed or ended.
        """
        try:
            with self._watch.inside(name, is_call=True):
                yield
        except BaseException as error:
            if is_lost_connection(error):
                raise self._lost(name) from error
            self._watch.tell(name, error, self._patience)
            raise

    def settle(self, phase: str, error: Exception | None, patience: float | None = None) -> None:
        """Return when no rank failed. Otherwise raise on all of them.

        Where it happened: `error` itself if it is one of this project's, else a ReshardError from it. Elsewhere:
        RemoteError with the messages of the ranks that failed; so does a RemoteError of which this rank came to know
        inside the block. LostRankError, with this rank's own error if it has one, when a rank does not come.
        """
        group = self._open_group()
        with self._watch.arrived(phase):
            if error is not None and not self._tell(phase, error, patience or self._patience):
                raise self._alone(phase, error) from error
            num_failed = torch.tensor([error is not None], dtype=torch.int64)
            with self._connected(phase, error):
                dist.all_reduce(num_failed, op=dist.ReduceOp.MAX, group=group)
            if not num_failed:
                return
            own = None if error is None else f"{type(error).__name__}: {error}"
            messages = self._gather((own, _is_secondhand(error)), phase, error)
        firsthand = {rank: text for rank, (text, is_heard) in enumerate(messages) if text and not is_heard}
        told = firsthand or {rank: text for rank, (text, _) in enumerate(messages) if text}
        causes = "\n".join(f"rank {rank}: {text}" for rank, text in told.items())
        if error is None or (firsthand and isinstance(error, LostRankError)):  # lost by a library: all ranks are here
            self._agreed = RemoteError(f"{phase} failed on {len(told)} rank(s):\n{causes}")
        elif firsthand and isinstance(error, RemoteError):
            self._agreed = type(error)(f"{error}\n{causes}")
        elif isinstance(error, HybridEngineError):
            self._agreed = error
        else:
            self._agreed = ReshardError(f"{phase}: {own}")
        raise self._agreed from (error if error is not self._agreed else error.__cause__)

    def gather(self, value: object, phase: str = "gather") -> list:
        """`value` of every rank, by rank; for set-up and results, not for switches. Raises RemoteError."""
        self.settle(phase, None)  # a rank that failed on its way here settles that, and never meets this gather
        return self._gather(value, phase)

    def total(self, value: int) -> int:
        """Sum over all ranks. Raises RemoteError."""
        return sum(self.gather(value, "total"))

    def _gather(self, value: object, phase: str, error: Exception | None = None) -> list:
        group = self._open_group()
        values: list = [None] * dist.get_world_size(group)
        with self._connected(phase, error):
            dist.all_gather_object(values, value, group=group)
        return values

    def _open_group(self) -> dist.ProcessGroup:
        if self.group is None:
            raise StateError("there is nothing to agree on any more: what used this was shut down")
        return self.group

    def _tell(self, phase: str, error: Exception, patience: float) -> bool:
        """Let the others know; whether to go on and meet them."""
        if _is_secondhand(error):
            return True  # they know of that one
        self._watch.tell(phase, error, patience)
        return patience >= self.timeout_seconds or self._watch.all_arrived(patience)

    @contextmanager
    def _connected(self, phase: str, error: Exception | None = None) -> Iterator[None]:
        """What torch.distributed raises about a rank that is gone, in our words; `error` is this rank's own."""
        try:
            yield
        except RuntimeError as lost:
            is_cause = error is not None and not _is_secondhand(error) and not isinstance(error, TransportError)
            raise (self._alone(phase, error) if is_cause else self._lost(phase)) from (error or lost)

    def _alone(self, phase: str, error: Exception) -> LostRankError:
        return LostRankError(
            f"{phase}: {type(error).__name__}: {error}\nThe other ranks did not come to agree on this: they ended, or "
            "wait for this rank inside a library. The job cannot go on"
        )

    def _lost(self, phase: str) -> LostRankError:
        """Why a connection of this rank broke, as far as anybody knows."""
        failures = "\n".join(map(str, self._watch.failures_of_others()))
        reason = failures or ", ".join(self._watch.ended_ranks())
        if not reason:
            reason = f"a rank ended or gave no sign for {self.timeout_seconds:g} s; see the logs of the others"
        return LostRankError(f"{phase}: {reason}. The job cannot go on")


def _is_secondhand(error: Exception | None) -> bool:
    """Whether this rank came to know of another's failure, and has none of its own."""
    return isinstance(error, (RemoteError, LostRankError))


def _new_group(timeout_seconds: float) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_seconds))

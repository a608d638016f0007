"""All ranks leave a phase together: either all succeeded or all raise.

with agreement.phase("commit"):
    ...                             # may fail on one rank only
# here on every rank, or an error on every rank: the own one where it happened, RemoteError elsewhere
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hybrid_engine.errors import HybridEngineError, RemoteError, ReshardError, StateError
from hybrid_engine.process_groups import end_groups


class Agreement:
    """Lets every rank know whether any rank failed. One small all-reduce when all is well.

    Args:
        timeout_seconds: longest wait for a peer, then RemoteError.

    Creates a gloo group of its own, so that it works beside NCCL and never mixes with other traffic; `close` ends it.
    Collective.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        timeout = datetime.timedelta(seconds=timeout_seconds)
        self.group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)

    def close(self) -> None:
        """End the group, when there is nothing more to agree on; idempotent."""
        group, self.group = self.group, None
        end_groups(group)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Leave the block on all ranks or raise on all ranks. No other collective of this group inside."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.settle(name, error)

    def _open_group(self) -> dist.ProcessGroup:
        if self.group is None:
            raise StateError("there is nothing to agree on any more: what used this was shut down")
        return self.group

    def settle(self, phase: str, error: Exception | None) -> None:
        """Return when no rank failed. Otherwise raise on all of them.

        Where it happened: `error` itself if it is one of this project's, else a ReshardError from it. Elsewhere:
        RemoteError with the messages of the ranks that failed; so does a RemoteError of which this rank came to know
        inside the block.
        """
        if self._reduce(phase, int(error is not None), dist.ReduceOp.MAX, error) == 0:
            return
        own = None if error is None else f"{type(error).__name__}: {error}"
        is_secondhand = isinstance(error, RemoteError)
        messages = self.gather(None if is_secondhand else own, phase)
        causes = "\n".join(f"rank {rank}: {message}" for rank, message in enumerate(messages) if message)
        if is_secondhand and causes:
            raise type(error)(f"{error}\n{causes}") from error
        if isinstance(error, HybridEngineError):
            raise error
        if error is not None:
            raise ReshardError(f"{phase}: {own}") from error
        raise RemoteError(f"{phase} failed on {sum(m is not None for m in messages)} rank(s):\n{causes}")

    def gather(self, value: object, phase: str = "gather") -> list:
        """`value` of every rank, by rank; for set-up and results, not for switches. Raises RemoteError."""
        group = self._open_group()
        values: list = [None] * dist.get_world_size(group)
        with self._lost_rank(phase):
            dist.all_gather_object(values, value, group=group)
        return values

    def total(self, value: int) -> int:
        """Sum over all ranks. Raises RemoteError."""
        return self._reduce("total", value, dist.ReduceOp.SUM)

    def _reduce(
        self, phase: str, value: int, operation: dist.ReduceOp.RedOpType, error: Exception | None = None
    ) -> int:
        tensor, group = torch.tensor([value], dtype=torch.int64), self._open_group()
        with self._lost_rank(phase, error):
            dist.all_reduce(tensor, op=operation, group=group)
        return int(tensor)

    @contextmanager
    def _lost_rank(self, phase: str, error: Exception | None = None) -> Iterator[None]:
        """What torch.distributed raises about a rank that is gone, as RemoteError; `error` is this rank's own."""
        try:
            yield
        except RuntimeError as lost:
            raise RemoteError(
                f"{phase}: a rank ended or gave no sign for {self.timeout_seconds:g} s ({lost}); see its log. "
                "The job cannot go on"
            ) from (error or lost)

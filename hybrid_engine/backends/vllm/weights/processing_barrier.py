"""A barrier before collective post-load processing, which reduces scales or gathers weights.

A rank that fails on its way to a collective would leave its peers waiting there, or let them pair
it with a different collective. So where vLLM's processing is collective, ranks synchronise before
each run of it:

    barrier.wait("processing mlp")      all ranks have reached the same step, and none has failed
    ... vLLM's processing ...           with its collectives
    barrier.finish()                    all ranks are done; `begin` then opens it for the next fill

    barrier.abandon()                   replaces the next of these calls on a rank that failed; its
                                        peers raise there

Whether the processing is collective is observed when vLLM first processes weights: communication
reads one of the channel attributes of a vLLM group (`channels_taken`). If it is not collective, the
barrier has no group and never waits.

The barrier does not cover a rank that fails inside the processing: its peers end by the timeout of
their collective.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.private_names import Function, around
from hybrid_engine.errors import RemoteError, ReshardError, StateError, TransportError
from hybrid_engine.ranks.groups import RankGroup, plain_text

logger = logging.getLogger(__name__)


@contextmanager
def channels_taken() -> Iterator[set[str]]:
    """Yield a set that receives the channels by which ranks of a vLLM group communicate."""
    taken: set[str] = set()

    def get(original: Function, group: Any, name: str) -> Any:
        # A group of one rank has channels as well; reading one there communicates nothing.
        if name in internals.GROUP_CHANNELS and original(group, "world_size") > 1:
            taken.add(name)
        return original(group, name)

    with internals.GROUP_ATTRIBUTE.replaced(around(get)):
        yield taken


class ProcessingBarrier:
    """One rank's end of a barrier among ranks that process the same weights together.

    Without a group it never waits.

    Args:
        rank: global rank of this process.
        group: CPU group of these ranks, used only here.

    Attributes:
        is_over: True if this rank cannot pass the barrier again before `reset`: a rank has failed,
            or all ranks have finished.
    """

    def __init__(self, rank: int = 0, group: RankGroup | None = None) -> None:
        self._rank = rank
        self._group = group
        self.is_over = False
        self._is_finished = False  # all ranks have finished

    @property
    def is_collective(self) -> bool:
        return self._group is not None

    def wait(self, what: str, wish: bool = False) -> bool:
        """Wait until all ranks have reached the step `what`; return whether any has a wish.

        Collective. Raises RemoteError if a rank has failed, ReshardError if ranks have reached
        different steps, TransportError if a rank does not arrive, and StateError between a failure
        and `reset`.
        """
        if self._group is None:
            return wish
        if self.is_over:
            raise StateError(
                f"{what}: the ranks that process weights together have finished or failed; "
                "release the weights first",
                code="processing-is-over",
            )
        checksum = zlib.crc32(what.encode())
        try:
            # One maximum agrees on everything. The checksums of all ranks are equal exactly if the
            # largest one and the negated smallest one have the same magnitude.
            maximum, largest = self._post([0, checksum, -checksum, int(wish)])
            self._group.end_maximum(maximum)
        except RuntimeError as error:
            self.is_over = True
            raise TransportError(
                f"{what}: not every rank of the vLLM instance arrived within "
                f"{self._group.timeout_seconds:g} s ({plain_text(error)}); raise "
                "generate_config.timeout_seconds if the ranks are only slow",
                code="processing-timeout",
            ) from error
        # Checksums 5 and 7 make maxima of 7 and -5, and 7 differs from 5. Equal ones make 7 and -7.
        failed, highest, lowest, wished = largest.tolist()
        self.is_over = bool(failed) or highest != -lowest
        if failed:
            raise RemoteError(f"rank {failed - 1} failed before {what}", code="peer-failed")
        if self.is_over:
            raise ReshardError(
                f"rank {self._rank} has reached {what}, other ranks of its vLLM instance a "
                "different step: vLLM processes their weights in different ways. Give all ranks "
                "the same model, settings and kernels",
                code="different-processing",
            )
        return bool(wished)

    def finish(self) -> None:
        """Wait until all ranks have finished. Collective. Raises as `wait` does."""
        self.wait("the last group's end")
        self.is_over = self.is_collective
        self._is_finished = self.is_collective

    def abandon(self) -> None:
        """Report a failure of this rank without waiting. Idempotent until `reset`."""
        if self._group is None or self.is_over:
            return
        self.is_over = True
        try:
            # Ranks count from 1 here, because 0 means that none has failed.
            self._post([self._rank + 1, 0, 0, 0])
        except RuntimeError as error:
            logger.warning(
                "cannot report a failure to ranks that process weights together: %s",
                plain_text(error),
            )

    def begin(self) -> None:
        """Open for another fill if all ranks finished the last one; a failed one needs `reset`."""
        if self._is_finished:
            self.reset()

    def reset(self) -> None:
        """Start over, once all ranks have left the barrier."""
        self.is_over = False
        self._is_finished = False

    @contextmanager
    def section(self) -> Iterator[None]:
        """Finish if this block succeeds, abandon if it raises."""
        try:
            yield
            self.finish()
        except BaseException:
            self.abandon()
            raise

    def _post(self, numbers: list[int]) -> tuple[int, torch.Tensor]:
        """Start an elementwise maximum of `numbers` over ranks; return its handle and its result.

        The result tensor is complete after `end_maximum`.
        """
        # The device is explicit, because vLLM's contexts set another default.
        largest = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        assert self._group is not None
        return self._group.begin_maximum(largest), largest

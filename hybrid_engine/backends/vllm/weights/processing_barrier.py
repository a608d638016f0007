"""Post-load processing in which ranks wait for each other: scales are reduced over them, weights are gathered.

A rank that fails on its way there would leave the others in a collective, or have them meet it in the wrong one. So
where vLLM's processing is collective, ranks come together before each run of it:

    barrier.wait("processing mlp")      all have come to the same, and none of them has failed
    ... vLLM's processing ...           its own collectives
    barrier.finish()                    all are through; `begin` then opens it for the next fill

    barrier.abandon()                   in place of the next of these, by a rank that failed: the others raise there

Whether it is collective is seen when vLLM first processes weights: whoever communicates takes one of the channels that
vLLM's groups have (`channels_taken`). Elsewhere a barrier has no group, and nothing waits.

A rank that fails inside the processing itself is not waited for here: the others end by their collective's timeout.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.errors import RemoteError, ReshardError, StateError, TransportError
from hybrid_engine.ranks.groups import RankGroup, plain_text

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def channels_taken() -> Iterator[set[str]]:
    """Yields a set to which is added, within this context, by what ranks of a group of vLLM's communicate."""
    taken: set[str] = set()

    def build(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        def get(group: Any, name: str) -> Any:
            if name in internals.GROUP_CHANNELS and original(group, "world_size") > 1:
                taken.add(name)
            return original(group, name)

        return get

    with internals.GROUP_ATTRIBUTE.replaced(build):
        yield taken


class ProcessingBarrier:
    """One rank's view of those that process the same weights together; without a group nobody waits.

    Args:
        rank: global rank of this process.
        group: of these ranks, on the CPU, used for nothing else.
    """

    def __init__(self, rank: int = 0, group: RankGroup | None = None) -> None:
        self._rank, self._group = rank, group
        self._is_over = False  # a rank has failed, or all are through
        self._is_through = False  # the latter

    @property
    def is_collective(self) -> bool:
        return self._group is not None

    @property
    def is_over(self) -> bool:
        """Whether this rank can pass no more."""
        return self._is_over

    def wait(self, what: str, wish: bool = False) -> bool:
        """Wait until all have come to `what`; returns whether any of them has a wish. Collective.

        Raises RemoteError when one has failed, ReshardError when they have come to different things, TransportError
        when one does not come, StateError between a failure and `reset`.
        """
        if self._group is None:
            return wish
        if self._is_over:
            raise StateError(
                f"{what}: the ranks that do it together are through or have failed; release the weights first"
            )
        number = zlib.crc32(what.encode())
        try:
            maximum, largest = self._post([0, number, -number, int(wish)])
            self._group.end_maximum(maximum)
        except RuntimeError as error:
            self._is_over = True
            raise TransportError(
                f"{what}: not every rank of the vLLM instance came to it within {self._group.timeout_seconds:g} s "
                f"({plain_text(error)}); raise generate_config.timeout_seconds if they are only slow"
            ) from error
        failed, highest, lowest, wished = largest.tolist()
        self._is_over = bool(failed) or highest != -lowest
        if failed:
            raise RemoteError(f"rank {failed - 1} failed before {what}")
        if self._is_over:
            raise ReshardError(
                f"rank {self._rank} has come to {what}, others of its vLLM instance to something else: vLLM processes "
                "their weights in different ways. Give all ranks the same model, settings and kernels"
            )
        return bool(wished)

    def finish(self) -> None:
        """Wait until all are through. Collective. Raises as `wait`."""
        self.wait("the last group's end")
        self._is_over = self._is_through = self.is_collective

    def abandon(self) -> None:
        """This rank goes no further; waits for nobody. Idempotent until `reset`."""
        if self._group is None or self._is_over:
            return
        self._is_over = True
        try:
            self._post([self._rank + 1, 0, 0, 0])
        except RuntimeError as error:
            logger.warning("ranks that process weights together cannot be told of a failure: %s", plain_text(error))

    def begin(self) -> None:
        """Open for another fill where all came through the last one; a failed one needs `reset`."""
        if self._is_through:
            self.reset()

    def reset(self) -> None:
        """Begin anew, once all ranks have ended what they were at."""
        self._is_over = self._is_through = False

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """Finish when this block ends well, abandon when it does not."""
        try:
            yield
            self.finish()
        except BaseException:
            self.abandon()
            raise

    def _post(self, told: list[int]) -> tuple[int, torch.Tensor]:
        """Tell the others, by a maximum of this number; the tensor will hold the largest of what each tells."""
        largest = torch.tensor(told, dtype=torch.int64, device="cpu")  # also inside vLLM's contexts, which choose one
        assert self._group is not None
        return self._group.begin_maximum(largest), largest

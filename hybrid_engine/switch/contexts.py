"""What owners of a switch offer their users: its contexts and hooks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from hybrid_engine.errors import StateError
from hybrid_engine.memory.offload_items import KINDS, Kind
from hybrid_engine.ranks.job import Job
from hybrid_engine.switch.hooks import Hook
from hybrid_engine.switch.sharding_manager import ShardingManager
from hybrid_engine.switch.states import State


class SwitchContexts(ABC):
    """Base of what has a switch, `_sharding`. All methods are collective, but for the hooks'.

    As a context manager it is shut down at the end of the block, whatever ends it.
    """

    job: Job
    _sharding: ShardingManager | None = None

    @property
    def sharding(self) -> ShardingManager:
        """The switch. Raises StateError where it is gone, after `shutdown`."""
        if self._sharding is None:
            raise StateError(f"this {type(self).__name__} was shut down: build a new one")
        return self._sharding

    @abstractmethod
    def shutdown(self) -> None:
        """End what was made here; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or self.job.is_inherited:
            self.shutdown()
            return
        self.job.agreement.leave(error)
        try:
            self.shutdown()
        except Exception as failure:  # the error that ends the block is the one to be seen
            error.add_note(f"then the shutdown failed: {type(failure).__name__}: {failure}")

    def rollout_context(self) -> AbstractContextManager[None]:
        """Generate inside: weights are resharded into vLLM, training state is off the device as configured."""
        return self.sharding.entered(State.INFER)

    def train_context(self) -> AbstractContextManager[None]:
        """Train inside: parameters, gradients and optimizer state are on the device, vLLM's weights are released."""
        return self.sharding.entered(State.TRAIN)

    def forward_context(self) -> AbstractContextManager[None]:
        """Score inside: only parameters need to be on the device."""
        return self.sharding.entered(State.FORWARD)

    def prefetch(self, kinds: Iterable[Kind] = KINDS) -> None:
        """In a rollout: begin to bring training state back; see `ShardingManager.prefetch`."""
        self.sharding.prefetch(kinds)

    def on_reshard_start(self, hook: Hook) -> Hook:
        """Decorator: call `hook(from_state, to_state)` before every switch, or `hook()` if it takes no argument."""
        return self.sharding.on_reshard_start(hook)

    def on_reshard_end(self, hook: Hook) -> Hook:
        """Decorator: call `hook(report)` after every successful switch, or `hook()` if it takes no argument."""
        return self.sharding.on_reshard_end(hook)

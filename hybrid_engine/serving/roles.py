"""Switch of a process that trains or serves, and null objects for the side that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hybrid_engine.config import GenerateConfig
from hybrid_engine.memory.offload_items import Guards, OffloadItem
from hybrid_engine.ports import GuardedTrainer, InferenceCaches, InferenceWeights, TrainingWeights
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.signals_and_forks import Ends
from hybrid_engine.ranks.world import World
from hybrid_engine.records.layout import Extent, Layout
from hybrid_engine.switch.sharding_manager import ShardingManager


class NoTraining(GuardedTrainer, TrainingWeights):
    """Trainer without weights or state, for a server's process.

    Implements `ports.Trainer`, and is its own weights.
    """

    version = 0

    def __init__(self) -> None:
        self.guard = Guards()
        self.before_step: Callable[[], object] = lambda: None

    @property
    def weights(self) -> NoTraining:
        return self

    def layout(self) -> Layout:
        return Layout({}, {}, ())

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {}

    def finish_pending(self) -> None:
        """Do nothing: no gathers are pending."""

    def check_values(self, unread: Mapping[str, Sequence[Extent]] | None = None) -> None:
        """Do nothing: there are no values."""

    def offload_items(self) -> Iterable[OffloadItem]:
        return ()


class NoInference(InferenceWeights, InferenceCaches):
    """Engine without weights or caches, for a trainer's process.

    No rank waits for it in `commit`, and the server wakes its caches itself.
    """

    def layout(self) -> Layout:
        return Layout({}, {}, ())

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        assert not groups, "the plan gives this rank nothing to fill"
        return {}

    def commit(self, groups: Sequence[str]) -> None:
        """Do nothing: this rank has no groups."""

    def release(self, keep: Collection[str] = ()) -> None:
        """Do nothing: this rank has no weights."""

    @contextmanager
    def proving(self, tensors: Collection[str], unproven: Callable[[str], None]) -> Iterator[None]:
        yield

    def resident_nbytes(self) -> int:
        return 0

    def reset_caches(self) -> None:
        """Do nothing: a server clears its caches when it is paused."""


class OneSidedSwitch(ShardingManager):
    """Switch of a job of trainers and servers, in a process with one side; `close` leaves the job.

    Args:
        world: ranks of the job, which this joins; collective over them.
        config: keys of a switch.
        device: device of this process's side.
        host: host of this rank, if it is known.
        parts: further arguments of a `ShardingManager`.
    """

    def __init__(
        self,
        world: World,
        *,
        config: GenerateConfig,
        device: torch.device,
        host: str | None = None,
        **parts: Any,
    ) -> None:
        with Ends() as undo:
            job = Job.join(config.timeout_seconds, world=world, device=device, host=host)
            undo.callback(job.close)
            # Trainers compare servers by separate calls.
            config = config.model_copy(update={"check_compute": "off"})
            super().__init__(config=config, job=job, **parts)
            undo.pop_all()

    def close(self) -> None:
        """Close the switch, and leave the job. Idempotent."""
        try:
            super().close()
        finally:
            self.job.close()

"""A server's worker: joins the trainers' job, is filled by them, reports if weights are usable.

    NOTHING_YET --join, first switch--> EMPTY --fill--> PARTIAL --committed by all--> FILLED(v)
                                          ^----------------- withdrawn, or failed -------|
    if trainers compare            PARTIAL --committed by all--> UNCOMPARED --finished--> FILLED(v)

    with release_weights: false    FILLED(v) --fill--> PARTIAL --committed by all--> FILLED(v + n)
                                      ^--failed before ---|---failed in or after the fill---> EMPTY

    on leaving or changing the job    weights that were FILLED stay, others are void. This happens
                                      when a trainer is gone, or other trainers invite the worker

A server belongs to the trainers that it joined last, even while it is in no job, until those have
ended. The server checks `obstacle` before it generates: it is "" only in FILLED, also without a job
if the last fill completed. A lost trainer ends a wait, never this process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import torch

from hybrid_engine.errors import LostRankError, StateError
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ports import InferenceCaches, InferenceWeights
from hybrid_engine.serving.invitation import Invitation, Update, require_ports
from hybrid_engine.serving.roles import NoTraining, OneSidedSwitch
from hybrid_engine.switch.sharding_manager import ShardingManager
from hybrid_engine.switch.states import State

logger = logging.getLogger("hybrid_engine")


class Holds(StrEnum):
    """States of a worker's weights."""

    NOTHING_YET = "no weights yet"
    EMPTY = "no weights: trainers have taken them, or could not bring them"
    PARTIAL = "weights that were being filled"
    UNCOMPARED = "weights whose computation trainers have not compared with theirs"
    FILLED = "weights"


class ServedWeights(InferenceWeights, Protocol):
    """Weights of a worker; each job assigns another rank."""

    def take_place(self, rank: int, *, keeps_memory: bool) -> None:
        """Produce the layout of `rank` from now on.

        With `keeps_memory`, `release` does not free memory.
        """
        ...


class WeightReceiver:
    """One worker of a server.

    Args:
        weights: weights of the worker's model.
        caches: caches computed with these weights.
        index: index of the worker in its server, from 0, over all replicas.
        device: device of the weights.

    Attributes:
        holds: present state of the weights.
        version: version of the weights, in FILLED.
        job: job of the trainers that filled them.
    """

    def __init__(
        self,
        weights: ServedWeights,
        caches: InferenceCaches,
        index: int,
        device: torch.device,
    ) -> None:
        self._weights = weights
        self._caches = caches
        self._index = index
        self._device = device
        self.holds = Holds.NOTHING_YET
        self.version = -1
        self.job = ""
        self._owner: Invitation | None = None
        self._manager: ShardingManager | None = None

    def join(self, invitation: Invitation) -> None:
        """Join a job, and leave the previous one.

        Collective over all trainers and servers of the job. The weights do not change before the
        job's first switch. If the plan cannot be made, the error is raised, and this worker is in
        no job. A refused invitation has no effect: StateError if the worker belongs to other
        trainers that are still alive and the invitation does not take over; MessageError or
        ConfigError if it is invalid.
        """
        if self._index >= invitation.num_workers:
            raise StateError(
                f"worker {self._index} was invited to a job that counts {invitation.num_workers} "
                "workers of it. Count the workers of all replicas",
                code="worker-count-differs",
            )
        config = invitation.config()
        rank = invitation.first_rank + self._index
        require_ports(config.server_ports)
        world = invitation.world(rank, may_end=False)
        owner = self._owner
        if (
            owner is not None
            and owner.job != invitation.job
            and not invitation.takes_over
            and not owner.has_ended()
        ):
            # A job's name starts with the host and the id of its first process: "HOST/PID/RANDOM".
            owner_process = owner.job.rpartition("/")[0]
            # Equal, and not empty, as the job of an invitation may be.
            is_same_process = owner_process == invitation.job.rpartition("/")[0] != ""
            where = ", in the same process" if is_same_process else ""
            remedy = (
                "close its earlier worker or publisher" if is_same_process else "end these trainers"
            )
            raise StateError(
                f"this server belongs to job {owner.job}, whose trainers are alive{where}, "
                f"but job {invitation.job} invites it: {remedy}, name another server, "
                "or take this one: generate_config.server_take_over",
                code="server-is-taken",
            )
        self.leave()
        self._owner = invitation
        self._weights.take_place(rank, keeps_memory=not config.release_weights)
        trainer = NoTraining()
        self._manager = manager = OneSidedSwitch(
            world,
            trainer=trainer,
            inference=self._weights,
            caches=self._caches,
            offloader=Offloader(trainer),
            config=config,
            device=self._device,
        )
        logger.info(
            "[Reshard] joined as rank %d of %d: %d buckets",
            rank,
            world.size,
            len(manager.plan.buckets),
        )

    def switch(self, update: Update) -> None:
        """Take part in a switch.

        Collective over all trainers and servers of the job; see `ShardingManager.enter`. Raises
        StateError if this worker is not in the update's job. If the switch fails, the weights are
        void unless they were not touched yet.
        """
        manager = self._manager
        owner = self._owner
        if manager is None or owner is None or update.name != owner.name:
            raise StateError(
                "this worker is not in the job that requests a switch: "
                "it was lost or restarted. Publish again",
                code="not-in-job",
            )
        target = State(update.to)
        before = self.holds
        self.holds = Holds.PARTIAL if target is State.INFER else Holds.EMPTY
        try:
            manager.enter(target)
        except BaseException as error:
            self._note_failure(before, error)
            raise
        if target is State.INFER:
            self.holds = Holds.UNCOMPARED if update.is_compared else Holds.FILLED
            self.version = update.version
            self.job = owner.job
        elif not manager.has_written:
            self.holds = before

    def finish(self) -> None:
        """End an update: trainers found that this worker computes what they compute."""
        if self.holds is Holds.UNCOMPARED:
            self.holds = Holds.FILLED

    def obstacle(self, also_uncompared: bool = False) -> str:
        """Return the reason for which the weights must not be used, or "".

        `also_uncompared`: allow weights that trainers have not compared yet, for the comparison
        itself.
        """
        is_whole = self.holds is Holds.FILLED or (
            also_uncompared and self.holds is Holds.UNCOMPARED
        )
        return "" if is_whole else f"worker {self._index} has {self.holds}"

    def leave(self) -> None:
        """Leave the job; complete weights stay. Idempotent."""
        manager = self._manager
        self._manager = None
        if manager is not None:
            manager.close()

    def _note_failure(self, before: Holds, error: BaseException) -> None:
        """Discard weights that a failed switch has touched, and leave a job that is lost.

        `before`: state of the weights before the switch.
        """
        manager = self._manager
        assert manager is not None
        steps: list[Callable[[], None]] = []
        if manager.has_written or before is not Holds.FILLED:
            self.holds = Holds.EMPTY
            steps = [self._weights.abandon, self._weights.release]
        else:
            self.holds = before
        if isinstance(error, LostRankError) or manager.state is State.INTERRUPTED:
            steps = [self.leave, *steps]
        for step in steps:
            try:
                step()
            except Exception as failure:
                # The remaining steps still run; the caller raises the switch's error.
                logger.error(
                    "[Reshard] after a failed switch: %s: %s", type(failure).__name__, failure
                )

"""A server's worker: joins the trainers' job, is filled by their switches, and says whether its weights can be used.

    NOTHING_YET --join, first switch--> EMPTY --fill--> PARTIAL --committed by all--> FILLED(version)
                                          ^------------------ withdrawn, or failed -------|
    where trainers compare              PARTIAL --committed by all--> UNCOMPARED --finished--> FILLED(version)

    with release_weights: false         FILLED(version) --fill--> PARTIAL --committed by all--> FILLED(next version)
                                               ^--failed before ---|---failed in it, or after it---> EMPTY

    in no job, or in another   when a trainer is gone, or others invite: weights that were FILLED stay, others are void

A server belongs to the trainers that it joined last, also while it is in no job, until they have ended. Whoever draws
tokens asks `obstacle` before: "" only in FILLED, also in no job with the weights of a last fill. A lost trainer ends a
wait, never this process.
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
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.process import Ends
from hybrid_engine.serving.addresses import require_ports
from hybrid_engine.serving.invitation import Invitation, Update
from hybrid_engine.serving.roles import NoTraining
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
    """Weights of a worker, whose rank each job decides."""

    def take_place(self, rank: int, *, keeps_memory: bool) -> None:
        """From now on the records are those of this rank, and `release` leaves memory where it is, or does not."""
        ...


class WeightReceiver:
    """One worker of a server.

    Args:
        weights: of its model. caches: of what it computed with them.
        index: of the worker in its server, from 0, over all its replicas.
        device: of the weights.

    Attributes:
        holds: what the weights are now.
        version: of the weights, in FILLED.
        job: of the trainers that filled them.
    """

    def __init__(self, weights: ServedWeights, caches: InferenceCaches, index: int, device: torch.device) -> None:
        self._weights, self._caches = weights, caches
        self._index, self._device = index, device
        self.holds, self.version = Holds.NOTHING_YET, -1
        self.job = ""
        self._owner: Invitation | None = None
        self._name = ""
        self._manager: ShardingManager | None = None
        self._ends = Ends()

    def join(self, invitation: Invitation) -> None:
        """Take part in a job, in place of an earlier one. Collective, of all its trainers and servers.

        Weights stay as they are until the job's first switch. Raises what keeps the plan from being made; then this
        worker is in no job. Of an invitation that it refuses nothing follows; it refuses one of other trainers, unless
        they take over or those that it belongs to have ended.
        """
        if self._index >= invitation.num_workers:
            raise StateError(
                f"worker {self._index} was invited to a job that counts {invitation.num_workers} workers of its server"
            )
        config, rank = invitation.config(), invitation.first_rank + self._index
        require_ports(config.server_ports)
        world = invitation.world(rank, may_end=False)
        owner = self._owner
        if owner is not None and owner.job != invitation.job and not invitation.takes_over and not owner.has_ended():
            # a job's name begins with the host and the id of its first process
            is_same_process = owner.job.rpartition("/")[0] == invitation.job.rpartition("/")[0] != ""
            where = ", in the same process" if is_same_process else ""
            remedy = "close its earlier worker or publisher" if is_same_process else "end these trainers"
            raise StateError(
                f"this server belongs to job {owner.job}, whose trainers live{where}, and job {invitation.job} invites "
                f"it: {remedy}, name another server, or take this one: generate_config.server_take_over"
            )
        self.leave()
        self._owner = invitation
        with Ends() as undo:
            job = Job.join(config.timeout_seconds, world=world, device=self._device)
            undo.callback(job.close)
            self._weights.take_place(rank, keeps_memory=not config.release_weights)
            trainer = NoTraining()
            manager = ShardingManager(
                trainer,
                self._weights,
                caches=self._caches,
                offloader=Offloader(trainer),
                config=config,
                job=job,
            )
            undo.callback(manager.close)
            self._ends = undo.pop_all()
        self._name, self._manager = invitation.name, manager
        logger.info("[Reshard] joined as rank %d of %d: %d buckets", rank, world.size, len(manager.plan.buckets))

    def switch(self, update: Update) -> None:
        """Take part in a switch. Collective, of all trainers and servers of the job; see `ShardingManager.enter`.

        Raises StateError for a job that this worker is not in. On failure the weights are void, unless nothing has been
        done to them yet.
        """
        manager = self._manager
        if manager is None or update.name != self._name:
            raise StateError("this worker is not in the job of whoever asks for a switch: it was lost or restarted")
        target = State(update.to)
        before = self.holds
        self.holds = Holds.PARTIAL if target is State.INFER else Holds.EMPTY
        try:
            manager.enter(target)
        except BaseException as error:
            self._note_failure(before, error)
            raise
        if target is State.INFER:
            assert self._owner is not None, "a worker in a job has joined it"
            self.holds = Holds.UNCOMPARED if update.is_compared else Holds.FILLED
            self.version = update.version
            self.job = self._owner.job
        elif not manager.has_written:
            self.holds = before

    def finish(self) -> None:
        """The trainers end an update: they compute what this worker does, if they had to compare."""
        if self.holds is Holds.UNCOMPARED:
            self.holds = Holds.FILLED

    def obstacle(self, also_uncompared: bool = False) -> str:
        """Return why no token is to be drawn now; "" where the weights are whole.

        With `also_uncompared`, why nothing is to be computed for the trainers that compare.
        """
        is_whole = self.holds is Holds.FILLED or (also_uncompared and self.holds is Holds.UNCOMPARED)
        return "" if is_whole else f"worker {self._index} has {self.holds}"

    def leave(self) -> None:
        """Be in no job; weights that are whole stay. Idempotent."""
        manager, self._manager, self._name = self._manager, None, ""
        if manager is not None:
            self._ends.close()

    def _note_failure(self, before: Holds, error: BaseException) -> None:
        """After a switch that failed: weights that it touched are void, and where the job is lost this worker is in
        none."""
        manager, steps = self._manager, list[Callable[[], None]]()
        assert manager is not None
        if manager.has_written or before is not Holds.FILLED:
            self.holds, steps = Holds.EMPTY, [self._weights.abandon, self._weights.release]
        else:
            self.holds = before
        if isinstance(error, LostRankError) or manager.state is State.INTERRUPTED:
            steps = [self.leave, *steps]
        for step in steps:
            try:
                step()
            except Exception as failure:  # each step is made, and what failed at first is raised
                logger.error("[Reshard] after a failed switch: %s: %s", type(failure).__name__, failure)

"""Publication of the trainers' weights to vLLM servers in separate processes.

    servers = ["http://127.0.0.1:8000"]
    publisher = WeightPublisher(trainer, servers, config=config.generate_config, job=job)
    for step in range(num_steps):
        with publisher.rollout_context(): ...   servers have the weights and generate on request
        with publisher.train_context(): ...     servers are paused and empty; training state is back

`publish` and `withdraw` do the same without a context. Every server must answer when the publisher
is created. The first switch invites the servers. If one is lost, the next switch invites those that
are reachable then, so restarting a server does not require restarting trainers.

    pause -> start_weight_update -> update_weights: ShardingManager.enter on all ranks of both sides
                                 -> probe, in the first switch: comparison.py
                                 -> finish_weight_update(version) -> resume

A server belongs to the job of one group of trainers. While these are alive it refuses invitations
of others, and it refuses requests for weights of another job or version (`drawn_with`).

No failure of a server loses training state: offloaded state is onloaded again from host memory.

With `release_weights: false` servers keep their weights and generate during training. They are
paused only while they are filled, and trainers return from a rollout without them:

    publish, version v                 servers generate with v
    withdraw, train: v + 1, v + 2 ...  servers generate with v; `require_step` stops training at
                                       v + server_max_lag
    publish, version v + n             servers are paused, filled in place, and generate with v + n
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as NotDone
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

from msgspec.structs import replace

from hybrid_engine.compute_check.logprob_check import ConfigModel
from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import (
    ConfigError,
    DifferentCallsError,
    HybridEngineError,
    LostRankError,
    ServerError,
    StateError,
    require_none,
)
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ports import Trainer
from hybrid_engine.ranks.background import call_in_rounds
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from hybrid_engine.serving.clients import (
    VllmServer,
    call_while_switching,
    failures_of,
    refuse_meeting,
    require_servers,
    server_of,
    silent_servers,
    weak_call,
    with_server_error,
)
from hybrid_engine.serving.comparison import ServerAnswer, ServerComparison, describe, read_json
from hybrid_engine.serving.invitation import (
    LOOPBACK,
    NO_VERSION,
    SWITCH_KEYS,
    DrawnWith,
    Invitation,
    Rendezvous,
    Update,
    require_address,
    require_ports,
)
from hybrid_engine.serving.roles import NoInference, OneSidedSwitch
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.sharding_manager import ShardingManager
from hybrid_engine.switch.states import State, Switch

logger = logging.getLogger("hybrid_engine")

_T = TypeVar("_T")


class WeightPublisher(Switch):
    """One trainer rank's part of the publication. All methods are collective over the trainers.

    Args:
        trainer: its weights are published and its state is offloaded; its `before_step` is set
            here.
        servers: servers, in any form that `clients.server_of` takes; the same on all ranks, but
            called by the first rank only. Raises ConfigError if one does not answer.
        config: configuration of the switch: transport, bucket size, kinds to offload, timeout; and
            its keys `server_...`.
        job: job of the trainers; outlives this object.
        offloader: offloader of the trainer's state; created here if omitted.
        reference: compared with the trainer if the servers cannot be.

    Attributes:
        state: state of the devices.
        drawn_with: job and version of the weights with which servers generate for these trainers;
            None while they generate for none. A request with `drawn_with.arguments()` as its
            `vllm_xargs` is answered by no others.
        last_report: report of the last switch.
        served: with `release_weights: false`, the last published version; servers generate with
            none older.
    """

    inference: NoInference
    served: int | None = None
    drawn_with: DrawnWith | None = None

    def __init__(
        self,
        trainer: Trainer,
        servers: Sequence[object],
        *,
        config: GenerateConfig,
        job: Job,
        offloader: Offloader | None = None,
        reference: ConfigModel | None = None,
    ) -> None:
        if not hasattr(trainer, "guard"):
            raise ConfigError.of(
                "trainer",
                f"got a {type(trainer).__name__}",
                "Pass a ports.Trainer. For a model, HybridEngine(model=...) has one",
                code="not-a-trainer",
            )
        super().__init__(trainer, offloader or Offloader(trainer), config, job)
        self.inference = NoInference()
        self._check: ServerComparison = ServerComparison(
            trainer, job, config.check_compute, reference
        )
        # With `release_weights`: servers may hold weights, in memory that training state needs.
        self._may_hold = False
        self._manager: ShardingManager | None = None
        self._name = ""
        self._is_new = False  # no switch has followed the invitation yet
        # Previous ones too: a server that leaves a job still reads its store.
        self._rendezvous: list[Rendezvous] = []
        self._servers: list[VllmServer] = []
        timeout = config.timeout_seconds
        with job.agreement.phase("looking at the servers"):
            require_ports(config.server_ports)
            require_servers(servers, config.server_address, self.job.hosts)
            if config.server_address is not None:
                require_address(config.server_address, allow_public=config.server_allow_public)
            if job.rank == 0:
                self._servers = [
                    server_of(server, timeout, allow_public=config.server_allow_public)
                    for server in servers
                ]
        silent = silent_servers(self._servers, timeout)
        self._call_servers("asking the servers", lambda: require_none(silent))
        # The name identifies the first process to a user who reads it in an error.
        name = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        self._job_name = job.agreement.gather(name, str, "naming the job of the servers")[0]
        trainer.before_step = weak_call(self.require_step)

    # -- public calls ------------------------------------------------------------------------------

    def publish(self) -> ReshardReport | None:
        """Give the servers the present weights, and let them generate.

        Returns None if they have them already. Raises ServerError if a server refuses or cannot be
        reached, and the errors of `ShardingManager.enter`. Training state is then on the device,
        and the servers are paused, except servers that refused to pause.
        """
        return self.enter(State.INFER)

    def withdraw(self) -> ReshardReport | None:
        """Onload training state; servers pause and, with `release_weights`, free their weights."""
        return self.enter(State.TRAIN)

    def rollout_context(self) -> AbstractContextManager[None]:
        """Context in which servers generate; they go on after it if `release_weights` is false."""
        return self.entered(State.INFER)

    def train_context(self) -> AbstractContextManager[None]:
        """Context for training: all training state is on the device."""
        return self.entered(State.TRAIN)

    def forward_context(self) -> AbstractContextManager[None]:
        """Context for scoring: only parameters need to be on the device."""
        return self.entered(State.FORWARD)

    def require_step(self) -> None:
        """Raise StateError if another optimizer step would exceed the servers' server_max_lag."""
        version = self.trainer.version
        max_lag = self.config.server_max_lag
        # With a lag of 2 servers of version 5 allow version 7: the step to 8 raises.
        if self.served is not None and version + 1 - self.served > max_lag:
            raise StateError(
                f"an optimizer step would make version {version + 1} of the weights, "
                f"but servers generate with version {self.served}: generate_config.server_max_lag "
                f"is {max_lag}. Publish first (rollout_context), or raise it",
                code="server-lag-exceeded",
            )

    def require_drawing(self) -> None:
        if self.drawn_with is None:
            super().require_drawing()

    def close(self) -> None:
        """Onload training state and leave the job with the servers. Idempotent.

        Servers with weights keep them, unless training state does not fit into the remaining
        memory. Servers without weights stay paused.
        """
        self.served = None
        self.drawn_with = None
        may_hold = self._may_hold
        self._may_hold = False
        try:
            try:
                # First without asking servers for memory: both may fit.
                self._disconnect()
            except HybridEngineError:
                if self.job.agreement.lost is not None or not may_hold:
                    raise
                self._may_hold = True
                self._disconnect()
            if self._manager is not None:  # joined again, to make servers release their weights
                self._leave_servers()
                self.state = State.TRAIN
                # torch's FileStore ends the process if its file is removed while the store is being
                # destroyed.
                self.job.agreement.conclude("leaving the servers")
        finally:
            self._close_rendezvous(num_kept=0)

    # -- switches ----------------------------------------------------------------------------------

    def _enter(self, before: State, target: State) -> ReshardReport:
        started = time.perf_counter()
        takes_back = before is State.INFER and self.config.release_weights
        with_servers = target is State.INFER or takes_back
        if before is State.INTERRUPTED:
            # An update may be open in the servers; a new invitation ends it.
            self._disconnect()
        manager = self._connected() if with_servers else None
        self._begin(before, target)
        report = None
        if manager is not None:
            report = self._switch(manager, before, target)
        else:
            with self.offloader.owner_rests():
                # The servers' weights do not change.
                if before is State.TRAIN:
                    self._finish_pending()
                self._move_state(target)
        return self._end(target, report or self._report(f"{before}->{target}", started))

    def _progress(self) -> list[int]:
        served = -1 if self.served is None else self.served
        return [*super()._progress(), self._manager is None, self._may_hold, served]

    def _resync(self, phase: str) -> None:
        """Also leave the servers, which may hold what any rank has noted."""
        super()._resync(phase)
        by_rank = self.job.agreement.gather(
            (self.served, self._may_hold), tuple[int | None, bool], phase
        )
        # The oldest version with which a server may generate.
        self.served = min((version for version, _ in by_rank if version is not None), default=None)
        self._may_hold = any(may_hold for _, may_hold in by_rank)
        self.drawn_with = None
        self._leave_servers()

    def _switch(
        self,
        manager: ShardingManager,
        before: State,
        target: State,
    ) -> ReshardReport | None:
        """Switch trainers and servers."""
        fills = target is State.INFER
        update = Update(
            name=self._name,
            to=target.value,  # type: ignore[arg-type]  # mypy knows it as a str, not as one of four
            version=self.trainer.version,
            is_compared=fills and self._check.asks_engines,
        )
        switch_error: Exception | None = None
        calls: list[Future[None]] = []
        self.drawn_with = None
        try:
            if fills and self._check.is_due:
                self._probe_trainer()
            calls = self._start_update(before, update, manager.job.world)
            held = self._may_hold
            will_hold = fills and self.config.release_weights
            # Set early: an interrupt may come once the servers are filled.
            self._may_hold = held or will_hold
            try:
                manager.enter(target)
                self._may_hold = will_hold
            except Exception as error:
                switch_error = error
                # After a failure that follows the first write or release, all servers have dropped
                # their weights.
                self._may_hold = held and (
                    isinstance(error, LostRankError) or not manager.has_written
                )
            # Either all ranks raise or none: if a server dies near the end of a switch, some
            # trainers have finished it.
            self.job.agreement.conclude("the switch with the servers", switch_error)
            self._end_update(calls, target, update)
            if fills:
                self._check.conclude()
                self.drawn_with = DrawnWith(job=self._job_name, version=update.version)
                if not self.config.release_weights:
                    self.served = update.version
        except Exception as error:
            if switch_error is None and isinstance(error, DifferentCallsError):
                # After Ctrl-C some rank is in its next call already, where all ranks resynchronize.
                raise
            self._recover(manager, calls, stays=switch_error is not None)
            if isinstance(error, LostRankError):
                # The lost rank is a server's: without all trainers, `_recover` would have raised.
                text = f"a server was lost in a switch; {_what_follows(error, calls)}"
                raise ServerError(text, code="server-lost") from error
            raise
        except BaseException as interrupt:
            self._leave_servers(interrupt)
            raise
        return manager.last_report

    def _start_update(self, before: State, update: Update, world: World) -> list[Future[None]]:
        """Start an update in all servers; servers that may be generating are paused first.

        In the first switch of a job that is unknown: servers may have weights of trainers that are
        gone. Requests that wait there for weights are not aborted.
        """
        is_first = self._is_new
        self._is_new = False
        mode = self.config.server_pause
        if is_first and mode == "abort":
            mode = "wait"
        may_draw = (
            before in (State.INFER, State.INTERRUPTED)
            or is_first
            or not self.config.release_weights
        )
        manager = self._manager

        def ask() -> None:
            for server in self._while_joined(manager):
                if may_draw:
                    server.pause(mode, clear_cache=True)  # cached values belong to the old weights
                    server.update_weight_version(NO_VERSION)
                server.start_weight_update()

        self._call_servers("asking the servers for a switch", ask)
        return [
            call_while_switching(server.update_weights, update, world) for server in self._servers
        ]

    def _end_update(self, calls: Sequence[Future[None]], target: State, update: Update) -> None:
        """End the update: once all are filled, servers report the new version and resume."""
        manager = self._manager

        def end() -> None:
            self._await(calls)
            if update.is_compared:
                self._compare_servers(manager)
            for server in self._while_joined(manager):
                server.finish_weight_update(
                    str(update.version) if target is State.INFER else NO_VERSION
                )
            if target is State.INFER:
                for server in self._while_joined(manager):
                    server.resume()

        self._call_servers("ending the switch of the servers", end)

    def _compare_servers(self, manager: ShardingManager | None) -> None:
        """Raise ComputationError unless paused servers compute as trainers do. First rank only."""
        assert self._check.tokens is not None, "servers are asked only if it is due"
        tokens = self._check.tokens.tolist()
        answers = [
            # It has described itself, so it has `probe`.
            read_json(ServerAnswer, server.probe(tokens))  # type: ignore[attr-defined]
            for server in self._while_joined(manager)
        ]
        self._check.require_same(answers)

    def _while_joined(self, manager: ShardingManager | None) -> Iterator[VllmServer]:
        """Yield the servers while the trainers are in the job of `manager`; then raise ServerError.

        After Ctrl-C the thread that calls servers still runs, and must not pause a server that
        generates for the next job.
        """
        for server in self._servers:
            if self._manager is not manager:
                raise ServerError("the trainers have left this job", code="job-was-left")
            yield server

    def _connected(self) -> ShardingManager:
        """Return the switch with the servers, or invite them to a new job and plan. Collective."""
        present = self._manager
        if present is not None:
            return present
        phase = "inviting the servers"
        with ExitStack() as undo:
            counts = self._call_servers(
                phase, lambda: [server.num_workers() for server in self._servers]
            )
            created: Invitation | None = None
            with self.job.agreement.phase(phase):
                if self.job.rank == 0:
                    rendezvous = Rendezvous(self.config.server_address)
                    self._rendezvous.append(rendezvous)
                    created = Invitation(
                        place=rendezvous.place,
                        name=rendezvous.name,
                        first_rank=self.job.world_size,
                        num_workers=0,
                        size=self.job.world_size + sum(counts),
                        settings=self.config.model_dump(mode="json", include=set(SWITCH_KEYS)),
                        address=LOOPBACK if self.config.server_address is None else None,
                        job=self._job_name,
                        takes_over=self.config.server_take_over,
                    )
            invitation = self.job.agreement.gather(created, Invitation | None, phase)[0]
            assert invitation is not None, "the first rank has created it"
            # A rank may lack the token, or not reach the store.
            with self.job.agreement.phase(phase):
                world = invitation.signed().world(self.job.rank)
            undo.push(functools.partial(refuse_meeting, world, world.meeting))
            calls = self._invite(invitation, counts, world)
            undo.callback(self._leave)
            failure: Exception | None = None
            try:
                self._manager = OneSidedSwitch(
                    world,
                    trainer=self.trainer,
                    inference=self.inference,
                    caches=self.inference,
                    offloader=self.offloader,
                    config=self.config,
                    device=self.job.device,
                    host=self.job.hosts[self.job.rank],
                    within=self,
                )
            except Exception as error:
                failure = error
            try:
                self.job.agreement.conclude("joining the servers", failure)
            except LostRankError as error:
                if self.job.agreement.lost is not None:
                    raise
                text = f"a server did not join; {_what_follows(error, calls)}"
                raise ServerError(text, code="server-did-not-join") from error
            self._call_servers("joining the servers", lambda: self._await(calls))
            if self._check.is_on:
                phase = "looking at what the servers compute"
                servers = self._call_servers(phase, lambda: list(map(describe, self._servers)))
                self._check.join(servers)
            self._name = invitation.name
            self._is_new = True
            undo.pop_all()
        self._close_rendezvous(num_kept=1)
        assert self._manager is not None
        return self._manager

    def _invite(
        self,
        invitation: Invitation,
        counts: Sequence[int],
        world: World,
    ) -> list[Future[None]]:
        """Invite the servers, which the first rank has; `counts`: number of workers of each."""
        first = invitation.first_rank
        calls = []
        for server, count in zip(self._servers, counts, strict=True):
            own_invitation = replace(invitation, first_rank=first, num_workers=count).signed()
            calls.append(
                call_while_switching(server.init_weight_transfer_engine, own_invitation, world)
            )
            # 8 trainers and servers of 2 and 4 workers: ranks 0 to 7, 8 to 9, 10 to 13.
            first += count
        return calls

    def _close_rendezvous(self, num_kept: int) -> None:
        """Close all but the last `num_kept` stores."""
        while len(self._rendezvous) > num_kept:
            self._rendezvous.pop(0).close()

    def _call_servers(self, phase: str, call: Callable[[], _T]) -> _T:
        """Run `call` on every rank; only the first rank has servers to call.

        Collective; all ranks raise its errors.
        """
        call = functools.partial(with_server_error, phase, call)
        return call_in_rounds(self.job.agreement, phase, call)

    def _await(self, calls: Sequence[Future[None]]) -> None:
        seconds = self.config.timeout_seconds
        for call in calls:
            try:
                call.result(seconds)
            except NotDone:
                raise ServerError(
                    f"a server did not answer within {seconds:g} s after the switch",
                    code="no-response",
                ) from None

    def _recover(
        self,
        manager: ShardingManager,
        calls: Sequence[Future[None]],
        *,
        stays: bool,
    ) -> None:
        """Onload training state after a failed switch, and end the job unless all ranks are in it.

        Args:
            manager: switch with the servers.
            calls: calls that requested the switch from the servers.
            stays: the servers observed the failure in the switch, and recover as the trainers do.
        """
        must_leave = (
            not stays or manager.state is not State.TRAIN or manager.job.agreement.lost is not None
        )
        # Ranks raise different errors, and must take the same branch.
        (must_leave,) = self.job.agreement.any_of([must_leave], "recovering")
        if must_leave:
            self._disconnect()
            return
        self.state = State.TRAIN
        self._call_servers(
            "waiting for the end of the servers' switch", lambda: self._resume_servers(calls)
        )

    def _resume_servers(self, calls: Sequence[Future[None]]) -> None:
        """Resume servers whose weights have not changed, once their switch has ended.

        Other servers refuse to resume, and stay paused.
        """
        wait(calls, self.config.timeout_seconds)
        if self.config.release_weights:
            return
        for server in self._servers:
            try:
                server.resume()
            except ServerError as error:
                logger.warning("[Reshard] after a failed switch: %s", error)

    def _disconnect(self) -> None:
        """Leave the job with the servers, and onload the training state."""
        try:
            self._leave_servers()
        finally:
            self._reclaim_memory()
            self._bring_back()

    def _reclaim_memory(self) -> None:
        """Reconnect once to make servers release weights that occupy memory training needs."""
        if not self._may_hold:
            return
        self._may_hold = False
        try:
            self._switch(self._connected(), State.INTERRUPTED, State.TRAIN)
        except BaseException as error:
            # All ranks raise such an error together, so all may continue without the servers'
            # memory.
            is_common = isinstance(error, HybridEngineError) and not isinstance(
                error, DifferentCallsError
            )
            if not is_common or self.job.agreement.lost is not None:
                self._may_hold = True
                raise
            logger.warning(
                "[Reshard] servers that may hold weights did not release them: %s", error
            )

    def _leave_servers(self, interrupt: BaseException | None = None) -> None:
        """Leave the job with the servers.

        `interrupt`: error because of which this rank leaves alone, if any.
        """
        self.state = State.INTERRUPTED
        if interrupt is not None and self._manager is not None:
            world = self._manager.job.world
            refuse_meeting(world, world.meeting, type(interrupt), interrupt)
        self._leave()

    def _leave(self) -> None:
        manager = self._manager
        self._manager = None
        if manager is not None:
            manager.close()


def _what_follows(error: LostRankError, calls: Sequence[Future[None]]) -> str:
    """Return what follows the loss of a server, and why it was lost."""
    return (
        "training state is on the device, and the next switch invites "
        f"the servers that are reachable then. {error}{failures_of(calls)}"
    )

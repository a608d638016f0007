"""The trainers' part: their weights go to servers and come back, though vLLM runs in processes of its own.

    publisher = WeightPublisher(trainer, ["http://127.0.0.1:8000"], config=config.generate_config, job=job)
    for step in range(num_steps):
        with publisher.rollout_context(): ...       servers have the weights and draw tokens; requests go to them
        with publisher.train_context(): ...         servers are paused and hold nothing; training state is back

`publish` and `withdraw` are the same without a context. The first switch invites the servers; where one is lost, the
next one invites those that are there, so a server that was restarted needs no restart of trainers.

    pause -> start_weight_update -> update_weights ...... ShardingManager.enter on all ranks of both sides
                                    -> probe, in the first one: comparison.py
                                    -> finish_weight_update(version) -> resume

A server belongs to one job of trainers. It refuses the invitation of others while these live, and a request that asks
for weights of another job or version than it has (`drawn_with`).

Training state is lost by no failure of a server: what left the device comes back from host memory.

With `release_weights: false` servers keep their weights and draw tokens while trainers train. They are paused only
while they are filled, and trainers come back from a rollout without them:

    publish, version v                 servers draw with v
    withdraw, train: v + 1, v + 2 ...  servers draw with v; `require_step` ends this at v + server_max_lag
    publish, version v + n             servers are paused, filled in place, and draw with v + n
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as NotDone
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, TypeVar

from msgspec.structs import replace

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import (
    ConfigError,
    DifferentCallsError,
    HybridEngineError,
    LostRankError,
    ServerError,
    StateError,
    Violation,
    shortened,
)
from hybrid_engine.memory.offload_items import KINDS, Kind
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ports import Trainer
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.background import in_background, steps_until
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.process import Ends
from hybrid_engine.ranks.world import World
from hybrid_engine.serving.addresses import require_ports
from hybrid_engine.serving.clients import PauseMode, VllmServer, server_of
from hybrid_engine.serving.comparison import ServerAnswer, ServerComparison, described, read_json
from hybrid_engine.serving.invitation import (
    LOOPBACK,
    NO_VERSION,
    SWITCH_KEYS,
    DrawnWith,
    Invitation,
    MeetingPlace,
    Told,
    Update,
    require_address,
)
from hybrid_engine.serving.roles import NoInference
from hybrid_engine.switch.report import ReshardReport, SwitchTally
from hybrid_engine.switch.sharding_manager import ShardingManager
from hybrid_engine.switch.states import NEEDED_KINDS, State, Switch, require, resident_kinds

logger = logging.getLogger("hybrid_engine")

_SECONDS_BETWEEN_LOOKS = 1.0

_T = TypeVar("_T")

_WHAT_FOLLOWS = "training state is on the device, and the next switch invites the servers that are there then"


class WeightPublisher(Switch):
    """One rank of the trainers that publish their weights. All methods are collective, over the trainers.

    Args:
        trainer: whose weights are published, and whose state leaves the device; its `before_step` is set here.
        servers: each as `clients.server_of` takes it; the same on all ranks, but called by the first alone.
        config: of the switch: transport, bucket size, what is offloaded, how long to wait.
        job: of the trainers; outlives this object.
        offloader: of the trainer's state; made here when there is none.
        pause: what becomes of requests in flight when weights leave or change.
        address: of the interface at which servers on other hosts reach these trainers; None: all are on this host.
        allow_public: see `clients.server_of`.
        take_over: take servers from other trainers that live.

    Attributes:
        state: of the devices.
        drawn_with: job and version of the weights that servers draw tokens with for these trainers; None while they
            draw none. `drawn_with.arguments()` are the `vllm_xargs` of a request that no others are to answer.
        last_report: of the last switch.
        served: with `release_weights: false`, the version that was published last: servers draw with none older.
    """

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
        pause: PauseMode = "keep",
        address: str | None = None,
        allow_public: bool = False,
        take_over: bool = False,
    ) -> None:
        super().__init__(trainer)
        self.trainer, self.config, self.job = trainer, config, job
        self.offloader = offloader or Offloader(trainer)
        self.inference = self._side = NoInference()
        self._pause: PauseMode = pause
        self._address, self._takes_over = address, take_over
        self._comparison = ServerComparison(trainer, job, config.check_compute)
        self.state, self._is_started = State.INTERRUPTED, False
        self._may_hold = False  # servers, where they are to have weights only while trainers have no training state
        self._manager: ShardingManager | None = None
        self._name, self._is_new = "", False
        self._ends = ExitStack()
        self._places: list[MeetingPlace] = []  # a server that leaves a job still asks its store
        self._servers: list[VllmServer] = []
        with job.agreement.phase("looking at the servers"):
            require_ports(config.server_ports)
            if not servers:
                raise ConfigError([Violation("servers", "none", "Name at least one")])
            if len({str(each).rstrip("/") for each in servers}) < len(servers):  # it would wait for itself to join
                raise ConfigError([Violation("servers", f"one twice: {shortened(servers)}", "Name each once")])
            if address is None and len(set(job.hosts)) > 1:
                problem = "trainers are on several hosts, and there is no address at which they meet the servers"
                raise ConfigError([Violation("address", problem, "Give that of an interface of the first trainer")])
            if address is not None:
                require_address(address, allow_public=allow_public)
            if job.rank == 0:
                self._servers = [server_of(each, config.timeout_seconds, allow_public=allow_public) for each in servers]
        own_name = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"  # by which a user finds the process
        self._job_name = job.agreement.gather(own_name, str, "naming the job of the servers")[0]
        require_step = weakref.WeakMethod(self.require_step)
        trainer.before_step = lambda: (require := require_step()) and require()

    # -- what users call ----------------------------------------------------------------------------------------------

    def publish(self) -> ReshardReport | None:
        """Give the servers the present weights, and have them draw tokens; None where they have them already.

        Raises ServerError where a server refuses or is not there, and what `ShardingManager.enter` raises; training
        state is on the device then, and the servers are paused, but for one that refuses to be.
        """
        return self.enter(State.INFER)

    def withdraw(self) -> ReshardReport | None:
        """Bring training state back; servers are paused and give their weights up, unless they keep them."""
        return self.enter(State.TRAIN)

    def rollout_context(self) -> AbstractContextManager[None]:
        """Servers draw tokens inside, by these weights; where they keep them, after it too."""
        return self.entered(State.INFER)

    def train_context(self) -> AbstractContextManager[None]:
        """Train inside: parameters, gradients and optimizer state are on the device."""
        return self.entered(State.TRAIN)

    def forward_context(self) -> AbstractContextManager[None]:
        """Score inside: only parameters need to be on the device."""
        return self.entered(State.FORWARD)

    def start(self) -> None:
        if not self._is_started:
            with self.job.agreement.phase("onload"):
                self.offloader.onload(KINDS)
            self.state, self._is_started = State.TRAIN, True

    def require_kinds(self, kinds: Collection[str]) -> None:
        if self._comparison.is_asking and {*kinds} == {"param"}:
            return
        if self._is_started:
            require(self.state, [state for state, needed in NEEDED_KINDS.items() if needed.issuperset(kinds)])

    def require_step(self) -> None:
        """Raise StateError where one more optimizer step would leave the servers more than server_max_lag behind."""
        version, most = self.trainer.version, self.config.server_max_lag
        if self.served is not None and version + 1 - self.served > most:
            raise StateError(
                f"an optimizer step would make version {version + 1} of the weights, and servers draw tokens with "
                f"version {self.served}: generate_config.server_max_lag is {most}. Publish first (rollout_context), or "
                "raise it"
            )

    def require_drawing(self) -> None:
        if self.drawn_with is None:
            super().require_drawing()

    def prefetch(self, kinds: Iterable[Kind] = KINDS) -> None:
        self.require(State.INFER)
        with self.job.agreement.phase("prefetch"):
            self.offloader.onload(kinds, read_only=True, wait=False)

    def near_end(self) -> None:
        """Servers do not tell when they are nearly done."""

    def close(self) -> None:
        """Bring training state back, and leave the servers paused where they have nothing. Idempotent.

        Servers with weights keep them, unless training state finds no room beside them.
        """
        self.served, self.drawn_with = None, None
        may_hold, self._may_hold = self._may_hold, False
        try:
            try:
                self._disconnect()  # servers go on with what they have, where there is room for both
            except HybridEngineError:
                if self.job.agreement.lost is not None or not may_hold:
                    raise
                self._may_hold = True
                self._disconnect()
            if self._manager is not None:  # joined once more, to have servers give up their weights
                self._leave_servers()
                self.state = State.TRAIN
                # torch's FileStore ends the process where its file goes while it is being destroyed
                self.job.agreement.conclude("leaving the servers")
        finally:
            self._close_places(but=0)

    # -- switches -----------------------------------------------------------------------------------------------------

    def enter(self, target: State) -> ReshardReport | None:
        """Switch to `target`; None when it is the present state already. See `publish`."""
        self.start()
        self._find_each_other(f"entering {target.context}")
        before, tally, started = self.state, SwitchTally(), time.perf_counter()
        if target is before:
            return None
        is_broken = before is State.INTERRUPTED and (self._manager is not None or self._may_hold)
        takes_back = before is State.INFER or is_broken
        with_servers = target is State.INFER or (takes_back and self.config.release_weights)
        if before is State.INTERRUPTED and (with_servers or is_broken):
            self._disconnect()  # an update may be open, which a new invitation ends
        manager = self._connected() if with_servers else None
        with self.job.agreement.phase("start hooks"):
            self._call_start_hooks(before, target)
        self.state = State.INTERRUPTED
        if manager is None:
            self._switch_alone(before, target, tally)
            report: ReshardReport | None = tally.report(
                f"{before}->{target}", self.trainer.version, time.perf_counter() - started
            )
        else:
            report = self._switch(manager, before, target)
        self.state, self.last_report = target, report
        with self.job.agreement.phase("end hooks"):
            self._call_end_hooks(report)
        return report

    def _find_each_other(self, phase: str) -> None:
        """After Ctrl-C ranks may differ in how far they came: then all are INTERRUPTED, and in no job with servers."""
        said = [list(State).index(self.state), self._manager is None, self._may_hold]
        if self.job.agreement.is_same([*said, -1 if self.served is None else self.served], phase):
            return
        told = self.job.agreement.gather((self.served, self._may_hold), tuple[int | None, bool], phase)
        # the oldest that a server may draw with
        self.served = min((served for served, _ in told if served is not None), default=None)
        self._may_hold, self.drawn_with = any(may_hold for _, may_hold in told), None
        self._leave_servers()

    def _switch_alone(self, before: State, target: State, tally: SwitchTally) -> None:
        """A switch in which servers have the same before and after."""
        wanted, agreement = resident_kinds(target, self.config), self.job.agreement
        if before is State.TRAIN:  # what is pending would write what leaves, or is only read
            with tally.timed("prepare"), agreement.phase("prepare", SHORT_PATIENCE):
                self.trainer.weights.prepare()
        with tally.timed("offload"), agreement.phase("offload"):
            tally.offloaded += self.offloader.offload(frozenset(KINDS) - wanted).total_nbytes
        with tally.timed("onload"), agreement.phase("onload"):
            tally.onloaded += self.offloader.onload(wanted, read_only=target is not State.TRAIN).total_nbytes

    def _switch(self, manager: ShardingManager, before: State, target: State) -> ReshardReport | None:
        """Both sides of one switch."""
        is_compared = target is State.INFER and self._comparison.is_due
        update = Update(
            name=self._name,
            to=target.value,  # type: ignore[arg-type]  # mypy knows it as a str, not as one of four
            version=self.trainer.version,
            is_compared=is_compared,
        )
        within: Exception | None = None
        calls, self.drawn_with = list[_Call](), None
        try:
            if is_compared:
                with self.job.agreement.phase("onload"):
                    self.offloader.onload({"param"}, read_only=True)
                self._comparison.ask_trainer()
            calls = self._ask_servers(before, update, manager.job.world)
            held, fills = self._may_hold, target is State.INFER and self.config.release_weights
            self._may_hold = held or fills  # an interrupt may come once the servers are filled
            try:
                manager.enter(target)
                self._may_hold = fills
            except Exception as error:
                within = error
                # what failed once it had begun to write or to release, all have dropped
                self._may_hold = held and (isinstance(error, LostRankError) or not manager.has_written)
            # all raise, or none: where a server ends at the end of a switch, some trainers have left it by then
            self.job.agreement.conclude("the switch with the servers", within)
            self._end_update(calls, target, update)
            if target is State.INFER:
                self._comparison.conclude()
                self.drawn_with = DrawnWith(job=self._job_name, version=update.version)
                if not self.config.release_weights:
                    self.served = update.version
        except Exception as error:
            if within is None and isinstance(error, DifferentCallsError):
                raise  # after Ctrl-C a rank is in its next call, where all find each other
            self._recover(manager, calls, stays=within is not None)
            if isinstance(error, LostRankError):  # of a server: had a trainer been lost, no recovery would have come
                said = "".join(f"\n{why}" for call in calls if (why := call.failure()))
                raise ServerError(f"a server was lost in a switch; {_WHAT_FOLLOWS}. {error}{said}") from error
            raise
        except BaseException as interrupt:
            self._leave_servers(interrupt)
            raise
        return manager.last_report

    def _ask_servers(self, before: State, update: Update, world: World) -> list[_Call]:
        """Begin an update in all servers, paused where they draw tokens.

        In a job's first one that is not known: they may have weights of trainers that are gone. Where requests wait for
        weights, none of them is ended.
        """
        is_first, self._is_new = self._is_new, False
        mode: PauseMode = "wait" if is_first and self._pause == "abort" else self._pause
        may_draw = before in (State.INFER, State.INTERRUPTED) or is_first or not self.config.release_weights
        manager = self._manager

        def ask() -> None:
            for server in self._while_joined(manager):
                if may_draw:
                    server.pause(mode, clear_cache=True)  # what was cached with older weights is computed again
                    server.update_weight_version(NO_VERSION)
                server.start_weight_update()

        self._ask("asking the servers for a switch", ask)
        refuse = functools.partial(world.refuse, meeting=world.meeting)
        return [_Call(server.update_weights, update, refused=refuse) for server in self._servers]

    def _end_update(self, calls: Sequence[_Call], target: State, update: Update) -> None:
        """End it: servers that were filled draw tokens, once all of them were, and say by which version."""

        manager = self._manager

        def end() -> None:
            self._await(calls)
            if update.is_compared:
                self._compare_servers(manager)
            for server in self._while_joined(manager):
                server.finish_weight_update(str(update.version) if target is State.INFER else NO_VERSION)
            if target is State.INFER:
                for server in self._while_joined(manager):
                    server.resume()

        self._ask("ending the switch of the servers", end)

    def _compare_servers(self, manager: ShardingManager | None) -> None:
        """Raise ComputationError unless servers, which are paused, compute what the trainers do. On the first rank."""
        tokens = self._comparison.tokens()
        answers = [server.probe(tokens) for server in self._while_joined(manager)]  # type: ignore[attr-defined]  # it has described itself
        self._comparison.require_same([read_json(ServerAnswer, answer) for answer in answers])

    def _while_joined(self, manager: ShardingManager | None) -> Iterator[VllmServer]:
        """The servers, as long as they are in this job: after Ctrl-C the thread that calls them is still there, and is
        not to pause one that draws tokens for the next."""
        for server in self._servers:
            if self._manager is not manager:
                raise ServerError("the trainers have left this job meanwhile")
            yield server

    def _connected(self) -> ShardingManager:
        """The switch with the servers; where there is none they are invited to a new job, and planned with."""
        if (present := self._manager) is not None:
            return present
        with ExitStack() as undo:
            counts = self._ask("inviting the servers", lambda: [server.num_workers() for server in self._servers])
            with self.job.agreement.phase("inviting the servers"):
                place = MeetingPlace(self._address) if self.job.rank == 0 else None
                told = [] if place is None else [place.place, place.name]
                if place is not None:
                    self._places.append(place)
            heard = self.job.agreement.gather((told, counts), tuple[list[str], list[int]], "inviting the servers")
            (where, name), counts = heard[0]
            size = self.job.world_size + sum(counts)
            values = self.config.model_dump(mode="json", include=set(SWITCH_KEYS))
            first, calls = self.job.world_size, list[_Call]()
            invitation = Invitation(
                place=where,
                name=name,
                first_rank=first,
                num_workers=0,
                size=size,
                settings=values,
                address=LOOPBACK if self._address is None else None,
                job=self._job_name,
                takes_over=self._takes_over,
            )
            with self.job.agreement.phase("inviting the servers"):  # a rank that has no token, or finds no store
                world = invitation.signed().world(self.job.rank)
            undo.push(functools.partial(_refuse, world, world.meeting))
            refused = functools.partial(world.refuse, meeting=world.meeting)
            for server, count in zip(self._servers, counts, strict=False):  # none on other ranks
                own = replace(invitation, first_rank=first, num_workers=count).signed()
                calls.append(_Call(server.init_weight_transfer_engine, own, refused=refused))
                first += count
            failure: Exception | None = None
            try:
                undo.enter_context(self._join(world))
            except Exception as error:
                failure = error
            try:
                self.job.agreement.conclude("joining the servers", failure)
            except LostRankError as error:
                if self.job.agreement.lost is not None:
                    raise
                why = "".join(f"\n{each}" for call in calls if (each := call.failure()))
                raise ServerError(f"a server did not join; {_WHAT_FOLLOWS}. {error}{why}") from error
            self._ask("joining the servers", lambda: self._await(calls))
            self._agree_on_comparison()
            self._name, self._is_new, self._ends = name, True, undo.pop_all()
        self._close_places(but=1)
        assert self._manager is not None
        return self._manager

    def _agree_on_comparison(self) -> None:
        """Hear from servers that have joined what they can compute, where the trainers can be compared with them."""
        if self._comparison.has_trainers():
            phase = "looking at what the servers compute"
            self._comparison.agree(self._ask(phase, lambda: [described(server) for server in self._servers]))

    def _close_places(self, but: int) -> None:
        """But for the last ones."""
        closing = self._places[: len(self._places) - but]
        self._places = self._places[len(closing) :]
        for place in closing:
            place.close()

    def _join(self, world: World) -> ExitStack:
        """Join as one of the trainers, and plan; what is returned ends it."""
        with Ends() as undo:
            host = self.job.hosts[self.job.rank]
            job = Job.join(self.config.timeout_seconds, world=world, device=self.job.device, host=host)
            undo.callback(job.close)
            self._manager = ShardingManager(
                self.trainer,
                self._side,
                caches=self._side,
                offloader=self.offloader,
                config=self.config.model_copy(update={"check_compute": "off"}),
                job=job,
                within=self,
            )
            undo.callback(self._manager.close)
            undo.callback(setattr, self, "_manager", None)  # where a server fails once all have joined
            return undo.pop_all()

    def _ask(self, phase: str, ask: Callable[[], _T]) -> _T:
        """Have the first rank, which has the servers, call them; what fails there is raised on all.

        A server may take longer to answer than ranks wait for each other, so they meet every few seconds.
        """
        answers: list[_T] = []

        def asking() -> Iterator[None]:
            if self._servers:
                answer = in_background(functools.partial(_told_of_servers, phase, ask), phase)
                answers.append((yield from steps_until(answer, _SECONDS_BETWEEN_LOOKS)))
            else:
                answers.append(ask())

        self.job.agreement.rounds(phase, asking())
        return answers[0]

    def _await(self, calls: Sequence[_Call]) -> None:
        for call in calls:
            call.result(self.config.timeout_seconds)

    def _recover(self, manager: ShardingManager, calls: Sequence[_Call], *, stays: bool) -> None:
        """After a failed switch: training state is back on the device, and the job goes unless all are still in it.

        `stays`: the servers heard of it in the switch, and end it as trainers have; `calls`: that asked them for it.
        """
        goes = not stays or manager.state is not State.TRAIN or manager.job.agreement.lost is not None
        (goes,) = self.job.agreement.any_of([goes], "recovering")  # ranks raise different things
        if goes:
            self._disconnect()
            return
        self.state = State.TRAIN
        self._ask("hearing of the servers that their switch has ended", lambda: self._go_on(calls))

    def _go_on(self, calls: Sequence[_Call]) -> None:
        """Once their switch has ended, too, servers in which nothing has changed draw tokens again; others refuse, and
        stay paused."""
        for server, call in zip(self._servers, calls, strict=True):
            call.wait(self.config.timeout_seconds)
            try:
                if not self.config.release_weights:
                    server.resume()
            except ServerError as error:
                logger.warning("[Reshard] after a failed switch: %s", error)

    def _disconnect(self) -> None:
        """End the job with the servers, and bring training state back."""
        try:
            self._leave_servers()
        finally:
            self._ask_for_memory()
            with self.job.agreement.phase("bringing training state back"):
                self.offloader.onload(KINDS)
            self.state, self._is_started = State.TRAIN, True

    def _ask_for_memory(self) -> None:
        """Have servers that may have weights where training state belongs give them up, in a job of their own."""
        if not self._may_hold:
            return
        self._may_hold = False
        try:
            self._switch(self._connected(), State.INTERRUPTED, State.TRAIN)
        except BaseException as error:
            is_told = isinstance(error, HybridEngineError) and not isinstance(error, DifferentCallsError)
            if not is_told or self.job.agreement.lost is not None:
                self._may_hold = True
                raise
            logger.warning("[Reshard] servers that may have weights do not give them up: %s", error)

    def _leave_servers(self, why: BaseException | None = None) -> None:
        """End the job with them; `why` this rank goes alone, where it does."""
        ends, self._ends, manager, self._manager, self._name = self._ends, ExitStack(), self._manager, None, ""
        self.state = State.INTERRUPTED
        if why is not None and manager is not None:
            world = manager.job.world
            _refuse(world, world.meeting, type(why), why)
        ends.close()


def _refuse(
    world: World, meeting: str, kind: type[BaseException] | None, error: BaseException | None, *_: object
) -> None:
    """Where there is an error, tell those who wait in a meeting for all to come that this rank does not."""
    if error is not None:
        with suppress(RuntimeError):  # the store is gone, and so is the job
            world.refuse(f"rank {world.rank}: {type(error).__name__}: {error}", meeting)


def _told_of_servers(phase: str, ask: Callable[[], _T]) -> _T:
    try:
        return ask()
    except HybridEngineError:
        raise
    except BaseException as error:
        raise ServerError(f"{phase}: {type(error).__name__}: {error}") from error


class _Call:
    """A call of a server that goes on while all ranks take part in what it waits for.

    Args:
        call: of the server.
        told: to it.
        refused: is told why, where the server refuses.
    """

    def __init__(
        self, call: Callable[[dict[str, Any]], None], told: Told, refused: Callable[[str], None] = lambda why: None
    ) -> None:
        def tell(answer: Future[None]) -> None:
            if error := answer.exception():
                with suppress(RuntimeError):  # a store that is gone, with the job
                    refused(str(error))

        self._future = in_background(lambda: call(told.said()), "call of a server")
        self._future.add_done_callback(tell)

    def result(self, seconds: float) -> None:
        """Wait for the answer. Raises ServerError."""
        try:
            self._future.result(seconds)
        except NotDone:
            raise ServerError(f"a server did not answer within {seconds:g} s after the switch") from None

    def wait(self, seconds: float) -> None:
        """Until it has ended, whatever came of it."""
        wait([self._future], seconds)

    def failure(self) -> str:
        """What came of it, where it has failed by now."""
        error = self._future.exception() if self._future.done() else None
        return "" if error is None else str(error)

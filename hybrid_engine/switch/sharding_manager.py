"""The switch between training and inference.

                 params   grads, optimizer   inference weights
    TRAIN        device   device             released
    FORWARD      device   host *             released
    INFER        host *   host *             device
    IDLE         host *   host *             released          (* where the configuration asks to offload them)

Entering INFER, every phase ending with an agreement of all ranks:

    offload     gradients and optimizer state leave the device
    prepare     pending parameter gathers finish; values are checked
    fill        bucket by bucket: allocate, transfer, commit              (WeightContainer)
                parameters that every rank has read leave the device      (ReleaseFence)
    offload     the rest of the parameters leave the device
    resume      inference caches are reset

So the device holds at most the larger of training state and inference weights, and a few buckets. (With vLLM's sleep
mode, on GPUs, all inference weights wake at the first bucket: there the peak is parameters and inference weights.) A
failure restores the state before; the training weights are only ever read, and those that left come back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import LostRankError, PlanError, ReshardError, StateError
from hybrid_engine.memory.elastic import Handle, is_elastic
from hybrid_engine.memory.offloader import KINDS as KIND_ORDER
from hybrid_engine.memory.offloader import MegatronOffloader, OffloadReport, Part
from hybrid_engine.planning.plan import Link, ReshardPlan
from hybrid_engine.planning.planner import plan
from hybrid_engine.planning.release_schedule import release_schedule
from hybrid_engine.ports import InferenceWeights, TrainingWeights
from hybrid_engine.ranks.agreement import SHORT_PATIENCE, Agreement
from hybrid_engine.ranks.hosts import host_id
from hybrid_engine.ranks.process_groups import end_groups
from hybrid_engine.records.layout import BufferId, Layout
from hybrid_engine.switch.release_fence import ReleaseFence
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import KINDS, NEEDED_KINDS, State, require
from hybrid_engine.switch.weight_container import BucketFollower, FillReport, WeightContainer
from hybrid_engine.transports import LocalTransport, RelayBuffers, TransportSet, export_handles

logger = logging.getLogger("hybrid_engine")

_GIB = 1024**3


class InferenceCaches(Protocol):
    """What the switch asks of an inference engine beside its weights."""

    def wake_kv_cache(self) -> None:
        """Take the KV cache's memory again where the release of the weights gave it back."""
        ...

    def reset_caches(self) -> None:
        """Forget what was computed with older weights."""
        ...


@dataclass
class _Tally:
    """What a running switch has done so far."""

    seconds: dict[str, float] = field(default_factory=dict)
    received: int = 0
    own: int = 0
    across_hosts: int = 0
    staging: int = 0
    by_peer: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # of other ranks, by transport
    offloaded: int = 0
    onloaded: int = 0
    peak: int = 0

    def add_fill(self, report: FillReport) -> None:
        self.seconds.update(report.seconds)
        self.received = report.received_nbytes
        self.own = report.nbytes_by_link[Link.SELF]
        self.across_hosts = report.nbytes_by_link[Link.NETWORK]
        self.staging = report.staging_nbytes
        self.by_peer = {
            name: by_peer for name, by_peer in report.nbytes_by_peer.items() if by_peer and name != LocalTransport.name
        }


@dataclass(frozen=True)
class _RankSetup:
    """What the ranks tell each other before planning."""

    host: str
    training: Layout
    inference: Layout
    handles: Mapping[BufferId, Handle]
    can_relay: bool


@dataclass(frozen=True)
class _RankPlan:
    """What the ranks tell each other after planning."""

    fingerprint: str
    handles: Mapping[BufferId, Handle]  # of relay buffers


class ShardingManager:
    """Moves one set of devices between training and inference. All methods are collective.

    Args:
        training: the weights that are read.
        inference: the weights that are written.
        caches: the inference engine's caches.
        offloader: takes training state off the device and back.
        version: gives the number of optimizer steps the training weights have taken.
        config: which kinds to offload, transport, bucket size, timeout.
        agreement: of all ranks; made here when there is none.
        unserved: canonical tensors that training holds and the inference engine does not read.

    Knows neither Megatron nor vLLM. The plan is made once, here; a later switch that finds the training weights
    elsewhere raises (`TrainingWeights.prepare`).
    """

    def __init__(
        self,
        training: TrainingWeights,
        inference: InferenceWeights,
        caches: InferenceCaches,
        offloader: MegatronOffloader,
        version: Callable[[], int],
        config: GenerateConfig,
        agreement: Agreement | None = None,
        unserved: Iterable[str] = (),
    ) -> None:
        self.training = training
        self.inference = inference
        self.caches = caches
        self.offloader = offloader
        self.version = version
        self.config = config
        self.unserved = frozenset(unserved)
        self.agreement = agreement or Agreement(config.timeout_seconds)
        self._owns_agreement = agreement is None
        self._groups: list[dist.ProcessGroup] = []
        self._is_closed = False
        self.state = State.TRAIN
        self.last_report: ReshardReport | None = None
        self._start_hooks: list[Callable[[State, State], None]] = []
        self._end_hooks: list[Callable[[ReshardReport], None]] = []
        self._context_state: State | None = None
        self._tally = _Tally()
        self._num_prefetched = 0  # bytes, for the report of the next switch
        self.rank = dist.get_rank()
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    def _set_up(self) -> None:
        """Agree on a plan with all ranks, and connect."""
        training, inference, config = self.training, self.inference, self.config
        devices = [tensor.device for tensor in training.buffers().values()]
        self._device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
        self.transfer_group = self._new_group("nccl" if self._device.type == "cuda" else "gloo")
        self._fence_group = self._new_group("gloo")
        with self._phase("layout"):
            handles = export_handles(self.rank, training.buffers())
            can_relay = config.transport == "auto" and is_elastic(self._device)
            setup = _RankSetup(host_id(), training.layout(), inference.layout(), handles, can_relay)
        setups = self.agreement.gather(setup)
        with self._phase("plan"):
            self.plan = self._make_plan(setups)
            relays = RelayBuffers(self.rank, self.plan.relays, self._device)
            self._releases = release_schedule(setup.training.shards, self.plan.buckets)
        settings = f"{config.bucket_mb} MiB, {config.transport}"
        plans = self.agreement.gather(_RankPlan(f"{self.plan.fingerprint} {settings}", relays.handles()))
        if len({made.fingerprint for made in plans}) > 1:
            raise PlanError(["the ranks made different plans: they do not run the same code or configuration"])
        relaying = any(made.handles for made in plans)
        tell_group = self._new_group("gloo") if relaying else None
        with self._phase("plan"):
            self.router = self._connect(setups, plans, relays, tell_group)
            # On CUDA releasing training memory waits for the device, so for messages on their way: a peer that hangs.
            ahead = self._device.type == "cpu"
            self.container = WeightContainer(self.inference, self.plan, self.router, sends_ahead=ahead)
        with self._phase("release"):
            self.inference.release()
        with self._phase("onload"):
            self.offloader.onload(KINDS)
        self._setup_seconds = dict(self._tally.seconds)

    def on_reshard_start(self, hook: Callable[[State, State], None]) -> Callable[[State, State], None]:
        """Call `hook(from_state, to_state)` before every switch; usable as a decorator."""
        self._start_hooks.append(hook)
        return hook

    def on_reshard_end(self, hook: Callable[[ReshardReport], None]) -> Callable[[ReshardReport], None]:
        """Call `hook(report)` after every successful switch; usable as a decorator."""
        self._end_hooks.append(hook)
        return hook

    @contextmanager
    def entered(self, state: State) -> Iterator[None]:
        """Be in `state` inside the context. The state is kept at the end: the next context switches if it must.

        Raises StateError inside another state's context, which would go on in the wrong state.
        """
        outer = self._context_state
        if outer not in (None, state):
            raise StateError(f"a {state.value} context inside a {outer.value} context; leave that one first")
        self.enter(state)
        self._context_state = state
        try:
            yield
        finally:
            self._context_state = outer

    def enter(self, target: State) -> ReshardReport | None:
        """Switch to `target`; None when it is the present state already.

        Raises on all ranks when any rank fails. Then the state before is restored (IDLE, when the inference weights
        were lost on the way, or when the message says that restoring failed too); every later switch starts from what
        is really there. When only an end hook failed, the switch itself stands. After a LostRankError nothing is
        restored, and no switch can follow.
        """
        self._require_open()
        if target is self.state:
            return None
        before, started = self.state, time.perf_counter()
        setup = self._setup_seconds if self.last_report is None else {}  # the first report tells what planning took
        self._tally = _Tally(seconds=dict(setup), onloaded=self._num_prefetched)
        self._num_prefetched = 0
        with self._phase("start hooks"):
            for hook in self._start_hooks:
                hook(before, target)
        try:
            self._switch(before, target)
        except LostRankError:
            self.state = State.IDLE
            raise
        except Exception as error:
            self._restore(before, target, error)
            raise
        self.state = target
        report = self._report(f"{before.value}->{target.value}", time.perf_counter() - started)
        logger.info("%s", report)
        with self._phase("end hooks"):
            for hook in self._end_hooks:
                hook(report)
        return report

    def prefetch(self, kinds: Iterable[str] = KIND_ORDER) -> None:
        """Begin to bring training state back while the last completions are generated, in state INFER.

        The switch to TRAIN finds these kinds there; a switch to another state takes off again what that does not need.
        Memory: theirs beside the inference weights', so name what fits ("optimizer", say). On CUDA the copies run on a
        side stream. Raises StateError in any other state, OffloadError when memory runs out; both lose nothing.
        """
        self._require_open()
        if self.state is not State.INFER:
            raise StateError(f"training state is prefetched while vLLM generates; the state is {self.state.value}")
        with self.agreement.phase("prefetch"):
            self._num_prefetched += _total(self.offloader.onload(kinds, read_only=True, wait=False))

    def require(self, *states: State) -> None:
        """Raise StateError unless the present state is one of these."""
        require(self.state, states)

    def require_kinds(self, kinds: Iterable[str]) -> None:
        """Raise StateError unless the present state needs these kinds of training state on the device."""
        require(self.state, [state for state, needed in NEEDED_KINDS.items() if needed.issuperset(kinds)])

    def _switch(self, before: State, target: State) -> None:
        with self._phase("survey"):
            self._note_peak()
        if before in (State.INFER, State.IDLE):  # IDLE may follow a release that failed
            self._release_inference()
        if target is State.INFER:
            self._fill_inference()
        elif before is State.TRAIN:  # what is pending would write parameters that count as unchanged from here on
            self._prepare()
        wanted = self._resident_kinds(target)
        self._offload(KINDS - wanted)
        self._onload(wanted, read_only=target is not State.TRAIN)
        if target is State.INFER:
            with self._phase("resume"):
                self.caches.wake_kv_cache()
                self.caches.reset_caches()

    def _fill_inference(self) -> None:
        self._offload(KINDS - self._resident_kinds(State.INFER) - {"param"})
        self._onload({"param"}, read_only=True)
        self._prepare()
        with self._phase("check"):
            if self.config.check_nan:
                self.training.check_values()
        with self._phase("fill"):
            buffers = self.training.buffers()
            self._tally.add_fill(self.container.fill(buffers, self._follower(buffers)))
            self._note_peak()

    def _prepare(self) -> None:
        # where gathers overlap, the others wait in one for a rank that fails here
        with self._phase("prepare", SHORT_PATIENCE):
            self.training.prepare()

    def _follower(self, buffers: Mapping[str, torch.Tensor]) -> BucketFollower | None:
        """Lets parameters go bucket by bucket during a fill, and notes the peak; None where they are to stay."""
        if not self.config.offload_train_param:
            return None
        on_device = _resident_nbytes(self.offloader)

        def give_back(index: int) -> None:
            nonlocal on_device
            self._note_peak(on_device)
            parts = [
                Part(buffers[name], extent.start, extent.stop)
                for name, extents in self._releases[index].items()
                for extent in extents
            ]
            nbytes = self.offloader.offload_parts("param", parts)
            self._tally.offloaded += nbytes
            on_device -= nbytes

        return ReleaseFence(self._fence_group, len(self.plan.buckets), give_back, self.config.timeout_seconds)

    def _release_inference(self) -> None:
        with self._phase("release"):
            self.container.release()

    def _resident_kinds(self, state: State) -> set[str]:
        """Kinds of training state on the device in `state`: those it needs, and those never offloaded."""
        flags = {
            "param": self.config.offload_train_param,
            "grad": self.config.offload_train_grad,
            "optimizer": self.config.offload_train_optimizer,
        }
        return {kind for kind, offloads in flags.items() if kind in NEEDED_KINDS[state] or not offloads}

    def _offload(self, kinds: set[str]) -> None:
        with self._phase("offload"):
            self._tally.offloaded += _total(self.offloader.offload(kinds))

    def _onload(self, kinds: set[str], *, read_only: bool) -> None:
        with self._phase("onload"):
            self._tally.onloaded += _total(self.offloader.onload(kinds, read_only=read_only))
            self._note_peak()

    def _restore(self, before: State, target: State, error: Exception) -> None:
        """After a failed switch: drop what was filled and bring back what `before` needs.

        Inference weights are gone by then, so INFER itself is not restored. Nothing of training is ever lost.
        """
        self.state = State.IDLE
        restored = State.IDLE if before is State.INFER else before
        try:
            with self.agreement.phase("restore"):
                self.container.release()
                wanted = self._resident_kinds(restored)
                self.offloader.offload(KINDS - wanted)
                self.offloader.onload(wanted)
        except LostRankError as lost:
            raise LostRankError(f"{error}\nThe state before could not be restored: {lost}") from error
        except Exception as restore_error:
            away = [kind for kind in KIND_ORDER if self.offloader.is_offloaded(kind)]
            raise ReshardError(
                f"switch {before.value}->{target.value} failed ({error}) and so did the way back ({restore_error}); "
                f"in host memory: {', '.join(away) or 'nothing'}; the state is idle, and the next switch starts from it"
            ) from error
        self.state = restored
        logger.error("[Reshard] %s->%s failed; state is %s: %s", before.value, target.value, restored.value, error)

    @contextmanager
    def _phase(self, name: str, patience: float | None = None) -> Iterator[None]:
        """Time a phase and end it with all ranks agreeing that it succeeded; see `Agreement.phase`."""
        started = time.perf_counter()
        with self.agreement.phase(name, patience):
            yield
        self._tally.seconds[name] = self._tally.seconds.get(name, 0.0) + time.perf_counter() - started

    def _note_peak(self, training: int | None = None) -> None:
        """Look at what is on the device; `training`: bytes of training state there, if they are known."""
        if training is None:
            training = _resident_nbytes(self.offloader)
        self._tally.peak = max(self._tally.peak, training + self.inference.resident_nbytes())

    def _new_group(self, backend: str) -> dist.ProcessGroup:
        """A group for one purpose only: after a timeout it is dead."""
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=self.config.timeout_seconds))
        self._groups.append(group)
        return group

    def close(self) -> None:
        """No switch any more: give back the transports' mappings and memory, and end the process groups. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if "router" in vars(self):
            self.router.close()
        for owner in ("router", "container", "transfer_group", "_fence_group"):
            vars(self).pop(owner, None)
        groups, self._groups = self._groups, []
        end_groups(*groups)
        if self._owns_agreement:
            self.agreement.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise StateError("the switch was closed; build the engine anew")

    def _make_plan(self, setups: Sequence[_RankSetup]) -> ReshardPlan:
        """Plan, from what all ranks told each other. A host relays where all of its ranks can."""
        hosts = [setup.host for setup in setups]
        return plan(
            Layout.merge(setup.training for setup in setups),
            Layout.merge(setup.inference for setup in setups),
            hosts,
            self.config.bucket_mb * 1024**2,
            self.unserved,
            rank=self.rank,
            relaying_hosts=set(hosts) - {setup.host for setup in setups if not setup.can_relay},
        )

    def _connect(
        self,
        setups: Sequence[_RankSetup],
        plans: Sequence[_RankPlan],
        relays: RelayBuffers,
        tell_group: dist.ProcessGroup | None,
    ) -> TransportSet:
        """The transports for the plan."""
        handles = {buffer: handle for made in (*setups, *plans) for buffer, handle in made.handles.items()}
        router = TransportSet.connect(
            self.rank,
            {key: buffer for setup in setups for key, buffer in setup.training.buffers.items()},
            handles,
            self.transfer_group,
            destination_buffers={key: buffer for setup in setups for key, buffer in setup.inference.buffers.items()},
            relays=relays,
            tell_group=tell_group,
            preference=self.config.transport,
            timeout=self.config.timeout_seconds,
        )
        router.check(self.plan, exported=handles)
        return router

    def _report(self, direction: str, seconds: float) -> ReshardReport:
        tally, filled = self._tally, direction.endswith(State.INFER.value)
        bytes_of_rank = self.plan.bytes_by_rank.get(self.rank) if filled else None
        report = ReshardReport(
            direction=direction,
            version=self.version(),
            seconds=seconds,
            seconds_by_phase=dict(tally.seconds),
            bytes_received=tally.received,
            bytes_own=tally.own,
            bytes_least=bytes_of_rank.lower_bound if bytes_of_rank else 0,
            bytes_offloaded=tally.offloaded,
            bytes_onloaded=tally.onloaded,
            peak_bytes=tally.peak,
            staging_bytes=tally.staging,
            bytes_across_hosts=tally.across_hosts,
            bytes_by_transport={name: sum(by_peer.values()) for name, by_peer in tally.by_peer.items()},
            pairs_by_transport={name: len(by_peer) for name, by_peer in tally.by_peer.items()},
        )
        self.last_report = report
        return report


def _total(report: OffloadReport) -> int:
    return sum(report.nbytes.values())


def _resident_nbytes(offloader: MegatronOffloader) -> int:
    return sum(nbytes for by_owner in offloader.resident_nbytes().values() for nbytes in by_owner.values())

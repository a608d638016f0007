"""Set-up: the ranks tell each other what they hold, make the plan, and connect.

    1  gather_layouts   the training layouts of all ranks, once: by assembly.py, for the order of ranks, or here
    2  peer_access      which hosts' ranks can read each other's memory
       gather           inference layouts, handles of exported buffers, and who can relay
    3  plan             on every rank from the same records; each keeps its own part
    4  gather           digests of the plans, which must be one; handles of relay buffers
    5  connect          process groups, transports, the container to be filled

Called by ShardingManager, once; and for a destination beside it (a second Megatron model) by whoever has one.
Memory: the records of all ranks while this runs; afterwards the plan of one rank, and relay buffers where it has any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, PlanError, Violation
from hybrid_engine.memory.elastic import Handle, is_elastic
from hybrid_engine.planning.plan import ReshardPlan
from hybrid_engine.planning.planner import plan
from hybrid_engine.planning.release_schedule import Releases, release_schedule
from hybrid_engine.planning.residency import Residency, frozen_everywhere
from hybrid_engine.ports import InferenceWeights, TrainingWeights, WeightAdaptor
from hybrid_engine.ranks.host_groups import HostGroup
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import BufferId, Layout
from hybrid_engine.switch.common_regions import CommonRegions
from hybrid_engine.switch.deliveries import Deliveries, Delivery
from hybrid_engine.switch.peer_access import hosts_without_access
from hybrid_engine.switch.value_ranges import ValueRanges
from hybrid_engine.switch.weight_container import WeightContainer
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.registry import choose_transport
from hybrid_engine.transports.relay_buffers import RelayBuffers
from hybrid_engine.transports.router import TransportSet, export_handles
from hybrid_engine.transports.wiring import Wiring

_Value = TypeVar("_Value")

Timed = Callable[[str], AbstractContextManager[object]]
"""Takes the time of a step, with its wait for the slowest rank."""


@dataclass(frozen=True, eq=False)
class Connection:
    """What a rank switches with.

    Attributes:
        plan: of this rank.
        releases: by bucket, what can go of this rank's training buffers once all ranks have read it.
        router: the transports, connected for the plan.
        container: the inference weights, to be filled by the router.
        fence_group: of this host, for the fences of a switch (release_fence.py).
        regions: of this rank, where switches are verified.
        deliveries: what need not be sent again; None without `generate_config.incremental`.
        ranges: of the values that are sent in another dtype.
    """

    plan: ReshardPlan
    releases: Sequence[Releases]
    router: TransportSet
    container: WeightContainer
    fence_group: HostGroup
    regions: CommonRegions | None = None
    deliveries: Deliveries | None = None
    ranges: ValueRanges | None = None

    def check_values(self, training: TrainingWeights, delivery: Delivery) -> None:
        """Raise WeightError for values that are no numbers, or would be none where they are sent."""
        training.check_values(delivery.unread)
        if self.ranges is not None:
            self.ranges.require(training)


@dataclass(frozen=True)
class _Offer:
    """What the ranks tell each other before planning."""

    destination: Layout
    handles: Mapping[BufferId, Handle]
    can_relay: bool
    frozen: frozenset[str]


@dataclass(frozen=True)
class _Planned:
    """What the ranks tell each other after planning."""

    digest: str
    handles: Mapping[BufferId, Handle]  # of relay buffers


def gather_layouts(job: Job, weights: WeightAdaptor) -> Sequence[Layout]:
    """What every rank holds of one side, by rank. Collective. Raises ParameterMismatchError on the rank at fault."""
    with job.agreement.phase("layout"):
        own = weights.layout()
    return job.agreement.gather(own, "exchange of layouts")


def connect(
    job: Job,
    source: TrainingWeights,
    destination: InferenceWeights,
    config: GenerateConfig,
    owner: ExitStack,
    *,
    may_stay_unread: Collection[str] = (),
    frozen: Callable[[], Collection[str]] = tuple,
    source_layouts: Sequence[Layout] | None = None,
    timed: Timed = nullcontext,
) -> Connection:
    """Agree on a plan with all ranks, and connect. Collective.

    Args:
        job: whose ranks hold both sides.
        source, destination: this rank's.
        config: transport, bucket size and timeout; the same on all ranks.
        owner: ends what is made here.
        may_stay_unread: source tensors that no destination needs to read.
        frozen: called for those of this rank's that no step changes, with `config.incremental`: they get buckets of
            their own.
        source_layouts: of all ranks, where they are known (`gather_layouts`).
        timed: called with "layout" and "plan"; default: nobody looks at the time.

    Raises, on all ranks: PlanError with every fault of the two sides, ConfigError for a transport that cannot carry the
    plan and for a job of another device or timeout, DeviceMemoryError when relay buffers find no memory.
    """
    with timed("layout"):
        with job.agreement.phase("layout"):
            job.require_timeout(config.timeout_seconds)
            buffers = source.buffers()
            _require_device(job, buffers)
        shares_memory = job.hosts[job.rank] not in hosts_without_access(job, config)
        with job.agreement.phase("layout"):
            untrained = frozenset(frozen() if config.incremental == "auto" else ())
            own = _offer(job, buffers, destination, config, untrained, shares_memory=shares_memory)
        if source_layouts is None:
            source_layouts = gather_layouts(job, source)
        offers: Sequence[_Offer] = job.agreement.gather(own, "exchange of layouts")
    fence_group = job.new_host_group(owner)
    with timed("plan"):
        with job.agreement.phase("plan"):
            apart = frozen_everywhere([each.tensors for each in source_layouts], [each.frozen for each in offers])
            made = _make_plan(job, source_layouts, offers, config, may_stay_unread, apart)
            relays = RelayBuffers(job.rank, made.relays, job.device)
        own_plan = _Planned(_digest(made, config), relays.handles())
        planned: Sequence[_Planned] = job.agreement.gather(own_plan, "comparison of plans")
        if len({each.digest for each in planned}) > 1:
            raise PlanError(["the ranks made different plans: they do not run the same code or configuration"])
        handles_of_all = _joined([*(each.handles for each in offers), *(each.handles for each in planned)])
        # each for one purpose: a group that timed out is dead
        transfer_group = _transfer_group(job, made, handles_of_all.keys(), config, owner)
        tell_group = job.new_group("gloo", owner) if any(each.handles for each in planned) else None
        with job.agreement.phase("plan"):
            wiring = Wiring(
                job.rank,
                _joined(each.buffers for each in source_layouts),
                handles_of_all,
                transfer_group,
                destination_buffers=_joined(each.destination.buffers for each in offers),
                relays=relays,
                tell_group=tell_group,
                buckets=made.buckets,
                timeout=job.timeout_seconds,
            )
            router = TransportSet.connect(wiring, config.transport)
            owner.callback(router.close)
            router.check(made, exported=handles_of_all)
            container = WeightContainer(destination, made, router, num_ranks=job.world_size)
            schedule = release_schedule(source_layouts[job.rank].shards, [bucket.tensors for bucket in made.buckets])
            regions, deliveries, ranges = None, None, None
            if config.check_nan:
                ranges = ValueRanges(job.rank, source_layouts[job.rank], [each.destination for each in offers])
            if config.verify != "off":
                regions = CommonRegions(source_layouts, [each.destination for each in offers], job.rank)
            if config.incremental == "auto":
                deliveries = _deliveries(job, made, source_layouts[job.rank], offers, config, apart)
    return Connection(made, schedule, router, container, fence_group, regions, deliveries, ranges)


def _offer(
    job: Job,
    buffers: Mapping[str, torch.Tensor],
    destination: InferenceWeights,
    config: GenerateConfig,
    frozen: frozenset[str],
    *,
    shares_memory: bool,
) -> _Offer:
    """This rank's; `shares_memory`: the ranks of its host can read each other's."""
    handles = export_handles(job.rank, buffers) if shares_memory else {}
    can_relay = shares_memory and config.transport == "auto" and is_elastic(job.device)
    return _Offer(destination.layout(), handles, can_relay, frozen)


def _transfer_group(
    job: Job, made: ReshardPlan, exported: Set[BufferId], config: GenerateConfig, owner: ExitStack
) -> dist.ProcessGroup | None:
    """For messages, if any rank has some: an NCCL communicator keeps hundreds of MB of each device. Collective."""
    chosen = {choose_transport(transfer, exported, config.transport) for transfer in made.transfers()}
    (is_needed,) = job.agreement.any_of([CollectiveTransport.name in chosen], "choice of transports")
    return job.new_group("nccl" if job.device.type == "cuda" else "gloo", owner) if is_needed else None


def _digest(made: ReshardPlan, config: GenerateConfig) -> str:
    """What must be the same on all ranks, of the plan and of the keys by which they take part in a switch."""
    incremental = f"{config.incremental} {config.incremental_mb} MiB"
    return f"{made.fingerprint} {config.bucket_mb} MiB, {config.transport}, {config.verify}, {incremental}"


def _deliveries(
    job: Job,
    made: ReshardPlan,
    source: Layout,
    offers: Sequence[_Offer],
    config: GenerateConfig,
    frozen: Collection[str],
) -> Deliveries:
    """Where inference weights keep their memory in any case there is nothing to bound."""
    buffers = _joined(each.destination.buffers for each in offers)
    limit = config.incremental_mb * 1024**2 if config.release_weights else None
    return Deliveries(
        made.buckets,
        source,
        {buffer.group for buffer in offers[job.rank].destination.buffers.values()},
        Residency.of(made.buckets, buffers, job.world_size, limit),
        frozen,
        job.rank,
    )


def _require_device(job: Job, buffers: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError unless training buffers are on the job's device; a device without a number is any of its kind.

    Transports, relay buffers and process groups are made for that one.
    """
    device = job.device
    found = {flat.device for flat in buffers.values()}
    others = [one for one in found if one.type != device.type or device.index not in (None, one.index)]
    if others:
        where = " and ".join(sorted(map(str, others)))
        problem = f"{device}, but training weights of rank {job.rank} are on {where}"
        raise ConfigError([Violation("Job.device", problem, "Pass their device: Job.join(..., device=...)")])


def _make_plan(
    job: Job,
    source_layouts: Sequence[Layout],
    offers: Sequence[_Offer],
    config: GenerateConfig,
    may_stay_unread: Collection[str],
    apart: Collection[str],
) -> ReshardPlan:
    """A host relays where all of its ranks can."""
    cannot_relay = {host for host, offer in zip(job.hosts, offers, strict=True) if not offer.can_relay}
    return plan(
        Layout.merge(source_layouts),
        Layout.merge(each.destination for each in offers),
        job.hosts,
        config.bucket_mb * 1024**2,
        may_stay_unread,
        rank=job.rank,
        relaying_hosts=set(job.hosts) - cannot_relay,
        apart=apart,
    )


def _joined(parts: Iterable[Mapping[BufferId, _Value]]) -> dict[BufferId, _Value]:
    """What each rank says of its own buffers, as one."""
    return {buffer_id: value for part in parts for buffer_id, value in part.items()}

"""Set-up: the ranks tell each other what they hold, make the plan, and connect.

    1  gather_side      what all ranks hold for training, once: by assembly.py, for the order of ranks, or here
    2  peer access      which hosts' ranks can read each other's memory, tried: they may be of several users, or on
                        GPUs that do not reach each other. Found in the middle of a switch that would be an error; found
                        here, the ranks of that host send messages
       share            what they hold for inference, and who can relay: messages that many ranks have come once
       host_groups      handles of exported buffers, among the ranks of a host
    3  plan             on every rank from the same records; each keeps its own part
    4  is_same          digests of the plans, which must be one; then handles of relay buffers
    5  connect          process groups, transports, the container to be filled

Called by ShardingManager, once; and for a destination beside it (a second Megatron model) by whoever has one.
Memory: the records of all ranks while this runs; afterwards the plan of one rank, and relay buffers where it has any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, PlanError, TransportError, Violation
from hybrid_engine.layouts.memory import MIB
from hybrid_engine.memory.device_pages import DeviceHandle
from hybrid_engine.memory.elastic import ElasticBuffer, Handle, is_elastic, reading
from hybrid_engine.memory.host_pages import BufferHandle
from hybrid_engine.messages import Record, decode, encode
from hybrid_engine.planning.buckets import Releases, Residency, frozen_everywhere, release_schedule
from hybrid_engine.planning.plan import ReshardPlan, rounding_faults
from hybrid_engine.planning.planner import plan
from hybrid_engine.ports import InferenceWeights, TrainingWeights, WeightAdaptor
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.groups import MEETING_DIRECTORY, RankGroup
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import BufferId
from hybrid_engine.records.sides import Side, layout_messages
from hybrid_engine.switch.incremental import Incremental, Selection
from hybrid_engine.switch.verifier import CommonRegions, ValueRanges, Verifier
from hybrid_engine.switch.weight_container import WeightContainer
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.context import Group, RelayBuffers, TransportContext
from hybrid_engine.transports.deltas import Deltas
from hybrid_engine.transports.pull import SharedMemoryTransport
from hybrid_engine.transports.router import CONFIG_KEY, TransportSet, choose_transport, export_handles

logger = logging.getLogger("hybrid_engine")

Timed = Callable[[str], AbstractContextManager[object]]
"""Takes the time of a step, with its wait for the slowest rank."""


@dataclass(frozen=True, eq=False)
class Connection:
    """Everything that a rank switches with.

    Attributes:
        plan: of this rank.
        releases: by bucket, what can go of this rank's training buffers once all ranks have read it.
        router: the transports, connected for the plan.
        container: the inference weights, to be filled by the router.
        fence_group: of this host, for the fences of a switch (release_fence.py).
        verifier: of the switches, where they are verified.
        incremental: what need not be sent again; None without `generate_config.incremental`.
        ranges: of the values that are sent in another dtype.
        is_apart: a rank of the job has one side alone.
    """

    plan: ReshardPlan
    releases: Sequence[Releases]
    router: TransportSet
    container: WeightContainer
    fence_group: RankGroup
    verifier: Verifier | None = None
    incremental: Incremental | None = None
    ranges: ValueRanges | None = None
    is_apart: bool = False

    def check_values(self, training: TrainingWeights, selection: Selection) -> None:
        """Raise WeightError for values that are no numbers, or would be none where they are sent."""
        training.check_values(selection.unread)
        if self.ranges is not None:
            self.ranges.require(training)


class Offer(Record, frozen=True):
    """What a rank says beside its layouts before planning; most say the same."""

    can_relay: bool
    frozen: list[str]


_Handles = tuple[dict[str, BufferHandle], dict[str, DeviceHandle]]
"""A rank's buffers that the others of its host can map, by name, of each of these kinds:"""
_HANDLE_KINDS = (BufferHandle, DeviceHandle)


def gather_side(job: Job, weights: WeightAdaptor) -> Side:
    """What all ranks hold of one side. Collective. Raises ParameterMismatchError on the rank at fault."""
    with job.agreement.phase("layout"):
        own = layout_messages(weights.layout())
    told, messages = job.agreement.share(own, "exchange of layouts")
    with job.agreement.phase("layout"):
        return Side.from_messages(told, messages)


def connect(
    job: Job,
    source: TrainingWeights,
    destination: InferenceWeights,
    config: GenerateConfig,
    owner: ExitStack,
    *,
    may_stay_unread: Collection[str] = (),
    frozen: Callable[[], Collection[str]] = tuple,
    source_side: Side | None = None,
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
        source_side: what all ranks hold for training, where that is known (`gather_side`).
        timed: called with "layout" and "plan"; default: nobody looks at the time.

    Raises, on all ranks: PlanError with every fault of the two sides, ConfigError for a transport that cannot carry the
    plan and for a job of another device or timeout, DeviceMemoryError when relay buffers find no memory.
    """
    fence_group = job.new_host_group(owner)
    with timed("layout"):
        with job.agreement.phase("layout"):
            job.require_timeout(config.timeout_seconds)
            buffers = source.buffers()
            _require_device(job, buffers)
        reasons = hosts_without_access(job, config, fence_group)
        shares_memory = job.hosts[job.rank] not in reasons
        if config.transport == "auto" and (not buffers or job.rank == job.hosts.index(job.hosts[job.rank])):
            _say_ways(job, reasons)
        with job.agreement.phase("layout"):
            can_relay = shares_memory and config.transport == "auto" and is_elastic(job.device)
            offer = Offer(can_relay, sorted(frozen() if config.incremental != "off" else ()))
            own = *layout_messages(destination.layout()), encode(offer)
            exported = export_handles(job.rank, buffers) if shares_memory else {}
        if source_side is None:
            source_side = gather_side(job, source)
        told, messages = job.agreement.share(own, "exchange of layouts")
        handles = _gather_handles(job, exported, fence_group)
    with timed("plan"):
        with job.agreement.phase("plan"):
            made = rank_plan(job.rank, job.hosts, source_side, told, messages, config, may_stay_unread, job.devices)
            relays = RelayBuffers(job.rank, made.plan.relays, job.device)
            of_relays = export_handles(job.rank, relays.tensors)
        if not job.agreement.is_same([text_digest(made.parameters)], "comparison of plans"):
            raise PlanError(["the ranks made different plans: they do not run the same code or configuration"])
        (has_relays,) = job.agreement.any_of([bool(of_relays)], "comparison of plans")
        if has_relays:
            handles |= _gather_handles(job, of_relays, fence_group)
        # each for one purpose: a group that timed out is dead
        transfer_group = _transfer_group(job, made.plan, handles.keys(), config, owner)
        notify_group = job.new_host_group(owner) if has_relays else None
        with job.agreement.phase("plan"):
            context = TransportContext(
                job.rank,
                source_side.buffers,
                handles,
                transfer_group,
                destination_buffers=made.destination.buffers,
                relays=relays,
                notify_group=notify_group,
                buckets=made.plan.buckets,
                deltas=Deltas() if config.incremental == "delta" else None,
                timeout=job.timeout_seconds,
            )
            router = TransportSet.connect(context, config.transport)
            owner.callback(router.close)
            router.check(made.plan, exported=handles)
            container = WeightContainer(destination, made.plan, router, num_ranks=job.world_size)
            verifier = None
            if made.regions is not None and config.verify != "off":
                verifier = Verifier(made.regions, job, config.verify)
    return Connection(
        made.plan,
        made.releases,
        router,
        container,
        fence_group,
        verifier,
        made.incremental,
        made.ranges,
        is_apart=made.is_apart,
    )


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank works out of what all ranks said.

    Attributes:
        parameters: what must be the same on all ranks, of the plan and of the keys by which they take part in a switch.
        destination: what all ranks hold for inference.
        plan, releases, regions, incremental, ranges, is_apart: see `Connection`; regions are what its verifier
            compares.
    """

    parameters: str
    destination: Side
    plan: ReshardPlan
    releases: Sequence[Releases]
    regions: CommonRegions | None
    incremental: Incremental | None
    ranges: ValueRanges | None
    is_apart: bool


def rank_plan(
    rank: int,
    hosts: Sequence[str],
    source: Side,
    told: Sequence[Sequence[int]],
    messages: Sequence[bytes],
    config: GenerateConfig,
    may_stay_unread: Collection[str] = (),
    devices: Sequence[str] = (),
) -> RankPlan:
    """Plan for one rank, without a collective. Raises PlanError, MessageError.

    Args:
        rank: global.
        hosts: of all ranks. A host relays where all of its ranks can.
        source: what all ranks hold for training.
        told, messages: what the ranks shared: names and records of their inference layout, and an `Offer`.
        config, may_stay_unread: see `connect`.
        devices: of all ranks; see `planner.plan`.
    """
    destination = Side.from_messages([of_rank[:2] for of_rank in told], messages)
    # some rank has one side only; where none does, one key is both dtypes
    is_apart = bool((source.holds_any() != destination.holds_any()).any())
    dtypes = source.placed.holdings.dtypes, destination.placed.holdings.dtypes
    if is_apart and not config.compress_reshard and (faults := rounding_faults(*dtypes)):
        raise PlanError(faults)
    offers = {number: decode(messages[number], Offer) for number in {of_rank[2] for of_rank in told}}
    said = [offers[of_rank[2]] for of_rank in told]
    cannot_relay = {host for host, offer in zip(hosts, said, strict=True) if not offer.can_relay}
    different = {(kind, of_rank[2]) for kind, of_rank in zip(source.kind_of.tolist(), told, strict=True)}
    frozen = frozen_everywhere((source.kinds[kind].tensors, offers[number].frozen) for kind, number in different)
    made = plan(
        source,
        destination,
        hosts,
        config.bucket_mb * MIB,
        may_stay_unread,
        rank=rank,
        relaying_hosts=set(hosts) - cannot_relay,
        frozen=frozen,
        devices=devices,
    )
    keys = config.bucket_mb, config.transport, config.verify, config.incremental, config.incremental_mb
    held = source.kind(rank)
    incremental = None
    if config.incremental != "off":
        # where inference weights keep their memory in any case there is nothing to bound
        limit = config.incremental_mb * MIB if config.release_weights else None
        groups = {buffer.group for buffer in destination.kind(rank).buffers.values()}
        residency = Residency.of(made.buckets, destination, rank, limit)
        incremental = Incremental(made.buckets, held, groups, residency, frozen)
    return RankPlan(
        f"{made.fingerprint} {keys}",
        destination,
        made,
        release_schedule(held.shards, [bucket.tensors for bucket in made.buckets]),
        CommonRegions(source, destination, rank) if config.verify != "off" else None,
        incremental,
        ValueRanges(rank, held, destination.placed.holdings.dtypes) if config.check_nan else None,
        is_apart,
    )


def _gather_handles(job: Job, own: Mapping[BufferId, Handle], group: RankGroup) -> dict[BufferId, Handle]:
    """Those of the ranks of this host. Collective."""
    with job.agreement.phase("exchange of handles"):
        named = {buffer_id.name: handle for buffer_id, handle in own.items()}
        message = encode(
            [{name: each for name, each in named.items() if isinstance(each, kind)} for kind in _HANDLE_KINDS]
        )
    with job.agreement.phase("exchange of handles"):
        told = group.gather(message)
        return {
            BufferId(rank, name): handle
            for rank, each in told.items()
            for of_kind in decode(each, _Handles)
            for name, handle in of_kind.items()
        }


def _transfer_group(
    job: Job, made: ReshardPlan, exported: Set[BufferId], config: GenerateConfig, owner: ExitStack
) -> Group | None:
    """For messages, if any rank has some: of those that meet, directly or by way of others. Collective.

    An NCCL communicator keeps hundreds of MB of each device.
    """
    by_message = (
        transfer
        for transfer in made.transfers()
        if choose_transport(transfer, exported, config.transport) == CollectiveTransport.name
    )
    parts = job.parts_that_meet(rank for transfer in by_message for rank in (transfer.src_rank, transfer.dst_rank))
    if parts is None:
        return None
    connect_parts = job.new_nccl_group if job.device.type == "cuda" else job.new_group
    return connect_parts(owner, parts)


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


_PHASE = "peer access"


def hosts_without_access(job: Job, config: GenerateConfig, group: RankGroup) -> Mapping[str, str]:
    """Hosts on which a rank cannot read another's memory, with the first reason; the same on all ranks. Collective.

    Raises ConfigError, on all ranks, where `config.transport` allows nothing else.
    """
    why = ""
    with ExitStack() as ends:
        with job.agreement.phase(_PHASE):
            own: dict[BufferId, Handle] = {}
            try:
                if is_elastic(job.device):
                    own = {BufferId(job.rank, "probe"): _probe(job, ends)}
            except TransportError as error:
                why = f"rank {job.rank} cannot offer its memory: {error}"
        handles = _gather_handles(job, own, group)
        with job.agreement.phase(_PHASE):
            why = why or _obstacle(job, {buffer_id.rank: handle for buffer_id, handle in handles.items()})
        found: Sequence[str] = job.agreement.gather(why, str, _PHASE)
    reasons: dict[str, str] = {}
    for host, why in zip(job.hosts, found, strict=True):
        if why:
            reasons.setdefault(host, why)
    if reasons and config.transport == SharedMemoryTransport.name:
        remedy = "Choose auto or collective, or give the permission"
        raise ConfigError([Violation(CONFIG_KEY, f"{config.transport}, but {why}", remedy) for why in reasons.values()])
    return reasons


def _say_ways(job: Job, reasons: Mapping[str, str]) -> None:
    """By which way this host's ranks have weights of each other, and why those of others come in messages."""
    own = job.hosts[job.rank]
    if why := reasons.get(own):
        logger.warning("[Reshard] the ranks of this host send their weights instead of sharing memory: %s", why)
    elif is_elastic(job.device):
        here = [rank for rank, host in enumerate(job.hosts) if host == own]
        away = job.world_size - len(here)
        why = f"on another machine, or in a container with another {MEETING_DIRECTORY}"
        others = f"; by messages with {away} others ({why})" if away else ""
        logger.info("[Reshard] ranks that read each other's memory: %s%s", ", ".join(map(str, here)), others)


def _probe(job: Job, ends: ExitStack) -> Handle:
    """A buffer that holds this rank's number, until `ends` is closed."""
    probe = ElasticBuffer(1, torch.int64, "probe", job.device)
    ends.callback(probe.close)
    probe.tensor.fill_(job.rank)
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    return probe.export()


def _obstacle(job: Job, handles: Mapping[int, Handle]) -> str:
    """Why this rank cannot read the probe of another of its host, by rank; "" if it can read all."""
    for peer, handle in handles.items():
        if peer == job.rank:
            continue
        try:
            with reading(handle, job.device) as flat:
                number = int(flat[0])
        except TransportError as error:
            return f"rank {job.rank} cannot read the memory of rank {peer}: {error}"
        if number != peer:
            return f"rank {job.rank} reads {number} where rank {peer} wrote {peer}"
    return ""

"""Set-up of the switch: ranks exchange their layouts, make the plan and connect the transports.

    1  gather_side    training layouts of all ranks, once: by assembly.py, which orders the ranks by
                      them, or here
    2  peer access    test on which hosts ranks can read each other's memory; not if ranks belong to
                      several users, or GPUs cannot reach each other: these ranks send messages. The
                      other hosts can relay: they receive messages for many ranks once
       share          inference layouts, and tensors that no optimizer step changes
    3  plan           on every rank from the same records; each rank keeps its part
    4  is_same        digests of the plans must be equal
       host_groups    handles of the buffers, relay buffers included, that other ranks of the host
                      read by this plan
    5  connect        process groups, transports, the container to be filled

Memory: during set-up, the records of all ranks; afterwards this rank's plan and relay buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, PlanError, TransportError, Violation, require_none
from hybrid_engine.layouts.memory import MIB
from hybrid_engine.memory.elastic import Handle, allocate_elastic, is_elastic, reading
from hybrid_engine.messages import decode, encode
from hybrid_engine.planning.buckets import Residency, frozen_everywhere
from hybrid_engine.planning.plan import Costs, ReshardPlan, rounding_faults
from hybrid_engine.planning.planner import plan
from hybrid_engine.ports import InferenceWeights, Trainer, WeightAdaptor
from hybrid_engine.ranks.digests import text_digest
from hybrid_engine.ranks.groups import MEETING_DIRECTORY, RankGroup
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import BufferId
from hybrid_engine.records.sides import Side, layout_messages, refined_alike
from hybrid_engine.switch.incremental import Incremental
from hybrid_engine.switch.replicas import Replicas
from hybrid_engine.switch.verifier import ValueRanges, Verifier
from hybrid_engine.switch.weight_container import WeightContainer
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.context import Group, RelayBuffers, TransportContext
from hybrid_engine.transports.copies import FlatBuffers
from hybrid_engine.transports.pull import SharedMemoryTransport
from hybrid_engine.transports.router import (
    CONFIG_KEY,
    TransportSet,
    choose_transport,
    export_handles,
    pulled_buffers,
)

logger = logging.getLogger("hybrid_engine")

_TIMEOUT_SHARE = 0.75
"""Share of the job's timeout for which a rank waits for messages of a bucket. A rank that failed
waits for the others for the whole timeout, so those that it has sent nothing come in time."""


@dataclass(frozen=True, eq=False)
class RankPlan:
    """Everything that one rank derives from the records of all ranks.

    Attributes:
        parameters: text of the plan's and the configuration's properties that must be equal on all
            ranks.
        destination: inference layouts of all ranks.
        plan: this rank's part of the plan.
        replicas: small weights that several ranks hold; compared in each switch.
        ranges: weights that inference holds in a dtype of smaller range; compared with it in each
            switch with `generate_config.check_nan`.
        incremental: buckets that need not be sent, and parts of this rank's training buffers to
            release once all ranks have read a bucket.
        verifier: None without `generate_config.verify`.
        is_apart: some rank of the job has one side only.
    """

    parameters: str
    destination: Side
    plan: ReshardPlan
    replicas: Replicas
    ranges: ValueRanges
    incremental: Incremental
    verifier: Verifier | None
    is_apart: bool


@dataclass(frozen=True, eq=False)
class Connection:
    """Plan and connected parts with which one rank switches.

    Attributes:
        of_rank: this rank's plan.
        container: inference weights, filled through the router.
        fence_group: ranks of this host, for the fences of a switch (release_fence.py).
    """

    of_rank: RankPlan
    router: TransportSet
    container: WeightContainer
    fence_group: RankGroup


def gather_side(job: Job, weights: WeightAdaptor) -> Side:
    """Gather one side's layouts from all ranks.

    Collective. Raises ParameterMismatchError on the rank at fault.
    """
    # A phase before the exchange: a rank without a layout must not leave the others waiting in it.
    with job.agreement.phase("layout"):
        layout = layout_messages(weights.layout())
    numbers, messages = job.agreement.share(layout, "exchange of layouts")
    with job.agreement.phase("layout"):
        return Side.from_messages(numbers, messages)


def connect(
    job: Job,
    trainer: Trainer,
    destination: InferenceWeights,
    config: GenerateConfig,
    owner: ExitStack,
    costs: Costs,
    source_side: Side | None = None,
) -> Connection:
    """Agree on a plan with all ranks, and connect. Collective.

    Args:
        job: job whose ranks hold both sides.
        trainer: its weights are read. With `config.incremental`, tensors that no optimizer step
            changes get separate buckets.
        destination: weights that are written.
        config: transport, bucket size and timeout; the same on all ranks.
        owner: closes everything created here.
        costs: gets the seconds of "layout" and "plan", with the waits for the slowest rank.
        source_side: training layouts of all ranks, if known (`gather_side`).

    Raises on all ranks: PlanError with every inconsistency of the two sides; ConfigError if the
    transport cannot carry the plan, or if the job has another device or timeout; DeviceMemoryError
    if relay buffers do not fit.
    """
    fence_group = job.new_host_group(owner)
    with costs.timed("layout"):
        with job.agreement.phase("layout"):
            job.require_timeout(config.timeout_seconds)
            buffers = trainer.weights.buffers()
            _require_device(job, buffers)
        reasons = hosts_without_access(job, config, fence_group)
        shares_memory = not reasons.get(job.hosts[job.rank])
        # One rank per host logs; so does a rank without training weights, because its log may be a
        # server's.
        is_first_of_host = job.rank == job.hosts.index(job.hosts[job.rank])
        if config.transport == "auto" and (not buffers or is_first_of_host):
            _log_transports(job, reasons)
        with job.agreement.phase("layout"):
            unchanging = trainer.frozen if config.incremental != "off" else ()
            records = (*layout_messages(destination.layout()), encode(sorted(unchanging)))
        if source_side is None:
            source_side = gather_side(job, trainer.weights)
        numbers, messages = job.agreement.share(records, "exchange of layouts")
    with costs.timed("plan"):
        with job.agreement.phase("plan"):
            rank_part = rank_plan(
                job.rank,
                job.hosts,
                source_side,
                numbers,
                messages,
                config,
                trainer.unserved,
                job.devices,
                set(job.hosts) - reasons.keys(),
            )
            relays = RelayBuffers(job.rank, rank_part.plan.relays, job.device)
            pulled = pulled_buffers(job.rank, rank_part.plan, config.transport)
            flats = {**buffers, **relays.tensors} if shares_memory else {}
            read = {name: flat for name, flat in flats.items() if name in pulled}
            exported = export_handles(job.rank, read)
        if not job.agreement.is_same([text_digest(rank_part.parameters)], "comparison of plans"):
            raise PlanError(
                ["the ranks made different plans: they do not run the same code or configuration"]
            )
        (has_relays,) = job.agreement.any_of([bool(relays.tensors)], "comparison of plans")
        handles = _gather_handles(job, exported, fence_group)
        # Every purpose has a separate group, because a group is unusable after a timeout.
        transfer_group = _transfer_group(job, rank_part.plan, handles.keys(), config, owner)
        notify_group = job.new_host_group(owner) if has_relays else None
        with job.agreement.phase("plan"):
            context = TransportContext(
                job.rank,
                source_side.buffers,
                handles,
                transfer_group,
                destination_buffers=rank_part.destination.buffers,
                relays=relays,
                notify_group=notify_group,
                timeout=_TIMEOUT_SHARE * job.timeout_seconds,
                sends_deltas=config.incremental == "delta",
            )
            router = TransportSet.connect(context, config.transport)
            owner.callback(router.close)
            router.check(rank_part.plan, exported=handles)
            container = WeightContainer(
                destination, rank_part.plan, router, num_ranks=job.world_size
            )
        # Not in the phase before: a rank that fails there must not leave its peers waiting here.
        with job.agreement.phase("first messages"):
            router.meet(rank_part.plan)
    return Connection(rank_part, router, container, fence_group)


def rank_plan(
    rank: int,
    hosts: Sequence[str],
    source: Side,
    numbers: Sequence[Sequence[int]],
    messages: Sequence[bytes],
    config: GenerateConfig,
    may_stay_unread: Collection[str] = (),
    devices: Sequence[str] = (),
    sharing_hosts: Collection[str] = (),
) -> RankPlan:
    """Plan for one rank, without a collective. Raises PlanError, MessageError.

    Args:
        rank: global rank.
        hosts: host of each rank.
        source: training layouts of all ranks.
        numbers: per rank, indexes into `messages`: names and records of its inference layout, and
            names of its tensors that no optimizer step changes.
        messages: distinct messages that the ranks shared.
        config: see `connect`.
        may_stay_unread: source tensors that no destination needs to read.
        devices: device of each rank; see `planner.plan`.
        sharing_hosts: hosts whose ranks read each other's memory. With transport "auto" they relay:
            a rank receives messages for others.
    """
    destination = Side.from_messages([of_rank[:2] for of_rank in numbers], messages)
    replicas = Replicas(source, rank)
    source, destination = refined_alike(source, destination)
    is_apart = bool((source.holds_any() != destination.holds_any()).any())
    # If every rank has both sides, one configuration key sets both dtypes, and they cannot differ.
    dtypes = (source.holdings.dtypes, destination.holdings.dtypes)
    if is_apart and not config.compress_reshard:
        faults = rounding_faults(*dtypes)
        if faults:
            raise PlanError(faults)

    unchanging = [of_rank[2] for of_rank in numbers]
    names = {number: decode(messages[number], list[str]) for number in set(unchanging)}
    # Ranks that hold and train the same count once.
    distinct = set(zip(source.kind_of.tolist(), unchanging, strict=True))
    frozen = frozen_everywhere(
        (source.kinds[kind].tensors, names[number]) for kind, number in distinct
    )
    job_plan = plan(
        source,
        destination,
        hosts,
        config.bucket_mb * MIB,
        may_stay_unread,
        rank=rank,
        relaying_hosts=sharing_hosts if config.transport == "auto" else (),
        frozen=frozen,
        devices=devices,
    )
    keys = (
        config.bucket_mb,
        config.transport,
        config.verify,
        config.incremental,
        config.incremental_mb,
        config.suspend_communicators,
    )
    layout = source.kind(rank)
    # Inference weights that are never released need no bound.
    limit = config.incremental_mb * MIB if config.release_weights else None
    residency = Residency.of(job_plan.buckets, destination, rank, limit)
    verifier = None
    if config.verify != "off":
        verifier = Verifier(source, destination, rank, config.verify)
    return RankPlan(
        f"{job_plan.fingerprint} {keys}",
        destination,
        job_plan,
        replicas,
        ValueRanges(rank, layout, destination.holdings.dtypes),
        Incremental(job_plan.buckets, layout, residency, frozen),
        verifier,
        is_apart,
    )


def _gather_handles(
    job: Job, exported: Mapping[BufferId, Handle], group: RankGroup
) -> dict[BufferId, Handle]:
    """Gather the handles of the ranks of this host. Collective."""
    # As a phase of its own: a rank that cannot encode must not leave the others in the gather.
    with job.agreement.phase("exchange of handles"):
        message = encode({buffer_id.name: handle for buffer_id, handle in exported.items()})
    with job.agreement.phase("exchange of handles"):
        return {
            BufferId(rank, name): handle
            for rank, received in group.gather(message).items()
            for name, handle in decode(received, dict[str, Handle]).items()
        }


def _transfer_group(
    job: Job,
    job_plan: ReshardPlan,
    exported: Set[BufferId],
    config: GenerateConfig,
    owner: ExitStack,
) -> Group | None:
    """Create the group for messages; None if no rank exchanges any. Collective.

    It spans only ranks that exchange some: an NCCL communicator takes hundreds of MB on a device.
    Deltas, which are for slow networks, are computed on the host, and go over gloo from there.
    """
    ranks = [
        rank
        for transfer in job_plan.transfers()
        if choose_transport(transfer, exported, config.transport) == CollectiveTransport.name
        for rank in (transfer.src_rank, transfer.dst_rank)
    ]
    parts = job.parts_that_meet(ranks)
    if parts is None:
        return None
    is_nccl = job.device.type == "cuda" and config.incremental != "delta"
    connect_parts = job.new_nccl_group if is_nccl else job.new_group
    return connect_parts(owner, parts)


def _require_device(job: Job, buffers: FlatBuffers) -> None:
    """Raise ConfigError unless all training buffers are on the job's device.

    A device without an index stands for any device of its type.
    """
    device = job.device
    others = {
        str(other)
        for other in (flat.device for flat in buffers.values())
        if other.type != device.type or device.index not in (None, other.index)
    }
    if others:
        where = " and ".join(sorted(others))
        problem = f"{device}, but training weights of rank {job.rank} are on {where}"
        remedy = "Pass their device: Job.join(..., device=...)"
        raise ConfigError.of("Job.device", problem, remedy, code="wrong-device")


_PHASE = "peer access"


def hosts_without_access(job: Job, config: GenerateConfig, group: RankGroup) -> Mapping[str, str]:
    """Return hosts on which a rank cannot read another rank's memory -> the first reason.

    It is "" if the device of a rank has no memory that others can read.

    Collective. All ranks return the same. Raises ConfigError on all ranks if `config.transport`
    requires such access.
    """
    reason = ""
    with job.agreement.phase(_PHASE):
        exported: dict[BufferId, Handle] = {}
        try:
            probe = _probe(job)
            exported = export_handles(job.rank, {"probe": probe})
        except TransportError as error:
            reason = f"rank {job.rank} cannot offer its memory: {error}"
    handles = _gather_handles(job, exported, group)
    with job.agreement.phase(_PHASE):
        reason = reason or _obstacle(job, handles)
    # `probe` lives until every rank has read it: this gather comes after all reads.
    own_access = (is_elastic(job.device), reason)
    gathered = job.agreement.gather(own_access, tuple[bool, str], _PHASE)
    reasons: dict[str, str] = {}
    for host, (can_share, obstacle) in zip(job.hosts, gathered, strict=True):
        if obstacle or not can_share:
            reasons[host] = reasons.get(host) or obstacle
    if config.transport == SharedMemoryTransport.name:
        remedy = "Choose auto or collective, or give the permission"
        require_none(
            Violation(CONFIG_KEY, f"shared_memory, but {problem}", remedy, code="no-peer-access")
            for problem in filter(None, reasons.values())
        )
    return reasons


def _log_transports(job: Job, reasons: Mapping[str, str]) -> None:
    """Log how the ranks of this host receive weights, and why some come in messages."""
    host = job.hosts[job.rank]
    if reason := reasons.get(host):
        logger.warning(
            "[Reshard] the ranks of this host send their weights instead of sharing memory: %s",
            reason,
        )
        return
    if host in reasons:
        return
    ranks = [rank for rank, other in enumerate(job.hosts) if other == host]
    num_remote = job.world_size - len(ranks)
    remote = ""
    if num_remote:
        where = f"on another machine, or in a container with another {MEETING_DIRECTORY}"
        remote = f"; by messages with {num_remote} others ({where})"
    listed = ", ".join(map(str, ranks))
    logger.info("[Reshard] ranks that read each other's memory: %s%s", listed, remote)


def _probe(job: Job) -> torch.Tensor:
    """Return a tensor that contains this rank's number, elastic if possible."""
    probe = allocate_elastic(1, torch.int64, job.device, "probe").fill_(job.rank)
    if job.device.type == "cuda":
        # Peers read without waiting for this rank's stream.
        torch.cuda.synchronize(job.device)
    return probe


def _obstacle(job: Job, probes: Mapping[BufferId, Handle]) -> str:
    """Read the probes of the other ranks of this host; return why one cannot be read, or ""."""
    for buffer_id, handle in probes.items():
        peer = buffer_id.rank
        if peer == job.rank:
            continue
        try:
            with reading(handle, job.device) as flat:
                number = int(flat[0])
        except TransportError as error:
            return f"rank {job.rank} cannot read the memory of rank {peer}: {error}"
        # An alias of another buffer would be read without an error.
        if number != peer:
            return f"rank {job.rank} reads {number} where rank {peer} wrote {peer}"
    return ""

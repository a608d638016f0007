"""Set-up: the ranks tell each other what they hold, make the same plan, and connect.

    1  gather_layouts   the training layouts of all ranks, once: by assembly.py, for the order of ranks, or here
    2  gather           inference layouts, handles of exported buffers, and who can relay
    3  plan             on every rank from the same records; each keeps its own part
    4  gather           digests of the plans, which must be one; handles of relay buffers
    5  connect          process groups, transports, the container to be filled

Called by ShardingManager, once; and for a destination beside it (a second Megatron model) by whoever has one.
Memory: the records of all ranks while this runs; afterwards the plan of one rank, and relay buffers where it has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import PlanError
from hybrid_engine.memory.elastic import Handle, is_elastic
from hybrid_engine.planning.plan import ReshardPlan
from hybrid_engine.planning.planner import plan
from hybrid_engine.planning.release_schedule import Releases, release_schedule
from hybrid_engine.ports import InferenceWeights, TrainingWeights, WeightAdaptor
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import BufferId, Layout
from hybrid_engine.switch.weight_container import WeightContainer
from hybrid_engine.transports import RelayBuffers, TransportSet, Wiring, export_handles

_Value = TypeVar("_Value")

Phase = Callable[[str], AbstractContextManager[None]]
"""What every step runs in: it ends with all ranks agreeing that the step succeeded."""


@dataclass(frozen=True, eq=False)
class Connection:
    """What a rank switches with.

    Attributes:
        plan: of this rank.
        releases: by bucket, what can go of this rank's training buffers once all ranks have read it.
        router: the transports, connected for the plan.
        container: the inference weights, to be filled by the router.
        transfer_group: what the collective transport sends over.
        fence_group: for the fences of a switch (release_fence.py).
    """

    plan: ReshardPlan
    releases: Sequence[Releases]
    router: TransportSet
    container: WeightContainer
    transfer_group: dist.ProcessGroup
    fence_group: dist.ProcessGroup


@dataclass(frozen=True)
class _Offer:
    """What the ranks tell each other before planning."""

    destination: Layout
    handles: Mapping[BufferId, Handle]
    can_relay: bool


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
    may_stay_unread: Iterable[str] = (),
    source_layouts: Sequence[Layout] | None = None,
    phase: Phase | None = None,
) -> Connection:
    """Agree on a plan with all ranks, and connect. Collective.

    Args:
        job: whose ranks hold both sides.
        source, destination: this rank's.
        config: transport and bucket size; the same on all ranks.
        owner: ends what is made here.
        may_stay_unread: source tensors that no destination needs to read.
        source_layouts: of all ranks, where they are known (`gather_layouts`).
        phase: default: the agreement's.

    Raises, on all ranks: PlanError with every fault of the two sides, ConfigError for a transport that cannot carry the
    plan, DeviceMemoryError when relay buffers find no memory.
    """
    phase = phase or job.agreement.phase
    # each for one purpose: a group that timed out is dead
    transfer_group = job.new_group("nccl" if job.device.type == "cuda" else "gloo", owner)
    fence_group = job.new_group("gloo", owner)
    if source_layouts is None:
        source_layouts = gather_layouts(job, source)
    with phase("layout"):
        handles = export_handles(job.rank, source.buffers())
        own = _Offer(destination.layout(), handles, config.transport == "auto" and is_elastic(job.device))
    offers: Sequence[_Offer] = job.agreement.gather(own, "exchange of layouts")
    with phase("plan"):
        made = _make_plan(job, source_layouts, offers, config, may_stay_unread)
        relays = RelayBuffers(job.rank, made.relays, job.device)
    digest = f"{made.fingerprint} {config.bucket_mb} MiB, {config.transport}"
    planned: Sequence[_Planned] = job.agreement.gather(_Planned(digest, relays.handles()), "comparison of plans")
    if len({each.digest for each in planned}) > 1:
        raise PlanError(["the ranks made different plans: they do not run the same code or configuration"])
    tell_group = job.new_group("gloo", owner) if any(each.handles for each in planned) else None
    with phase("plan"):
        handles_of_all = _joined([*(each.handles for each in offers), *(each.handles for each in planned)])
        wiring = Wiring(
            job.rank,
            _joined(each.buffers for each in source_layouts),
            handles_of_all,
            transfer_group,
            destination_buffers=_joined(each.destination.buffers for each in offers),
            relays=relays,
            tell_group=tell_group,
            timeout=job.timeout_seconds,
        )
        router = TransportSet.connect(wiring, config.transport)
        owner.callback(router.close)
        router.check(made, exported=handles_of_all)
        # On CUDA releasing training memory waits for the device, so for messages in flight: a peer that hangs.
        container = WeightContainer(destination, made, router, sends_ahead=job.device.type != "cuda")
        schedule = release_schedule(source_layouts[job.rank].shards, made.buckets)
    return Connection(made, schedule, router, container, transfer_group, fence_group)


def _make_plan(
    job: Job,
    source_layouts: Sequence[Layout],
    offers: Sequence[_Offer],
    config: GenerateConfig,
    may_stay_unread: Iterable[str],
) -> ReshardPlan:
    """The same on every rank, but for what it keeps of it. A host relays where all of its ranks can."""
    cannot_relay = {host for host, offer in zip(job.hosts, offers, strict=True) if not offer.can_relay}
    return plan(
        Layout.merge(source_layouts),
        Layout.merge(each.destination for each in offers),
        job.hosts,
        config.bucket_mb * 1024**2,
        may_stay_unread,
        rank=job.rank,
        relaying_hosts=set(job.hosts) - cannot_relay,
    )


def _joined(parts: Iterable[Mapping[BufferId, _Value]]) -> dict[BufferId, _Value]:
    """What each rank says of its own buffers, as one."""
    return {buffer_id: value for part in parts for buffer_id, value in part.items()}

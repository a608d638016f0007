"""The set of transports of one rank: gives each transfer of a bucket to one of them, and runs them in order.

To add a transport: a class that implements `RegisteredTransport`; its place in `REGISTRY`, before those that it is
better than; its name in `generate_config.transport` if it can be asked for; a case in the contract tests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from hybrid_engine.errors import ConfigError, PeerTransportError, TransportError, Violation
from hybrid_engine.memory.elastic import Handle, export_tensor
from hybrid_engine.planning.plan import Bucket, Link, ReshardPlan, Transfer
from hybrid_engine.ports import Transport
from hybrid_engine.ranks.process import signals_held
from hybrid_engine.records.layout import BufferId
from hybrid_engine.tracing import span
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.context import RelayBuffers, TransportContext
from hybrid_engine.transports.deltas import DeltaCount, Deltas
from hybrid_engine.transports.pull import LocalTransport, SharedMemoryTransport

CONFIG_KEY = "generate_config.transport"


class RegisteredTransport(Transport, Protocol):
    """A transport that says by itself what it is for."""

    @staticmethod
    def obstacle(transfer: Transfer, exported: Set[BufferId]) -> str:
        """Why it cannot carry a transfer, given the buffers that peers can map; "" if it can."""
        ...

    @classmethod
    def connect(cls, context: TransportContext) -> Transport | None:
        """This rank's; None where the job has not got what it needs. No collective."""
        ...


REGISTRY: tuple[type[RegisteredTransport], ...] = (LocalTransport, SharedMemoryTransport, CollectiveTransport)
"""Best first; a bucket's transfers run in this order too. The last carries everything."""


def choose_transport(transfer: Transfer, exported: Set[BufferId], preference: str = "auto") -> str:
    """Name of the transport for a transfer.

    auto: the first of the registry that can carry it. With another preference everything between two ranks goes that
    way (`obstacle_of` says whether it can).
    """
    for transport in REGISTRY:
        if not transport.obstacle(transfer, exported):
            return transport.name if preference == "auto" or transport is LocalTransport else preference
    raise AssertionError("the last transport of the registry carries everything")


def obstacle_of(name: str, transfer: Transfer, exported: Set[BufferId]) -> str:
    """Why the transport of this name cannot carry a transfer; "" if it can, or is not of the registry."""
    return next((each.obstacle(transfer, exported) for each in REGISTRY if each.name == name), "")


_ARRIVED, _READ = "relay arrived", "relay read"  # phases in messages


def export_handles(rank: int, buffers: Mapping[str, torch.Tensor]) -> dict[BufferId, Handle]:
    """Handles of this rank's flat buffers that peers can map; to be exchanged once among the ranks of a host."""
    handles = {BufferId(rank, name): export_tensor(flat) for name, flat in buffers.items()}
    return {buffer_id: handle for buffer_id, handle in handles.items() if handle is not None}


@dataclass(frozen=True, slots=True)
class RunReport:
    """Costs of one bucket on this rank; bytes of a pull that casts count in the narrower dtype, as a message has them.

    Attributes:
        seconds: by phase (read, transfer, write).
        nbytes: bytes it received, by transport name and by the rank they came from: for what was relayed, once from its
            sender to the relay rank, and from there to each other reader; of a message that came as a delta, its own.
        nbytes_by_link: the same bytes by link.
    """

    seconds: Mapping[str, float]
    nbytes: Mapping[str, Mapping[int, int]]
    nbytes_by_link: Mapping[Link, int]


class TransportSet:
    """The transports of one rank, with a rule that gives each transfer to one of them.

    Every rank calls `run` for every bucket of the plan, whatever its share, and each transport runs in each of them. A
    rank that cannot go on calls `abandon` for the buckets that are left.

    What comes over relay buffers is read after the bucket's other transfers:

        relay rank  receives -> tells its readers -> reads its own part -> hears that they have read: it may come anew
        reader      hears its relay ranks -> reads where it lies -> tells them

    Args:
        rank: global rank of this process.
        transports: in the order in which they run.
        choose: name of the transport for a transfer.
        relays: the plan's relay buffers; default: none.
        deltas: of messages; default: each goes whole.
    """

    def __init__(
        self,
        rank: int,
        transports: Sequence[Transport],
        choose: Callable[[Transfer], str],
        relays: RelayBuffers | None = None,
        deltas: Deltas | None = None,
    ) -> None:
        self.rank = rank
        self._transports = {transport.name: transport for transport in transports}
        self._choose = choose
        self._relays, self._deltas = relays or RelayBuffers(rank, {}), deltas
        self._shares: dict[int, _BucketShare] = {}
        self.num_met = 0  # buckets in which this rank took part, run or abandoned, since it was connected

    @classmethod
    def connect(
        cls,
        context: TransportContext,
        preference: str = "auto",
        registry: Sequence[type[RegisteredTransport]] = REGISTRY,
    ) -> TransportSet:
        """The transports of a running job. No collective.

        Args:
            context: what they are built from.
            preference: see `choose_transport`; a plan with relays needs "auto".
            registry: those that are tried; each name stands for what `REGISTRY` says that it can carry.
        """
        connected = [transport.connect(context) for transport in registry]
        exported = frozenset(context.handles)
        return cls(
            context.rank,
            [transport for transport in connected if transport is not None],
            lambda transfer: choose_transport(transfer, exported, preference),
            context.relays,
            context.deltas,
        )

    def check(self, plan: ReshardPlan, exported: Collection[BufferId]) -> None:
        """Raise ConfigError unless the chosen transports can carry every transfer of the plan. Before any bucket."""
        exported = frozenset(exported)
        problems: dict[str, Violation] = {}
        for transfer in plan.transfers():
            name = self._choose(transfer)
            if obstacle := obstacle_of(name, transfer, exported):
                problem = f"{name} cannot read {obstacle} ({transfer.src.buffer})"
                problems.setdefault(problem, Violation(CONFIG_KEY, problem, "Choose auto or collective"))
            elif name not in self._transports:
                problem = f"rank {transfer.dst_rank} reads {transfer.src.buffer} by {name}, which is absent"
                remedy = "Initialise torch.distributed, or export the buffer to its host"
                problems.setdefault(problem, Violation(CONFIG_KEY, problem, remedy))
        if problems:
            raise ConfigError(list(problems.values()))

    @torch.no_grad()
    @signals_held()
    def run(
        self,
        bucket: Bucket,
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
        following: Bucket | None = None,
    ) -> RunReport:
        """Carry out this rank's share of a bucket. Raises TransportError; no peer is left waiting then.

        `following`: the next bucket, whose messages are sent meanwhile; all ranks name it, or none. What fails here
        reaches the peers with a bucket's messages, so one bucket later if these were sent before.

        Signals are held until its end: a rank that stopped before it has sent all of a bucket, or heard of it, would
        meet its peers with others from there on.
        """
        share = self._share(bucket)
        self.num_met += 1
        failure = self._start(bucket, following, source) if following is not None else None
        for name, transport in self._transports.items():
            transfers = share.transfers.get(name, ())
            try:
                if failure is None:
                    with span(name) if transfers else nullcontext():
                        transport.run(bucket.index, transfers, source, destination)
                else:
                    transport.abandon(bucket.index, transfers, str(failure))
            except Exception as error:
                failure = failure or error
        if share.is_relaying:
            with span("relay"):
                failure = self._fan_out(share, destination, failure)
        report = self._report(share)
        if failure is not None:
            raise failure
        return report

    def abandon(self, bucket: Bucket, reason: str, following: Bucket | None = None) -> None:
        """Take part in a bucket without reading or writing: peers that wait for this rank fail with `reason`.

        `following` as in `run`. Raises TransportError when a process group is dead, having told all that others carry.
        """
        share = self._share(bucket)
        self.num_met += 1
        failure = self._start(bucket, following, None, reason)
        for name, transport in self._transports.items():
            try:
                transport.abandon(bucket.index, share.transfers.get(name, ()), reason)
            except Exception as error:
                failure = failure or error
        for phase in (_ARRIVED, _READ) if share.is_relaying else ():
            try:
                self._notify(share, phase, reason)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def trim(self) -> int:
        """Give back staging and relay memory after a fill, which they are taken for again; returns their bytes."""
        return sum(transport.trim() for transport in self._transports.values()) + self._relays.release()

    def begin(self, *, whole: bool) -> None:
        """Say how messages go, before any rank fills: ranks that abandon a fill send as the others do.

        `whole`: no message is a delta; the same on all ranks. Raises nothing.
        """
        if self._deltas is not None:
            self._deltas.begin(whole=whole)

    def prepare(self) -> None:
        """Before a fill: have relay memory. Raises DeviceMemoryError."""
        self._relays.restore()

    def deltas_sent(self) -> DeltaCount:
        """Of the messages that this rank sent since `begin`."""
        return DeltaCount() if self._deltas is None else self._deltas.counted()

    def _report(self, share: _BucketShare) -> RunReport:
        name, by_link, nbytes = CollectiveTransport.name, dict(share.nbytes_by_link), dict(share.nbytes)
        for peer, came in ({} if self._deltas is None else self._deltas.take_came()).items():
            link = next(each.link for each in share.transfers[name] if each.src_rank == peer)
            by_link[link] += came - nbytes[name][peer]
            nbytes[name] = {**nbytes[name], peer: came}
        return RunReport(self._take_seconds(), nbytes, by_link)

    def _start(
        self, bucket: Bucket, following: Bucket | None, source: Mapping[str, torch.Tensor] | None, reason: str = ""
    ) -> Exception | None:
        """Start buckets that were not yet, in order; returns a failure."""
        try:
            for each in (bucket, following):
                if each is not None:
                    for name, transport in self._transports.items():
                        transport.start(each.index, self._share(each).transfers.get(name, ()), source, reason)
        except Exception as error:
            return error
        return None

    def _fan_out(
        self, share: _BucketShare, destination: Mapping[str, torch.Tensor], failure: Exception | None
    ) -> Exception | None:
        """Read what came into relay buffers, unless this rank or one of its relay ranks failed; returns a failure.

        Says what is to be said in any case, so that nobody waits.
        """
        for phase in (_ARRIVED, _READ):
            try:
                heard = self._notify(share, phase, "" if failure is None else str(failure))
                if heard and failure is None:
                    failure = PeerTransportError(heard)
                if phase == _ARRIVED and failure is None:
                    for name, transfers in share.fan_out.items():
                        self._transports[name].run(share.bucket.index, transfers, self._relays.tensors, destination)
            except Exception as error:
                failure = failure or error
        return failure

    def _notify(self, share: _BucketShare, phase: str, reason: str) -> str:
        """Relay ranks tell readers that a bucket has arrived, readers tell relay ranks that they have read it."""
        receivers, senders = share.readers, share.relay_ranks
        if phase == _READ:
            receivers, senders = senders, receivers
        told = [
            transport.notify(share.bucket.index, phase, receivers, senders, reason)
            for transport in self._transports.values()
        ]
        return next(filter(None, told), "")

    def close(self) -> None:
        """Close all transports; idempotent."""
        self._shares.clear()
        for transport in self._transports.values():
            transport.close()
        self._relays.release()

    def _take_seconds(self) -> dict[str, float]:
        """Seconds by phase since the last call, of all transports together."""
        total: dict[str, float] = defaultdict(float)
        for transport in self._transports.values():
            for phase, seconds in transport.take_seconds().items():
                total[phase] += seconds
        return dict(total)

    def _share(self, bucket: Bucket) -> _BucketShare:
        share = self._shares.get(bucket.index)
        if share is None or share.bucket is not bucket:
            share = self._shares[bucket.index] = self._split(bucket)
        return share

    def _split(self, bucket: Bucket) -> _BucketShare:
        own = bucket.of_rank(self.rank)
        transfers = self._by_transport(bucket.index, own.transfers)
        fan_out = self._by_transport(bucket.index, own.fan_out)
        nbytes: dict[str, Counter[int]] = {name: Counter() for name in self._transports}
        nbytes_by_link = dict.fromkeys(Link, 0)
        for transfer in own.counted():
            if transfer.dst_rank == self.rank:
                nbytes[self._choose(transfer)][transfer.src_rank] += transfer.nbytes
                nbytes_by_link[transfer.link] += transfer.nbytes
        return _BucketShare(
            bucket,
            transfers,
            fan_out,
            nbytes,
            nbytes_by_link,
            frozenset(each.dst_rank for each in own.fan_out) - {self.rank},
            frozenset(each.src_rank for each in own.fan_out) - {self.rank},
        )

    def _by_transport(self, index: int, transfers: Iterable[Transfer]) -> Mapping[str, Sequence[Transfer]]:
        found: defaultdict[str, list[Transfer]] = defaultdict(list)
        for transfer in transfers:
            name = self._choose(transfer)
            if name not in self._transports:
                raise TransportError(
                    f"bucket {index}, tensor {transfer.tensor}: no {name} transport on rank {self.rank}; "
                    f"there are {', '.join(self._transports)}"
                )
            found[name].append(transfer)
        return found


@dataclass(frozen=True, slots=True)
class _BucketShare:
    """A rank's work in a bucket.

    Attributes:
        transfers, fan_out: by transport name.
        nbytes, nbytes_by_link: as in RunReport, where all messages go whole.
        readers: other ranks that read this one's relay buffers. relay_ranks: whose relay buffers it reads.
    """

    bucket: Bucket
    transfers: Mapping[str, Sequence[Transfer]]
    fan_out: Mapping[str, Sequence[Transfer]]
    nbytes: Mapping[str, Mapping[int, int]]
    nbytes_by_link: Mapping[Link, int]
    readers: Set[int]
    relay_ranks: Set[int]

    @property
    def is_relaying(self) -> bool:
        return bool(self.fan_out)

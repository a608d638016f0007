"""The transports of one rank: each transfer of a bucket is assigned to one, and they run in order.

To add a transport: write a class that extends `context.Transport`; put it into `REGISTRY`,
before the transports that it is better than; add its name to `generate_config.transport` if users
may choose it. The contract tests run over every class of the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_engine.errors import ConfigError, PeerTransportError, TransportError, Violation
from hybrid_engine.memory.elastic import Handle, export_tensor
from hybrid_engine.planning.plan import Bucket, Costs, ReshardPlan, Transfer
from hybrid_engine.ranks.signals_and_forks import signals_held
from hybrid_engine.records.layout import BufferId
from hybrid_engine.tracing import span
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.context import RelayBuffers, Transport, TransportContext
from hybrid_engine.transports.copies import FlatBuffers
from hybrid_engine.transports.pull import LocalTransport, SharedMemoryTransport

CONFIG_KEY = "generate_config.transport"


REGISTRY: tuple[type[Transport], ...] = (
    LocalTransport,
    SharedMemoryTransport,
    CollectiveTransport,
)
"""Best first; a bucket's transfers run in this order too. The last carries all between ranks."""


def choose_transport(transfer: Transfer, exported: Set[BufferId], preference: str = "auto") -> str:
    """Return the name of the transport for a transfer.

    "auto" chooses the first of the registry that can carry it. Any other preference applies to all
    transfers between two ranks, even if that transport cannot carry them; see `TransportSet.check`.
    """
    # A preference is about two ranks; copies within a rank are always local.
    if preference != "auto" and transfer.src_rank != transfer.dst_rank:
        return preference
    # The last one has no obstacle.
    return next(kind.name for kind in REGISTRY if not kind.obstacle(transfer, exported))


# Phases of relaying, as they appear in messages.
_ARRIVED = "relay arrived"
_READ = "relay read"


def export_handles(rank: int, buffers: FlatBuffers) -> dict[BufferId, Handle]:
    """Return handles of this rank's flat buffers that peers can map."""
    handles = {BufferId(rank, name): export_tensor(flat) for name, flat in buffers.items()}
    return {buffer: handle for buffer, handle in handles.items() if handle is not None}


def pulled_buffers(rank: int, plan: ReshardPlan, preference: str) -> set[str]:
    """Return the names of this rank's buffers that other ranks read, if they can map them.

    Only these are exported, which takes about 0.9 ms for each chunk on CUDA.
    """
    return {
        transfer.src.buffer.name
        for transfer in plan.transfers()
        if transfer.src_rank == rank
        and choose_transport(transfer, {transfer.src.buffer}, preference)
        == SharedMemoryTransport.name
    }


class TransportSet:
    """The transports of one rank, with a rule that assigns each transfer to one of them.

    Every rank calls `run`, or `abandon`, for every bucket of the plan, even without a share, after
    `check`. Transfers out of relay buffers follow the bucket's other transfers:

        relay rank  receives -> notifies its readers -> reads its part -> waits for their
                    notifications: the buffer may be overwritten
        reader      waits for notifications of its relay ranks -> reads in place -> notifies them

    Args:
        rank: global rank of this process.
        transports: in the order in which they run.
        choose: returns the name of the transport for a transfer.
        relays: the plan's relay buffers.
    """

    def __init__(
        self,
        rank: int,
        transports: Sequence[Transport],
        choose: Callable[[Transfer], str],
        relays: RelayBuffers,
    ) -> None:
        self.rank = rank
        self._transports = {transport.name: transport for transport in transports}
        self._choose = choose
        self._relays = relays
        self._shares: dict[int, _BucketShare] = {}
        # Buckets in which this rank took part, run or abandoned; 0 when a fill begins.
        self.num_met = 0

    @classmethod
    def connect(
        cls,
        context: TransportContext,
        preference: str = "auto",
    ) -> TransportSet:
        """Build the transports of a running job. No collective.

        Args:
            context: inputs of the transports.
            preference: see `choose_transport`; a plan with relays needs "auto".
        """
        connected = [transport_class.connect(context) for transport_class in REGISTRY]
        transports = [transport for transport in connected if transport is not None]
        # Both ranks of a transfer on a host have the same handles, so they choose alike.
        exported = frozenset(context.handles)
        return cls(
            context.rank,
            transports,
            lambda transfer: choose_transport(transfer, exported, preference),
            context.relays,
        )

    def check(self, plan: ReshardPlan, exported: Collection[BufferId]) -> None:
        """Raise ConfigError unless the chosen transports can carry every transfer of the plan.

        Called before any bucket.
        """
        exported = frozenset(exported)
        violations: dict[str, Violation] = {}
        for transfer in plan.transfers():
            name = self._choose(transfer)
            buffer = transfer.src.buffer
            if name not in self._transports:
                problem = (
                    f"rank {transfer.dst_rank} reads {buffer} by {name}, which is not available"
                )
                remedy = "Initialise torch.distributed, or export the buffer to its host"
                violation = Violation(CONFIG_KEY, problem, remedy, code="no-transport")
            elif obstacle := self._transports[name].obstacle(transfer, exported):
                problem = f"{name} cannot read {obstacle} ({buffer})"
                remedy = "Choose auto or collective"
                violation = Violation(CONFIG_KEY, problem, remedy, code="cannot-read")
            else:
                continue
            # The same problem is reported once.
            violations.setdefault(problem, violation)
        if violations:
            raise ConfigError(list(violations.values()))

    def meet(self, plan: ReshardPlan) -> None:
        """Connect to the peers of a plan that `check` accepts, as all of them do at the same time.

        Otherwise the first switch would wait for it. Raises TransportError.
        """
        peers: dict[str, set[int]] = {name: set() for name in self._transports}
        for transfer in plan.transfers():
            peers[self._choose(transfer)] |= {transfer.src_rank, transfer.dst_rank} - {self.rank}
        for name, of_transport in peers.items():
            self._transports[name].meet(of_transport)

    @torch.no_grad()
    @signals_held()
    def run(
        self,
        bucket: Bucket,
        source: FlatBuffers,
        destination: FlatBuffers,
        following: Bucket | None = None,
    ) -> Costs:
        """Carry out this rank's share of a bucket.

        Args:
            bucket: bucket of the plan.
            source: this rank's flat source buffers, by name.
            destination: this rank's flat destination buffers, by name.
            following: the next bucket, whose messages are sent meanwhile; passed by all ranks or by
                none.

        Raises TransportError if this rank or a peer failed; no peer is left waiting. Peers receive
        the failure with the messages of a bucket: one bucket later if these were already sent.
        """
        # Signals are held until the end. A rank interrupted before it has sent and received all
        # messages of a bucket would exchange messages of different buckets with its peers from then
        # on.
        failures: list[Exception] = []
        self._take_part(bucket, source, destination, following, failures)
        costs = Costs()
        costs.add(self._share(bucket).planned)
        for transport in self._transports.values():
            costs.add(transport.take_costs())
        if failures:
            raise failures[0]
        return costs

    def abandon(self, bucket: Bucket, reason: str, following: Bucket | None = None) -> None:
        """Take part in a bucket without reading or writing; peers of this rank fail with `reason`.

        `following` as in `run`. Raises TransportError, at the end, for an unusable process group.
        """
        failures = [Exception(reason)]
        self._take_part(bucket, {}, {}, following, failures)
        for failure in failures[1:]:
            # Peers may have failed as well, which changes nothing for this rank.
            if not isinstance(failure, PeerTransportError):
                raise failure

    def trim(self) -> Costs:
        """Free staging and relay memory until the next fill; return its bytes."""
        costs = Costs()
        costs.counts["staging_bytes"] = self._relays.release()
        for transport in self._transports.values():
            costs.add(transport.trim())
        return costs

    def begin(self, *, whole: bool) -> None:
        """Set the form of the messages, on every rank, before any rank fills; never raises.

        `whole`: no message is a delta; the same on all ranks.
        """
        for transport in self._transports.values():
            transport.begin(whole=whole)

    def prepare(self) -> None:
        """Allocate relay memory before a fill. Raises DeviceMemoryError."""
        self._relays.restore()

    def _take_part(
        self,
        bucket: Bucket,
        source: FlatBuffers,
        destination: FlatBuffers,
        following: Bucket | None,
        failures: list[Exception],
    ) -> None:
        """Carry out this rank's share, and add to its failures.

        After the first failure, which explains later ones, nothing is read or written any more, and
        peers that wait for this rank fail with it.
        """
        share = self._share(bucket)
        self.num_met += 1
        if following is not None:
            with collecting(failures):
                for started in (bucket, following):
                    for name, part in self._share(started).parts.items():
                        transport = self._transports[name]
                        transport.start(started.index, part, source, _reason(failures))
        # Local copies come first, and go on while the messages that were posted are in flight.
        for name, part in share.parts.items():
            transport = self._transports[name]
            # Other transports have other peers.
            with collecting(failures):
                if failures:
                    transport.abandon(bucket.index, part, _reason(failures))
                else:
                    with span(name):
                        transport.run(bucket.index, part, source, destination)
        if share.fan_out:
            with span("relay"):
                self._fan_out(bucket.index, share, destination, failures)

    def _fan_out(
        self, bucket: int, share: _BucketShare, destination: FlatBuffers, failures: list[Exception]
    ) -> None:
        """Read from relay buffers, unless this rank or a relay rank failed; add to the failures.

        Both notifications are sent in any case, so that no rank is left waiting.
        """
        with collecting(failures):
            self._relays.finish_writes()
        for phase, receivers, senders in (
            (_ARRIVED, share.readers, share.relay_ranks),
            # Readers notify their relay ranks, which may then overwrite the buffer.
            (_READ, share.relay_ranks, share.readers),
        ):
            for transport in self._transports.values():
                with collecting(failures):
                    transport.notify(bucket, phase, receivers, senders, _reason(failures))
            if phase == _ARRIVED and not failures:
                with collecting(failures):
                    # The relay rank reads its part here as well.
                    for name, part in share.fan_out.items():
                        self._transports[name].run(bucket, part, self._relays.tensors, destination)

    def close(self) -> None:
        """Close all transports; idempotent."""
        self._shares.clear()
        for transport in self._transports.values():
            transport.close()
        self._relays.release()

    def _share(self, bucket: Bucket) -> _BucketShare:
        """Return this rank's share of a bucket, computed once: a plan runs at every switch."""
        if bucket.index in self._shares:
            return self._shares[bucket.index]
        of_rank = bucket.of_rank(self.rank)
        # Transports subtract what they save by deltas.
        planned = Costs()
        for transfer in of_rank.counted():
            if transfer.dst_rank == self.rank:
                planned.nbytes_by_peer[self._choose(transfer)][transfer.src_rank] += transfer.nbytes
                planned.nbytes_by_link[transfer.link] += transfer.nbytes
        readers = {transfer.dst_rank for transfer in of_rank.fan_out}
        relay_ranks = {transfer.src_rank for transfer in of_rank.fan_out}
        share = _BucketShare(
            self._prepared(of_rank.transfers),
            self._prepared(of_rank.fan_out),
            planned,
            frozenset(readers - {self.rank}),
            frozenset(relay_ranks - {self.rank}),
        )
        self._shares[bucket.index] = share
        return share

    def _prepared(self, transfers: Iterable[Transfer]) -> dict[str, Any]:
        """Return what each transport carries, in the order in which they run."""
        by_name: dict[str, list[Transfer]] = {name: [] for name in self._transports}
        for transfer in transfers:
            name = self._choose(transfer)
            if name not in by_name:
                raise TransportError(
                    f"tensor {transfer.tensor}: no {name} transport on rank {self.rank}; "
                    f"available: {', '.join(by_name)}",
                    code="no-transport",
                )
            by_name[name].append(transfer)
        transports = self._transports
        return {name: transports[name].prepare(part) for name, part in by_name.items() if part}


@contextmanager
def collecting(failures: list[Exception]) -> Iterator[None]:
    """Add an exception of the block to `failures`."""
    try:
        yield
    except Exception as error:
        failures.append(error)


def _reason(failures: Sequence[Exception]) -> str:
    """Return why a rank's data is void; "" if it is valid."""
    return next((str(failure) or repr(failure) for failure in failures), "")


@dataclass(frozen=True, slots=True)
class _BucketShare:
    """A rank's work in a bucket.

    Attributes:
        parts, fan_out: of each transport with transfers, in the form of its `prepare`. `fan_out`
            reads from relay buffers.
        planned: bytes, if all messages are sent whole.
        readers: other ranks that read this rank's relay buffers.
        relay_ranks: other ranks whose relay buffers this rank reads.
    """

    parts: Mapping[str, Any]
    fan_out: Mapping[str, Any]
    planned: Costs
    readers: Set[int]
    relay_ranks: Set[int]

"""Between any two ranks of a process group: gloo on the CPU, NCCL on GPUs. Packed messages, per bucket and peer.

    source rank                                              destination rank
    strided reads -> staging [header|piece|piece|…] --isend/irecv--> staging -> strided writes, cast
                     image of a relay buffer -------isend/irecv--> the relay buffer itself

`start` posts a bucket's messages and leaves them in flight until `run` needs them, so the next bucket crosses while
this one is written and committed: at most NUM_SLOTS buckets at once, each with staging memory of its own, which is kept
and reused and grows to the largest bucket.

A rank whose read fails, or that cannot take part in a bucket at all (`abandon`), still sends its messages: their
header says that the pieces are void, and why. So no peer is left waiting, and the process group stays usable. `notify`
sends headers alone: a rank got so far in a bucket, or why it did not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from hybrid_engine.errors import PeerTransportError, TransportError
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.planning.relays import NUM_SLOTS
from hybrid_engine.ranks.groups import RankGroup, plain_text
from hybrid_engine.records.layout import BufferId
from hybrid_engine.transports.context import Group, RelayBuffers, TransportContext
from hybrid_engine.transports.copies import BatchedCopies, CopyError, PhaseClock, copy_straight, failure_at, synchronize
from hybrid_engine.transports.messages import HEADER_NBYTES, Message, MessagePlanner, StagedMessage, round_up

_MESSAGE_ALIGNMENT = 64  # bytes
_SHORTEST_WAIT = 0.001  # seconds; torch takes a timeout of 0 for "no timeout"
_ROUNDING = 0.01  # seconds by which a wait may end early: torch counts whole milliseconds


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """This rank's work in a bucket; made at the first switch.

    Attributes:
        transfers: it is made from.
        outgoing, incoming: messages, by ascending peer.
        packing, unpacking: copies into and out of messages.
        own: copies within the rank.
    """

    transfers: Sequence[Transfer]
    outgoing: Sequence[Message]
    incoming: Sequence[Message]
    packing: BatchedCopies
    unpacking: BatchedCopies
    own: BatchedCopies

    def planned(self, moved: Transfer) -> Transfer:
        """The plan's transfer, of which `moved` has one end in a message."""
        # A packed transfer has the plan's source, an unpacked one its destination: one of the two tells which it was.
        return next(
            one
            for one in self.transfers
            if (one.tensor, one.dst_rank) == (moved.tensor, moved.dst_rank)
            and (one.src == moved.src or one.dst == moved.dst)
        )


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """The messages of one bucket (or of one `notify`) that are being exchanged.

    Attributes:
        group: over which they go.
        outgoing, incoming: with the memory that they are sent from or come into.
        works: what to wait for, `peers[i]` being whom `works[i]` is about.
        failure: why the outgoing messages are void.
    """

    group: Group
    outgoing: list[StagedMessage]
    incoming: list[StagedMessage]
    works: list[dist.Work]
    peers: list[object]
    failure: TransportError | None = None


class CollectiveTransport:
    """Point-to-point messages over a process group.

    After a timeout or a lost connection the process group is unusable (gloo closes its connections, so that peers
    notice soon), and every later call that needs it raises at once; after any other failure the transport goes on
    working.

    Args:
        context: with a group.
        device: where staging lies; default: the current GPU with NCCL, else the CPU.
    """

    name = "collective"

    def __init__(self, context: TransportContext, device: torch.device | None = None) -> None:
        assert context.group is not None
        self.rank, self._timeout = context.rank, context.timeout
        self._relays = context.relays or RelayBuffers(context.rank, {})
        self._planner = MessagePlanner(
            context.rank, context.source_buffers, context.destination_buffers, self._relays.buffers
        )
        self._group, self._notify_group = context.group, context.notify_group or context.group
        self._device, self._notify_device = (
            device or _staging_device(each) for each in (self._group, self._notify_group)
        )
        self._clock = PhaseClock()
        self._staging: dict[str, torch.Tensor] = {}
        self._shares: dict[int, _Share] = {}  # by bucket
        self._in_flight: dict[int, _InFlight] = {}  # started, by bucket
        self._broken: dict[Group, TransportError] = {}

    @staticmethod
    def obstacle(transfer: Transfer, exported: Set[BufferId]) -> str:
        """See `router.RegisteredTransport`: it carries everything."""
        return ""

    @classmethod
    def connect(cls, context: TransportContext) -> CollectiveTransport | None:
        """See `router.RegisteredTransport`; None without a process group."""
        return None if context.group is None else cls(context)

    @torch.no_grad()
    def start(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor] | None,
        reason: str = "",
    ) -> None:
        """Post the messages of a bucket, which were not yet; see `ports.Transport`.

        A failure to read is raised by `run`. Raises TransportError when the group is unusable or memory is short.
        """
        if bucket not in self._in_flight:
            self._in_flight[bucket] = self._launch(bucket, transfers, source, reason)

    @torch.no_grad()
    def run(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
    ) -> None:
        """Send and receive this rank's transfers of the bucket; see `ports.Transport`.

        Raises TransportError. Nothing was written to `destination` unless the phase in the message is "write".
        """
        self.start(bucket, transfers, source)
        exchange = self._in_flight.pop(bucket)
        self._wait(bucket, "transfer", exchange)
        if exchange.failure is not None:
            raise exchange.failure
        with self._clock.phase("write"):
            if failed := self._peer_failure(bucket, "transfer", exchange.incoming):
                raise PeerTransportError(failed)
            share = self._share_of(bucket, transfers)
            self._unpack(bucket, share, exchange.incoming, destination)
            copy_straight(self.name, bucket, share.own, lambda transfer: source[transfer.src.buffer.name], destination)

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """Take part in a bucket without reading or writing anything: peers get `reason` as a PeerTransportError.

        Called in place of `run` by a rank that failed elsewhere, so that its peers do not wait for it. What was started
        before is sent as it is. Raises TransportError only when the messages cannot be exchanged.
        """
        self.start(bucket, transfers, None, reason)
        self._wait(bucket, "transfer", self._in_flight.pop(bucket))

    def notify(
        self, bucket: int, phase: str, receivers: Iterable[int], senders: Iterable[int], reason: str = ""
    ) -> str:
        """See `ports.Transport`: headers alone go to the receivers. Raises TransportError as `run` does."""
        self._raise_if_broken(bucket, self._notify_group)
        outgoing, incoming = (
            [
                StagedMessage(Message(peer), torch.empty(HEADER_NBYTES, dtype=torch.uint8, device=self._notify_device))
                for peer in sorted(peers)
            ]
            for peers in (receivers, senders)
        )
        for staged in outgoing:
            staged.write_header(bucket, reason)
        self._wait(bucket, phase, self._post(bucket, phase, outgoing, incoming, self._notify_group))
        return self._peer_failure(bucket, phase, incoming)

    def take_seconds(self) -> dict[str, float]:
        """See `ports.Transport`."""
        return self._clock.take()

    def trim(self) -> int:
        """Free the staging memory, which the next bucket takes again; returns its bytes."""
        nbytes = self.staging_nbytes()
        self._staging.clear()
        return nbytes

    def close(self) -> None:
        """Free the staging memory; idempotent. The process groups stay the caller's. No bucket may be in flight."""
        self._staging.clear()
        self._shares.clear()

    def staging_nbytes(self) -> int:
        """Bytes of staging memory held now."""
        return sum(staging.numel() for staging in self._staging.values())

    # Staging, packing, unpacking.

    def _share_of(self, bucket: int, transfers: Sequence[Transfer]) -> _Share:
        share = self._shares.get(bucket)
        if share is None or share.transfers is not transfers:
            outgoing, incoming = self._planner.messages(transfers)
            share = self._shares[bucket] = _Share(
                transfers,
                outgoing,
                incoming,
                BatchedCopies(transfer for message in outgoing for transfer in message.packed()),
                BatchedCopies(transfer for message in incoming for transfer in message.unpacked()),
                BatchedCopies(one for one in transfers if one.src_rank == one.dst_rank == self.rank),
            )
        return share

    def _launch(
        self, bucket: int, transfers: Sequence[Transfer], source: Mapping[str, torch.Tensor] | None, reason: str
    ) -> _InFlight:
        """Pack and post the messages of a bucket; without a source void ones, for a `reason`."""
        self._raise_if_broken(bucket, self._group)
        with self._clock.phase("read"):
            share = self._share_of(bucket, transfers)
            slot = bucket % NUM_SLOTS
            sent = self._stage(f"send {slot}", share.outgoing)
            received = self._stage(f"receive {slot}", share.incoming, self._relays.tensors)
            failure = self._pack(bucket, share, sent, source) if source is not None else None
            for staged in sent:
                staged.write_header(bucket, reason if failure is None else str(failure))
        return replace(self._post(bucket, "transfer", sent, received, self._group), failure=failure)

    def _stage(
        self, side: str, messages: Sequence[Message], relays: Mapping[str, torch.Tensor] | None = None
    ) -> list[StagedMessage]:
        """Byte tensors for messages, out of the side's staging memory; relay images lie in `relays`, if given."""
        # One allocation holds all bodies and then all images, each in the order of the messages. Images that come in
        # need none of it: they are received into the relay buffer itself, of which they are the first elements.
        sizes = [message.nbytes for message in messages]
        if relays is None:
            sizes += [image.nbytes for message in messages for image in message.images]
        parts = self._staged_parts(side, sizes)
        bodies, images = parts[: len(messages)], iter(parts[len(messages) :])
        return [
            StagedMessage(
                message,
                body,
                tuple(
                    next(images) if relays is None else relays[image.buffer.name][: image.numel].view(torch.uint8)
                    for image in message.images
                ),
            )
            for message, body in zip(messages, bodies, strict=True)
        ]

    def _staged_parts(self, side: str, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Byte tensors of these sizes, out of the side's staging memory."""
        starts, end = [], 0
        for nbytes in sizes:
            starts.append(end)
            end = round_up(end + nbytes, _MESSAGE_ALIGNMENT)
        staging = self._staging.get(side)
        if staging is None or staging.numel() < end:
            staging = None  # the old memory goes before the new one comes, not beside it
            self._staging.pop(side, None)
            try:
                staging = torch.empty(end, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                raise TransportError(f"no memory for {end} bytes of {side} staging; make buckets smaller") from error
            self._staging[side] = staging
        return [staging[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=True)]

    def _pack(
        self, bucket: int, share: _Share, outgoing: Iterable[StagedMessage], source: Mapping[str, torch.Tensor]
    ) -> TransportError | None:
        """Fill the messages; returns the first failure."""
        flats = _flats(outgoing)
        try:
            share.packing.run(
                lambda transfer: self._source(transfer, source), lambda transfer: flats[transfer.dst.buffer]
            )
        except CopyError as failed:
            return failure_at(self.name, bucket, "read", share.planned(failed.transfer), failed.error)
        return None

    def _source(self, transfer: Transfer, source: Mapping[str, torch.Tensor]) -> torch.Tensor:
        flat, dtype = source[transfer.src.buffer.name], self._planner.source_dtype(transfer)
        if flat.dtype != dtype:
            raise TransportError(f"the source is {flat.dtype}, its layout says {dtype}; build the plan again")
        return flat

    def _peer_failure(self, bucket: int, phase: str, incoming: Sequence[StagedMessage]) -> str:
        for staged in incoming:
            if fault := staged.fault(bucket):
                return f"{self.name} transport, bucket {bucket}, phase {phase}, peer {staged.message.peer}: {fault}"
        return ""

    def _unpack(
        self, bucket: int, share: _Share, incoming: Iterable[StagedMessage], destination: Mapping[str, torch.Tensor]
    ) -> None:
        flats = _flats(incoming)
        try:
            share.unpacking.run(
                lambda transfer: flats[transfer.src.buffer], lambda transfer: destination[transfer.dst.buffer.name]
            )
        except CopyError as failed:
            raise failure_at(self.name, bucket, "write", share.planned(failed.transfer), failed.error) from failed.error
        synchronize(self._device)

    # The exchange.

    def _post(
        self,
        bucket: int,
        phase: str,
        outgoing: list[StagedMessage],
        incoming: list[StagedMessage],
        group: Group,
    ) -> _InFlight:
        """Begin to send and receive messages."""
        parts = [
            (is_sent, tensor, staged.message.peer)
            for is_sent, messages in ((False, incoming), (True, outgoing))
            for staged in messages
            for tensor in staged.tensors
        ]
        peers: list[object] = [peer for _, _, peer in parts]
        everybody = sorted({peer for _, _, peer in parts})
        try:
            works = _begin(parts, group) if parts else []
        except Exception as error:
            self._break(bucket, phase, group, everybody, error, timed_out=False)
        if len(works) != len(peers):  # NCCL gives one work for the whole batch
            peers = [everybody] * len(works)
        return _InFlight(group, outgoing, incoming, works, peers)

    def _wait(self, bucket: int, phase: str, exchange: _InFlight) -> None:
        deadline = time.monotonic() + self._timeout
        with self._clock.phase("transfer"):
            for work, peer in zip(exchange.works, exchange.peers, strict=True):
                try:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), _SHORTEST_WAIT)))
                except Exception as error:
                    timed_out = time.monotonic() > deadline - _ROUNDING
                    self._break(bucket, phase, exchange.group, peer, error, timed_out=timed_out)

    def _break(
        self, bucket: int, phase: str, group: Group, peer: object, error: Exception, *, timed_out: bool
    ) -> NoReturn:
        cause = f"nothing for {self._timeout:g} seconds" if timed_out else "the connection failed"
        if group is self._group:
            self._staging.clear()  # late bytes may still arrive in what the operations hold
            self._in_flight.clear()
        self._broken[group] = TransportError(
            f"{self.name} transport, bucket {bucket}, phase {phase}, peer {peer}: {cause} "
            f"({type(error).__name__}: {plain_text(error)}). See the peer's log; the process group cannot be used "
            "any more"
        )
        raise self._broken[group] from error

    def _raise_if_broken(self, bucket: int, group: Group) -> None:
        if group in self._broken:
            raise TransportError(f"bucket {bucket} cannot be exchanged after an earlier failure: {self._broken[group]}")


def _flats(messages: Iterable[StagedMessage]) -> dict[BufferId, torch.Tensor]:
    return {buffer: flat for staged in messages for buffer, flat in staged.flats().items()}


def _begin(parts: Iterable[tuple[bool, torch.Tensor, int]], group: Group) -> list[dist.Work]:
    """Send tensors, or receive into them: (whether it is sent, tensor, peer)."""
    if isinstance(group, RankGroup):
        return [
            group.begin_send(tensor, peer) if is_sent else group.begin_receive(tensor, peer)
            for is_sent, tensor, peer in parts
        ]
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend if is_sent else dist.irecv, tensor, peer, group) for is_sent, tensor, peer in parts]
    )


def _staging_device(group: Group) -> torch.device:
    if not isinstance(group, RankGroup) and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

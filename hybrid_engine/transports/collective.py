"""Between any two ranks of a process group: gloo on the CPU, NCCL on GPUs. Packed messages, per bucket and peer.

    source rank                                              destination rank
    strided reads -> staging [header|piece|piece|…] --isend/irecv--> staging -> strided writes, cast
                     image of a relay buffer -------isend/irecv--> the relay buffer itself

`start` posts a bucket's messages and leaves them in flight until `run` needs them, so the next bucket crosses while
this one is written and committed: at most NUM_SLOTS buckets at once, each with staging memory of its own, which is kept
and reused and grows to the largest bucket.

A fill of deltas (deltas.py) sends nothing ahead. Lengths are known only once headers have come, so each bucket takes
two batches, both within `run` or `abandon`:

    compare with copies -> headers of all peers --> contents of all peers, whole or deltas, none of what is void

Any two ranks post the same sequence for each other, and wait only for what the other posts in the same bucket.

A rank whose read fails, or that cannot take part in a bucket at all (`abandon`), still sends its messages: their
header says that the pieces are void, and why. So no peer is left waiting, and the process group stays usable. `notify`
sends headers alone: a rank got so far in a bucket, or why it did not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
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
from hybrid_engine.transports.deltas import Deltas
from hybrid_engine.transports.messages import ALIGNMENT, HEADER_NBYTES, Message, MessagePlanner, StagedMessage, round_up

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


_Part = tuple[int, torch.Tensor]
"""Bytes that are sent to a peer, or that come from it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Posted:
    """Works to wait for once (gloo waits for another message the next time); `works[i]` is about `peers[i]`."""

    group: Group
    works: Sequence[dist.Work]
    peers: Sequence[object]


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """The messages of one bucket that are being exchanged.

    Attributes:
        incoming: with the memory that they come into.
        posted: all of them, or their headers.
        failure: why the outgoing messages are void, or why those that come are lost.
        contents: to be sent once the headers of the incoming ones have come; None where `posted` is all.
        deltas: that come instead of contents, by peer.
    """

    incoming: Sequence[StagedMessage]
    posted: _Posted
    failure: TransportError | None
    contents: Sequence[_Part] | None
    deltas: dict[int, torch.Tensor] = field(default_factory=dict)


class CollectiveTransport:
    """Point-to-point messages over a process group.

    After a timeout or a lost connection the process group is unusable (gloo closes its connections, so that peers
    notice soon), and every later call that needs it raises at once; after any other failure the transport goes on
    working.

    Args:
        context: with a group. Staging lies on the current GPU with NCCL, else on the CPU.
    """

    name = "collective"

    def __init__(self, context: TransportContext) -> None:
        assert context.group is not None
        self.rank, self._timeout = context.rank, context.timeout
        self._relays = context.relays or RelayBuffers(context.rank, {})
        self._planner = MessagePlanner(
            context.rank, context.source_buffers, context.destination_buffers, self._relays.buffers
        )
        self._deltas = context.deltas
        self._group, self._notify_group = context.group, context.notify_group or context.group
        self._device, self._notify_device = map(_staging_device, (self._group, self._notify_group))
        self._receives_copies = self._device.type == "cpu"  # messages come into the copies themselves
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
        """Post the messages of a bucket, which were not yet; see `ports.Transport`. Nothing in a fill of deltas.

        A failure to read is raised by `run`. Raises TransportError when the group is unusable or memory is short.
        """
        if bucket not in self._in_flight and not self._sends_deltas:
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
        exchange = self._exchange(bucket, transfers, source)
        if exchange.failure is not None:
            raise exchange.failure
        with self._clock.phase("write"):
            if failed := self._peer_failure(bucket, "transfer", exchange.incoming):
                raise PeerTransportError(failed)
            share = self._share_of(bucket, transfers)
            if self._deltas is not None:
                self._complete(bucket, exchange, self._deltas)
            self._unpack(bucket, share, exchange.incoming, destination)
            copy_straight(self.name, bucket, share.own, lambda transfer: source[transfer.src.buffer.name], destination)

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """Take part in a bucket without reading or writing anything: peers get `reason` as a PeerTransportError.

        Called in place of `run` by a rank that failed elsewhere, so that its peers do not wait for it. What was started
        before is sent as it is. Raises TransportError only when the messages cannot be exchanged.
        """
        self._exchange(bucket, transfers, None, reason)

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
        posted = self._post(bucket, phase, _parts(incoming), _parts(outgoing), self._notify_group)
        self._wait(bucket, phase, posted, self._deadline())
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
        """Free staging memory and copies; idempotent. Process groups stay the caller's. No bucket may be in flight."""
        self._staging.clear()
        if self._deltas is not None:
            self._deltas.close()
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
            memory = self._staged_parts(f"send {slot}", [message.staged_nbytes for message in share.outgoing])
            sent = [message.staged_in(part) for message, part in zip(share.outgoing, memory, strict=True)]
            received = self._awaited(bucket, f"receive {slot}", share.incoming)
            failure = self._pack(bucket, share, sent, source) if source is not None else None
            contents, unsent = self._write_headers(bucket, sent, reason if failure is None else str(failure))
        of_deltas = self._sends_deltas
        parts = _parts(received, headers=of_deltas), _parts(sent, headers=of_deltas)
        posted = self._post(bucket, "transfer", *parts, self._group)
        return _InFlight(received, posted, failure or unsent, contents if of_deltas else None)

    def _write_headers(
        self, bucket: int, sent: Sequence[StagedMessage], reason: str
    ) -> tuple[list[_Part], TransportError | None]:
        """Write the headers of packed messages, or of void ones for a `reason`.

        Returns what follows them in a fill of deltas, and a failure to compare, for which they are void.
        """
        found: Sequence[tuple[torch.Tensor | None, int]] = [(None, 0)] * len(sent)
        failure = None
        if self._deltas is not None and not reason:
            try:
                found = [self._deltas.outgoing(bucket, staged.message.peer, staged.contents) for staged in sent]
            except (RuntimeError, MemoryError) as error:  # torch's and numpy's for want of memory
                failure = TransportError(f"{self.name} transport, bucket {bucket}, phase read: {error}")
                reason = str(failure)
        for staged, (delta, digest) in zip(sent, found, strict=True):
            staged.write_header(bucket, reason, -1 if delta is None else delta.numel(), digest)
        if reason:
            return [], failure
        bodies = zip(sent, found, strict=True)
        return [(each.message.peer, each.contents if delta is None else delta) for each, (delta, _) in bodies], None

    def _awaited(self, bucket: int, side: str, messages: Sequence[Message]) -> list[StagedMessage]:
        """Memory for messages that come: where they may be deltas, each in one piece, on the host the copy itself."""
        if self._deltas is None:  # images need none: they come into the relay buffers, of which they are the beginning
            relays, bodies = self._relays.tensors, self._staged_parts(side, [each.nbytes for each in messages])
            return [
                StagedMessage(
                    message,
                    body,
                    tuple(relays[image.buffer.name][: image.numel].view(torch.uint8) for image in message.images),
                )
                for message, body in zip(messages, bodies, strict=True)
            ]
        parts = [self._deltas.received(bucket, each.peer, each.staged_nbytes) for each in messages]
        if not self._receives_copies:
            parts = self._staged_parts(side, [each.staged_nbytes for each in messages])
        return [message.staged_in(memory) for message, memory in zip(messages, parts, strict=True)]

    def _complete(self, bucket: int, exchange: _InFlight, deltas: Deltas) -> None:
        """Make of deltas what was packed, and bring relay images to where they are read."""
        for staged in exchange.incoming:
            peer = staged.message.peer
            deltas.arrived(bucket, peer, staged.contents, exchange.deltas.get(peer), staged.read_header().digest)
            for image, flat in zip(staged.message.images, staged.images, strict=True):
                self._relays.tensors[image.buffer.name][: image.numel].view(torch.uint8).copy_(flat)

    def _staged_parts(self, side: str, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Byte tensors of these sizes, out of the side's staging memory."""
        starts, end = [], 0
        for nbytes in sizes:
            starts.append(end)
            end = round_up(end + nbytes, ALIGNMENT)
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

    @property
    def _sends_deltas(self) -> bool:
        return self._deltas is not None and not self._deltas.is_whole

    def _exchange(
        self, bucket: int, transfers: Sequence[Transfer], source: Mapping[str, torch.Tensor] | None, reason: str = ""
    ) -> _InFlight:
        """Send and receive the messages of a bucket, of which some may be under way."""
        exchange = self._in_flight.pop(bucket, None) or self._launch(bucket, transfers, source, reason)
        deadline = self._deadline()
        self._wait(bucket, "transfer", exchange.posted, deadline)
        if exchange.contents is None:
            return exchange
        announced, failure = self._announced(exchange)
        rest = self._post(bucket, "transfer", announced, exchange.contents, self._group)
        self._wait(bucket, "transfer", rest, deadline)
        return replace(exchange, failure=exchange.failure or failure)

    def _announced(self, exchange: _InFlight) -> tuple[list[_Part], TransportError | None]:
        """Memory for what the headers that have come announce, and a failure to find some.

        The peers send it in any case, and it must be received, or they are out of step from here on. So deltas come
        into the memory of the messages where that is no copy, and where there is no other.
        """
        headers = [staged.read_header() for staged in exchange.incoming]
        parts, failure = list[_Part](), None
        rooms = [staged.contents for staged in exchange.incoming]  # a delta is shorter
        if self._receives_copies:
            try:
                rooms = self._staged_parts("deltas", [max(header.delta_nbytes, 0) for header in headers])
            except TransportError as error:
                failure = error
        for staged, header, room in zip(exchange.incoming, headers, rooms, strict=True):
            peer, memory = staged.message.peer, staged.contents
            if header.delta_nbytes >= 0:
                memory = exchange.deltas[peer] = room[: header.delta_nbytes]
            if not header.failure:
                parts.append((peer, memory))
        return parts, failure

    def _post(self, bucket: int, phase: str, received: Iterable[_Part], sent: Iterable[_Part], group: Group) -> _Posted:
        """Begin to receive and to send, in this order, what is not empty."""
        parts = [(is_sent, *part) for is_sent, side in ((False, received), (True, sent)) for part in side]
        parts = [part for part in parts if part[-1].numel()]
        peers: list[object] = [peer for _, peer, _ in parts]
        everybody = sorted({peer for _, peer, _ in parts})
        try:
            works = _begin(parts, group) if parts else []
        except Exception as error:
            self._break(bucket, phase, group, everybody, error, timed_out=False)
        if len(works) != len(peers):  # NCCL gives one work for the whole batch
            peers = [everybody] * len(works)
        return _Posted(group, works, peers)

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout

    def _wait(self, bucket: int, phase: str, posted: _Posted, deadline: float) -> None:
        with self._clock.phase("transfer"):
            for work, peer in zip(posted.works, posted.peers, strict=True):
                try:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), _SHORTEST_WAIT)))
                except Exception as error:
                    timed_out = time.monotonic() > deadline - _ROUNDING
                    self._break(bucket, phase, posted.group, peer, error, timed_out=timed_out)

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


def _parts(messages: Iterable[StagedMessage], *, headers: bool = False) -> list[_Part]:
    """All of these messages, or their headers alone."""
    return [
        (staged.message.peer, memory)
        for staged in messages
        for memory in ((staged.header,) if headers else staged.tensors)
    ]


def _begin(parts: Iterable[tuple[bool, int, torch.Tensor]], group: Group) -> list[dist.Work]:
    """Send tensors, or receive into them: (whether it is sent, peer, tensor)."""
    if isinstance(group, RankGroup):
        return [
            group.begin_send(tensor, peer) if is_sent else group.begin_receive(tensor, peer)
            for is_sent, peer, tensor in parts
        ]
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend if is_sent else dist.irecv, tensor, peer, group) for is_sent, peer, tensor in parts]
    )


def _staging_device(group: Group) -> torch.device:
    if not isinstance(group, RankGroup) and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

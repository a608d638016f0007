"""Transport between any two ranks of a group: packed messages over gloo (CPU) or NCCL (GPU).

    source rank                                              destination rank
    strided reads -> staging [header|piece|piece|…] --isend/irecv--> staging -> strided writes, cast

`start` posts a bucket's messages and leaves them in flight until `run` needs them, so the next
bucket crosses while this one is written and committed. At most NUM_SLOTS buckets are in flight,
each with separate staging memory, which grows to the largest bucket. Any two ranks post the same
sequence for each other, and wait only for messages that the other posts in the same bucket.

A rank whose read fails, or that cannot take part in a bucket (`abandon`), still sends its messages:
their headers declare the pieces void and carry the reason. No peer is left waiting, and the process
group stays usable. `notify` sends headers alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from hybrid_engine.errors import PeerTransportError, TransportError
from hybrid_engine.planning.plan import Costs, Transfer
from hybrid_engine.planning.relays import NUM_SLOTS
from hybrid_engine.ranks.groups import RankGroup, plain_text
from hybrid_engine.ranks.torch_internals import TensorDict, abort_group, end_batch
from hybrid_engine.records.layout import BufferId
from hybrid_engine.transports.context import Group, Transport, TransportContext
from hybrid_engine.transports.copies import BatchedCopies, FlatBuffers
from hybrid_engine.transports.deltas import Deltas
from hybrid_engine.transports.messages import (
    ALIGNMENT,
    HEADER_NBYTES,
    Message,
    MessagePlanner,
    StagedMessage,
    read_headers,
    stage,
    write_headers,
)

# Seconds. torch interprets a timeout of 0 as "no timeout".
_MIN_WAIT = 0.001
# Seconds by which a wait may end early, because torch counts whole milliseconds.
_WAIT_TOLERANCE = 0.01
# Seconds between two polls of NCCL's messages.
_MIN_POLL_INTERVAL = 0.00001
_MAX_POLL_INTERVAL = 0.0005
# Peers that a rank receives from, and those that it sends to, in one batch of NCCL's operations.
_MAX_PEERS_PER_BATCH = 32


@dataclass(frozen=True, slots=True, eq=False)
class _BucketMessages:
    """Messages of this rank in a bucket, by ascending peer.

    `packing`, `unpacking`: into and out of messages.
    """

    outgoing: Sequence[Message]
    incoming: Sequence[Message]
    packing: BatchedCopies
    unpacking: BatchedCopies


Posted = Sequence[tuple[dist.Work, object]]
"""Posted operations, with the peer of each, or the peers.

Each work is waited for once: a second wait would wait for the next message with gloo."""


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """The messages of a bucket that are being exchanged.

    Attributes:
        incoming: messages with the memory that receives them.
        failure: reason why the outgoing messages are void.
    """

    incoming: Sequence[StagedMessage]
    posted: Posted
    failure: TransportError | None


class CollectiveTransport(Transport):
    """Point-to-point messages over a process group.

    After a timeout or a lost connection the process group is unusable, and every later call that
    needs it raises at once. After any other failure the transport continues to work.

    Args:
        context: must have a group. Staging lies on the current GPU with NCCL, else on the CPU.
    """

    name = "collective"

    def __init__(self, context: TransportContext) -> None:
        assert context.group is not None
        super().__init__(context.rank)
        self._timeout = context.timeout
        self._relays = context.relays
        self._planner = MessagePlanner(
            context.rank,
            context.source_buffers,
            context.destination_buffers,
            self._relays.buffers,
        )
        self._group = context.group
        self._notify_group = context.notify_group
        self._device = torch.device("cpu")
        if not isinstance(self._group, RankGroup):
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._deltas = Deltas() if context.sends_deltas else None
        self._staging: TensorDict = {}
        # By bucket.
        self._in_flight: dict[int, InFlight] = {}
        self._broken: dict[Group, TransportError] = {}

    @classmethod
    def connect(cls, context: TransportContext) -> Self | None:
        """See `Transport`; None without a process group."""
        return None if context.group is None else cls(context)

    def begin(self, *, whole: bool) -> None:
        """See `context.Transport`."""
        if self._deltas is not None:
            self._deltas.begin(whole=whole)

    def prepare(self, transfers: Sequence[Transfer]) -> _BucketMessages:
        """Return the messages of these transfers; see `context.Transport`."""
        outgoing, incoming = self._planner.messages(transfers)
        packed = [transfer for message in outgoing for transfer in message.transfers]
        unpacked = [transfer for message in incoming for transfer in message.transfers]
        return _BucketMessages(outgoing, incoming, BatchedCopies(packed), BatchedCopies(unpacked))

    @torch.no_grad()
    def start(
        self, bucket: int, share: _BucketMessages, source: FlatBuffers, reason: str = ""
    ) -> None:
        """Post the messages of a bucket if they are not posted yet; see `context.Transport`.

        Raises TransportError when the group is unusable or memory is short; `run` raises others.
        """
        if bucket in self._in_flight:
            return
        self._raise_if_broken(bucket, self._group)
        # Messages of the previous bucket may still be in flight, in the other slot.
        slot = bucket % NUM_SLOTS
        with self._costs.timed("read"):
            sent = self._stage(f"send {slot}", share.outgoing)
            received = self._stage(f"receive {slot}", share.incoming)
            failure = None
            if not reason:
                sent, failure = self._pack(bucket, share, sent, source)
            write_headers(sent, bucket, reason if failure is None else str(failure))
        posted = self._post(bucket, "transfer", self._group, received, sent)
        self._in_flight[bucket] = InFlight(received, posted, failure)

    @torch.no_grad()
    def run(
        self, bucket: int, share: _BucketMessages, source: FlatBuffers, destination: FlatBuffers
    ) -> None:
        """Send and receive this rank's messages of the bucket; see `context.Transport`.

        Raises TransportError. `destination` is unchanged unless the phase in the message is
        "write".
        """
        exchange = self._exchange(bucket, share, source)
        # Raised only now, after the messages with the reason were sent.
        if exchange.failure is not None:
            raise exchange.failure
        received = read_headers(exchange.incoming, bucket)
        with self._costs.timed("write"):
            self._require_valid(bucket, "transfer", received)
            if self._deltas is not None:
                self._apply(bucket, received, self._deltas)
            flats = _flats(received)
            targets = {**destination, **self._relays.tensors}
            share.unpacking.run(
                lambda transfer: flats[transfer.src.buffer],
                lambda transfer: targets[transfer.dst.buffer.name],
                self.where(bucket, "write"),
            )

    def abandon(self, bucket: int, share: _BucketMessages, reason: str) -> None:
        """Take part in a bucket without reading or writing; see `context.Transport`.

        Messages that were started before are sent unchanged. Raises TransportError only when the
        messages cannot be exchanged.
        """
        self._exchange(bucket, share, {}, reason)

    def notify(
        self,
        bucket: int,
        phase: str,
        receivers: Iterable[int],
        senders: Iterable[int],
        reason: str,
    ) -> None:
        """Send headers alone to the receivers; see `context.Transport`.

        Raises TransportError as `run` does.
        """
        group = self._notify_group
        assert group is not None, "a plan with relays has a group for notifications"
        self._exchange_headers(bucket, phase, group, receivers, senders, reason)

    def meet(self, peers: Set[int]) -> None:
        """Exchange headers with the peers; see `context.Transport`."""
        # NCCL connects two ranks, and allocates memory for them, at their first message.
        self._exchange_headers(0, "first message", self._group, peers, peers, "")
        self.take_costs()  # not those of the first fill

    def trim(self) -> Costs:
        """Free the staging memory, which the next bucket allocates again; see the base class."""
        costs = Costs()
        costs.counts["staging_bytes"] = sum(flat.numel() for flat in self._staging.values())
        if self._deltas is not None:
            costs.counts["bytes_of_copies"] = self._deltas.copies_nbytes
        self._staging.clear()
        return costs

    def close(self) -> None:
        """Free staging memory and copies for deltas; idempotent.

        Process groups stay open. No bucket is in flight.
        """
        self._staging.clear()
        if self._deltas is not None:
            self._deltas.close()

    # Staging, packing, unpacking.

    def _stage(self, side: str, messages: Sequence[Message]) -> list[StagedMessage]:
        """Return messages in the staging memory of `side`."""
        nbytes = sum(message.nbytes for message in messages)
        if side not in self._staging or self._staging[side].numel() < nbytes:
            # Free the old memory before the new one is allocated.
            self._staging.pop(side, None)
            try:
                self._staging[side] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                raise TransportError(
                    f"no memory for {nbytes} bytes of {side} staging; make buckets smaller",
                    code="no-staging-memory",
                ) from error
        return stage(messages, self._staging[side][:nbytes])

    def _apply(self, bucket: int, received: Iterable[StagedMessage], deltas: Deltas) -> None:
        """Turn received deltas into messages, and subtract the bytes that they saved."""
        for staged in received:
            deltas.decode(bucket, staged)
            if staged.sent_nbytes < staged.contents.numel():
                # The plan counts all bytes of the transfers, without header and padding, and all
                # cross one link.
                transfers = staged.message.transfers
                saved = sum(transfer.nbytes for transfer in transfers) - staged.sent_nbytes
                self._costs.nbytes_by_peer[self.name][staged.message.peer] -= saved
                self._costs.nbytes_by_link[transfers[0].link] -= saved

    def _pack(
        self,
        bucket: int,
        share: _BucketMessages,
        outgoing: list[StagedMessage],
        source: FlatBuffers,
    ) -> tuple[list[StagedMessage], TransportError | None]:
        """Fill the messages; return what to send, and the first failure."""
        if self._deltas is not None:
            for staged in outgoing:
                # Deltas compare the padding, too: pieces end up to 63 bytes before the message.
                staged.memory[-ALIGNMENT:].zero_()
        flats = _flats(outgoing)

        def source_of(transfer: Transfer) -> torch.Tensor:
            flat = source[transfer.src.buffer.name]
            planned = self._planner.source_buffers[transfer.src.buffer].dtype
            if flat.dtype != getattr(torch, planned):
                raise TransportError(
                    f"the source is {flat.dtype}, its layout has torch.{planned}; "
                    "build the plan again",
                    code="different-dtypes",
                )
            return flat

        where = self.where(bucket, "read")
        try:
            share.packing.run(source_of, lambda transfer: flats[transfer.dst.buffer], where)
            if self._deltas is None:
                return outgoing, None
            encode = self._deltas.encode
            return [encode(bucket, staged, self._costs) for staged in outgoing], None
        except TransportError as failure:
            return outgoing, failure
        except (RuntimeError, MemoryError) as error:
            # torch and numpy raise these when memory is short.
            return outgoing, TransportError(f"{where}: {error}", code="read-failed")

    def _require_valid(self, bucket: int, phase: str, received: Iterable[StagedMessage]) -> None:
        """Raise PeerTransportError with the fault of the first message that has one."""
        for staged in received:
            if staged.fault:
                raise PeerTransportError(
                    f"{self.where(bucket, phase)}, peer {staged.message.peer}: {staged.fault}",
                    code="peer-failed",
                )

    # The exchange.

    def _exchange_headers(
        self,
        bucket: int,
        phase: str,
        group: Group,
        receivers: Iterable[int],
        senders: Iterable[int],
        reason: str,
    ) -> None:
        self._raise_if_broken(bucket, group)
        device = self._device if group is self._group else "cpu"
        outgoing = _headers(receivers, device)
        incoming = _headers(senders, device)
        write_headers(outgoing, bucket, reason)
        posted = self._post(bucket, phase, group, incoming, outgoing)
        self._wait(bucket, phase, group, posted)
        self._require_valid(bucket, phase, read_headers(incoming, bucket))

    def _exchange(
        self, bucket: int, share: _BucketMessages, source: FlatBuffers, reason: str = ""
    ) -> InFlight:
        """Exchange the messages of a bucket."""
        self.start(bucket, share, source, reason)
        exchange = self._in_flight.pop(bucket)
        self._wait(bucket, "transfer", self._group, exchange.posted)
        return exchange

    def _post(
        self,
        bucket: int,
        phase: str,
        group: Group,
        received: Iterable[StagedMessage],
        sent: Iterable[StagedMessage],
    ) -> Posted:
        """Post the receives and then the sends of all messages."""
        operations = [(False, staged.message.peer, staged.sent) for staged in received]
        operations += [(True, staged.message.peer, staged.sent) for staged in sent]
        peers: list[Any] = [peer for _, peer, _ in operations]
        all_peers = sorted(set(peers))
        try:
            works = _begin(operations, self.rank, group)
        except Exception as error:
            self._break(bucket, phase, group, all_peers, error, timed_out=False)
        if not isinstance(group, RankGroup):
            # NCCL returns one work for each batch.
            peers = [all_peers] * len(works)
        return list(zip(works, peers, strict=True))

    def _wait(self, bucket: int, phase: str, group: Group, posted: Posted) -> None:
        # From here on: a message that was started with the bucket before has the full time left.
        deadline = time.monotonic() + self._timeout
        with self._costs.timed("transfer"):
            for work, peer in posted:
                try:
                    _finish(work, deadline, of_nccl=not isinstance(group, RankGroup))
                except Exception as error:
                    # With gloo a timeout and a lost connection raise the same type of error.
                    timed_out = time.monotonic() > deadline - _WAIT_TOLERANCE
                    self._break(bucket, phase, group, peer, error, timed_out=timed_out)

    def _break(
        self,
        bucket: int,
        phase: str,
        group: Group,
        peer: object,
        error: Exception,
        *,
        timed_out: bool,
    ) -> NoReturn:
        """Mark the group as unusable, and raise TransportError with the cause."""
        cause = f"nothing for {self._timeout:g} seconds" if timed_out else "the connection failed"
        if not isinstance(group, RankGroup):
            # NCCL's kernels would keep the device busy without end.
            abort_group(group)
        if group is self._group:
            # Late bytes may still arrive in the memory that the operations hold.
            self._staging.clear()
            self._in_flight.clear()
        self._broken[group] = TransportError(
            f"{self.where(bucket, phase)}, peer {peer}: {cause} "
            f"({type(error).__name__}: {plain_text(error)}). See the peer's log; "
            "the process group cannot be used any more",
            code="exchange-failed",
        )
        raise self._broken[group] from error

    def _raise_if_broken(self, bucket: int, group: Group) -> None:
        if group in self._broken:
            earlier = self._broken[group]
            raise TransportError(
                f"bucket {bucket} cannot be exchanged after an earlier failure: {earlier}",
                code="exchange-is-broken",
            )


def _headers(peers: Iterable[int], device: torch.device | str) -> list[StagedMessage]:
    # Not in staging memory, which belongs to the buckets in flight.
    messages = [Message(peer) for peer in sorted(peers)]
    memory = torch.empty(len(messages) * HEADER_NBYTES, dtype=torch.uint8, device=device)
    return stage(messages, memory)


def _flats(messages: Iterable[StagedMessage]) -> dict[BufferId, torch.Tensor]:
    """Return the flat buffers of packed transfers: each message in every dtype."""
    return {
        buffer: staged.memory.view(dtype)
        for staged in messages
        for buffer, dtype in staged.message.dtypes.items()
    }


def _begin(
    operations: Iterable[tuple[bool, int, torch.Tensor]], rank: int, group: Group
) -> list[dist.Work]:
    """Post operations of `rank`, given as (True to send or False to receive, peer, tensor)."""
    if isinstance(group, RankGroup):
        return [
            group.begin_send(tensor, peer) if is_sent else group.begin_receive(tensor, peer)
            for is_sent, peer, tensor in operations
        ]
    works = []

    def batch_of(operation: tuple[bool, int, torch.Tensor]) -> int:
        # By the difference of destination and source, so both ends have a message in the same
        # batch. All post batches in ascending order, so none waits for a later one.
        # From rank 3 to 40, 37 // 32 is batch 1 on both; from 40 to 3, -37 // 32 is batch -2.
        is_sent, peer, _ = operation
        return (peer - rank if is_sent else rank - peer) // _MAX_PEERS_PER_BATCH

    for _, operations_of_batch in groupby(sorted(operations, key=batch_of), batch_of):
        batch = [
            dist.P2POp(dist.isend if is_sent else dist.irecv, tensor, peer, group)
            for is_sent, peer, tensor in operations_of_batch
        ]
        try:
            works += dist.batch_isend_irecv(batch)
        except Exception:
            # torch leaves NCCL's group call open after a failure.
            end_batch(group, batch[0].tensor.device)
            raise
    return works


def _finish(work: dist.Work, deadline: float, *, of_nccl: bool) -> None:
    """Wait until a message is exchanged; with NCCL the host and the current stream wait."""
    if not of_nccl:
        work.wait(timedelta(seconds=max(deadline - time.monotonic(), _MIN_WAIT)))
        return
    # torch's timeout would abort NCCL's communicator as a failure found by its watchdog. That ends
    # the process within a moment: before the other ranks are notified of the failure, and before
    # the training state is back.
    pause = _MIN_POLL_INTERVAL
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise dist.DistError("the peer's messages have not come")
        time.sleep(pause)
        # A tenth of the wait, so that the end is noticed by a tenth too late at most.
        pause = min(1.1 * pause, _MAX_POLL_INTERVAL)
    # Complete, so this only orders the current stream after the message.
    work.wait()

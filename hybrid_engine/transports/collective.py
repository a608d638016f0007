"""Between any two ranks of a process group: gloo on the CPU, NCCL on GPUs. Packed messages, per bucket and peer.

    source rank                                              destination rank
    strided reads -> staging [header|piece|piece|…] --isend/irecv--> staging -> strided writes, cast
                     image of a relay buffer -------isend/irecv--> the relay buffer itself

Both ends derive the same messages from the order of the bucket's transfers: pieces follow one another in that order,
in the source's dtype or, where it is narrower, the destination's, each aligned to its element size. What goes into a
relay buffer (planning/relays.py) is a message of its own, packed as it lies there. Nothing is pickled and no object
collective runs.

`start` posts a bucket's messages and leaves them on their way until `run` needs them, so the next bucket crosses while
this one is written and committed: at most NUM_SLOTS buckets at once, each with staging memory of its own, which is kept
and reused and grows to the largest bucket.

A rank whose read fails, or that cannot take part in a bucket at all (`abandon`), still sends its messages: their
header says that the pieces are void, and why. So no peer is left waiting, and the process group stays usable. `tell`
sends headers alone: a rank got so far in a bucket, or why it did not.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from hybrid_engine.errors import PeerTransportError, TransportError
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.planning.relays import NUM_SLOTS
from hybrid_engine.ports import PhaseClock
from hybrid_engine.ranks.process_groups import plain_text
from hybrid_engine.records.layout import BufferId
from hybrid_engine.transports.copies import copy_straight, failure_at, strided, synchronize
from hybrid_engine.transports.relay_buffers import RelayBuffers

_HEADER = struct.Struct("<qqH")  # bucket, bytes of the message, length of the failure's text (0: the pieces are good)
_HEADER_NBYTES = 512
_MESSAGE_ALIGNMENT = 64  # bytes
_SHORTEST_WAIT = 0.001  # seconds; torch takes a timeout of 0 for "no timeout"
_ROUNDING = 0.01  # seconds by which a wait may end early: torch counts whole milliseconds


@dataclass(frozen=True, slots=True)
class _Piece:
    """One transfer's elements in a message: `nbytes` from `start`, row-major, in the dtype of the wire."""

    transfer: Transfer
    dtype: torch.dtype
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _RelayImage:
    """What one rank sends into one relay buffer of another: its first `numel` elements, as they lie there."""

    buffer: BufferId
    transfers: tuple[Transfer, ...]
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Message:
    """What one rank sends another in one bucket.

    Attributes:
        nbytes: of header, pieces and padding.
        images: follow as messages of their own.
    """

    peer: int
    pieces: tuple[_Piece, ...] = ()
    nbytes: int = _HEADER_NBYTES
    images: tuple[_RelayImage, ...] = ()

    @property
    def total_nbytes(self) -> int:
        return self.nbytes + sum(image.nbytes for image in self.images)


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """A message and the byte tensors that it is sent from or comes into; `image_bytes` are those of its images."""

    message: _Message
    body: torch.Tensor
    image_bytes: tuple[torch.Tensor, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.body, *self.image_bytes


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """The messages of one bucket (or of one `tell`) that are on their way.

    Attributes:
        group: over which they go.
        works: what to wait for, `peers[i]` being whom `works[i]` is about.
        failure: why the outgoing messages are void.
    """

    group: dist.ProcessGroup | None
    outgoing: list[_Staged]
    incoming: list[_Staged]
    works: list[dist.Work]
    peers: list[object]
    failure: TransportError | None = None


class CollectiveTransport:
    """Point-to-point messages over a process group.

    Every rank of a bucket's transfers calls `run` (or `abandon`) for that bucket, buckets in the same order. After a
    timeout or a lost connection the process group is unusable (gloo closes its connections, so that peers notice
    soon), and every later call that needs it raises at once; after any other failure the transport goes on working.
    """

    name = "collective"

    def __init__(
        self,
        rank: int,
        source_dtypes: Mapping[BufferId, str],
        group: dist.ProcessGroup | None = None,
        *,
        destination_dtypes: Mapping[BufferId, str] | None = None,
        relays: RelayBuffers | None = None,
        tell_group: dist.ProcessGroup | None = None,
        timeout: float = 300.0,
        device: torch.device | None = None,
    ) -> None:
        """Args:
        rank: global rank of this process; transfers name global ranks.
        source_dtypes: `Buffer.dtype` of the source buffers of all ranks: what is on the wire.
        destination_dtypes: of destination buffers of all ranks; a narrower one is on the wire instead.
        relays: the relay buffers that this rank has to do with; default: none.
        group: holds all ranks of the transfers; default: the world. Better one of its own: after a timeout it is dead.
        tell_group: for `tell`; default: `group`. Better gloo, since NCCL would deliver after all that is on its way.
        timeout: seconds one call of `run` may wait in all.
        device: where staging lies; default: the current GPU with NCCL, else the CPU.
        """
        if timeout <= 0:
            raise ValueError(f"a timeout of {timeout} seconds")
        self.rank = rank
        self._source_dtypes = _torch_dtypes(source_dtypes)
        self._destination_dtypes = _torch_dtypes(destination_dtypes or {})
        self._relays = relays or RelayBuffers(rank, {})
        self._group, self._tell_group = group, tell_group or group
        self._timeout = timeout
        self._device, self._tell_device = (device or _staging_device(each) for each in (group, self._tell_group))
        self.clock = PhaseClock()
        self._staging: dict[str, torch.Tensor] = {}
        self._in_flight: dict[int, _InFlight] = {}  # started, by bucket
        self._broken: dict[dist.ProcessGroup | None, TransportError] = {}

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
        in_flight = self._in_flight.pop(bucket)
        self._wait(bucket, "transfer", in_flight)
        if in_flight.failure is not None:
            raise in_flight.failure
        with self.clock.phase("write"):
            if failed := self._peer_failure(bucket, "transfer", in_flight.incoming):
                raise PeerTransportError(failed)
            self._unpack(bucket, in_flight.incoming, destination)
            own = [transfer for transfer in transfers if transfer.src_rank == transfer.dst_rank == self.rank]
            copy_straight(self.name, bucket, own, lambda transfer: source[transfer.src.buffer.name], destination)

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """Take part in a bucket without reading or writing anything: peers get `reason` as a PeerTransportError.

        Called in place of `run` by a rank that failed elsewhere, so that its peers do not wait for it. What was started
        before is sent as it is. Raises TransportError only when the messages cannot be exchanged.
        """
        self.start(bucket, transfers, None, reason)
        self._wait(bucket, "transfer", self._in_flight.pop(bucket))

    def tell(self, bucket: int, phase: str, listeners: Iterable[int], speakers: Iterable[int], reason: str = "") -> str:
        """Tell `listeners` that this rank has finished a phase of a bucket, or failed for a `reason`; hear `speakers`.

        Returns what the first of the speakers to fail said, with peer, bucket and phase; "" when none did. Each rank
        is a listener of those that are its speakers. Raises TransportError as `run` does.
        """
        self._raise_if_broken(bucket, self._tell_group)
        outgoing, incoming = (
            [
                _Staged(_Message(peer), torch.empty(_HEADER_NBYTES, dtype=torch.uint8, device=self._tell_device), ())
                for peer in sorted(peers)
            ]
            for peers in (listeners, speakers)
        )
        for staged in outgoing:
            _write_header(staged, bucket, reason)
        self._wait(bucket, phase, self._post(bucket, phase, outgoing, incoming, self._tell_group))
        return self._peer_failure(bucket, phase, incoming)

    def close(self) -> None:
        """Free the staging memory; idempotent. The process groups stay the caller's. No bucket may be on its way."""
        self._staging.clear()

    def trim(self) -> int:
        """Free the staging memory, which the next bucket takes again; returns its bytes."""
        nbytes = self.staging_nbytes()
        self._staging.clear()
        return nbytes

    def staging_nbytes(self) -> int:
        """Bytes of staging memory held now."""
        return sum(staging.numel() for staging in self._staging.values())

    # The schedule: the same at both ends.

    def _messages(self, transfers: Sequence[Transfer]) -> tuple[list[_Message], list[_Message]]:
        """What this rank sends and what it receives, by ascending peer."""
        outgoing: dict[int, list[Transfer]] = {}
        incoming: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            if transfer.src_rank == transfer.dst_rank:
                continue  # no message; `run` copies it
            if transfer.src_rank == self.rank:
                outgoing.setdefault(transfer.dst_rank, []).append(transfer)
            elif transfer.dst_rank == self.rank:
                incoming.setdefault(transfer.src_rank, []).append(transfer)
        return tuple(
            [self._message(peer, by_peer[peer]) for peer in sorted(by_peer)] for by_peer in (outgoing, incoming)
        )

    def _message(self, peer: int, transfers: Sequence[Transfer]) -> _Message:
        pieces, end = [], _HEADER_NBYTES
        by_relay_buffer: dict[BufferId, list[Transfer]] = {}
        for transfer in transfers:
            if transfer.dst.buffer in self._relays.buffers:
                by_relay_buffer.setdefault(transfer.dst.buffer, []).append(transfer)
                continue
            dtype = self._dtypes_of(transfer)[1]
            start = _round_up(end, dtype.itemsize)
            pieces.append(_Piece(transfer, dtype, start, transfer.numel * dtype.itemsize))
            end = start + pieces[-1].nbytes
        images = (self._relay_image(buffer, by_relay_buffer[buffer]) for buffer in sorted(by_relay_buffer))
        return _Message(peer, tuple(pieces), end, tuple(images))

    def _relay_image(self, buffer: BufferId, transfers: Sequence[Transfer]) -> _RelayImage:
        dtype = getattr(torch, self._relays.buffers[buffer].dtype)
        return _RelayImage(buffer, tuple(transfers), dtype, max(one.dst.extent(one.lengths).stop for one in transfers))

    def _dtypes_of(self, transfer: Transfer) -> tuple[torch.dtype, torch.dtype]:
        """Of the source, and of the wire."""
        source = self._source_dtypes.get(transfer.src.buffer)
        if source is None:
            raise TransportError(f"{transfer.tensor}: the dtype of {transfer.src.buffer} was not given")
        destination = self._destination_dtypes.get(transfer.dst.buffer, source)
        return source, destination if destination.itemsize < source.itemsize else source

    # Staging, packing, unpacking.

    def _launch(
        self, bucket: int, transfers: Sequence[Transfer], source: Mapping[str, torch.Tensor] | None, reason: str
    ) -> _InFlight:
        """Pack and post the messages of a bucket; without a source void ones, for a `reason`."""
        self._raise_if_broken(bucket, self._group)
        with self.clock.phase("read"):
            outgoing, incoming = self._messages(transfers)
            slot = bucket % NUM_SLOTS
            sent = self._stage(f"send {slot}", outgoing)
            received = self._stage(f"receive {slot}", incoming, self._relays.tensors)
            failure = self._pack(bucket, sent, source) if source is not None else None
            for staged in sent:
                _write_header(staged, bucket, reason if failure is None else str(failure))
        return replace(self._post(bucket, "transfer", sent, received, self._group), failure=failure)

    def _stage(
        self, side: str, messages: Sequence[_Message], relays: Mapping[str, torch.Tensor] | None = None
    ) -> list[_Staged]:
        """Byte tensors for messages, out of the side's staging memory; those of images out of `relays`, if given."""
        sizes = [message.nbytes for message in messages]
        if relays is None:
            sizes += [image.nbytes for message in messages for image in message.images]
        parts = self._staged_parts(side, sizes)
        bodies, image_bytes = parts[: len(messages)], iter(parts[len(messages) :])
        return [
            _Staged(
                message,
                body,
                tuple(
                    next(image_bytes) if relays is None else relays[image.buffer.name][: image.numel].view(torch.uint8)
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
            end = _round_up(end + nbytes, _MESSAGE_ALIGNMENT)
        staging = self._staging.get(side)
        if end and (staging is None or staging.numel() < end):
            del staging
            self._staging.pop(side, None)  # before the new one, not beside it
            try:
                staging = self._staging[side] = torch.empty(end, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                raise TransportError(f"no memory for {end} bytes of {side} staging; make buckets smaller") from error
        return [staging[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=True)]

    def _pack(
        self, bucket: int, outgoing: Sequence[_Staged], source: Mapping[str, torch.Tensor]
    ) -> TransportError | None:
        """Fill the messages; returns the first failure."""
        for staged in outgoing:
            for transfer, view in self._views_to_fill(staged):
                try:
                    dtype = self._dtypes_of(transfer)[0]
                    view.copy_(_source_view(transfer, dtype, source))
                except Exception as error:
                    return failure_at(self.name, bucket, "read", transfer, error)
        return None

    def _views_to_fill(self, staged: _Staged) -> Iterator[tuple[Transfer, torch.Tensor]]:
        """Each transfer of a message, and its elements there in the box's shape."""
        for piece in staged.message.pieces:
            yield piece.transfer, _view_of(piece, staged.body)
        for image, staged_bytes in zip(staged.message.images, staged.image_bytes, strict=True):
            flat = staged_bytes.view(image.dtype)
            for transfer in image.transfers:
                yield transfer, strided(flat, transfer.lengths, transfer.dst)

    def _peer_failure(self, bucket: int, phase: str, incoming: Sequence[_Staged]) -> str:
        for staged in incoming:
            message = staged.message
            sent_bucket, nbytes, text = _read_header(staged.body)
            where = f"{self.name} transport, bucket {bucket}, phase {phase}, peer {message.peer}"
            if text:
                return f"{where}: the peer failed: {text}"
            if (sent_bucket, nbytes) != (bucket, message.total_nbytes):
                return (
                    f"{where}: the peer sent {nbytes} bytes of bucket {sent_bucket}, expected {message.total_nbytes} "
                    f"of bucket {bucket}: the ranks' plans differ; compare their fingerprints"
                )
        return ""

    def _unpack(self, bucket: int, incoming: Sequence[_Staged], destination: Mapping[str, torch.Tensor]) -> None:
        for staged in incoming:
            for piece in staged.message.pieces:
                transfer = piece.transfer
                try:
                    flat = destination[transfer.dst.buffer.name]
                    strided(flat, transfer.lengths, transfer.dst).copy_(_view_of(piece, staged.body))
                except Exception as error:
                    raise failure_at(self.name, bucket, "write", transfer, error) from error
        synchronize(self._device)

    # The exchange.

    def _post(
        self,
        bucket: int,
        phase: str,
        outgoing: list[_Staged],
        incoming: list[_Staged],
        group: dist.ProcessGroup | None,
    ) -> _InFlight:
        """Begin to send and receive messages."""
        operations = [
            dist.P2POp(operation, tensor, staged.message.peer, group)
            for operation, messages in ((dist.irecv, incoming), (dist.isend, outgoing))
            for staged in messages
            for tensor in staged.tensors
        ]
        peers: list[object] = [operation.peer for operation in operations]
        everybody = sorted(set(peers))
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except Exception as error:
            self._break(bucket, phase, group, everybody, error, timed_out=False)
        if len(works) != len(peers):  # NCCL gives one work for the whole batch
            peers = [everybody] * len(works)
        return _InFlight(group, outgoing, incoming, works, peers)

    def _wait(self, bucket: int, phase: str, in_flight: _InFlight) -> None:
        deadline = time.monotonic() + self._timeout
        with self.clock.phase("transfer"):
            for work, peer in zip(in_flight.works, in_flight.peers, strict=True):
                try:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), _SHORTEST_WAIT)))
                except Exception as error:
                    timed_out = time.monotonic() > deadline - _ROUNDING
                    self._break(bucket, phase, in_flight.group, peer, error, timed_out=timed_out)

    def _break(
        self,
        bucket: int,
        phase: str,
        group: dist.ProcessGroup | None,
        peer: object,
        error: Exception,
        *,
        timed_out: bool,
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

    def _raise_if_broken(self, bucket: int, group: dist.ProcessGroup | None) -> None:
        if group in self._broken:
            raise TransportError(f"bucket {bucket} cannot be exchanged after an earlier failure: {self._broken[group]}")


def _view_of(piece: _Piece, staging: torch.Tensor) -> torch.Tensor:
    """The piece's elements in a message, in the box's shape."""
    return staging[piece.start : piece.start + piece.nbytes].view(piece.dtype).view(piece.transfer.lengths)


def _source_view(transfer: Transfer, dtype: torch.dtype, source: Mapping[str, torch.Tensor]) -> torch.Tensor:
    flat = source[transfer.src.buffer.name]
    if flat.dtype != dtype:
        raise TransportError(f"the source is {flat.dtype}, its layout says {dtype}; build the plan again")
    return strided(flat, transfer.lengths, transfer.src)


def _write_header(staged: _Staged, bucket: int, failure: str) -> None:
    text = failure.encode()[: _HEADER_NBYTES - _HEADER.size]
    fixed = _HEADER.pack(bucket, staged.message.total_nbytes, len(text))
    header = bytearray(fixed + text).ljust(_HEADER_NBYTES, b"\0")
    staged.body[:_HEADER_NBYTES].copy_(torch.frombuffer(header, dtype=torch.uint8))


def _read_header(staging: torch.Tensor) -> tuple[int, int, str]:
    header = staging[:_HEADER_NBYTES].cpu().numpy().tobytes()
    bucket, nbytes, text_nbytes = _HEADER.unpack_from(header)
    return bucket, nbytes, header[_HEADER.size : _HEADER.size + text_nbytes].decode(errors="replace")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _torch_dtypes(names: Mapping[BufferId, str]) -> dict[BufferId, torch.dtype]:
    return {buffer_id: getattr(torch, name) for buffer_id, name in names.items()}


def _staging_device(group: dist.ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

"""Between any two ranks of a process group: gloo on the CPU, NCCL on GPUs. One packed message per bucket and peer.

    source rank                                              destination rank
    strided reads -> staging [header|piece|piece|…] --isend/irecv--> staging -> strided writes, cast

Both ends derive the same message from the order of the bucket's transfers: pieces follow one another in that order,
in the source's dtype or, where it is narrower, the destination's, each aligned to its element size. Nothing is pickled
and no object collective runs. Staging memory is kept and reused; it grows to the largest bucket.

A rank whose read fails, or that cannot take part in a bucket at all (`abandon`), still sends its messages: their
header says that the pieces are void, and why. So no peer is left waiting, and the process group stays usable.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hybrid_engine.errors import PeerTransportError, TransportError
from hybrid_engine.planning.layout import BufferId
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.ports import PhaseClock
from hybrid_engine.transports.copies import copy_straight, failure_at, strided, synchronize

_HEADER = struct.Struct("<qqH")  # bucket, bytes of the message, length of the failure's text (0: the pieces are good)
_HEADER_NBYTES = 512
_MESSAGE_ALIGNMENT = 64  # bytes
_SHORTEST_WAIT = 0.001  # seconds; torch takes a timeout of 0 for "no timeout"
_ROUNDING = 0.01  # seconds by which a wait may end early: torch counts whole milliseconds


@dataclass(frozen=True, slots=True)
class _Piece:
    """One transfer's elements in a message: `nbytes` from `start`, row-major, in the dtype of the wire."""

    transfer: Transfer
    source_dtype: torch.dtype
    dtype: torch.dtype
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Message:
    """What one rank sends another in one bucket; `nbytes` with header and padding."""

    peer: int
    pieces: tuple[_Piece, ...]
    nbytes: int


class CollectiveTransport:
    """Point-to-point messages over a process group.

    Every rank of a bucket's transfers calls `run` (or `abandon`) for that bucket, buckets in the same order. After a
    timeout or a lost connection the process group is unusable (gloo closes its connections, so that peers notice
    soon), and every later call raises at once; after any other failure the transport goes on working.
    """

    name = "collective"

    def __init__(
        self,
        rank: int,
        source_dtypes: Mapping[BufferId, str],
        group: dist.ProcessGroup | None = None,
        *,
        destination_dtypes: Mapping[BufferId, str] | None = None,
        timeout: float = 300.0,
        device: torch.device | None = None,
    ) -> None:
        """Args:
        rank: global rank of this process; transfers name global ranks.
        source_dtypes: `Buffer.dtype` of the source buffers of all ranks: what is on the wire.
        destination_dtypes: of destination buffers of all ranks; a narrower one is on the wire instead.
        group: holds all ranks of the transfers; default: the world. Better one of its own: after a timeout it is dead.
        timeout: seconds one call of `run` may wait in all.
        device: where staging lies; default: the current GPU with NCCL, else the CPU.
        """
        if timeout <= 0:
            raise ValueError(f"a timeout of {timeout} seconds")
        self.rank = rank
        self._source_dtypes = _torch_dtypes(source_dtypes)
        self._destination_dtypes = _torch_dtypes(destination_dtypes or {})
        self._group = group
        self._timeout = timeout
        self._device = device or _staging_device(group)
        self.clock = PhaseClock()
        self._staging: dict[str, torch.Tensor] = {}
        self._broken: TransportError | None = None

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
        self._raise_if_broken(bucket)
        outgoing, incoming = self._messages(transfers)
        with self.clock.phase("read"):
            sent = self._stage("send", outgoing)
            failure = self._pack(bucket, outgoing, sent, source)
        received = self._exchange(bucket, outgoing, incoming, sent)
        if failure is not None:
            raise failure
        with self.clock.phase("write"):
            self._raise_peer_failures(bucket, incoming, received)
            self._unpack(bucket, incoming, received, destination)
            own = [transfer for transfer in transfers if transfer.src_rank == transfer.dst_rank == self.rank]
            copy_straight(self.name, bucket, own, lambda transfer: source[transfer.src.buffer.name], destination)

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """Take part in a bucket without reading or writing anything: peers get `reason` as a PeerTransportError.

        Called in place of `run` by a rank that failed elsewhere, so that its peers do not wait for it. Raises
        TransportError only when the messages cannot be exchanged.
        """
        self._raise_if_broken(bucket)
        outgoing, incoming = self._messages(transfers)
        sent = self._stage("send", outgoing)
        for message, staging in zip(outgoing, sent, strict=True):
            _write_header(staging, bucket, message, reason)
        self._exchange(bucket, outgoing, incoming, sent)

    def close(self) -> None:
        """Free the staging memory; idempotent. The process group stays the caller's."""
        self._staging.clear()

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
        for transfer in transfers:
            source, dtype = self._dtypes_of(transfer)
            start = _round_up(end, dtype.itemsize)
            pieces.append(_Piece(transfer, source, dtype, start, transfer.numel * dtype.itemsize))
            end = start + pieces[-1].nbytes
        return _Message(peer, tuple(pieces), end)

    def _dtypes_of(self, transfer: Transfer) -> tuple[torch.dtype, torch.dtype]:
        """Of the source, and of the wire."""
        source = self._source_dtypes.get(transfer.src.buffer)
        if source is None:
            raise TransportError(f"{transfer.tensor}: the dtype of {transfer.src.buffer} was not given")
        destination = self._destination_dtypes.get(transfer.dst.buffer, source)
        return source, destination if destination.itemsize < source.itemsize else source

    # Staging, packing, unpacking.

    def _stage(self, side: str, messages: Sequence[_Message]) -> list[torch.Tensor]:
        """A byte tensor for each message, out of the side's staging memory."""
        starts, end = [], 0
        for message in messages:
            starts.append(end)
            end = _round_up(end + message.nbytes, _MESSAGE_ALIGNMENT)
        staging = self._staging.get(side)
        if end and (staging is None or staging.numel() < end):
            del staging
            self._staging.pop(side, None)  # before the new one, not beside it
            try:
                staging = self._staging[side] = torch.empty(end, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:
                raise TransportError(f"no memory for {end} bytes of {side} staging; make buckets smaller") from error
        return [staging[start : start + message.nbytes] for start, message in zip(starts, messages, strict=True)]

    def _pack(
        self,
        bucket: int,
        outgoing: Sequence[_Message],
        staged: Sequence[torch.Tensor],
        source: Mapping[str, torch.Tensor],
    ) -> TransportError | None:
        """Fill the messages; a failure is returned, after it was written into the headers of all of them."""
        failure = None
        for message, staging in zip(outgoing, staged, strict=True):
            for piece in message.pieces:
                try:
                    _view_of(piece, staging).copy_(_source_view(piece, source))
                except Exception as error:
                    failure = failure_at(self.name, bucket, "read", piece.transfer, error)
                    break
        for message, staging in zip(outgoing, staged, strict=True):
            _write_header(staging, bucket, message, "" if failure is None else str(failure))
        return failure

    def _raise_peer_failures(self, bucket: int, incoming: Sequence[_Message], staged: Sequence[torch.Tensor]) -> None:
        for message, staging in zip(incoming, staged, strict=True):
            sent_bucket, nbytes, text = _read_header(staging)
            where = f"{self.name} transport, bucket {bucket}, phase transfer, peer {message.peer}"
            if text:
                raise PeerTransportError(f"{where}: the peer failed: {text}")
            if (sent_bucket, nbytes) != (bucket, message.nbytes):
                raise PeerTransportError(
                    f"{where}: the peer sent {nbytes} bytes of bucket {sent_bucket}, expected {message.nbytes} of "
                    f"bucket {bucket}: the ranks' plans differ; compare their fingerprints"
                )

    def _unpack(
        self,
        bucket: int,
        incoming: Sequence[_Message],
        staged: Sequence[torch.Tensor],
        destination: Mapping[str, torch.Tensor],
    ) -> None:
        for message, staging in zip(incoming, staged, strict=True):
            for piece in message.pieces:
                transfer = piece.transfer
                try:
                    flat = destination[transfer.dst.buffer.name]
                    strided(flat, transfer.lengths, transfer.dst).copy_(_view_of(piece, staging))
                except Exception as error:
                    raise failure_at(self.name, bucket, "write", transfer, error) from error
        synchronize(self._device)

    # The exchange.

    def _exchange(
        self, bucket: int, outgoing: Sequence[_Message], incoming: Sequence[_Message], sent: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Send and receive all messages of the bucket; returns the received ones."""
        with self.clock.phase("transfer"):
            received = self._stage("receive", incoming)
            operations = [
                dist.P2POp(operation, staging, message.peer, self._group)
                for operation, messages, staged in ((dist.irecv, incoming, received), (dist.isend, outgoing, sent))
                for message, staging in zip(messages, staged, strict=True)
            ]
            if operations:
                self._wait(bucket, operations)
        return received

    def _wait(self, bucket: int, operations: list[dist.P2POp]) -> None:
        deadline = time.monotonic() + self._timeout
        peers = [operation.peer for operation in operations]
        peer: object = sorted(set(peers))
        try:
            works = dist.batch_isend_irecv(operations)
            one_by_one = len(works) == len(operations)  # NCCL gives one work for the whole batch
            for index, work in enumerate(works):
                peer = peers[index] if one_by_one else peer
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), _SHORTEST_WAIT)))
        except Exception as error:
            self._break(bucket, peer, error, timed_out=time.monotonic() > deadline - _ROUNDING)

    def _break(self, bucket: int, peer: object, error: Exception, *, timed_out: bool) -> None:
        cause = f"nothing for {self._timeout:g} seconds" if timed_out else "the connection failed"
        self._staging.clear()  # late bytes may still arrive in what the operations hold
        self._broken = TransportError(
            f"{self.name} transport, bucket {bucket}, phase transfer, peer {peer}: {cause} "
            f"({type(error).__name__}: {error}). See the peer's log; the process group cannot be used any more"
        )
        raise self._broken from error

    def _raise_if_broken(self, bucket: int) -> None:
        if self._broken is not None:
            raise TransportError(f"bucket {bucket} cannot be exchanged after an earlier failure: {self._broken}")


def _view_of(piece: _Piece, staging: torch.Tensor) -> torch.Tensor:
    """The piece's elements in a message, in the box's shape."""
    return staging[piece.start : piece.start + piece.nbytes].view(piece.dtype).view(piece.transfer.lengths)


def _source_view(piece: _Piece, source: Mapping[str, torch.Tensor]) -> torch.Tensor:
    flat = source[piece.transfer.src.buffer.name]
    if flat.dtype != piece.source_dtype:
        raise TransportError(f"the source is {flat.dtype}, its layout says {piece.source_dtype}; build the plan again")
    return strided(flat, piece.transfer.lengths, piece.transfer.src)


def _write_header(staging: torch.Tensor, bucket: int, message: _Message, failure: str) -> None:
    text = failure.encode()[: _HEADER_NBYTES - _HEADER.size]
    header = bytearray(_HEADER.pack(bucket, message.nbytes, len(text)) + text).ljust(_HEADER_NBYTES, b"\0")
    staging[:_HEADER_NBYTES].copy_(torch.frombuffer(header, dtype=torch.uint8))


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

"""Messages as deltas of the previous ones, over a process group.

A fill of deltas (deltas.py) sends nothing ahead. Lengths are known only after the headers have
arrived, so each bucket takes two batches, both within `run` or `abandon`:

    compare with copies -> headers of all peers --> contents of all valid messages, whole or deltas
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.planning.plan import Costs, Transfer
from hybrid_engine.transports.collective import CollectiveTransport, InFlight, Part
from hybrid_engine.transports.context import TransportContext
from hybrid_engine.transports.copies import FlatBuffers
from hybrid_engine.transports.deltas import Deltas
from hybrid_engine.transports.messages import Message, StagedMessage, write_headers


class DeltaTransport(CollectiveTransport):
    """`CollectiveTransport` that sends messages as deltas where these are smaller.

    All ranks of a job use it, or none. `deltas`: copies of the previous messages, and counts.
    """

    def __init__(self, context: TransportContext) -> None:
        super().__init__(context)
        self.deltas = Deltas()
        # On the host, messages are received directly into the copies that deltas are applied to.
        self._receives_copies = self._device.type == "cpu"

    def start(
        self,
        bucket: int,
        transfers: Sequence[Transfer],
        source: FlatBuffers | None,
        reason: str = "",
    ) -> None:
        """Post the messages of a bucket, but nothing in a fill of deltas; see the base class."""
        if self.deltas.is_whole:
            super().start(bucket, transfers, source, reason)

    def take_costs(self) -> Costs:
        """See `ports.Transport`."""
        costs = super().take_costs()
        costs.counts.update(self.deltas.counts)
        self.deltas.counts.clear()
        return costs

    def close(self) -> None:
        """Free staging memory and copies; idempotent."""
        super().close()
        self.deltas.close()

    def _write_headers(
        self, bucket: int, sent: Sequence[StagedMessage], reason: str
    ) -> tuple[Sequence[Part] | None, TransportError | None]:
        """Write the headers; see the base class.

        Returns the parts that follow the headers in a fill of deltas, and the failure to compute
        deltas, which makes the messages void.
        """
        deltas: Sequence[tuple[torch.Tensor | None, int]] = [(None, 0)] * len(sent)
        failure = None
        if not reason:
            try:
                deltas = [
                    self.deltas.outgoing(bucket, staged.message.peer, staged.contents)
                    for staged in sent
                ]
            except (RuntimeError, MemoryError) as error:
                # torch and numpy raise these when memory is short.
                failure = TransportError(
                    f"{self.name} transport, bucket {bucket}, phase read: {error}",
                    code="read-failed",
                )
                reason = str(failure)
        contents: list[Part] = []
        headers = []
        for staged, (delta, digest) in zip(sent, deltas, strict=True):
            delta_nbytes = -1 if delta is None else delta.numel()
            headers.append(staged.header_bytes(bucket, reason, delta_nbytes, digest))
            if not reason:
                contents.append((staged.message.peer, staged.contents if delta is None else delta))
        write_headers(sent, headers)
        return None if self.deltas.is_whole else contents, failure

    def _awaited(self, bucket: int, side: str, messages: Sequence[Message]) -> list[StagedMessage]:
        """Return incoming messages, each in one piece: on the host the copy, else staged."""
        # The copies are needed in either case: `_complete` writes them.
        parts = [
            self.deltas.received(bucket, message.peer, message.staged_nbytes)
            for message in messages
        ]
        if not self._receives_copies:
            parts = self._staged_parts(side, [message.staged_nbytes for message in messages])
        return [message.staged_in(memory) for message, memory in zip(messages, parts, strict=True)]

    def _finish(self, bucket: int, exchange: InFlight, deadline: float) -> InFlight:
        """Exchange the contents that the headers have announced, within the same deadline."""
        if exchange.contents is None:
            return exchange
        announced, failure = self._announced(exchange)
        self._wait(
            bucket,
            "transfer",
            self._post(bucket, "transfer", announced, exchange.contents, self._group),
            deadline,
        )
        return replace(exchange, failure=exchange.failure or failure)

    def _announced(self, exchange: InFlight) -> tuple[list[Part], TransportError | None]:
        """Return memory for the contents that the received headers announce, and a failure.

        The failure is a lack of memory. The contents must be received nevertheless, or the ranks
        would be out of step. Then, and if the message is not the copy, a delta is received into the
        memory of the message.
        """
        failure = None
        # A delta is always shorter than its message.
        rooms = [staged.contents for staged in exchange.incoming]
        if self._receives_copies:
            sizes = [max(header.delta_nbytes, 0) for header in exchange.headers]
            try:
                rooms = self._staged_parts("deltas", sizes)
            except TransportError as error:
                failure = error
        parts: list[Part] = []
        for staged, header, room in zip(exchange.incoming, exchange.headers, rooms, strict=True):
            peer = staged.message.peer
            memory = staged.contents
            if header.delta_nbytes >= 0:
                memory = room[: header.delta_nbytes]
                exchange.deltas[peer] = memory
            # The contents of a void message are not sent.
            if not header.failure:
                parts.append((peer, memory))
        return parts, failure

    def _complete(self, bucket: int, exchange: InFlight) -> None:
        """Turn received deltas into messages, and copy relay images into their relay buffers."""
        for staged, header in zip(exchange.incoming, exchange.headers, strict=True):
            peer = staged.message.peer
            delta = exchange.deltas.get(peer)
            self.deltas.arrived(bucket, peer, staged.contents, delta, header.digest)
            for image, flat in zip(staged.message.images, staged.images, strict=True):
                relay = self._relays.tensors[image.buffer.name]
                relay[: image.numel].view(torch.uint8).copy_(flat)
                if relay.is_cuda:
                    # Readers are other processes, notified by this host thread and not by the
                    # stream.
                    torch.cuda.current_stream(relay.device).synchronize()

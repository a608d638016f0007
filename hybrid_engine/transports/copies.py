"""What all transports share: the strided copy, the clock of the phases, and errors that say where they happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.planning.layout import Place
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.ports import Transport


@dataclass
class PhaseClock:
    """Seconds by phase, summed up until `take`.

    read: find the sources, pack them; transfer: bytes cross from rank to rank, and copies that go straight from
    source to destination; write: unpack into destinations. On CUDA a phase that only queues work ends before the work
    does, and the next phase that waits has its time.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("read", "transfer", "write"), 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The sums since the last call, which start again at zero."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken


class RoutedTransport(Transport, Protocol):
    """What `TransportSet` asks of a transport besides `ports.Transport`."""

    clock: PhaseClock

    def abandon(self, bucket: int, transfers: Sequence[Transfer], reason: str) -> None:
        """In place of `run`, by a rank that failed elsewhere: peers that wait for this rank fail with `reason`."""
        ...


def strided(flat: torch.Tensor, lengths: tuple[int, ...], place: Place) -> torch.Tensor:
    """The box of `lengths` at `place` of a flat buffer, as a view; lengths and strides in elements."""
    return flat.detach().as_strided(lengths, place.strides, flat.storage_offset() + place.offset)


def copy_straight(
    label: str,
    bucket: int,
    transfers: Iterable[Transfer],
    source_of: Callable[[Transfer], torch.Tensor],
    destination: Mapping[str, torch.Tensor],
) -> None:
    """Copy every transfer from its flat source into its place in `destination`, casting to the destination's dtype.

    Raises TransportError naming the transfer that failed. Returns when the copies are done, on CUDA too.
    """
    device = None
    for transfer in transfers:
        try:
            flat = destination[transfer.dst.buffer.name]
            strided(flat, transfer.lengths, transfer.dst).copy_(
                strided(source_of(transfer), transfer.lengths, transfer.src)
            )
        except Exception as error:
            raise failure_at(label, bucket, "transfer", transfer, error) from error
        device = flat.device
    synchronize(device)


def synchronize(device: torch.device | None) -> None:
    """Wait until the copies queued on the device's current stream are done; nothing to do on the CPU."""
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def failure_at(
    label: str, bucket: int, phase: str, transfer: Transfer, error: BaseException, peer: int | None = None
) -> TransportError:
    """The TransportError for `error`, which happened at one transfer (with `peer`, where one is to blame)."""
    if isinstance(error, KeyError):
        problem = f"there is no buffer {error}"
    elif isinstance(error, TransportError):
        problem = str(error)
    else:
        problem = f"{type(error).__name__}: {error}"
    return TransportError(
        f"{label} transport, bucket {bucket}, phase {phase}{'' if peer is None else f', peer {peer}'}, "
        f"tensor {transfer.tensor}, rank {transfer.src_rank} {transfer.src.buffer.name!r} -> "
        f"rank {transfer.dst_rank} {transfer.dst.buffer.name!r}: {problem}"
    )

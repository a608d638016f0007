"""What all transports share: the strided copy, and errors that say where they happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.records.layout import Place
from hybrid_engine.transports.batched_copies import BatchedCopies, CopyError

SourceOf = Callable[[Transfer], torch.Tensor]
"""The flat source buffer of a transfer."""


def strided(flat: torch.Tensor, lengths: tuple[int, ...], place: Place) -> torch.Tensor:
    """The box of `lengths` at `place` of a flat buffer, as a view; lengths and strides in elements."""
    return flat.as_strided(lengths, place.strides, flat.storage_offset() + place.offset)


def copy_straight(
    label: str,
    bucket: int,
    transfers: Iterable[Transfer] | BatchedCopies,
    source_of: SourceOf,
    destination: Mapping[str, torch.Tensor],
) -> None:
    """Copy every transfer from its flat source into its place in `destination`, casting to the destination's dtype.

    Raises TransportError naming the transfer that failed. Returns when the copies are done, on CUDA too.
    """
    copies = transfers if isinstance(transfers, BatchedCopies) else BatchedCopies(transfers)
    try:
        copies.run(source_of, lambda transfer: destination[transfer.dst.buffer.name])
    except CopyError as failed:
        raise failure_at(label, bucket, "transfer", failed.transfer, failed.error) from failed.error
    if copies.transfers:
        synchronize(destination[copies.transfers[-1].dst.buffer.name].device)


def synchronize(device: torch.device) -> None:
    """Wait until the copies queued on the device's current stream are done; nothing to do on the CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def failure_at(
    label: str, bucket: int, phase: str, transfer: Transfer, error: BaseException, peer: int | None = None
) -> TransportError:
    """The TransportError for `error`, which happened at one transfer (with `peer`, where one is to blame)."""
    if isinstance(error, KeyError):
        missing = error.args[0]
        problem = f"there is no buffer {getattr(missing, 'name', missing)!r}"
    elif isinstance(error, TransportError):
        problem = str(error)
    else:
        problem = f"{type(error).__name__}: {error}"
    return TransportError(
        f"{label} transport, bucket {bucket}, phase {phase}{'' if peer is None else f', peer {peer}'}, "
        f"tensor {transfer.tensor}, rank {transfer.src_rank} {transfer.src.buffer.name!r} -> "
        f"rank {transfer.dst_rank} {transfer.dst.buffer.name!r}: {problem}"
    )

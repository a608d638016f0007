"""What training sides say of the flat buffers that their weights lie in: which elements hold none, and values that no
engine can use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from hybrid_engine.errors import WeightError
from hybrid_engine.memory.elastic import exported_buffer_of
from hybrid_engine.records.layout import Buffer, Extent, Shard


def runs_by_buffer(shards: Sequence[Shard]) -> dict[str, list[Extent]]:
    """By buffer, the elements from each shard's first to its last: parameters are dense and cut along their rows, so
    shards hold all of these."""
    runs: dict[str, list[Extent]] = {}
    for shard in shards:
        extent = shard.place.extent(shard.region.lengths)
        runs.setdefault(shard.place.buffer.name, []).append(extent)
    return runs


def gaps(numel: int, runs: Sequence[Extent]) -> tuple[Extent, ...]:
    """What no run covers of a buffer: ends of buckets, padding of the vocabulary, what aligns a parameter."""
    found, end = [], 0
    for run in (*sorted(runs), Extent(numel, numel)):
        if run.start > end:
            found.append(Extent(end, run.start))
        end = max(end, run.stop)
    return tuple(found)


def describe(flat: torch.Tensor, padding: tuple[Extent, ...]) -> Buffer:
    """The record of a flat buffer with this padding."""
    return Buffer(flat.numel(), dtype_name(flat), padding=padding, exported=exported_buffer_of(flat) is not None)


def is_frozen(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter that requires no gradient."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def dtype_name(tensor: torch.Tensor) -> str:
    """Of a tensor's elements, as records have it."""
    return str(tensor.dtype).removeprefix("torch.")


def read_parts(buffers: Mapping[str, torch.Tensor], unread: Mapping[str, Sequence[Extent]]) -> Iterator[torch.Tensor]:
    """The buffers without the intervals that nobody reads."""
    for name, flat in buffers.items():
        yield from (flat[part.start : part.stop] for part in gaps(flat.numel(), unread.get(name, ())))


def require_usable_values(
    buffers: Iterable[torch.Tensor], parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]]
) -> None:
    """Raise WeightError naming every parameter that holds a NaN or an infinity. Reads each buffer once.

    `parameters`: (what a message calls it, its elements on this rank), asked for where a buffer is at fault: there may
    be something in its padding alone.
    """
    if all(_is_finite(tensor) for tensor in buffers):
        return
    findings = [
        f"{name}: {problem} of {tensor.numel()} elements"
        for name, tensor in parameters()
        if (problem := _unusable_values(tensor.detach()))
    ]
    if findings:
        raise WeightError(findings)


def require_finite_to_save(tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
    """Raise WeightError naming each of what is to be saved, (name, elements on this rank), that is not finite."""
    try:
        require_usable_values((tensor for _, tensor in tensors()), tensors)
    except WeightError as error:
        raise WeightError([*error.findings, "go back to a checkpoint, or save them with check_nan=False"]) from None


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    # the sum is the fastest look, but it may overflow where no element does
    if not tensor.numel() or tensor.sum().isfinite():
        return True
    return all(bool(value.isfinite()) for value in tensor.aminmax())


def _unusable_values(tensor: torch.Tensor) -> str:
    """ "3 NaN, 1 Inf", or nothing when every element is finite."""
    counts = {"NaN": int(tensor.isnan().sum()), "Inf": int(tensor.isinf().sum())}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)

"""Random buckets of transfers, an oracle that uses index arithmetic, and outcomes of calls.

A case depends on its seed alone, so every rank of a launch builds it and knows all sources.
"""

from __future__ import annotations

import itertools
import pickle
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybrid_engine.errors import HybridEngineError
from hybrid_engine.planning.plan import Bucket, Link, Transfer, wire_dtype
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.ranks.world import World
from hybrid_engine.records.layout import DTYPE_NBYTES, Buffer, BufferId, Place

SENTINEL_BYTE = 0xA5  # fills destinations, so that a stray write shows
WHERE = "local transport, bucket 0, phase transfer"  # of an error


@dataclass(frozen=True)
class Shape:
    """Distribution of random cases.

    Attributes:
        src_dtypes, dst_dtypes: a buffer of each on every rank; transfers connect equal positions.
        edges: (src rank, dst rank) pairs in use; None: all.
        max_length: elements per dim, at most.
        small: transfers of one to three elements only.
    """

    num_transfers: int = 40
    num_buckets: int = 3
    src_dtypes: tuple[str, ...] = ("bfloat16",)
    dst_dtypes: tuple[str, ...] = ("bfloat16",)
    edges: tuple[tuple[int, int], ...] | None = None
    max_length: int = 9
    small: bool = False


@dataclass(frozen=True)
class Case:
    buckets: tuple[Bucket, ...]
    sources: Mapping[BufferId, torch.Tensor]
    destinations: Mapping[BufferId, Buffer]

    def source_buffers(self) -> dict[BufferId, Buffer]:
        return {
            buffer_id: Buffer(flat.numel(), str(flat.dtype).removeprefix("torch."))
            for buffer_id, flat in self.sources.items()
        }

    def sources_of(self, rank: int) -> TensorDict:
        return {
            buffer_id.name: flat
            for buffer_id, flat in self.sources.items()
            if buffer_id.rank == rank
        }

    def new_destinations(self, rank: int) -> TensorDict:
        return {
            buffer_id.name: _filled(buffer.numel, getattr(torch, buffer.dtype))
            for buffer_id, buffer in self.destinations.items()
            if buffer_id.rank == rank
        }

    def expected(self, rank: int) -> TensorDict:
        """Compute this rank's destinations after all buckets element by element."""
        expected = self.new_destinations(rank)
        for transfer in itertools.chain.from_iterable(bucket.transfers for bucket in self.buckets):
            if transfer.dst_rank == rank:
                flat = expected[transfer.dst.buffer.name]
                values = self.sources[transfer.src.buffer][_indices(transfer.lengths, transfer.src)]
                flat[_indices(transfer.lengths, transfer.dst)] = values.to(flat.dtype)
        return expected


def differing(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> list[str]:
    assert actual.keys() == expected.keys()
    return [
        name for name in actual if not torch.equal(_bytes(actual[name]), _bytes(expected[name]))
    ]


def build_case(seed: int, num_ranks: int, shape: Shape) -> Case:
    """Build a case: each destination element is written at most once; sources may be read often."""
    generator = random.Random(seed)
    edges = shape.edges or tuple(itertools.product(range(num_ranks), repeat=2))
    positions = range(len(shape.src_dtypes))
    src_ids = [
        [BufferId(rank, f"src{position}") for position in positions] for rank in range(num_ranks)
    ]
    dst_ids = [
        [BufferId(rank, f"dst{position}") for position in positions] for rank in range(num_ranks)
    ]
    ends = dict.fromkeys(itertools.chain(*src_ids, *dst_ids), 1)  # elements used of each buffer
    transfers: list[list[Transfer]] = [[] for _ in range(shape.num_buckets)]
    for number in range(shape.num_transfers):
        src_rank, dst_rank = generator.choice(edges)
        position = generator.choice(positions)
        lengths = _lengths(generator, shape)
        src = _place(generator, ends, src_ids[src_rank][position], lengths)
        dst = _place(generator, ends, dst_ids[dst_rank][position], lengths)
        link = Link.SELF if src_rank == dst_rank else Link.HOST
        dtype = wire_dtype(shape.src_dtypes[position], shape.dst_dtypes[position])
        nbytes = torch.Size(lengths).numel() * DTYPE_NBYTES[dtype]
        transfer = Transfer(f"tensor{number}", lengths, src, dst, nbytes, link)
        generator.choice(transfers).append(transfer)
    random_source = torch.Generator().manual_seed(seed)
    sources = {
        buffer_id: _random(
            ends[buffer_id], getattr(torch, shape.src_dtypes[position]), random_source
        )
        for ids in src_ids
        for position, buffer_id in enumerate(ids)
    }
    destinations = {
        buffer_id: Buffer(ends[buffer_id], shape.dst_dtypes[position])
        for ids in dst_ids
        for position, buffer_id in enumerate(ids)
    }
    return Case(
        tuple(_bucket(index, part) for index, part in enumerate(transfers)), sources, destinations
    )


def _bucket(index: int, transfers: Sequence[Transfer]) -> Bucket:
    return Bucket(
        index,
        (),
        tuple(transfers),
        (f"group{index}",),
        sum(transfer.nbytes for transfer in transfers),
    )


def _lengths(generator: random.Random, shape: Shape) -> tuple[int, ...]:
    longest = 3 if shape.small else shape.max_length
    num_dims = generator.randint(0, 1) if shape.small else generator.randint(0, 4)
    return tuple(generator.randint(1, longest) for _ in range(num_dims))


def _place(
    generator: random.Random,
    ends: dict[BufferId, int],
    buffer_id: BufferId,
    lengths: tuple[int, ...],
) -> Place:
    """Draw a place at the buffer's end, with dims in a random order (transposed) and some gaps."""
    strides = [0] * len(lengths)
    step = generator.choice((1, 1, 2))  # 2 leaves gaps between elements
    for dim in generator.sample(range(len(lengths)), len(lengths)):
        strides[dim] = step
        step *= lengths[dim]
        step += generator.choice((0, 0, 3))  # 3 leaves gaps between rows
    offset = ends[buffer_id] + generator.randint(0, 5)  # a gap between places
    ends[buffer_id] = (
        offset
        + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
        + 1
    )
    return Place(buffer_id, offset, tuple(strides))


def _indices(lengths: tuple[int, ...], place: Place) -> torch.Tensor:
    index = torch.tensor(place.offset)
    for dim, (length, stride) in enumerate(zip(lengths, place.strides, strict=True)):
        steps = torch.arange(length) * stride
        index = index + steps.reshape([-1 if other == dim else 1 for other in range(len(lengths))])
    return index


def _random(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return normal floats, which casts round, or small integers and flags."""
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 120, (numel,), generator=generator).to(
        dtype
    )


def _filled(numel: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.zeros(numel, dtype=dtype)
    return torch.full((numel * dtype.itemsize,), SENTINEL_BYTE, dtype=torch.uint8).view(dtype)


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.contiguous().view(torch.uint8)


def group_of_all() -> RankGroup:
    """Return a new group of all ranks, in torch's default group."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return RankGroup(World.of_default_group(), "messages", range(dist.get_world_size()), 60)


def outcome_of(action: Callable[[], object]) -> str:
    """Return "ok", or the seconds until the error with its type and message."""
    start = time.monotonic()
    try:
        action()
        return "ok"
    except HybridEngineError as error:
        pickle.loads(pickle.dumps(error))  # errors are sent between ranks
        return f"{time.monotonic() - start:.3f} {type(error).__name__} {error}"


def check_error(outcome: object, *parts: str, within: float = 30) -> None:
    """Check that a call failed within `within` seconds, with all `parts` in its message."""
    seconds, message = str(outcome).split(" ", 1)
    for part in parts:
        assert part in message, message
    assert float(seconds) < within

"""Many small copies in few calls: the same bytes, few views, and no reference to the memory."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch

from hybrid_engine import transports
from hybrid_engine.errors import TransportError
from hybrid_engine.memory.host_pages import tensor_over
from hybrid_engine.planning.plan import Link, Transfer
from hybrid_engine.records.layout import BufferId, Place
from hybrid_engine.transports.copies import BatchedCopies
from tests.harness.errors import refused
from tests.hybrid_engine.transports.cases import WHERE

EXPERTS = 8
ROWS = 4
COLUMNS = 6
SIZE = ROWS * COLUMNS


def transfer(
    src: int,
    dst: int,
    lengths: tuple[int, ...] = (SIZE,),
    strides: tuple[int, ...] = (1,),
    *,
    source: str = "source",
    name: str = "tensor",
) -> Transfer:
    src_place = Place(BufferId(0, source), src, strides)
    dst_place = Place(BufferId(0, "to"), dst, strides)
    return Transfer(name, lengths, src_place, dst_place, 4 * SIZE, Link.SELF)


def backwards() -> list[Transfer]:
    """Copy experts as they lie in Megatron's buffers: the last one first, with a gap after each."""
    return [
        transfer((EXPERTS - 1 - number) * (SIZE + 3), number * SIZE) for number in range(EXPERTS)
    ]


def backwards_with_gaps() -> list[Transfer]:
    return [
        transfer(
            (EXPERTS - 1 - number) * 2 * SIZE, number * 2 * SIZE, (ROWS, COLUMNS), (2 * COLUMNS, 1)
        )
        for number in range(EXPERTS)
    ]


def irregular() -> list[Transfer]:
    return [transfer(number * number * SIZE, number * SIZE) for number in range(EXPERTS)]


def repeated() -> list[Transfer]:
    """Copy one source box to several places."""
    return [transfer(5, number * SIZE) for number in range(EXPERTS)]


@pytest.mark.parametrize(
    ("make", "num_views"),
    [
        (backwards, EXPERTS),
        (backwards_with_gaps, EXPERTS),
        (irregular, EXPERTS // 2),
        (repeated, 1),
    ],
)
def test_a_bucket_is_copied_in_one_call(make, num_views: int) -> None:
    transfers = make()
    source = torch.arange(100.0 * SIZE)
    expected = torch.zeros(100 * SIZE)
    for copied in transfers:
        box = source.as_strided(copied.lengths, copied.src.strides, copied.src.offset)
        expected.as_strided(copied.lengths, copied.dst.strides, copied.dst.offset).copy_(box)
    destination = torch.zeros(100 * SIZE)
    with mock.patch.object(
        transports.copies, "copy_each", wraps=transports.copies.copy_each
    ) as copy_each:
        BatchedCopies(reversed(transfers)).run(lambda _: source, lambda _: destination, WHERE)
    assert torch.equal(destination, expected)
    assert [len(call.args[0]) for call in copy_each.call_args_list] == [num_views]


def test_buffers_of_one_storage_are_one_view() -> None:
    """Frozen experts are separate buffers that lie one after the other."""
    whole = torch.arange(1.0 * EXPERTS * SIZE)
    parts = {
        f"expert {number}": whole[number * SIZE : (number + 1) * SIZE] for number in range(EXPERTS)
    }
    copies = BatchedCopies(
        transfer(0, number * SIZE, source=name) for number, name in enumerate(parts)
    )
    counts = []

    def run_from(sources: dict[str, torch.Tensor]) -> None:
        destination = torch.zeros_like(whole)
        copies.run(lambda copied: sources[copied.src.buffer.name], lambda _: destination, WHERE)
        assert torch.equal(destination, whole)
        counts.append(len(copies._runs))

    run_from(parts)
    run_from({name: part.clone() for name, part in parts.items()})
    assert counts == [1, EXPERTS]  # runs found for the first memory do not hold for the second
    runs = copies._runs
    run_from({name: part.clone() for name, part in parts.items()})
    assert copies._runs is runs  # the layout is unchanged, so the runs are reused


class Memory:
    """Bytes that live as long as any tensor over them."""

    def __init__(self) -> None:
        self.pages = torch.ones(400 * SIZE, dtype=torch.uint8)


def test_no_memory_is_kept() -> None:
    copies = BatchedCopies(backwards())
    memories = [Memory(), Memory()]
    flats = [
        tensor_over(memory.pages.data_ptr(), 400 * SIZE, torch.device("cpu"), memory).view(
            torch.float32
        )
        for memory in memories
    ]
    copies.run(lambda _: flats[0], lambda _: flats[1], WHERE)
    alive = [weakref.ref(memory) for memory in memories]
    memories.clear()
    assert all(ref() is not None for ref in alive)
    flats.clear()
    assert [ref() for ref in alive] == [None, None]


def test_a_failed_transfer_is_named() -> None:
    outside = transfer(1000 * SIZE, EXPERTS * SIZE, name="outside")
    flats = torch.ones(2, 100 * SIZE)
    place = "tensor outside, rank 0 'source' -> rank 0 'to': "
    with refused(TransportError, "copy-failed", WHERE, place, "out of bounds"):
        BatchedCopies([*backwards(), outside]).run(lambda _: flats[0], lambda _: flats[1], WHERE)

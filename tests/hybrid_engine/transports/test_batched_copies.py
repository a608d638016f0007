"""Many small copies in few calls: the same bytes, few views, and nothing kept of the memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch

from hybrid_engine import transports
from hybrid_engine.memory.host_pages import tensor_over
from hybrid_engine.planning.plan import Link, Transfer
from hybrid_engine.records.layout import BufferId, Place
from hybrid_engine.transports.copies import BatchedCopies, CopyError, widened

EXPERTS, ROWS, COLUMNS = 8, 4, 6
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
    src_place, dst_place = Place(BufferId(0, source), src, strides), Place(BufferId(0, "to"), dst, strides)
    return Transfer(name, lengths, src_place, dst_place, 4 * SIZE, Link.SELF)


def backwards() -> list[Transfer]:
    """Experts as Megatron's buffers hold them: the last one first, and a gap after each."""
    return [transfer((EXPERTS - 1 - number) * (SIZE + 3), number * SIZE) for number in range(EXPERTS)]


def backwards_with_gaps() -> list[Transfer]:
    return [
        transfer((EXPERTS - 1 - number) * 2 * SIZE, number * 2 * SIZE, (ROWS, COLUMNS), (2 * COLUMNS, 1))
        for number in range(EXPERTS)
    ]


def irregular() -> list[Transfer]:
    return [transfer(number * number * SIZE, number * SIZE) for number in range(EXPERTS)]


def repeated() -> list[Transfer]:
    """One source box in several places."""
    return [transfer(5, number * SIZE) for number in range(EXPERTS)]


def calls_of(copies: BatchedCopies, source: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, int]:
    """What the copies write, and how many tensors they hand to torch."""
    handed: list[int] = []
    real = transports.copies.copy_each

    def counted(into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor]) -> None:
        handed.append(len(into))
        real(into, out_of)

    monkeypatch.setattr(transports.copies, "copy_each", counted)
    destination = torch.zeros(100 * SIZE, dtype=source.dtype)
    copies.run(lambda _: source, lambda _: destination)
    assert len(handed) == 1
    return destination, handed[0]


@pytest.mark.parametrize(
    ("make", "num_views"),
    [(backwards, EXPERTS), (backwards_with_gaps, EXPERTS), (irregular, EXPERTS // 2), (repeated, 1)],
)
def test_a_bucket_is_copied_in_one_call(make, num_views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    transfers, source = make(), torch.arange(100.0 * SIZE)
    expected = torch.zeros(100 * SIZE)
    for one in transfers:
        box = source.as_strided(one.lengths, one.src.strides, one.src.offset)
        expected.as_strided(one.lengths, one.dst.strides, one.dst.offset).copy_(box)
    copies = BatchedCopies(reversed(transfers))
    found, handed = calls_of(copies, source, monkeypatch)
    assert torch.equal(found, expected)
    assert handed == num_views


def test_buffers_of_one_storage_are_one_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen experts: each is a buffer of its own, and they lie one after the other."""
    whole = torch.arange(100.0 * SIZE)
    parts = {f"expert {number}": whole[number * SIZE : (number + 1) * SIZE] for number in range(EXPERTS)}
    copies = BatchedCopies(transfer(0, number * SIZE, source=name) for number, name in enumerate(parts))
    handed: list[int] = []
    monkeypatch.setattr(transports.copies, "copy_each", lambda into, _: handed.append(len(into)))
    copies.run(lambda one: parts[one.src.buffer.name], lambda _: torch.zeros(100 * SIZE))
    elsewhere = {name: part.clone() for name, part in parts.items()}
    copies.run(lambda one: elsewhere[one.src.buffer.name], lambda _: torch.zeros(100 * SIZE))
    assert handed == [1, EXPERTS]  # and what was found out of the memory before is not believed of another
    runs = copies._runs
    again = {name: part.clone() for name, part in parts.items()}
    copies.run(lambda one: again[one.src.buffer.name], lambda _: torch.zeros(100 * SIZE))
    assert copies._runs is runs  # but of memory that lies alike


class Memory:
    """Bytes that live as long as a tensor over them."""

    def __init__(self) -> None:
        self.pages = torch.ones(400 * SIZE, dtype=torch.uint8)


def test_no_memory_is_kept() -> None:
    copies, memories = BatchedCopies(backwards()), [Memory(), Memory()]
    flats = [
        tensor_over(memory.pages.data_ptr(), 400 * SIZE, torch.device("cpu"), memory).view(torch.float32)
        for memory in memories
    ]
    copies.run(lambda _: flats[0], lambda _: flats[1])
    alive = [weakref.ref(memory) for memory in memories]
    memories.clear()
    assert all(ref() is not None for ref in alive)
    flats.clear()
    assert [ref() for ref in alive] == [None, None]


def test_the_transfer_that_fails_is_named_out_of_thousands() -> None:
    outside = transfer(1000 * SIZE, EXPERTS * SIZE, name="outside")
    with pytest.raises(CopyError, match="out of bounds") as failed:
        BatchedCopies([*backwards(), outside]).run(lambda _: torch.ones(100 * SIZE), lambda _: torch.ones(100 * SIZE))
    assert failed.value.transfer is outside


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.bool, torch.complex128])
def test_elements_of_16_bytes_are_the_same_bytes(dtype: torch.dtype) -> None:
    """As the experts' second matrices are cut by tensor parallelism; shown on the CPU, used on CUDA."""
    step = 16 // dtype.itemsize
    source = torch.randint(0, 2, (3, 4 * 9 * 4 * step), dtype=torch.uint8).to(dtype).view(-1)
    into = torch.zeros_like(source)
    views = [flat.as_strided((3, 4, 2 * step), (36 * step, 9 * step, 1), step) for flat in (into, source)]
    wide = widened(*views)
    assert [view.dtype for view in wide] == [torch.complex128] * 2
    assert wide[0].shape == (3, 4, 2)
    wide[0].copy_(wide[1])
    assert torch.equal(views[0].contiguous().view(torch.uint8), views[1].contiguous().view(torch.uint8))
    assert torch.count_nonzero(into.view(torch.uint8)) <= torch.count_nonzero(views[1].contiguous().view(torch.uint8))


def test_what_is_no_multiple_of_16_bytes_stays() -> None:
    flat = torch.zeros(1000, dtype=torch.bfloat16)
    cases = {
        "start": flat.as_strided((2, 8), (16, 1), 4),
        "rows": flat.as_strided((2, 12), (16, 1), 0),
        "stride": flat.as_strided((2, 8), (20, 1), 0),
        "transposed": flat.as_strided((8, 8), (1, 16), 0),
        "address": flat[4:].view(torch.uint8).view(torch.bfloat16).as_strided((2, 8), (16, 1), 4),
        "another dtype": torch.zeros(2, 8),
        "a number": flat.as_strided((), (), 0),
    }
    for name, view in cases.items():
        assert widened(torch.zeros_like(view, dtype=torch.bfloat16), view)[1] is view, name

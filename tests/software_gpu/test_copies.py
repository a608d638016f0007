"""Copies of a bucket between buffers of a device: the same bytes as on a CPU, in one or two kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.planning.plan import Link, Transfer
from hybrid_engine.records.layout import BufferId, Place
from hybrid_engine.transports.copies import BatchedCopies, CopyError
from tests.hybrid_engine.transports.cases import Shape, build_case, differing
from tests.software_gpu.device import Reports, counted

EXPERTS, ROWS, COLUMNS, SHARDS = 12, 32, 64, 4
SIZE = ROWS * COLUMNS


def experts_backwards(shard: int, columns: int = COLUMNS // SHARDS) -> Iterator[Transfer]:
    """Yield transfers of a tensor parallel rank's columns of every expert's second matrix.

    Megatron's buffer holds whole matrices, the last expert first; vLLM's holds this rank's columns,
    the first first.
    """
    for expert in range(EXPERTS):
        place = (EXPERTS - 1 - expert) * SIZE + shard * columns
        source = Place(BufferId(0, "trained"), place, (COLUMNS, 1))
        destination = Place(BufferId(0, "served"), expert * ROWS * columns, (columns, 1))
        yield Transfer(f"expert {expert}", (ROWS, columns), source, destination, 2 * ROWS * columns, Link.SELF)


def copied(copies: BatchedCopies, source: torch.Tensor, served: torch.dtype, start: int = 0) -> torch.Tensor:
    """Run copies on the source's device, into memory that begins `start` elements after a multiple of 16 bytes."""
    flat = torch.zeros(EXPERTS * SIZE + start, dtype=served, device=source.device)[start:]
    copies.run(lambda _: source, lambda _: flat)
    return flat.cpu().view(torch.uint8)


@pytest.mark.parametrize("columns", [16, 9])  # A multiple of 16 bytes, or not.
@pytest.mark.parametrize(
    ("trained", "served"),
    [
        *((dtype, dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.bool)),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
)
def test_experts_in_reverse_order_are_copied_by_one_kernel(
    trained: torch.dtype, served: torch.dtype, columns: int
) -> None:
    source = torch.randn(EXPERTS * SIZE).to(trained)
    for shard in range(SHARDS):
        transfers = list(experts_backwards(shard, columns))
        expected = copied(BatchedCopies(transfers), source, served)
        with counted() as calls:
            assert torch.equal(copied(BatchedCopies(transfers), source.to("cuda"), served), expected)
        assert calls["copy_tiles"] == 1
        assert "aten::copy_" not in calls, calls


def grown(place: Place, step: int) -> Place:
    return Place(place.buffer, place.offset * step, (*(stride * step for stride in place.strides), 1))


DTYPES = ("uint8", "bfloat16", "float16", "float32", "int64")
CASTS = ("bfloat16", "float32", "float16", "bfloat16", "int64")


@given(st.integers(0, 2**32), st.sampled_from([DTYPES, CASTS]), st.integers(1, 20), st.sampled_from([1, 4, 16]))
def test_any_boxes_are_copied_as_on_a_cpu(seed: int, dtypes: tuple[str, ...], num: int, step: int) -> None:
    """Elements become runs of `step`: some boxes permit 16 bytes at a time, and others do not."""
    case = build_case(seed, 1, Shape(num, 1, DTYPES, dtypes, max_length=6))
    transfers = [
        replace(
            transfer, lengths=(*transfer.lengths, step), src=grown(transfer.src, step), dst=grown(transfer.dst, step)
        )
        for transfer in case.buckets[0].transfers
    ]
    sources = {buffer.name: flat.repeat_interleave(step) for buffer, flat in case.sources.items()}
    targets = {name: flat.repeat(step) for name, flat in case.new_destinations(0).items()}
    on_gpu = [{name: flat.cuda() for name, flat in flats.items()} for flats in (sources, targets)]
    copies = BatchedCopies(transfers)
    copies.run(lambda moved: sources[moved.src.buffer.name], lambda moved: targets[moved.dst.buffer.name])
    with counted() as calls:
        copies.run(lambda moved: on_gpu[0][moved.src.buffer.name], lambda moved: on_gpu[1][moved.dst.buffer.name])
    assert differing({name: flat.cpu() for name, flat in on_gpu[1].items()}, targets) == []
    classes = {(a, b, is_wide) for a, b in zip(DTYPES, dtypes, strict=True) for is_wide in (False, True)}
    assert 1 <= calls["copy_tiles"] <= len(classes)


def test_the_table_of_addresses_is_made_again_only_for_other_memory() -> None:
    copies = BatchedCopies(experts_backwards(0))
    source = torch.randn(EXPERTS * SIZE).to("cuda", torch.bfloat16)
    served = torch.empty(EXPERTS * SIZE, dtype=torch.bfloat16, device="cuda")
    tables = []
    for flat, num_copies in [(source, 2), (source, 0), (source.clone(), 1), (source, 1)]:
        served.zero_()
        with counted() as calls:
            copies.run(lambda _, flat=flat: flat, lambda _: served)
        assert (calls["cuMemcpyAsync"], calls["kernel"], calls["cuStreamSynchronize"]) == (
            num_copies,
            1,
            num_copies == 2,
        )
        tables.append(copies._tiled.tiles)
        expected = copied(BatchedCopies(experts_backwards(0)), flat.cpu(), torch.bfloat16)
        assert torch.equal(served.cpu().view(torch.uint8), expected)
    assert all(table is tables[0] for table in tables)


def test_memory_at_an_odd_place_is_copied_by_elements() -> None:
    copies = BatchedCopies(experts_backwards(1))
    source = torch.randn(EXPERTS * SIZE + 8).to("cuda", torch.bfloat16)
    kinds = []
    for start in (0, 1, 8):
        flat = source[start:]
        expected = copied(BatchedCopies(experts_backwards(1)), flat.cpu(), torch.bfloat16)
        assert torch.equal(copied(copies, flat, torch.bfloat16), expected)
        kinds += copies._tiled.tiles
    assert kinds == [("int64", "int64", 2), ("bfloat16", "bfloat16", 1), ("int64", "int64", 2)]


def test_a_transfer_beyond_the_memory_is_named_before_anything_is_copied() -> None:
    source = torch.ones(EXPERTS * SIZE // 2, device="cuda")
    served = torch.zeros(EXPERTS * SIZE, device="cuda")
    with pytest.raises(CopyError, match="out of bounds") as failed, counted() as calls:
        BatchedCopies(experts_backwards(0)).run(lambda _: source, lambda _: served)
    assert failed.value.transfer.tensor == "expert 0"
    assert calls["copy_tiles"] == 0


@pytest.mark.parametrize("side", ["source", "destination"])
def test_the_checker_sees_what_the_kernel_reads_and_writes(side: str, reports: Reports) -> None:
    flats = {
        "source": torch.ones(EXPERTS * SIZE, device="cuda"),
        "destination": torch.zeros(EXPERTS * SIZE, device="cuda"),
    }
    copies = BatchedCopies(experts_backwards(0))
    for writes in (False, True):
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            if writes:
                flats[side].zero_()  # Nothing waits for it.
        copies.run(lambda _: flats["source"], lambda _: flats["destination"])
        assert writes or not reports.new()
    text = reports.new()
    assert "RACE" in text
    assert "copy_tiles" in text
    torch.cuda.synchronize()

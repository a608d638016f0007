"""Copies of a bucket between buffers of a device: the same bytes as on a CPU, in one or two
kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import TransportError
from hybrid_engine.planning.plan import Bucket, Link, Transfer
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import Buffer, BufferId, Place
from hybrid_engine.transports.context import RelayBuffers, Transport
from hybrid_engine.transports.copies import BatchedCopies
from hybrid_engine.transports.pull import LocalTransport
from hybrid_engine.transports.router import TransportSet
from tests.harness.errors import refused
from tests.hybrid_engine.transports.cases import WHERE, Shape, build_case, differing
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
        yield Transfer(
            f"expert {expert}", (ROWS, columns), source, destination, 2 * ROWS * columns, Link.SELF
        )


def copied(
    copies: BatchedCopies, source: torch.Tensor, served: torch.dtype, start: int = 0
) -> torch.Tensor:
    """Run copies on the source's device, into memory that begins `start` elements after a multiple
    of 16 bytes.
    """
    flat = torch.zeros(EXPERTS * SIZE + start, dtype=served, device=source.device)[start:]
    copies.run(lambda _: source, lambda _: flat, WHERE)
    return flat.cpu().view(torch.uint8)


@pytest.mark.parametrize("columns", [16, 9])  # A multiple of 16 bytes, or not.
@pytest.mark.parametrize(
    ("trained", "served"),
    [
        *zip(
            SAME := (torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.bool),
            SAME,
            strict=True,
        ),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_experts_in_reverse_order_are_copied_by_one_kernel(
    trained: torch.dtype, served: torch.dtype, columns: int
) -> None:
    source = torch.randn(EXPERTS * SIZE).to(trained)
    copies = BatchedCopies(experts_backwards(1, columns))
    expected = copied(copies, source, served)
    for start in (0, 1, 0):
        with counted() as calls:
            assert torch.equal(copied(copies, source.to("cuda"), served, start), expected)
        assert calls["copy_tiles"] == 1
        ((*_, pack),) = copies._tiled.tiles
        assert (pack > 1) == (columns == 16 and start == 0)


def grown(place: Place, step: int) -> Place:
    return Place(
        place.buffer, place.offset * step, (*(stride * step for stride in place.strides), 1)
    )


DTYPES = ("uint8", "bfloat16", "float16", "float32", "int64")
CASTS = ("uint8", "float32", "bfloat16", "float16", "int64")


@given(
    st.integers(0, 2**32),
    st.sampled_from([DTYPES, CASTS]),
    st.integers(1, 20),
    st.sampled_from([1, 4, 16]),
)
def test_any_boxes_are_copied_as_on_a_cpu(
    seed: int, dtypes: tuple[str, ...], num: int, step: int
) -> None:
    """Elements become runs of `step`: some boxes permit 16 bytes at a time, and others do not."""
    case = build_case(seed, 1, Shape(num, 1, DTYPES, dtypes, max_length=6))
    transport = LocalTransport(0)
    copies = transport.prepare(
        [
            replace(
                moved,
                lengths=(*moved.lengths, step),
                src=grown(moved.src, step),
                dst=grown(moved.dst, step),
            )
            for moved in case.buckets[0].transfers
        ]
    )

    def copied_on(device: str) -> TensorDict:
        sources = {
            name: flat.repeat_interleave(step).to(device)
            for name, flat in case.sources_of(0).items()
        }
        targets = {
            name: flat.repeat(step).to(device) for name, flat in case.new_destinations(0).items()
        }
        transport.run(0, copies, sources, targets)
        return {name: flat.cpu() for name, flat in targets.items()}

    with counted() as calls:
        assert differing(copied_on("cuda"), copied_on("cpu")) == []
    assert 1 <= calls["copy_tiles"] <= 2 * len(dtypes)


def test_the_table_of_addresses_is_made_again_only_for_other_memory() -> None:
    copies = BatchedCopies(experts_backwards(0))
    source = torch.randn(EXPERTS * SIZE, device="cuda")
    served = torch.empty(EXPERTS * SIZE, device="cuda")
    tables = set()
    for flat, num_uploads in [(source, 2), (source, 0), (other := source.neg(), 1), (other, 0)]:
        with counted() as calls:
            copies.run(lambda _, flat=flat: flat, lambda _: served, WHERE)
        assert (calls["cuMemcpyAsync"], calls["kernel"], calls["cuStreamSynchronize"]) == (
            num_uploads,
            1,
            0,
        )
        assert torch.equal(served[:16], flat[-SIZE:][:16])
        tables.add(*map(id, copies._tiled.tiles.values()))
    assert len(tables) == 1


def test_a_transfer_beyond_the_memory_is_named_before_anything_is_copied() -> None:
    source = torch.ones(EXPERTS * SIZE // 2, device="cuda")
    with (
        refused(TransportError, "copy-failed", WHERE, "expert 0", "out of bounds"),
        counted() as calls,
    ):
        copied(BatchedCopies(experts_backwards(0)), source, torch.float32)
    assert calls["copy_tiles"] == 0


@pytest.mark.parametrize("side", [0, 1])
def test_the_checker_sees_what_the_kernel_reads_and_writes(side: int, reports: Reports) -> None:
    copies = BatchedCopies(experts_backwards(0))
    flats = torch.zeros(2, EXPERTS * SIZE, device="cuda")
    copies.run(lambda _: flats[0], lambda _: flats[1], WHERE)
    torch.cuda.synchronize()
    reports.require_none()
    with torch.cuda.stream(torch.cuda.Stream()):
        flats[side].zero_()  # Nothing waits for it.
    copies.run(lambda _: flats[0], lambda _: flats[1], WHERE)
    text = reports.new()
    assert "RACE" in text
    assert "copy_tiles" in text
    torch.cuda.synchronize()


def test_readers_are_notified_once_relay_buffers_are_written() -> None:
    """Readers are other processes, which do not wait for the stream of the relay rank."""
    relay, source, served = (
        Place(BufferId(rank, name), 0, (1,)) for rank, name in ((0, "relay"), (2, "s"), (1, "d"))
    )
    arrival = Transfer("t", (SIZE,), source, relay, 4 * SIZE, Link.NETWORK)
    read = Transfer("t", (SIZE,), relay, served, 4 * SIZE, Link.HOST)
    bucket = Bucket(0, ("t",), (arrival,), (), 4 * SIZE, fan_out=(read,))
    relays = RelayBuffers(0, {relay.buffer: Buffer(SIZE, "float32", "0")}, "cuda")
    (flat,) = relays.tensors.values()
    queued = torch.ones(SIZE, device="cuda")
    written = torch.cuda.Event()
    notified = []

    class Written(Transport):
        name = "written"

        def run(self, *share: object) -> None:
            if not notified:
                flat.copy_(queued)
                written.record()

        def notify(self, bucket: int, phase: str, *ends: object) -> None:
            notified.append((phase, written.query()))
            return ""

    TransportSet(0, [Written(0)], lambda transfer: "written", relays).run(bucket, {}, {})
    assert notified == [("relay arrived", True), ("relay read", True)]

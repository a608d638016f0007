"""Copies of a bucket between buffers of a device: the same bytes, in few kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hybrid_engine.planning.plan import Link, Transfer
from hybrid_engine.records.layout import BufferId, Place
from hybrid_engine.transports.copies import BatchedCopies
from tests.software_gpu.device import counted

EXPERTS, ROWS, COLUMNS, SHARDS = 12, 32, 64, 4
SIZE = ROWS * COLUMNS


def experts_backwards(shard: int) -> Iterator[Transfer]:
    """Yield transfers of a tensor parallel rank's columns of every expert's second matrix.

    Megatron's buffer holds whole matrices, the last expert first; vLLM's holds this rank's columns,
    the first first.
    """
    columns = COLUMNS // SHARDS
    for expert in range(EXPERTS):
        place = (EXPERTS - 1 - expert) * SIZE + shard * columns
        source = Place(BufferId(0, "trained"), place, (COLUMNS, 1))
        destination = Place(BufferId(0, "served"), expert * ROWS * columns, (columns, 1))
        yield Transfer(f"expert {expert}", (ROWS, columns), source, destination, 2 * ROWS * columns, Link.SELF)


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize(
    ("trained", "served", "num_kernels"),
    [
        (torch.bfloat16, torch.bfloat16, 2),  # Indices of the experts, and all experts.
        (torch.float8_e4m3fn, torch.float8_e4m3fn, 2),
        (torch.float32, torch.bfloat16, EXPERTS),  # Casts need a kernel per expert.
    ],
)
def test_experts_in_reverse_order_are_copied_by_one_kernel(
    trained: torch.dtype, served: torch.dtype, num_kernels: int, shard: int
) -> None:
    source = torch.randn(EXPERTS * SIZE).to("cuda", trained)
    destination = torch.zeros(EXPERTS * SIZE // SHARDS, dtype=served, device="cuda")
    copies = BatchedCopies(experts_backwards(shard))
    with counted() as calls:
        copies.run(lambda _: source, lambda _: destination)
    columns = source.view(EXPERTS, ROWS, SHARDS, -1)[:, :, shard].cpu()
    expected = columns.to(served).flip(0) if served.itemsize > 1 else columns.view(torch.uint8).flip(0)
    assert torch.equal(destination.cpu().view(expected.dtype).view(expected.shape), expected)
    assert calls["kernel"] == num_kernels

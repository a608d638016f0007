"""Digests of many boxes on the device equal single digests. They and headers need few waits."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.ranks import digests
from hybrid_engine.transports.messages import (
    HEADER_NBYTES,
    Message,
    StagedMessage,
    read_headers,
    write_headers,
)
from tests.software_gpu.device import counted
from tests.software_gpu.switch_calls import by_kind

DEVICE = torch.device("cuda", 0)
SIZES = (1, 3, 1000, digests._ROW * digests._MIN_ROWS, 2**20 + 17)


@pytest.fixture(scope="module")
def boxes() -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    digests.box_digest(torch.zeros(2**20, device=DEVICE))  # Computes the factors, which also waits.
    flats = [torch.randn(size, device=DEVICE, generator=generator) for size in SIZES]
    return [*flats, flats[-1][: 2**20].view(1024, 1024)[:, 3:700]]


def test_many_digests_need_one_wait(boxes: list[torch.Tensor]) -> None:
    on_the_host = [box.cpu() for box in boxes if box.nbytes <= digests._ROW]
    with counted() as calls:
        values = digests.box_digests(boxes)
    assert by_kind(calls)["waits of the host"] == 1
    assert values == [digests.box_digest(box) for box in boxes]
    # Small boxes are hashed directly.
    assert values[: len(on_the_host)] == digests.box_digests(on_the_host)


def test_headers_of_a_bucket_need_one_wait() -> None:
    headers = enumerate(torch.empty(5, HEADER_NBYTES, dtype=torch.uint8, device=DEVICE))
    messages = [StagedMessage(Message(1), memory, 0, digest) for digest, memory in headers]
    with counted() as calls:
        write_headers(messages, 7, "")
        received = read_headers(messages, 7)
    assert by_kind(calls)["waits of the host"] == 1
    assert [message.digest for message in received] == [0, 1, 2, 3, 4]


def test_pending_bytes_are_bounded(
    boxes: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = digests.box_digests(boxes)
    monkeypatch.setattr(digests, "_MAX_PENDING_NBYTES", 4096)
    with counted() as calls:
        assert digests.box_digests(boxes) == values
    # The first three, hashed directly, have 4016 bytes; the others have 2, 8 and 5 KiB.
    assert by_kind(calls)["waits of the host"] == 4


def test_digests_in_another_dtype(boxes: list[torch.Tensor]) -> None:
    values = digests.box_digests(boxes, [torch.bfloat16] * len(boxes))
    assert values == [digests.box_digest(box.to(torch.bfloat16)) for box in boxes]

"""Digests of many boxes on the device: those of each, for few waits."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.ranks import digests
from tests.software_gpu.device import counted
from tests.software_gpu.switch_calls import by_kind

DEVICE = torch.device("cuda", 0)
SIZES = (1, 3, 1000, digests._ROW * digests._FEWEST_ROWS, 2**20 + 17)


@pytest.fixture(scope="module")
def boxes() -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    digests.box_digest(torch.zeros(2**20, device=DEVICE))  # the factors are made, which waits too
    flats = [torch.randn(size, device=DEVICE, generator=generator) for size in SIZES]
    return [*flats, flats[-1][: 2**20].view(1024, 1024)[:, 3:700]]


def test_many_at_once(boxes: list[torch.Tensor]) -> None:
    on_the_host = [box.cpu() for box in boxes if box.nbytes <= digests._ROW]
    with counted() as calls:
        found = digests.box_digests(boxes)
    assert by_kind(calls)["waits of the host"] == 1
    assert found == [digests.box_digest(box) for box in boxes]
    assert found[: len(on_the_host)] == digests.box_digests(on_the_host), "few bytes are hashed as they are"


def test_what_is_hashed_is_bounded(boxes: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    found = digests.box_digests(boxes)
    monkeypatch.setattr(digests, "_MOST_PENDING_NBYTES", 4096)
    with counted() as calls:
        assert digests.box_digests(boxes) == found
    # 4016 bytes of the first three, which are hashed as they are; 2, 8 and 5 KiB of the others
    assert by_kind(calls)["waits of the host"] == 4


def test_each_in_its_dtype(boxes: list[torch.Tensor]) -> None:
    found = digests.box_digests(boxes, [torch.bfloat16] * len(boxes))
    assert found == [digests.box_digest(box.to(torch.bfloat16)) for box in boxes]

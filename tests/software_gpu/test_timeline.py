"""Seconds of an offload and an onload, from bytes and bandwidths and not by a clock."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offload_items import Items, OffloadItem
from hybrid_engine.memory.offloader import Offloader
from tests.software_gpu.device import timed

NBYTES = 256 * 2**20
TO_HOST = NBYTES / 55e9
"""Seconds of a copy of NBYTES to the host."""


def test_an_offload_and_an_onload_take_little_more_than_their_copies() -> None:
    """Memory is released right after the copies, and taken ahead of them."""
    params = allocate_elastic(NBYTES // 2, torch.bfloat16, torch.device("cuda", 0), "param")
    moments = allocate_elastic(NBYTES // 4, torch.float32, torch.device("cuda", 0), "relay")
    grads = allocate_elastic(NBYTES // 4, torch.float32, torch.device("cuda", 0), "grad")
    items = [
        OffloadItem("params", "param", params),
        OffloadItem("grads", "grad", grads, "drop"),
        OffloadItem("moments", "optimizer", moments),
    ]
    offloader = Offloader(Items(lambda: items))
    offloader.offload()  # Allocates host memory.
    offloader.onload()
    with timed() as out:
        offloader.offload()
    with timed() as back:
        offloader.onload()
    assert out.to_host == pytest.approx(2 * TO_HOST, rel=0.01)
    assert back.from_host == pytest.approx(2 * TO_HOST, rel=0.01)
    assert out.seconds <= 1.15 * out.to_host
    assert back.seconds <= 1.1 * back.from_host

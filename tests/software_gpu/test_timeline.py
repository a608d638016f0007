"""The timeline shows overlap and waits, computed from bytes and bandwidths and not by a clock."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offload_items import KINDS, LATE_KINDS, Items, OffloadItem
from hybrid_engine.memory.offloader import Offloader
from tests.software_gpu.device import timed

NBYTES = 256 * 2**20
TO_HOST = NBYTES / 55e9
"""Seconds of a copy of NBYTES to the host."""


@pytest.mark.parametrize("waits", [False, True])
def test_copies_both_ways_overlap_unless_one_waits(waits: bool) -> None:
    source, destination = (torch.empty(NBYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    on_host = [torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    out = torch.cuda.Stream()
    back = torch.cuda.Stream()
    torch.cuda.synchronize()
    with timed() as timeline:
        with torch.cuda.stream(out):
            on_host[0].copy_(source, non_blocking=True)
        if waits:
            back.wait_stream(out)
        with torch.cuda.stream(back):
            destination.copy_(on_host[1], non_blocking=True)
        torch.cuda.synchronize()
    assert timeline.to_host == pytest.approx(TO_HOST)
    assert timeline.from_host == pytest.approx(TO_HOST)
    assert timeline.seconds == pytest.approx(TO_HOST * (2 if waits else 1), rel=0.05)


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
    offloader.offload()
    with timed() as late:
        offloader.onload(late=LATE_KINDS)
        params.sum()
        grads.fill_(1)
        offloader.require_present(["param", "grad"])
        torch.cuda.current_stream().synchronize()
    with timed() as rest:
        offloader.require_present(KINDS)
    assert late.seconds <= 1.2 * TO_HOST, "passes do not wait for the moments"
    assert late.seconds + rest.seconds == pytest.approx(back.seconds, rel=0.1)
    assert rest.seconds >= 0.8 * TO_HOST, "a step does"
    assert out.to_host == pytest.approx(2 * TO_HOST, rel=0.01)
    assert back.from_host == pytest.approx(2 * TO_HOST, rel=0.01)
    assert out.seconds <= 1.15 * out.to_host
    assert back.seconds <= 1.1 * back.from_host

"""Report and log line of a switch, with fakes of both engines."""

from __future__ import annotations

from collections import Counter

import pytest

from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.planning.plan import DEVICE_GBPS, Costs, Link
from hybrid_engine.ranks.job import own_device
from hybrid_engine.switch.report import SLOWEST_RADIX, SwitchTally
from tests.hybrid_engine.switch.fakes import FORWARD, INFER, NBYTES, TRAIN, TRAINING_NBYTES, Rig

FILL_PARTS = {"allocate", "read", "transfer", "write", "commit"}
TO_INFER = {"offload", "onload", "prepare", "check", "begin", "fill", "resume"} | FILL_PARTS


def test_report_of_a_switch_to_infer_and_back(rig: Rig):
    first = rig.fill()
    assert set(first.seconds_by_phase) >= TO_INFER | {"plan", "layout"}
    assert (first.direction, first.version) == ("train->infer", 1)
    assert 0 < first.seconds < 60
    assert (first.bytes_received, first.bytes_least, first.bytes_own) == (0, 0, NBYTES)
    assert (first.bytes_offloaded, first.bytes_onloaded) == (sum(TRAINING_NBYTES.values()), 0)
    assert rig.manager.last_report is first
    bound = "0 %" if own_device().type == "cuda" else "unknown"
    assert f"GB/s in the fill ({bound} of the bound), slowest rank 0" in str(first)
    back = rig.manager.enter(TRAIN)
    assert set(back.seconds_by_phase) >= {"release", "onload"}
    assert set(back.seconds_by_phase).isdisjoint(
        FILL_PARTS | {"plan", "layout", "prepare", "resume"}
    )
    assert (back.bytes_received, back.bytes_least, back.bytes_own) == (0, 0, 0)
    assert (back.bytes_offloaded, back.bytes_onloaded) == (0, sum(TRAINING_NBYTES.values()))
    assert rig.manager.last_report is back
    again = rig.manager.enter(INFER)
    assert set(again.seconds_by_phase) >= TO_INFER
    assert set(again.seconds_by_phase).isdisjoint({"plan", "layout", "release"})


def test_the_bound_is_that_of_the_links():
    tally = SwitchTally()
    tally.seconds["fill"] = 0.25
    fill = Costs(nbytes_by_link=Counter({Link.HOST: 900_000_000, Link.NETWORK: 0}))
    tally.add_fill(fill, DEVICE_GBPS["NVIDIA H200"], 7_000_000 * SLOWEST_RADIX + 3)
    assert [*tally.speed.values()] == pytest.approx([3.6, 0.8, 3, 7])


@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
def test_peak_memory(job: None, elastic: bool):
    training = sum(TRAINING_NBYTES.values())
    rig = Rig(elastic=elastic)
    rig.training.step()
    kept = Rig(elastic=elastic, **{f"offload_train_{kind}": False for kind in KINDS})
    kept.training.step()
    # A switch from training peaks at entry: later only parameters and inference weights remain.
    peaks = [(rig.manager.enter(INFER).peak_bytes, training)]
    peaks.append((kept.manager.enter(INFER).peak_bytes, training + NBYTES))
    peaks.append((kept.manager.enter(TRAIN).peak_bytes, training + NBYTES))  # both resident
    peaks.append((kept.manager.enter(FORWARD).peak_bytes, training))
    for nbytes, expected in peaks:
        assert nbytes > expected if rig.comes_in_chunks else nbytes == expected

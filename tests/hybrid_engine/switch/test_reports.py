"""Report and log line of a switch, with fakes of both engines."""

from __future__ import annotations

import dataclasses
import logging
import re

import pytest

from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.switch.report import ReshardReport
from tests.hybrid_engine.switch.fakes import FORWARD, INFER, NBYTES, TRAIN, TRAINING_NBYTES, Rig

FILL_PARTS = {"allocate", "read", "transfer", "write", "commit"}
TO_INFER = {"offload", "onload", "prepare", "check", "begin", "fill", "resume"} | FILL_PARTS


def test_report_of_a_switch_to_infer_and_back(rig: Rig):
    rig.training.step()
    first = rig.manager.enter(INFER)
    assert set(first.seconds_by_phase) >= TO_INFER | {"plan", "layout"}
    assert (first.direction, first.version) == ("train->infer", 1)
    assert (first.bytes_received, first.bytes_least, first.bytes_own) == (0, 0, NBYTES)
    assert (first.bytes_offloaded, first.bytes_onloaded) == (sum(TRAINING_NBYTES.values()), 0)
    assert rig.manager.last_report is first
    back = rig.manager.enter(TRAIN)
    assert set(back.seconds_by_phase) >= {"release", "onload"}
    assert set(back.seconds_by_phase).isdisjoint(FILL_PARTS | {"plan", "layout", "prepare", "resume"})
    assert (back.bytes_received, back.bytes_least, back.bytes_own) == (0, 0, 0)
    assert (back.bytes_offloaded, back.bytes_onloaded) == (0, sum(TRAINING_NBYTES.values()))
    assert rig.manager.last_report is back
    again = rig.manager.enter(INFER)
    assert set(again.seconds_by_phase) >= TO_INFER
    assert set(again.seconds_by_phase).isdisjoint({"plan", "layout", "release"})


def test_phases_add_up_to_the_switch(rig: Rig):
    rig.manager.enter(FORWARD)  # the first report includes the seconds of planning
    report = rig.manager.enter(INFER)
    seconds = report.seconds_by_phase
    assert min(seconds.values()) >= 0
    assert seconds["transfer"] > 0
    assert sum(seconds[part] for part in FILL_PARTS) <= seconds["fill"]
    assert sum(seconds[phase] for phase in seconds.keys() - FILL_PARTS) <= report.seconds


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


LINE = re.compile(
    r"\[Reshard\] direction=(?P<direction>\S+) version=(?P<version>\d+) duration=(?P<seconds>[\d.]+) s, "
    r"transferred=(?P<received>[\d.]+) GB \(least possible (?P<least>[\d.]+) GB\), (?P<rate>[\d.]+) GB/s, "
    r"peak=(?P<peak>[\d.]+) GB"
)


def test_each_switch_logs_one_line(rig: Rig, caplog: pytest.LogCaptureFixture):
    rig.training.step()
    with caplog.at_level(logging.INFO, "hybrid_engine"):
        report = rig.manager.enter(INFER)
        rig.manager.enter(TRAIN)
    lines = [LINE.fullmatch(record.getMessage()) for record in caplog.records if record.name == "hybrid_engine"]
    assert [line["direction"] for line in lines] == ["train->infer", "infer->train"]
    line = lines[0]
    assert int(line["version"]) == 1
    assert float(line["seconds"]) == pytest.approx(report.seconds, abs=1e-3)
    assert float(line["peak"]) == pytest.approx(report.peak_bytes / 1e9, abs=1e-6)


def test_the_log_line_contains_bytes_and_rate():
    counts = {"bytes_received": 2_000_000_000, "bytes_least": 1_500_000_000, "peak_bytes": 7_000_000_000}
    counts |= {"bytes_own": 0, "bytes_offloaded": 0, "bytes_onloaded": 0}
    report = ReshardReport("train->infer", 3, seconds=0.5, seconds_by_phase={}, **counts)
    assert LINE.fullmatch(str(report)).groupdict() == {
        **{"direction": "train->infer", "version": "3", "seconds": "0.500", "peak": "7.000000"},
        **{"received": "2.000000", "least": "1.500000", "rate": "4.000"},
    }
    assert "0.000 GB/s" in str(dataclasses.replace(report, seconds=0.0))

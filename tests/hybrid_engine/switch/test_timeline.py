"""Timeline of switches with fakes of both engines on one rank.

end_to_end/test_verified_switches.py has real engines.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from hybrid_engine.errors import ConfigError, ReshardError
from hybrid_engine.tracing import Recording, check_path, path_of_rank, sorted_events
from tests.harness.errors import violated
from tests.hybrid_engine.switch.fakes import FORWARD, INFER, TRAIN, Rig


def slices(path: Path) -> list[dict]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_every_phase_of_the_report_is_a_slice(job: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    rig = Rig(trace=path, verify="full")
    set_up = {"set-up", "layout", "plan", "start", "release", "onload", "wait"}
    assert {event["name"] for event in slices(path)} == set_up
    rig.manager.enter(FORWARD)  # the first report includes the seconds of set-up
    reports = [rig.manager.enter(INFER), rig.manager.enter(TRAIN)]
    events = slices(path)
    for report in reports:
        (whole,) = (event for event in events if event["name"] == report.direction)
        inside = [
            event for event in events if whole["ts"] <= event["ts"] <= whole["ts"] + whole["dur"]
        ]
        names = {event["name"] for event in inside}
        assert set(report.seconds_by_phase) - {"write"} <= names  # no message is unpacked
        for phase in ("fill", "offload", "release"):
            seconds = sum(event["dur"] for event in inside if event["name"] == phase) / 1e6
            assert seconds == pytest.approx(report.seconds_by_phase.get(phase, 0), abs=0.01)


def test_a_failed_switch_is_recorded_with_its_error(job: None, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    rig = Rig(trace=path)
    rig.script.arm("commit second", OSError("disk on fire"))
    with pytest.raises(ReshardError):
        rig.manager.enter(INFER)
    rig.assert_is(TRAIN)
    errors = {
        event["name"]: event["args"].get("error")
        for event in slices(path)
        if "error" in event["args"]
    }
    assert {"train->infer", "fill", "bucket", "commit"} <= errors.keys()
    rig.manager.enter(INFER)
    switches = [event for event in slices(path) if event["name"] == "train->infer"]
    assert [event["args"].get("error") for event in switches] == ["ReshardError", None]


def test_outer_spans_precede_inner_ones_and_dropped_events_are_counted() -> None:
    events = [{"name": "inner", "ts": 6, "dur": 1}, {"name": "outer", "ts": 6, "dur": 2}]
    *spans, dropped = sorted_events(Recording(events, num_dropped=1), rank=2)
    assert [(event["name"], event["ts"], event["pid"]) for event in spans] == [
        ("outer", 6, 2),
        ("inner", 6, 2),
    ]
    assert (dropped["name"], dropped["args"]) == ("recorded", {"dropped": 1})


def test_each_rank_writes_its_own_file() -> None:
    assert [path_of_rank(Path("a/trace.json"), rank) for rank in (0, 3)] == [
        Path("a/trace.json"),
        Path("a/trace.rank3.json"),
    ]


def test_a_lost_file_ends_the_trace_not_the_job(
    job: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(trace=tmp_path / "trace.json")
    (tmp_path / "trace.json").unlink()  # has the effect of a failed disk
    with caplog.at_level(logging.WARNING, "hybrid_engine"):
        for target in (INFER, TRAIN):
            rig.manager.enter(target)
    assert caplog.text.count("the trace ends here") == 1
    rig.assert_is(TRAIN)


@pytest.mark.parametrize("path", ["", "missing/trace.json"])
def test_a_path_that_cannot_be_written_is_refused(job: None, tmp_path: Path, path: str) -> None:
    with violated(ConfigError, ("generate_config.trace", "not-writable")):
        check_path(tmp_path / path)
    with pytest.raises(ConfigError, match=r"generate_config\.trace"):
        Rig(trace=tmp_path / path)

"""Spans, the events of all ranks, and the file of a trace, in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hybrid_engine import tracing
from hybrid_engine.tracing import FIRST, TraceFile, count, recorded, span

HEADER = {**FIRST, "args": {"name": "header"}}


def test_spans_nest_and_record_errors() -> None:
    with span("outside of a recording"):
        count("bytes", training=1)
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match="disk"), recorded() as recording, span("outer"):
        with span("inner", bucket=3), span("wait"):
            pass
        raise ValueError("disk on fire")
    wait, inner, outer = recording.events
    assert [event["name"] for event in recording.events] == ["wait", "inner", "outer"]
    assert outer["ts"] <= inner["ts"] <= wait["ts"]
    ends = [event["ts"] + event["dur"] for event in (wait, inner, outer)]
    assert ends == sorted(ends)
    assert inner["args"] == {"bucket": 3}
    assert outer["args"] == {"error": "ValueError"}


def test_torchs_profiler_has_the_same_names() -> None:
    profiler = pytest.importorskip("torch.profiler")
    with (
        profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as profile,
        recorded(),
        span("commit"),
    ):
        pass
    assert "commit" in [event.name for event in profile.events()]


def test_a_recording_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_EVENTS", 3)
    with recorded() as recording:
        for number in range(5):
            count("b", of=number)
    assert [event["args"] for event in recording.events] == [{"of": number} for number in range(3)]
    assert recording.num_dropped == 2


def test_a_file_is_whole_after_every_write(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = TraceFile(path, [HEADER])
    assert json.loads(path.read_text()) == [HEADER]
    for number in range(3):
        file.append([{"name": number}, {"name": "x"}])
        file.append([])
        assert [event["name"] for event in json.loads(path.read_text())][1::2] == list(
            range(number + 1)
        )


def test_a_file_is_bounded_and_earlier_traces_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    before = tmp_path / "trace.json.1"
    TraceFile(path, [HEADER]).append([{"name": "of the run before"}])
    file = TraceFile(path, [HEADER], most_nbytes=200)
    assert "of the run before" in before.read_text()
    for number in range(50):
        file.append([{"name": number}])
    assert path.stat().st_size < 250
    assert before.stat().st_size < 250
    names = [event["name"] for event in (before, path) for event in json.loads(event.read_text())]
    assert names[-1] == 49
    assert names.count("process_name") == 2


@pytest.mark.parametrize("name", ["trace.json", "trace.json.1"])
def test_other_files_are_not_replaced(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.json"
    TraceFile(path, [HEADER])
    for make in (
        lambda: (tmp_path / name).write_text("precious"),
        lambda: os.mkfifo(tmp_path / name),
    ):
        (tmp_path / name).unlink(missing_ok=True)
        make()
        with pytest.raises(FileExistsError, match=rf"{name} is there, and is not a trace of ours"):
            TraceFile(path, [HEADER])
        assert {event.name for event in tmp_path.iterdir()} == {"trace.json", name}

"""What a script's switches and samples leave behind: files, Megatron's writers, its timers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_engine.backends.vllm.engine_settings import Completion
from hybrid_engine.megatron_script import journal
from hybrid_engine.switch.report import ReshardReport
from tests.harness.small_disks import file_size_limit


class Timers:
    """Megatron's, as far as they are used."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, name: str, log_level: int) -> Any:
        return SimpleNamespace(
            start=lambda barrier=False: self.calls.append(f"start {name}"),
            stop=lambda: self.calls.append(f"stop {name}"),
        )

    def write(self, names: list[str], writer: Any, iteration: int, reset: bool) -> None:
        self.calls.append("write")

    def log(self, names: list[str]) -> None:
        self.calls.append("log")


def report(direction: str) -> ReshardReport:
    return ReshardReport(
        direction=direction,
        version=4,
        seconds=0.5,
        seconds_by_phase={},
        bytes_received=10,
        bytes_own=0,
        bytes_least=10,
        bytes_offloaded=0,
        bytes_onloaded=0,
        peak_bytes=3_000_000_000,
    )


class StandInForWandb:
    """The module `wandb`, which Megatron uses as its writer, as far as it is used."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, Any]] = {}

    def Table(self, columns: list[str], data: list[list[str]]) -> list[list[str]]:
        return [columns, *data]

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.setdefault(step, {}).update(values)


def test_samples_and_reports_are_written_by_one_rank_and_by_megatrons_writers(tmp_path: Path) -> None:
    scalars: dict[str, float] = {}
    texts: dict[str, str] = {}
    wandb = StandInForWandb()
    script = SimpleNamespace(
        timers=Timers(),
        tokenizer=SimpleNamespace(detokenize=lambda ids: " ".join(map(str, ids))),
        tensorboard_writer=SimpleNamespace(
            add_scalar=lambda name, value, at: scalars.update({name: value}),
            add_text=lambda name, value, at: texts.update({name: value}),
        ),
        wandb_writer=wandb,
    )
    completions = [[Completion((4, 5), (-1.0, -3.0), "length")], [Completion((6,), (-2.0,), "stop")]]
    reports = [report("train->infer"), report("infer->train")]
    for is_writer in (True, False):
        notes = journal.Journal(script, tmp_path / str(is_writer), is_writer)
        notes.note(8, reports, notes.samples(8, ["7 8", (1, 2)], [[7, 8], [1, 2]], completions))
        notes.log_times(8)
    written = tmp_path / "True"
    first, second = (json.loads(line) for line in (written / "samples.jsonl").read_text().splitlines())
    assert first == {
        "iteration": 8,
        "prompt": "7 8",
        "text": "4 5",
        "prompt_token_ids": [7, 8],
        "token_ids": [4, 5],
        "log_probs": [-1.0, -3.0],
        "finish_reason": "length",
    }
    assert "text" not in second
    assert second["token_ids"] == [6]
    switches = [json.loads(line) for line in (written / "switches.jsonl").read_text().splitlines()]
    assert [switch["direction"] for switch in switches] == ["train->infer", "infer->train"]
    assert not (tmp_path / "False").exists()
    assert scalars["resharding/train->infer seconds"] == 0.5
    assert scalars["resharding/peak gigabytes"] == 3.0
    assert scalars["resharding/mean log-probability"] == -2.0
    assert scalars["resharding/completion tokens"] == 1.5
    assert texts == {"resharding/samples": "    7 8\n    => 4 5\n\n    [1, 2]\n    => [6]"}
    table = [["prompt", "completion", "finish reason"], ["7 8", "4 5", "length"], ["[1, 2]", "[6]", "stop"]]
    assert wandb.logged == {8: {**scalars, "resharding/samples": table}}
    assert script.timers.calls == ["write", "write", "log"] * 2


def test_a_full_disk_drops_lines_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whole lines, counted; a line that was cut short is not appended to."""
    script = SimpleNamespace(tensorboard_writer=None, wandb_writer=None)
    notes = journal.Journal(script, tmp_path, True)
    path = tmp_path / "samples.jsonl"
    path.write_text('{"iteration": 1}\n{"iterat')
    one = {"iteration": 2, "token_ids": [1], "log_probs": [], "prompt_token_ids": [], "finish_reason": "stop"}
    with file_size_limit(100):
        notes.note(2, [report("train->infer")], [one, one])
    assert notes.num_dropped == {"samples.jsonl": 2, "switches.jsonl": 1}
    assert f"appending to {path}: file too large (limit 100)" in caplog.text
    assert "2 lines dropped so far, training goes on" in caplog.text
    assert path.read_text() == '{"iteration": 1}\n'
    notes.note(3, [report("train->infer")], [one])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"iteration": 1}, one]


def test_without_prompts_there_are_no_samples_to_show() -> None:
    wandb = StandInForWandb()
    script = SimpleNamespace(tensorboard_writer=None, wandb_writer=wandb)
    journal.Journal(script, None, True).note(2, [report("train->infer")], [])
    assert "resharding/samples" not in wandb.logged[2]
    assert "resharding/completion tokens" not in wandb.logged[2]


def test_megatrons_interval_time_pauses_also_when_a_switch_fails() -> None:
    timers = Timers()
    notes = journal.Journal(SimpleNamespace(timers=timers), None, True)
    with pytest.raises(ValueError, match="no switch"), notes.apart_from_training(), notes.timed(journal.TIMERS[0]):
        raise ValueError("no switch")
    assert timers.calls == [
        "stop interval-time",
        "start resharding-to-inference",
        "stop resharding-to-inference",
        "start interval-time",
    ]

"""Files and output of rank 0."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.gpt_rl import report
from examples.gpt_rl.train import run_files
from examples.gpt_rl.trainer import documented


def row(iteration: int, **changes: Any) -> dict[str, Any]:
    values = {
        "accuracy": 0.3 + iteration / 10,
        "reward": 0.25,
        "kl": 0.01,
        "loss": 0.1,
        "logprob_diff": 1e-5,
    }
    times = {"reshard_seconds": 0.1, "iteration_seconds": 2.0, "generate_seconds": 0.5}
    return {
        "iteration": iteration,
        **values,
        **times,
        "bytes_received": 2_000_000,
        "bytes_least": 2_000_000,
        **changes,
    }


def test_rows_are_written_shown_and_summarized(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    screen = io.StringIO()
    directory = run_files(tmp_path)
    rows = [row(0, reward=None), row(1), row(2, accuracy=None), row(3)]
    with report.Report(Console(file=screen, width=80), directory) as shown:
        shown.begin()
        shown.show_progress("warm-up, loss 1.000", 1, 10)
        for values in rows:
            shown.add(values)
        shown.show_progress("generate", 3, 10)
    shown.finish()
    assert directory.metrics.rows() == rows
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    lines = screen.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["iter", "0", "1", "2", "3"]
    assert max(map(len, lines[:6])) <= 80
    assert lines[2].split() == [
        "0",
        "-",
        "0.010",
        "0.300",
        "0.100",
        "1.0e-05",
        "0.100",
        "2.00",
        "2.0",
    ]
    assert "accuracy now 0.600, 0.300 after the warm-up" in screen.getvalue()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("eval/accuracy")] == pytest.approx(
        [0.3, 0.4, 0.6]
    )
    assert {"train/kl", "time/generate", "reshard/seconds"} <= set(events.Tags()["scalars"])


@pytest.mark.parametrize("rows", [[], [row(2, accuracy=None), row(3)], [{"iteration": 4}]])
def test_missing_rows_and_values_are_tolerated(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    directory = run_files(tmp_path)
    screen = io.StringIO()
    for values in rows:
        directory.metrics.append(values)
    report.Report(Console(file=screen, width=80), directory).finish()
    assert (
        ("- after the warm-up" in screen.getvalue())
        == (tmp_path / "reward.png").is_file()
        == bool(rows)
    )


def test_a_row_without_completions_has_no_rate() -> None:
    """Before the first iteration, a checkpoint may wait for completions of later ones."""
    row = {"step": 0, "seconds": 2.0, "reshard_seconds": 0.5, "generate_seconds": 0.5}
    assert "tokens_per_second" not in documented(row, 8)
    assert documented({**row, "response_tokens": 3.0}, 8)["tokens_per_second"] == 48

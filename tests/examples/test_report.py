"""What rank 0 writes and shows, and what an iteration is measured to have taken."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.gpt_rl import report
from examples.gpt_rl.run_state import RunDirectory
from examples.gpt_rl.trainer import Tally, combine
from hybrid_engine import ReshardReport


def row(iteration: int, **changes: Any) -> dict[str, Any]:
    values = {"accuracy": 0.3 + iteration / 10, "reward": 0.25, "kl": 0.01, "loss": 0.1, "logprob_diff": 1e-5}
    taken = {"reshard_seconds": 0.1, "iteration_seconds": 2.0, "generate_seconds": 0.5}
    return {"iteration": iteration, **values, **taken, "bytes_received": 2_000_000, "bytes_least": 2_000_000, **changes}


def test_rows_are_written_shown_and_summed_up(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    screen, directory = io.StringIO(), RunDirectory(tmp_path)
    rows = [row(0, reward=None), row(1), row(2, accuracy=None), row(3)]
    with report.Report(Console(file=screen, width=80), directory) as shown:
        shown.begin()
        shown.show_progress("warm-up, loss 1.000", 1, 10)
        for each in rows:
            shown.add(each)
        shown.show_progress("generate", 3, 10)
    shown.finish()
    assert directory.rows() == rows
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    lines = screen.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["iter", "0", "1", "2", "3"]
    assert max(map(len, lines[:6])) <= 80
    assert lines[2].split() == ["0", "-", "0.010", "0.300", "0.100", "1.0e-05", "0.100", "2.00", "2.0"]
    assert "accuracy now 0.600, 0.300 after the warm-up" in screen.getvalue()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("eval/accuracy")] == pytest.approx([0.3, 0.4, 0.6])
    assert {"train/kl", "time/generate", "reshard/seconds"} <= set(events.Tags()["scalars"])


def test_the_summary_of_a_long_run_fits(tmp_path: Path) -> None:
    directory, screen = RunDirectory(tmp_path), io.StringIO()
    long = {"reshard_seconds": 1e5, "iteration_seconds": 1e6, "bytes_received": 10**15, "bytes_least": 10**15}
    directory.append_row(row(0, **long))
    report.Report(Console(file=screen, width=80), directory).finish()
    lines = [line for line in screen.getvalue().splitlines() if str(tmp_path) not in line]
    assert "resharding 100000.00 s of 1000000 s" in lines
    assert "1,000,000,000,000,000 bytes received, 1,000,000,000,000,000 the least possible" in lines
    assert max(map(len, lines)) <= 80


def test_the_bar_leaves_the_streams_alone(tmp_path: Path) -> None:
    """They go to the log; on a terminal rich would bring them back."""
    stdout, stderr = sys.stdout, sys.stderr
    with report.Report(Console(file=io.StringIO(), force_terminal=True, width=80), RunDirectory(tmp_path)):
        assert (sys.stdout, sys.stderr) == (stdout, stderr)


@pytest.mark.parametrize("rows", [[], [row(2, accuracy=None), row(3)], [{"iteration": 4}]])
def test_rows_that_were_lost_or_lack_values(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    directory, screen = RunDirectory(tmp_path), io.StringIO()
    for each in rows:
        directory.append_row(each)
    report.Report(Console(file=screen, width=80), directory).finish()
    assert ("- after the warm-up" in screen.getvalue()) == (tmp_path / "reward.png").is_file() == bool(rows)


def test_shares_of_ranks_combine() -> None:
    tally = Tally()
    values: dict[str, Any] = {**dict.fromkeys(ReshardReport.__dataclass_fields__, 0), "direction": "train->infer"}
    for seconds, received, peak in ((0.5, 100, 7), (0.25, 20, 9)):
        numbers = {"seconds": seconds, "bytes_received": received, "bytes_least": received, "peak_bytes": peak}
        tally.switches.append(ReshardReport(**{**values, "seconds_by_phase": {}, **numbers}))
    for _ in range(2):
        with tally.phase("update"):
            pass
    assert set(tally.seconds) == {"update"}
    share = tally.share()
    assert (share["reshard_seconds"], share["bytes_received"], share["peak_bytes"]) == (0.75, 120, 9)
    assert share["rss_bytes"] > 10_000_000
    other = {"reshard_seconds": 1.0, "bytes_received": 5, "bytes_least": 4, "peak_bytes": 3, "rss_bytes": 1}
    combined = combine([share, other], iteration_seconds=4.0)
    assert (combined["bytes_received"], combined["bytes_least"]) == (125, 124)
    assert (combined["reshard_seconds"], combined["reshard_share"], combined["peak_bytes"]) == (1.0, 0.25, 9)
    assert combine([share, share], iteration_seconds=4.0, are_totals=True)["bytes_received"] == 120

"""What rank 0 writes and shows."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.gpt_rl import report
from examples.gpt_rl.loggers import TensorBoard
from examples.gpt_rl.measure import Tally, combine, resident_nbytes
from examples.gpt_rl.run_state import RunDirectory
from hybrid_engine import ReshardReport


def row(iteration: int, **changes: Any) -> dict[str, Any]:
    seconds = {f"{phase}_seconds": 0.5 for phase in ("generate", "score", "update", "evaluate")}
    return {
        "iteration": iteration,
        "accuracy": 0.3 + iteration / 10,
        "reward": None if iteration == 0 else 0.25,
        "kl": 0.01 * iteration,
        "loss": 0.1,
        "logprob_diff": None if iteration == 0 else 1e-5,
        "reshard_seconds": 0.1,
        "reshard_share": 0.05,
        "iteration_seconds": 2.0,
        "bytes_received": 2_000_000,
        "bytes_least": 2_000_000,
        "peak_bytes": 5_000_000,
        "rss_bytes": 800_000_000,
        "weight_version": 10 + iteration,
        **seconds,
        **changes,
    }


def test_rows_are_written_and_shown(tmp_path: Path) -> None:
    screen = io.StringIO()
    directory = RunDirectory(tmp_path)
    with report.Report(Console(file=screen, width=80), directory) as shown:
        shown.begin([], [TensorBoard(tmp_path)])
        shown.show_progress("warm-up, loss 1.000", 1, 10)
        for iteration in range(4):
            shown.add(row(iteration, accuracy=None if iteration == 2 else 0.3 + iteration / 10))
    shown.finish()
    assert [json.loads(line)["iteration"] for line in directory.metrics_file.read_text().splitlines()] == [0, 1, 2, 3]
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.glob("events.out.tfevents.*"))
    lines, columns = screen.getvalue().splitlines(), report.columns_for(100)
    assert lines[:3] == ["starting engines ...", "warm-up, loss 1.000, 1/10", report.header_line(columns)]
    assert lines[5] == report.row_line(row(2, accuracy=None), columns)
    assert "0.600 (+0.300)" in screen.getvalue()


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(108, []), (100, ["MB least"]), (80, ["MB least", "peak MB", "share"]), (40, ["loss", "logp diff", "share"])],
)
def test_rows_fit_the_terminal(width: int, left_out: list[str]) -> None:
    columns = report.columns_for(width)
    header, line = report.header_line(columns), report.row_line(row(17), columns)
    assert len(header) == len(line)
    assert len(header) <= max(width, 61)
    assert not set(left_out) & {column.heading for column in columns}
    assert report.row_line(row(0), columns).split()[:4] == ["0", "-", "0.000", "0.300"]


def test_the_bar_leaves_the_streams_alone(tmp_path: Path) -> None:
    """They go to the log; on a terminal rich would bring them back."""
    stdout, stderr = sys.stdout, sys.stderr
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    with report.Report(screen, RunDirectory(tmp_path)):
        assert (sys.stdout, sys.stderr) == (stdout, stderr)
    assert "None" not in screen.file.getvalue()


def test_nothing_to_summarise(tmp_path: Path) -> None:
    screen = io.StringIO()
    report.Report(Console(file=screen), RunDirectory(tmp_path)).finish()
    assert screen.getvalue() == ""


def test_summary() -> None:
    result = report.summary([row(0), row(1), row(2, accuracy=None)])
    assert result["gain"] == pytest.approx(0.1)
    assert result["seconds"] == 6.0
    assert result["bytes_received"] == result["bytes_least"] == 6_000_000
    assert result["logprob_diff"] == 1e-5


@pytest.mark.parametrize(
    "rows",
    [
        [row(2, accuracy=None), row(3)],  # the first ones were lost
        [row(3, accuracy=None)],
        [row(0, accuracy=None), row(1, accuracy=None, reshard_seconds=None, peak_bytes=None)],
        [{"iteration": 4}],
    ],
)
def test_rows_that_were_lost_or_lack_values(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    directory, screen = RunDirectory(tmp_path), io.StringIO()
    for each in rows:
        directory.append_row(each)
    report.Report(Console(file=screen, width=80), directory).finish()
    assert "held-out accuracy now" in screen.getvalue()
    assert (tmp_path / "reward.png").is_file()
    assert report.summary(rows)["gain"] is None


def switch(seconds: float, received: int, peak: int) -> ReshardReport:
    values: dict[str, Any] = dict.fromkeys(ReshardReport.__dataclass_fields__, 0)
    return ReshardReport(
        **{
            **values,
            "direction": "train->infer",
            "seconds_by_phase": {},
            "seconds": seconds,
            "bytes_received": received,
            "bytes_least": received,
            "peak_bytes": peak,
        }
    )


def test_shares_of_ranks_combine() -> None:
    tally = Tally()
    tally.switches += [switch(0.5, 100, 7), switch(0.25, 20, 9)]
    share = tally.share()
    assert (share["reshard_seconds"], share["bytes_received"], share["peak_bytes"]) == (0.75, 120, 9)
    other = {"reshard_seconds": 1.0, "bytes_received": 5, "bytes_least": 4, "peak_bytes": 3, "rss_bytes": 1}
    combined = combine([share, other], iteration_seconds=4.0)
    assert (combined["bytes_received"], combined["bytes_least"]) == (125, 124)
    assert (combined["reshard_seconds"], combined["reshard_share"], combined["peak_bytes"]) == (1.0, 0.25, 9)
    assert 10_000_000 < combined["rss_bytes"] <= resident_nbytes() * 2


def test_phases_add_up() -> None:
    tally = Tally()
    for _ in range(2):
        with tally.phase("update"):
            pass
    with pytest.raises(RuntimeError), tally.phase("score"):
        raise RuntimeError
    assert set(tally.seconds) == {"update", "score"}

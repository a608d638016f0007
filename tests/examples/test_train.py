"""The command on two ranks, with real Megatron and vLLM: interrupted, resumed, finished."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.gpt_rl.train import run_files
from tests.examples.launched import finish, short_config, start
from tests.harness.processes import listening_addresses


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return short_config("tp2_to_dp2.yaml", tmp_path)


@pytest.mark.engines
@pytest.mark.slow
def test_an_interrupted_run_keeps_its_rows_and_can_be_finished(
    config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    directory = run_files(out)
    process = start(config, out)
    deadline = time.monotonic() + 200
    while (
        len(directory.metrics.rows()) < 2 and process.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    listening = listening_addresses(process.pid)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 128 + signal.SIGINT, output
    # At least the launcher and both ranks listen.
    assert sum(bool(sockets) for sockets in listening.values()) >= 3, listening
    assert all(address.is_loopback for address in set().union(*listening.values())), listening
    assert "the same command resumes the run" in output
    assert "Traceback" not in output
    check_progress(output)
    rows = directory.metrics.rows()
    last = rows[-1]["iteration"]
    assert [row["iteration"] for row in rows] == list(range(last + 1))
    assert directory.progress().step == last
    assert (out / "reward.png").is_file()
    check_rows(rows)

    once_more = start(config, out, f"rl_config.iterations={last}")
    assert "is finished" in finish(once_more)
    assert once_more.returncode == 0


@pytest.mark.long
@pytest.mark.engines
@pytest.mark.slow
def test_fsdp_runs_without_megatron_and_resumes_on_other_ranks(tmp_path: Path) -> None:
    """The first iteration runs on two ranks; the next one resumes on a single rank."""
    blocked = tmp_path / "modules"
    out = tmp_path / "run"
    blocked.mkdir()
    missing = "import sys\nsys.modules.update(dict.fromkeys(['megatron', 'megatron_patches']))\n"
    (blocked / "sitecustomize.py").write_text(missing)
    config = short_config("fsdp2_to_dp.yaml", tmp_path, micro_batch_size=8)
    for iterations, num_ranks in ((1, 2), (2, 1)):
        process = start(
            config, out, f"rl_config.iterations={iterations}", num_ranks=num_ranks, modules=blocked
        )
        output = finish(process)
        assert process.returncode == 0, output
        check_terminal(output)
    rows = run_files(out).metrics.rows()
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    check_rows(rows, num_ranks=[2, 2, 1])


@pytest.mark.ranks
def test_a_bad_configuration_ends_the_run_at_once(config: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(config.read_text())
    values["actor_config"]["tensor_model_parallel_size"] = 3
    values["rl_config"]["iteration"] = 5
    config.write_text(yaml.safe_dump(values))
    process = start(config, tmp_path / "run")
    output = finish(process)
    assert process.returncode != 0
    assert output.count("TP 3 x PP 1 x CP 1 = 3 does not divide") == 1
    assert output.count("rl_config.iteration: unknown key") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def check_progress(output: str) -> None:
    """Check the lines that replace the progress bar before the first row."""
    lines = output.splitlines()
    assert lines[1] == "starting engines ..."  # after the line of the launcher
    warm_up = next(line for line in lines if line.startswith("warm-up"))
    assert lines.index(warm_up) < next(
        index for index, line in enumerate(lines) if line.split()[:1] == ["0"]
    )


def check_rows(rows: list[dict[str, Any]], num_ranks: list[int] | None = None) -> None:
    for row, ranks in zip(rows, num_ranks or [2] * len(rows), strict=True):
        json.dumps(row, allow_nan=False)
        assert row["bytes_received"] == row["bytes_least"]
        assert (row["bytes_received"] > 0) == (ranks > 1)
        assert 0 < row["reshard_seconds"] < row["iteration_seconds"]
        assert row["reshard_share"] == pytest.approx(
            row["reshard_seconds"] / row["iteration_seconds"]
        )
        assert 0 <= row["accuracy"] <= 1
        assert row["peak_bytes"] > 0
        assert row["rss_bytes"] > 0
        assert row["evaluate_seconds"] > 0
        assert row["update_seconds"] > 0
    for row in rows[1:]:
        assert row["logprob_diff"] < 1e-4, "vLLM and Megatron compute with different weights"
        assert row["generate_seconds"] > 0
        assert row["score_seconds"] > 0
        assert row["weight_version"] == rows[0]["weight_version"] + 2 * row["iteration"]
    assert rows[1]["kl"] == pytest.approx(0, abs=1e-9)


def check_terminal(output: str) -> None:
    """Check that the summary is printed and no messages of libraries are."""
    assert "held-out accuracy now" in output
    assert "Warning" not in output
    assert "INFO" not in output

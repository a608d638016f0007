"""The command itself: two ranks, real Megatron, real vLLM; interrupted, taken up again, finished."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.gpt_rl import settings
from examples.gpt_rl.run_state import RunDirectory
from hybrid_engine.ranks.launching import kill_tree
from tests.harness.launch import REPO_ROOT

CONFIG = Path(settings.__file__).parent / "configs" / "tp2_to_dp2.yaml"
# of a row, what must not depend on the clock or on having been interrupted
RESULTS = ("accuracy", "reward", "kl", "loss", "grad_norm", "weight_version", "logprob_diff", "bytes_received")


def command(config: Path, out: Path, *options: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launcher, "-m", "examples.gpt_rl.train", "--config", str(config), "--out", str(out), *options]


def start(*arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO_ROOT)},
        cwd=REPO_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 200) -> str:
    """Everything printed; the processes are gone afterwards, whatever happened."""
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        if process.poll() is None:
            kill_tree(process)
            process.communicate()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The committed configuration, made short."""
    values = yaml.safe_load(CONFIG.read_text())
    values["model"] = str((CONFIG.parent / values["model"]).resolve())
    values["actor_config"]["micro_batch_size"] = 16
    values["rl_config"].update(
        data=str((CONFIG.parent / values["rl_config"]["data"]).resolve()),
        iterations=1000,
        prompts_per_iteration=16,
        samples_per_prompt=4,
        minibatches=2,
        checkpoint_every=1,
        warm_up={"max_steps": 10, "batch_size": 32},
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.engines
@pytest.mark.slow
def test_interrupt_resume_finish(config: Path, tmp_path: Path) -> None:
    out, directory = tmp_path / "run", RunDirectory(tmp_path / "run")
    process = start(config, out)
    wait_for_rows(directory, 2, process)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert "the same command goes on from there" in output
    rows = directory.rows()
    last = rows[-1]["iteration"]
    assert [row["iteration"] for row in rows] == list(range(last + 1))
    assert directory.progress().iteration == last
    assert (out / "reward.png").is_file()
    check_rows(rows)

    # as if it had been killed an iteration earlier
    (directory.checkpoints / "latest").write_text(f"iteration-{last - 1:04d}\n")
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    again = start(config, copy, "--iterations", str(last))
    output = finish(again)
    assert again.returncode == 0, output
    resumed = RunDirectory(copy).rows()
    assert [row["iteration"] for row in resumed] == list(range(last + 1))
    assert resumed[:-1] == rows[:-1]
    assert {key: resumed[-1][key] for key in RESULTS} == {key: rows[-1][key] for key in RESULTS}
    check_terminal(output)
    assert "[Reshard] direction=train->infer" in (copy / "log-rank1.txt").read_text()

    once_more = start(config, copy, "--iterations", str(last))
    assert "is finished" in finish(once_more)
    assert once_more.returncode == 0


@pytest.mark.ranks
def test_bad_configuration_ends_at_once(config: Path, tmp_path: Path) -> None:
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


def wait_for_rows(directory: RunDirectory, count: int, process: subprocess.Popen[str], timeout: float = 200) -> None:
    started = time.monotonic()
    while len(directory.rows()) < count:
        if process.poll() is not None or time.monotonic() - started > timeout:
            pytest.fail(f"no {count} rows after {timeout} s or an early end:\n{finish(process, timeout=1)}")
        time.sleep(0.1)


def check_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        json.dumps(row, allow_nan=False)
        assert row["bytes_received"] == row["bytes_least"] > 0
        assert 0 < row["reshard_seconds"] < row["iteration_seconds"]
        assert row["reshard_share"] == pytest.approx(row["reshard_seconds"] / row["iteration_seconds"])
        assert 0 <= row["accuracy"] <= 1
        assert row["peak_bytes"] > 0
        assert row["rss_bytes"] > 0
        assert row["evaluate_seconds"] > 0
        assert row["update_seconds"] > 0
    for row in rows[1:]:
        assert row["logprob_diff"] < 1e-4, "vLLM samples from other weights than Megatron scores"
        assert row["generate_seconds"] > 0
        assert row["score_seconds"] > 0
        assert row["weight_version"] == rows[0]["weight_version"] + 2 * row["iteration"]
    assert rows[1]["kl"] == pytest.approx(0, abs=1e-9)


def check_terminal(output: str) -> None:
    """Headings, rows, summary; nothing that a library printed."""
    assert "held-out accuracy now" in output
    assert "Warning" not in output
    assert "INFO" not in output

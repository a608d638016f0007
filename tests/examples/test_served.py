"""`make rl SERVER=1`: vLLM spawns its processes and has no weights until trainers publish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from examples.gpt_rl.train import run_files
from tests.examples.launched import short_config
from tests.harness.launch import REPO_ROOT

MODULE = "tests.examples.test_served"
TRAIN = ("-m", "hybrid_engine", "run", "--nproc-per-node", "2", "-m", "examples.gpt_rl.train")
MODEL_NBYTES = 3_165_696


@pytest.mark.long
@pytest.mark.engines
def test_a_server_waits_for_the_run_that_fills_it(tmp_path: Path) -> None:
    config = short_config("tp2_to_dp2.yaml", tmp_path, rl={"iterations": 1})
    train = [sys.executable, *TRAIN, "--config", str(config), "--out", str(tmp_path / "run")]
    serve = [
        sys.executable,
        "-m",
        "examples.gpt_rl.served",
        str(config),
        "--",
        sys.executable,
        "-m",
        MODULE,
        *train,
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO_ROOT),
        "TORCHDYNAMO_DISABLE": "1",
    }
    result = subprocess.run(serve, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, (
        f"{result.stdout}\n{result.stderr}\n"
        f"{(tmp_path / 'runs' / 'server.txt').read_text()[-3000:]}"
    )
    assert "is paused: True, version: none" in result.stdout
    before, after = run_files(tmp_path / "run").metrics.rows()
    assert before["weight_version"] < after["weight_version"]
    assert after["bytes_received"] == after["bytes_least"] == MODEL_NBYTES
    assert after["logprob_diff"] < 1e-4


def main(*command: str) -> None:
    """Print the state of the server named by the last argument, then execute the command."""
    url = command[-1].partition("[")[2].rstrip("]")
    replies = [
        json.load(urllib.request.urlopen(f"{url}/{route}"))
        for route in ("is_paused", "weight_info")
    ]
    print(
        f"is paused: {replies[0]['is_paused']}, version: {replies[1]['weight_version']}", flush=True
    )
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])

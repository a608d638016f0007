"""Resumed runs equal uninterrupted ones: the example with a critic, and a documented loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.gpt_rl.train import run_files
from tests.examples.launched import finish, short_config, start
from tests.harness.launch import REPO_ROOT, Ranks

pytestmark = [pytest.mark.faults, pytest.mark.engines]

RESULTS = ("accuracy", "reward", "kl", "value_loss", "value_clip_fraction", "explained_variance", "weight_version")


def rows_of(config: Path, out: Path, *iterations: int) -> list[dict[str, Any]]:
    for number in iterations:
        process = start(config, out, "rl_config.ppo.value_warm_up=1", f"rl_config.iterations={number}")
        output = finish(process)
        assert process.returncode == 0, output
    return run_files(out).metrics.rows()


def test_a_critic_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    config = short_config("ppo_tp2_to_dp2.yaml", tmp_path)
    at_once = rows_of(config, tmp_path / "once", 3)
    stopped = rows_of(config, tmp_path / "stopped", 2, 3)
    assert [row["iteration"] for row in at_once] == [0, 1, 2, 3]
    assert "policy_loss" not in at_once[1], "only the critic learns at first"
    assert at_once[1]["weight_version"] == at_once[0]["weight_version"] < at_once[2]["weight_version"]
    for row, other in zip(at_once, stopped, strict=True):
        assert {key: row.get(key) for key in RESULTS} == {key: other.get(key) for key in RESULTS}


PROGRAM = REPO_ROOT / "examples" / "ppo.py"
SETTINGS = 'RUN, NUM_STEPS, LENGTH = Path("runs/ppo"), 8, 11'


def run(directory: Path, num_steps: int) -> list[str]:
    lines: list[str] = []
    code = PROGRAM.read_text().replace(SETTINGS, f"RUN, NUM_STEPS, LENGTH = Path({str(directory)!r}), {num_steps}, 11")
    exec(compile(code, str(PROGRAM), "exec"), {"print": lines.append, "__file__": str(PROGRAM)})
    return lines


def test_the_loop_resumes_from_its_checkpoints(engines: Ranks, tmp_path: Path) -> None:
    once = tmp_path / "once"
    stopped = tmp_path / "stopped"
    calls = {"once": (run, (once, 3)), "stopped": (run, (stopped, 2)), "resumed": (run, (stopped, 3))}
    lines = engines.launch_in_turn(2, calls)
    assert SETTINGS in PROGRAM.read_text()
    for rank in range(2):
        at_once, first, second = (lines[name][rank] for name in calls)
        assert len(at_once) == 3
        assert at_once == first + second

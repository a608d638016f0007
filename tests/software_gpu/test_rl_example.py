"""The RL example on two GPUs: two iterations with both trainers."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.harness.launch import REPO_ROOT

EXAMPLE = REPO_ROOT / "examples" / "gpt_rl"
NUM_PROBLEMS = {"train.jsonl": 256, "held_out.jsonl": 8}
"""Few problems, because Triton's interpreter draws few tokens per second."""
SETTINGS = (
    "rl_config.iterations=2",
    "rl_config.warm_up.max_steps=3",
    "rl_config.warm_up.batch_size=8",
    "rl_config.prompts_per_iteration=4",
    "rl_config.samples_per_prompt=2",
    "rl_config.minibatches=1",
    "actor_config.micro_batch_size=4",
    "generate_config.max_num_seqs=32",
    "generate_config.enforce_eager=true",
    "generate_config.vllm.attention_backend=TRITON_ATTN",
    "generate_config.vllm.disable_custom_all_reduce=true",
)
MAX_LOG_PROB_DIFFERENCE = 1e-4  # In float32.


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, number in NUM_PROBLEMS.items():
        with (EXAMPLE / "data" / name).open() as problems:
            (tmp_path / name).write_text("".join(islice(problems, number)))
    return tmp_path


@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", ["tp2_to_dp2", "fsdp2_to_dp"])
def test_two_iterations_compute_the_same_in_both_engines(config: str, data: Path) -> None:
    out = data / "out"
    command = [sys.executable, "-m", "hybrid_engine", "run", "--nproc-per-node", "2"]
    command += [
        "-m",
        "examples.gpt_rl.train",
        "--config",
        str(EXAMPLE / "configs" / f"{config}.yaml"),
    ]
    command += ["--out", str(out), f"rl_config.data={data}", *SETTINGS]
    result = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    differences = [row["logprob_diff"] for row in rows if row.get("logprob_diff") is not None]
    assert differences
    assert max(differences) < MAX_LOG_PROB_DIFFERENCE

"""`hybrid-engine train`: a run of two steps on two ranks, and what it would be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.tools.programs import invoke, read_lines, run_python

ACTOR = {
    "tensor_model_parallel_size": 2,
    "params_dtype": "float32",
    "seq_length": 16,
    "micro_batch_size": 8,
}
RUN = {
    "data": {"source": "rows.jsonl"},
    "reward": {"twos": "own_rewards:twos", "short": "own_rewards:short"},
    "grpo": {
        "steps": 2,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_tokens": 8,
        "evaluate_every": 2,
    },
    "evaluation": {"source": "rows.jsonl", "samples": 2},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"prompt": [first, 2, 3, 4], "answer": str(first)} for first in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "own_rewards.py").write_text(
        "def twos(prompt, completion): return completion.token_ids.count(2) / 8\n"
        "def short(prompt, completion): return 1 / len(completion.token_ids)\n"
    )
    engines = {
        "model": str(REPO_ROOT / "examples/gpt_rl/model"),
        "random_weights": True,
        "actor_config": ACTOR,
    }
    engines["generate_config"] = {
        "infer_tensor_parallel_size": 1,
        "max_model_len": 16,
        "kv_cache_mb": 64,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**engines, "run": {**RUN, "out": str(tmp_path / "out")}}))
    return path


def test_a_dry_run_shows_the_prompt_its_rewards_and_the_plan(file: Path) -> None:
    result = invoke("train", file, "run.reward=exact_answer", "--ranks", 2, "--dry-run")
    shown, _, plan = result.output.partition("reward of the completion '': 0.0\n")
    assert shown.startswith("5 prompts. The first:\n[0, 2, 3, 4]\n")
    assert "reward of the completion '0': 1.0" in shown
    assert plan.startswith("Planned for 139.7 GiB a device")
    assert "What a switch moves" in plan
    assert not (file.parent / "out").exists()


def test_a_wrong_file_is_refused_before_ranks_start(file: Path) -> None:
    result = invoke("train", file, "run.reward=luck", "--ranks", 2, "--dry-run", status=2)
    assert "run.reward: 'luck'" in result.output
    result = invoke(
        "train",
        file,
        "run.reward=exact_answer",
        "run.grpo.max_tokens=500",
        "--ranks",
        2,
        "--dry-run",
        status=2,
    )
    assert "but 16 fit together" in result.output
    invoke("train", "run.grpo.steps=1", status=2)


@pytest.mark.parametrize("option", [["--dry-run"], ["--ranks", "2"]])
def test_a_rank_refuses_options_of_the_start(
    file: Path, option: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert option[0] in invoke("train", file, *option, status=2).output


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_and_its_continuation(file: Path) -> None:
    outputs = []
    for steps in (2, 3):
        words = "train", file, f"run.grpo.steps={steps}", "--ranks", 2
        outputs.append(run_python("-m", "hybrid_engine", *words, status=0, timeout=None).stdout)
    rows = read_lines(file.parent / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert "step 1/3" not in outputs[1]
    for line in ("building the engines", "DP=1 built in", "DP=2 built in", "closing the engines"):
        assert outputs[0].count(line) == 1
    for row in rows:
        assert row["reward"] == pytest.approx(row["reward_twos"] + row["reward_short"], abs=1e-6)
    assert {"held_out_reward", "held_out_pass_1", "held_out_pass_2"} <= rows[1].keys()

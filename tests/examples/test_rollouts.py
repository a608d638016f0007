"""Rollouts as a dataset with a scripted inference engine, and the whole script."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.gpt_rl import task
from examples.gpt_rl.rollouts import Batch, Rollouts, RolloutSettings
from hybrid_engine import Completion, Sampling
from hybrid_engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "examples" / "gpt_rl" / "data"
CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
SETTINGS = RolloutSettings(
    data=DATA, samples_per_prompt=2, max_tokens=4, batch_size=6, steps=2, seq_length=10, seed=7
)
ANSWERS = {
    task.decode([*task.encode(problem.prompt), task.END]): problem.answer
    for problem in task.load_problems(DATA / "train.jsonl")
}


class ScriptedInference:
    """Inference that records prompts; only the first sample of a group is right."""

    def __init__(self) -> None:
        self.seeds: list[int | None] = []
        self.prompts: list[list[list[int]]] = []

    def generate_over_replicas(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Any:
        self.prompts.append([list(prompt) for prompt in prompts])
        self.seeds.append(sampling.seed)
        return [[_answer(prompt, number) for number in range(sampling.n)] for prompt in prompts]


def _answer(prompt: Sequence[int], number: int) -> Completion:
    text = ANSWERS.get(task.decode([*prompt, task.END]), "0")
    token_ids = tuple(task.encode_response(text if number == 0 else "1"))
    return Completion(
        token_ids, tuple(-0.5 * (index + 1) for index in range(len(token_ids))), "stop"
    )


def _rollouts(num_consumed: int = 0, **more: Any) -> tuple[Rollouts, list[Any]]:
    reports: list[Any] = []
    score = more.get("score")
    return Rollouts(
        SETTINGS, 36, num_consumed, score, lambda *report: reports.append(report)
    ), reports


def test_only_samples_of_the_next_steps_are_drawn() -> None:
    drawn, reports = _rollouts()
    with pytest.raises(IndexError, match="sample 0 was not drawn yet; there are 0 from 0 on"):
        drawn[0]
    drawn, reports = _rollouts()
    assert drawn.collect(ScriptedInference()) is None
    right, wrong = drawn[0], drawn[1]
    assert right["advantages"] == -wrong["advantages"] > 0.9
    positions = right["mask"].nonzero().flatten()
    assert right["labels"][positions].tolist()[-1] == task.END
    assert right["old_log_probs"][positions].tolist() == [
        -0.5 * (index + 1) for index in range(len(positions))
    ]
    assert torch.equal(right["ref_log_probs"], right["old_log_probs"])
    drawn[11]
    with pytest.raises(IndexError, match="sample 12 was not drawn"):
        drawn[12]
    ((step, figures),) = reports
    assert step == 0
    assert figures["reward"] == 0.5
    assert 0 <= figures["accuracy"] <= 1


def test_a_resumed_run_draws_the_same_samples() -> None:
    first, reports = _rollouts()
    inference = ScriptedInference()
    resumed_inference = ScriptedInference()
    for start in (0, 12):
        first.collect(inference)
        for index in range(start, start + 12):
            first[index]
    resumed, _ = _rollouts(num_consumed=12)
    resumed.collect(resumed_inference)
    # Index 2, because every rollout also generates for the held-out prompts.
    assert resumed_inference.prompts[0] == inference.prompts[2] != inference.prompts[0]
    assert resumed_inference.seeds[0] == inference.seeds[2] not in (None, inference.seeds[0])
    assert [step for step, _ in reports] == [0, 2]


def test_the_last_rollout_is_cut_to_the_run_and_then_only_accuracy_is_reported() -> None:
    drawn, reports = _rollouts(num_consumed=30)
    drawn.collect(ScriptedInference())
    assert len([drawn[index] for index in range(30, 36)]) == 6
    assert drawn.collect(ScriptedInference()) is None
    assert "reward" in reports[0][1]
    assert list(reports[1][1]) == ["accuracy"]


def test_the_reference_scores_after_the_switch_to_training() -> None:
    scored: list[Any] = []

    def score(batch: Batch, policy: Sequence[Any]) -> torch.Tensor:
        scored.append((batch["tokens"].shape, policy))
        return torch.full_like(batch["mask"], -3.0)

    drawn, _ = _rollouts(score=score)
    in_training = drawn.collect(ScriptedInference())
    assert not scored
    in_training(["chunk"])
    assert scored == [((12, 10), ["chunk"])]
    assert bool((drawn[5]["ref_log_probs"] == -3).all())


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.skipif(
    not CHECKOUT, reason="MEGATRON_LM_PATH names no checkout of Megatron-LM core_v0.16.1"
)
def test_the_script_trains_saves_and_resumes(tmp_path: Path) -> None:
    for steps in ("4", "6"):
        sizes = {"OUT": str(tmp_path), "WARM_UP": "3", "STEPS": steps, "SAVE": "2"}
        command = ["sh", "examples/gpt_rl/pretrain_gpt_rl.sh"]
        run = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **sizes},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        lines = [line for line in run.stdout.splitlines() if "rollout after iteration" in line]
        iterations = [int(line.split("iteration")[1].split("|")[0]) for line in lines]
        assert iterations == ([0, 4] if steps == "4" else [4])
    assert (tmp_path / "reward" / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert (tmp_path / "reward" / "reference" / "rank0.pt").is_file()


@pytest.mark.parametrize(
    "change", [{"samples_per_prompt": 0}, {"max_tokens": -1}, {"samples_per_prompt": 10**6}]
)
def test_settings_that_vllm_would_refuse_are_refused(change: dict[str, int]) -> None:
    sizes = {
        "samples_per_prompt": 2,
        "max_tokens": 4,
        "batch_size": 4,
        "steps": 1,
        "seq_length": 16,
        "seed": 0,
    }
    with pytest.raises(ConfigError, match=r"sampling\.(n|max_tokens): Input should be"):
        RolloutSettings(data=Path("data"), **{**sizes, **change})

"""Rollouts as a dataset, with a scripted inference engine; and the whole script where Megatron-LM is at hand."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.gpt_rl import rollouts, task
from examples.gpt_rl.rollouts import Batch, Demonstrations, Rollouts, RolloutSettings
from hybrid_engine import Completion, Sampling
from hybrid_engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "examples" / "gpt_rl" / "data"
CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
SETTINGS = RolloutSettings(data=DATA, samples_per_prompt=2, max_tokens=4, batch_size=6, steps=2, seq_length=10, seed=7)
ANSWERS = {
    task.decode([*task.encode(one.prompt), task.END]): one.answer for one in task.load_problems(DATA / "train.jsonl")
}


class ScriptedInference:
    """The first sample of a group is right, all others are wrong. Notes seeds and prompts."""

    def __init__(self) -> None:
        self.seeds: list[int | None] = []
        self.asked: list[list[list[int]]] = []

    def generate_over_replicas(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Any:
        self.asked.append([list(prompt) for prompt in prompts])
        self.seeds.append(sampling.seed)
        return [[_answer(prompt, number) for number in range(sampling.n)] for prompt in prompts]


def _answer(prompt: Sequence[int], number: int) -> Completion:
    text = ANSWERS.get(task.decode([*prompt, task.END]), "0")
    token_ids = tuple(task.encode_response(text if number == 0 else "1"))
    return Completion(token_ids, tuple(-0.5 * (place + 1) for place in range(len(token_ids))), "stop")


def _rollouts(num_consumed: int = 0, num_samples: int = 36, **more: Any) -> tuple[Rollouts, list[Any]]:
    reports: list[Any] = []
    score = more.get("score")
    return Rollouts(SETTINGS, num_samples, num_consumed, score, lambda *report: reports.append(report)), reports


def test_samples_of_the_next_steps_are_drawn_and_no_others() -> None:
    drawn, reports = _rollouts()
    with pytest.raises(IndexError, match="sample 0 was not drawn yet; there are 0 from 0 on"):
        drawn[0]
    drawn, reports = _rollouts()
    assert drawn.collect(ScriptedInference()) is None
    right, wrong = drawn[0], drawn[1]
    assert right["advantages"] == -wrong["advantages"] > 0.9
    places = right["mask"].nonzero().flatten()
    assert right["labels"][places].tolist()[-1] == task.END
    assert right["old_log_probs"][places].tolist() == [-0.5 * (place + 1) for place in range(len(places))]
    assert torch.equal(right["ref_log_probs"], right["old_log_probs"])
    drawn[11]
    with pytest.raises(IndexError, match="sample 12 was not drawn"):
        drawn[12]
    ((step, figures),) = reports
    assert step == 0
    assert figures["reward"] == 0.5
    assert 0 <= figures["accuracy"] <= 1


def test_a_resumed_run_draws_what_the_first_would_have_drawn() -> None:
    first, reports = _rollouts()
    inference, again = ScriptedInference(), ScriptedInference()
    for start in (0, 12):
        first.collect(inference)
        for index in range(start, start + 12):
            first[index]
    resumed, _ = _rollouts(num_consumed=12)
    resumed.collect(again)
    assert again.asked[0] == inference.asked[2] != inference.asked[0]  # each rollout also asks the held-out prompts
    assert again.seeds[0] == inference.seeds[2] not in (None, inference.seeds[0])
    assert [step for step, _ in reports] == [0, 2]


def test_the_last_rollout_is_as_short_as_the_run_and_after_it_only_accuracy_is_told() -> None:
    drawn, reports = _rollouts(num_consumed=30)
    drawn.collect(ScriptedInference())
    assert len([drawn[index] for index in range(30, 36)]) == 6
    assert drawn.collect(ScriptedInference()) is None
    assert "reward" in reports[0][1]
    assert list(reports[1][1]) == ["accuracy"]


def test_the_reference_scores_when_training_is_back() -> None:
    seen: list[Any] = []

    def score(batch: Batch, policy: Sequence[Any]) -> torch.Tensor:
        seen.append((batch["tokens"].shape, policy))
        return torch.full_like(batch["mask"], -3.0)

    drawn, _ = _rollouts(score=score)
    in_training = drawn.collect(ScriptedInference())
    assert not seen
    in_training(["chunk"])
    assert seen == [((12, 10), ["chunk"])]
    assert bool((drawn[5]["ref_log_probs"] == -3).all())


def test_demonstrations_depend_on_seed_and_place_alone() -> None:
    one, same, other = (Demonstrations(DATA, 50, 10, seed) for seed in (1, 1, 2))
    assert len(one) == 50
    assert set(one[3]) == {"tokens", "labels", "mask"}
    assert all(torch.equal(one[place]["tokens"], same[place]["tokens"]) for place in range(50))
    assert any(not torch.equal(one[place]["tokens"], other[place]["tokens"]) for place in range(50))


def test_collecting_without_the_script_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "_rollouts", None)
    with pytest.raises(RuntimeError, match="no rollouts are installed"):
        rollouts.collect(ScriptedInference())


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no checkout of Megatron-LM core_v0.16.1")
def test_the_script_trains_saves_and_is_resumed(tmp_path: Path) -> None:
    for steps in ("4", "6"):
        sizes = {"OUT": str(tmp_path), "WARM_UP": "3", "STEPS": steps, "SAVE": "2"}
        command = ["sh", "examples/gpt_rl/pretrain_gpt_rl.sh"]
        run = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **sizes}, capture_output=True, text=True, timeout=280
        )
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        told = [line for line in run.stdout.splitlines() if "rollout after iteration" in line]
        assert [int(line.split("iteration")[1].split("|")[0]) for line in told] == ([0, 4] if steps == "4" else [4])
    assert (tmp_path / "reward" / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert (tmp_path / "reward" / "reference" / "rank0.pt").is_file()


@pytest.mark.parametrize("change", [{"samples_per_prompt": 0}, {"max_tokens": -1}, {"samples_per_prompt": 10**6}])
def test_rollouts_that_vllm_would_refuse_are_refused_first(change: dict[str, int]) -> None:
    sizes = {"samples_per_prompt": 2, "max_tokens": 4, "batch_size": 4, "steps": 1, "seq_length": 16, "seed": 0}
    with pytest.raises(ConfigError, match=r"sampling\.(n|max_tokens): Input should be"):
        RolloutSettings(data=Path("data"), **{**sizes, **change})

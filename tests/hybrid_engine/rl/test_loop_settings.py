"""Settings and arguments of `train` with both real engines, on two ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import ActorHybridWorker, Completion
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.rl import BatchReward, GrpoConfig, train
from tests.harness.launch import Ranks
from tests.harness.values import Values
from tests.hybrid_engine.rl.test_loop import PROMPTS
from tests.hybrid_engine.rl.test_loop import reward as parity
from tests.zoo import workers

pytestmark = pytest.mark.timeout(900)

CONFIG: Values = {
    "steps": 2,
    "prompts_per_step": 2,
    "samples_per_prompt": 4,
    "max_tokens": 6,
    "learning_rate": 1e-2,
    "evaluate_every": 2,
    "save_every": 5,
    "log_completions_every": 1,
}


def is_odd_prompt(prompt: Mapping[str, Any], completion: Completion) -> float | None:
    return 1.0 if prompt["wanted"] else None


def evaluate(worker: ActorHybridWorker) -> dict[str, float]:
    return {"version": float(worker.train.version)}


class Interrupted:
    """A reward of the batch that fails in step 2, while its result is read."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompts: list[Any], completions: list[Any]) -> Any:
        self.calls += 1
        for prompt, completion in zip(prompts, completions, strict=True):
            yield parity(prompt, completion)
            if self.calls > 1:
                raise ConnectionError("the judge is away")


class Worked:
    """A reward that fails from a call on."""

    def __init__(self, last: int) -> None:
        self.calls = 0
        self.last = last

    def __call__(self, prompt: Mapping[str, Any], completion: Completion) -> float:
        self.calls += 1
        if self.calls > self.last:
            raise ConnectionError("the judge is away")
        return parity(prompt, completion)


def runs(model: Path, out: Path) -> Values:
    """Return the rows of several runs of one worker, and the shares that a rank's batch reward got."""
    shares: list[int] = []

    def share(prompts: list[Any], completions: list[Any]) -> list[float]:
        shares.append(len(completions))
        return [float(completion.token_ids[0] % 2) for completion in completions]

    actor = {"tensor_model_parallel_size": 2, "micro_batch_size": 4}
    results: Values = {}
    with workers.build_worker(model, actor) as worker:

        def run(name: str, reward: Any, advantages: Any = None, **changed: Any) -> list[Values]:
            config = GrpoConfig(**{**CONFIG, **changed})
            return train(worker, PROMPTS, reward, config, out=out / name, evaluate=evaluate, advantages=advantages)

        results["several"] = run(
            "several",
            {"parity": parity, "odd": is_odd_prompt, "first": BatchReward(share, on_all_ranks=True)},
            reward_weights={"first": 0.5},
            evaluate_first=True,
            entropy_coefficient=0.1,
            keep_checkpoints=2,
            save_every=1,
        )
        results["shares"] = list(shares)
        redrawn: list[tuple[int, ...]] = []

        def constant_at_first(prompt: Any, completion: Completion) -> float:
            redrawn.append(completion.token_ids)
            return 0.0 if len(redrawn) <= 8 else parity(prompt, completion)

        results["redrawn"] = run("redrawn", constant_at_first, redraws=1, steps=1)
        results["drawn"] = redrawn
        penalized: list[float] = []

        def note_rewards(rewards: torch.Tensor, _groups: Any) -> torch.Tensor:
            penalized.append(rewards.mean().item())
            return rewards - rewards.mean()

        results["penalized"] = penalized
        results["kl in the reward"] = run(
            "kl in the reward",
            parity,
            advantages=note_rewards,
            kl_place="reward",
            kl_coefficient=5.0,
            kl_estimator="k1",
            importance_cap=2.0,
            importance_of="sequence",
            above_importance_cap="mask",
            importance_veto=1e-4,
        )
        results["skipped"] = run("skipped", Worked(6), reward_failures="skip", steps=1)
        with pytest.raises(HybridEngineError, match="the judge is away"):
            run("failed", Worked(12))
        results["resumed"] = run("failed", parity)
        with pytest.raises(HybridEngineError, match="the judge is away"):
            run("failed batch", BatchReward(Interrupted()))
        results["resumed batch"] = run("failed batch", parity)
    return results


@pytest.mark.slow
def test_settings_of_a_loop(engines: Ranks, tmp_path: Path) -> None:
    model = workers.write_model(tmp_path / "model", "qwen3", num_hidden_layers=2)
    first, second = engines.launch(runs, 2, model, tmp_path)
    for name in ("several", "redrawn", "kl in the reward", "skipped", "resumed", "resumed batch"):
        assert first[name] == second[name]
    initial, *steps = first["several"]
    assert (initial["step"], initial["version"], "reward" in initial) == (0, 0.0, False)
    for row in steps:
        parts = row["reward_parity"] + row["reward_first"] / 2
        odd = row.get("reward_odd", 0.0)
        assert row["reward"] >= parts - 1e-6
        assert (row["reward"] > parts + 1e-6) == bool(odd)
        assert 0 < row["entropy"] < 10
        assert row["loss"] < row["policy_loss"], "the bonus lowers the loss"
    assert "version" in steps[-1]
    assert first["shares"] == second["shares"] == [4, 4], "each rank has half of eight completions"
    checkpoints = tmp_path / "several" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000001", "step-000002"]
    for step, row in enumerate(steps, start=1):
        lines = (tmp_path / "several" / "completions" / f"step-{step:06d}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert len(samples) == 8
        assert sum(sample["reward"] for sample in samples) / 8 == pytest.approx(row["reward"], abs=1e-6)
        assert {sample["weight_version"] for sample in samples} == {step - 1}
        assert samples[0]["rewards"].keys() == {"parity", "odd", "first"}
        assert sum(sample["advantage"] for sample in samples) == pytest.approx(0, abs=1e-4)
    drawn = first["drawn"]
    assert len(drawn) == 16, "both groups agreed at first"
    assert drawn[:8] != drawn[8:], "with another seed"
    assert first["redrawn"][0]["reward"] > 0
    # The policy is the reference in step 1.
    penalties = [row["reward"] - mean for row, mean in zip(first["kl in the reward"], first["penalized"], strict=True)]
    assert abs(penalties[0]) < 1e-4
    assert abs(penalties[1]) > 1e-2
    assert all(row["importance"] == pytest.approx(1, abs=1e-3) for row in first["kl in the reward"])
    assert all("kl" in row and row["loss"] == row["policy_loss"] for row in first["kl in the reward"])
    assert first["skipped"][0]["left_out"] == pytest.approx(0.25)
    assert [row["step"] for row in first["resumed batch"]] == [2]
    assert [row["step"] for row in first["resumed"]] == [2], "step 1 was saved when the reward failed"

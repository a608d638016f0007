"""Settings and arguments of `train` with both real engines, on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import ActorHybridWorker, Completion
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.rl import BatchReward, GrpoConfig, train
from tests.harness.launch import of_all_ranks, on_engines
from tests.harness.values import Values
from tests.hybrid_engine.rl.test_loop import PROMPTS
from tests.hybrid_engine.rl.test_loop import reward as parity
from tests.hybrid_engine.tools.programs import read_lines
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


Run = Callable[..., list[Values]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workers.write_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)


@contextmanager
def running(model: Path, out: Path) -> Iterator[Run]:
    """Yield a function that trains with a reward, and checks that rows are those of all ranks."""
    with workers.build_worker(
        model, {"tensor_model_parallel_size": 2, "micro_batch_size": 4}
    ) as worker:

        def run(
            name: str, reward: Any, advantages: Any = None, prompts: Any = PROMPTS, **changed: Any
        ) -> list[Values]:
            config = GrpoConfig(**{**CONFIG, **changed})
            rows = train(
                worker,
                prompts,
                reward,
                config,
                out=out / name,
                evaluate=evaluate,
                advantages=advantages,
            )
            assert of_all_ranks(rows)[0] == rows
            return rows

        yield run


@pytest.mark.slow
@on_engines(2)
def test_several_rewards_and_rows_of_completions(model: Path, tmp_path: Path) -> None:
    shares: list[int] = []

    def share(prompts: list[Any], completions: list[Any]) -> list[float]:
        shares.append(len(completions))
        return [float(completion.token_ids[0] % 2) for completion in completions]

    with running(model, tmp_path) as run:
        initial, *steps = run(
            "several",
            {
                "parity": parity,
                "odd": is_odd_prompt,
                "first": BatchReward(share, on_all_ranks=True),
            },
            reward_weights={"first": 0.5},
            evaluate_first=True,
            entropy_coefficient=0.1,
            keep_checkpoints=2,
            save_every=1,
        )
    assert (initial["step"], initial["version"], "reward" in initial) == (0, 0.0, False)
    for row in steps:
        parts = row["reward_parity"] + row["reward_first"] / 2
        odd = row.get("reward_odd", 0.0)
        assert row["reward"] >= parts - 1e-6
        assert (row["reward"] > parts + 1e-6) == bool(odd)
        assert 0 < row["entropy"] < 10
        assert row["loss"] < row["policy_loss"], "the bonus lowers the loss"
    assert "version" in steps[-1]
    assert shares == [4, 4], "each rank has half of eight completions"
    checkpoints = tmp_path / "several" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000001", "step-000002"]
    for step, row in enumerate(steps, start=1):
        samples = read_lines(tmp_path / "several" / "completions" / f"step-{step:06d}.jsonl")
        assert len(samples) == 8
        assert sum(sample["reward"] for sample in samples) / 8 == pytest.approx(
            row["reward"], abs=1e-6
        )
        assert {sample["weight_version"] for sample in samples} == {step - 1}
        assert samples[0]["rewards"].keys() == {"parity", "odd", "first"}
        assert sum(sample["advantage"] for sample in samples) == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
@on_engines(2)
def test_settings_of_a_loop(model: Path, tmp_path: Path) -> None:
    drawn: list[tuple[Any, tuple[int, ...]]] = []
    means: list[float] = []

    def constant_at_first(prompt: Any, completion: Completion) -> float:
        drawn.append((prompt, completion.token_ids))
        return 0.0 if len(drawn) <= 8 else parity(prompt, completion)

    def note_rewards(rewards: torch.Tensor, _groups: Any) -> torch.Tensor:
        means.append(rewards.mean().item())
        return rewards - rewards.mean()

    with running(model, tmp_path) as run:
        for prompts, are_others in ((PROMPTS, True), (PROMPTS[:2], False)):
            drawn.clear()
            (redrawn,) = run(
                f"redrawn {are_others}", constant_at_first, prompts=prompts, redraws=1, steps=1
            )
            assert redrawn["reward"] > 0
            if dist.get_rank() == 0:
                assert len(drawn) == 16, "both groups agreed at first"
                assert drawn[:8] != drawn[8:], "with another seed"
                first, second = (
                    [prompts.index(prompt) for prompt, _ in part] for part in (drawn[:8], drawn[8:])
                )
                assert set(first).isdisjoint(second) == are_others
        penalized = run(
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
        if dist.get_rank() == 0:
            # The policy is the reference in step 1.
            penalties = [row["reward"] - mean for row, mean in zip(penalized, means, strict=True)]
            assert abs(penalties[0]) < 1e-4
            assert abs(penalties[1]) > 1e-2
        assert all(row["importance"] == pytest.approx(1, abs=1e-3) for row in penalized)
        assert all("kl" in row and row["loss"] == row["policy_loss"] for row in penalized)
        (skipped,) = run("skipped", Worked(6), reward_failures="skip", steps=1)
        assert skipped["left_out"] == pytest.approx(0.25)
        for name, failing in (("failed", Worked(12)), ("failed batch", BatchReward(Interrupted()))):
            with pytest.raises(HybridEngineError, match="the judge is away"):
                run(name, failing)
            assert [row["step"] for row in run(name, parity)] == [2], (
                "step 1 was saved when the reward failed"
            )

"""GRPO's loop with both real engines: it learns, and a run that was interrupted goes on to the same rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hybrid_engine import ActorHybridWorker, Completion, Sampling
from hybrid_engine.errors import ConfigError, HybridEngineError
from hybrid_engine.rl import Grpo, GrpoConfig, train
from tests.harness.launch import REPO_ROOT, Ranks
from tests.zoo import workers

pytestmark = pytest.mark.timeout(900)

PROMPTS = [{"prompt": [first, 3, 4], "wanted": first % 2} for first in range(5, 11)]
CONFIG: dict[str, Any] = {
    **{"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4, "max_tokens": 6, "temperature": 0.8},
    **{"epochs": 2, "minibatches": 2, "learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 1},
    **{"kl_coefficient": 0.01, "importance_cap": 2.0, "clip_ratio_high": 0.3, "evaluate_every": 2, "save_every": 2},
}


def reward(prompt: Mapping[str, Any], completion: Completion) -> float:
    return sum(token % 2 == prompt["wanted"] for token in completion.token_ids) / 6


def evaluate(worker: ActorHybridWorker) -> dict[str, float]:
    ((one,),) = worker.generate_sequences([[5, 6]], Sampling(temperature=0.0, max_tokens=2, ignore_eos=True))
    return {"first_token": float(one.token_ids[0])}


def interrupted(prompt: Mapping[str, Any], completion: Completion) -> float:
    interrupted.calls += 1
    return reward(prompt, completion) if interrupted.calls <= 2 * 16 else float("nan")


interrupted.calls = 0


def runs(model: Path, out: Path) -> dict[str, Any]:
    """Rows of a whole run, of one whose reward fails in step 3, and of the same call again."""
    config, actor = GrpoConfig(**CONFIG), {"tensor_model_parallel_size": 2, "micro_batch_size": 4}
    with workers.build_worker(model, actor) as worker:
        worker.save_checkpoint(out / "start")

        def run(name: str, reward: Any, config: GrpoConfig = config) -> list[dict[str, Any]]:
            with worker.train_context():
                worker.load_checkpoint(out / "start")
            return train(worker, PROMPTS, reward, config, out=out / name, evaluate=evaluate)

        found: dict[str, Any] = {"whole": run("whole", reward)}
        for name, failing, changed in (
            ("failed", interrupted, {}),
            ("refused", reward, {"seed": 1}),
            ("rows", reward, {"minibatches": 3}),
        ):
            with pytest.raises(HybridEngineError) as caught:
                run("resumed", failing, GrpoConfig(**{**CONFIG, **changed}))
            found[name] = str(caught.value)
        found["resumed"] = run("resumed", reward)
        found["again"] = run("resumed", reward)
    return found


@pytest.mark.slow
def test_a_resumed_run_has_the_rows_of_one_without_interruption(engines: Ranks, tmp_path: Path) -> None:
    model = workers.write_model(tmp_path / "model", "qwen3", num_hidden_layers=2)
    first, second = engines.launch(runs, 2, model, tmp_path)
    assert first["whole"] == second["whole"]
    whole, resumed = (rows_of(tmp_path / name) for name in ("whole", "resumed"))
    assert [row["step"] for row in whole] == [1, 2, 3]
    assert whole == resumed
    assert [row["step"] for row in first["resumed"]] == [3]
    assert first["again"] == []
    for row in whole:
        assert min(row["grad_norm"], row["bytes_received"]) > 0
        assert 0 < row["kl"] < 5
        assert row["importance"] == pytest.approx(1, abs=1e-3)
        assert row["sampled_difference"] < 1e-4
    assert [row["learning_rate"] for row in whole] == pytest.approx([0.01, 0.0075, 0.0025])
    assert ["first_token" in row for row in whole] == [False, True, True]
    assert whole[0]["bytes_received"] < whole[1]["bytes_received"], "the evaluation has weights of its own step"
    assert "GrpoConfig.seed: the run in" in first["refused"]
    assert "not a multiple of" in first["rows"]
    assert "reward: is nan for prompt 0, completion 0" in first["failed"]
    assert "reward: is nan for prompt 0, completion 0" in second["failed"]
    assert [path.name for path in (tmp_path / "resumed" / "checkpoints").iterdir()] == ["step-000003"]
    assert (tmp_path / "resumed" / "model" / "config.json").exists()


def rows_of(out: Path) -> list[dict[str, float]]:
    """The rows written, without what the clock says."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.endswith("seconds")} for row in rows]


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_the_learning_rate_rises_and_falls(schedule: str, rates: list[float]) -> None:
    config = GrpoConfig(steps=5, schedule=schedule, warmup_steps=2)
    assert [config.learning_rate_share(step) for step in range(1, 6)] == pytest.approx(rates)


def test_a_configuration_names_everything_that_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        GrpoConfig(samples_per_prompt=1, clipratio=0.1)
    assert {found.key for found in caught.value.findings} == {"GrpoConfig.samples_per_prompt", "GrpoConfig.clipratio"}


def without_engines(**settings: Any) -> Grpo:
    worker = mock.MagicMock()
    worker.train.limits = mock.Mock(micro_batch_size=1, dp_size=1)
    return Grpo(worker, list("abcde"), mock.Mock(), GrpoConfig(**settings))


@pytest.mark.slow  # imports vLLM
def test_every_step_of_every_run_samples_with_a_seed_of_its_own() -> None:
    seeds = [without_engines(seed=seed)._sampling(step).seed for seed in (0, 1) for step in range(1, 6)]
    assert len(set(seeds)) == 10


def test_each_pass_has_every_prompt_once_in_an_order_of_its_own() -> None:
    grpo = without_engines(prompts_per_step=2)
    drawn = [prompt for step in range(1, 11) for prompt in grpo._prompts_of(step)]
    passes = {"".join(drawn[start : start + 5]) for start in range(0, 20, 5)}
    assert {"".join(sorted(one)) for one in passes} == {"abcde"}
    assert len(passes) > 1


def test_the_page_has_every_option() -> None:
    page = (REPO_ROOT / "docs" / "rl.md").read_text()
    assert [name for name in GrpoConfig.model_fields if f"`{name}`" not in page] == []

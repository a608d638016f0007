"""A run with packed rows takes the steps of a run with one completion a row, up to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_engine import Completion
from hybrid_engine.rl import GrpoConfig, PpoConfig, train
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = [[7, 3, 4], [8] * 12, [9, 9, 3, 4, 5, 6]]
SETTINGS: Values = {
    **{
        "steps": 2,
        "prompts_per_step": 3,
        "samples_per_prompt": 4,
        "max_tokens": 8,
        "learning_rate": 1e-3,
    },
    "stop_token_ids": (1, 2, 3, 4, 5, 6, 7, 8),
}
ALGORITHMS = {
    "grpo": (
        GrpoConfig,
        {"kl_coefficient": 0.01, "entropy_coefficient": 0.01},
        {"fsdp": {}, "make_vocab_size_divisible_by": 128},
    ),
    "ppo": (PpoConfig, {}, {"tensor_model_parallel_size": 2}),
    # Virtual stages take an even number of micro batches.
    "virtual stages": (
        GrpoConfig,
        {},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
}
EQUAL = ("reward", "reward_std", "response_tokens", "truncated", "groups_agreeing")
CLOSE = (
    "loss",
    "policy_loss",
    "kl",
    "entropy",
    "grad_norm",
    "value_loss",
    "clip_fraction",
    "explained_variance",
)


def reward(_prompt: Any, completion: Completion) -> float:
    return sum(token % 2 for token in completion.token_ids) / 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workers.write_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=4)


@on_engines({2: ALGORITHMS})
def test_packed_rows_give_the_same_steps(model: Path, case: str) -> None:
    padded, sizes = run(model, case, pack=False)
    packed, packed_sizes = run(model, case, pack=True)
    assert sizes == [12, 12]
    assert all(size < 12 for size in packed_sizes)
    for row, other in zip(padded, packed, strict=True):
        assert {key: row[key] for key in EQUAL} == {key: other[key] for key in EQUAL}
        assert row.keys() == other.keys()
        compared = row.keys() & set(CLOSE)
        assert len(compared) >= 5
        for key in compared:
            assert row[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5), key


def run(model: Path, name: str, pack: bool) -> tuple[list[Values], list[int]]:
    """Return the rows of a run, and the number of rows of each update."""
    algorithm, settings, actor = ALGORITHMS[name]
    critic = {"critic_config": {"micro_batch_size": 2}} if algorithm is PpoConfig else {}
    actor = {**actor, "micro_batch_size": 2, "seq_length": 32}
    sizes: list[int] = []
    with workers.build_worker(model, actor, **critic) as worker:
        update = worker.update

        def counting(batch: Any, *args: Any, **further: Any) -> dict[str, float]:
            sizes.append(len(batch["tokens"]))
            return update(batch, *args, **further)

        worker.update = counting  # type: ignore[method-assign]
        rows = train(worker, PROMPTS, reward, algorithm(**SETTINGS, **settings, pack=pack))
    return rows, sizes

"""A killed run that is resumed in a new worker equals an uninterrupted one, for every trainer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import Completion
from hybrid_engine.rl import GrpoConfig, train
from hybrid_engine.rl.run_files import Row, RunFiles
from tests.harness.launch import Ranks, on_engines
from tests.harness.values import Values
from tests.hybrid_engine.end_to_end.digests import digest, training_state
from tests.hybrid_engine.rl.test_loop import rows_of
from tests.zoo import workers

pytestmark = pytest.mark.timeout(600)

PROMPTS = [[first, 3, 4] for first in range(5, 10)]
SETTINGS: Values = {
    **{
        "steps": 4,
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "max_tokens": 4,
        "save_every": 2,
    },
    **{"minibatches": 2, "learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 1},
}
KILLED_AFTER = 3
RESUMED_AFTER = 2  # step of the last checkpoint before the kill
MEGATRON = {"tensor_model_parallel_size": 2}
TRAINERS: dict[str, Values] = {
    "fsdp2": {"fsdp": {}, "make_vocab_size_divisible_by": 128},
    "megatron": MEGATRON,
    "megatron, in another layout": {"use_distributed_optimizer": False},
    "megatron-lora": {**MEGATRON, "lora": {"rank": 4}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workers.write_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)


def run(
    trainer: str, model: Path, out: Path, killed: Path | None = None, kl: float = 0.01
) -> tuple[list[tuple[Any, ...]], dict[str, str]]:
    """Train; returns the sampled tokens and the final state.

    Args:
        killed: receives a copy of the run's files, as a kill after step 3 would leave them.
        kl: coefficient; the reference has the initial weights, which are random in each layout.
    """
    drawn: list[tuple[Any, ...]] = []

    def reward(prompt: list[int], completion: Completion) -> float:
        drawn.append(
            (*prompt, *completion.token_ids, *(value.hex() for value in completion.logprobs or ()))
        )
        return sum(token % 2 for token in completion.token_ids) / 4

    with workers.build_worker(model, TRAINERS[trainer]) as worker:

        def copy_run(row: Row) -> None:
            if killed is not None and worker.rank == 0 and row["step"] == KILLED_AFTER:
                shutil.copytree(out, killed)

        train(
            worker,
            PROMPTS,
            reward,
            GrpoConfig(**SETTINGS, kl_coefficient=kl),
            out=out,
            on_step=copy_run,
        )
        with worker.train_context():
            state = training_state(worker.train)
            state |= {
                "generator": digest(torch.get_rng_state()),
                "version": str(worker.train.version),
            }
    torch.rand(7)  # a new process has another random state
    return drawn, state


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [
        "fsdp2",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("megatron", "megatron-lora")),
    ],
)
def test_a_resumed_run_is_bit_identical(
    engines: Ranks,
    model: Path,
    tmp_path: Path,
    trainer: str,
) -> None:
    engines.launch(resume_bit_by_bit, 2, model, tmp_path, trainer)


def resume_bit_by_bit(model: Path, out: Path, trainer: str) -> None:
    whole = out / "whole"
    killed = out / "killed"
    drawn, state = run(trainer, model, whole, killed)
    drawn_again, resumed_state = run(trainer, model, killed)
    assert any("exp_avg" in name for name in state)
    assert state == resumed_state
    if os.environ["RANK"] == "0":
        assert len(set(drawn)) == 8 * SETTINGS["steps"]
        assert drawn[8 * RESUMED_AFTER :] == drawn_again
        assert read_lines(whole) == read_lines(killed)
        assert len(read_lines(whole)) == SETTINGS["steps"]
        assert read_weights(whole) == read_weights(killed) != {}
        assert all(
            0 < row["reshard_fill_seconds"] < row["reshard_seconds"]
            for row in RunFiles(whole).metrics.rows()
        )


@pytest.mark.slow
@on_engines(2)
def test_a_run_goes_on_in_another_layout(model: Path, tmp_path: Path) -> None:
    """The weights are equal, so the next step draws the same; then gradients are summed in another
    order.
    """
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    drawn, _ = run("megatron", model, whole, killed, kl=0.0)
    drawn_again, _ = run("megatron, in another layout", model, killed, kl=0.0)
    if os.environ["RANK"] == "0":
        next_step = slice(8 * RESUMED_AFTER, 8 * RESUMED_AFTER + 8)
        assert sorted(drawn[next_step]) == sorted(drawn_again[:8])
        for row, resumed in zip(rows_of(whole), rows_of(killed), strict=True):
            assert row["loss"] == pytest.approx(resumed["loss"], rel=1e-3, abs=1e-4)


def read_lines(out: Path) -> list[str]:
    """Return the rows as text, with every digit."""
    return [json.dumps(row) for row in rows_of(out)]


def read_weights(out: Path) -> Mapping[str, bytes]:
    """Return the weights of the exported Hugging Face checkpoint."""
    return {path.name: path.read_bytes() for path in (out / "model").glob("*.safetensors")}

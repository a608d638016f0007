"""Log-probabilities of both engines for a model whose routers are close to ties, with and without
router replay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import Completion
from hybrid_engine.rl import GrpoConfig, train
from tests.harness.launch import on_engines
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [list(range(2 + 3 * number, 14 + 3 * number)) for number in range(8)]
NOISE = 1e-7
"""Relative difference of weights in a router: that of rounding in float32."""


def tie_experts(worker: Any) -> None:
    """Make four scores of a router differ by rounding only, of which two are selected, and experts
    by everything.
    """
    with torch.no_grad():
        for chunk in worker.train.chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("router.weight"):
                    parameter.mul_(20)
                    for number in range(1, 4):
                        parameter[number::4] = parameter[::4] * (1 + number * NOISE)
                elif ".experts." in name:
                    parameter.mul_(10)
    worker.train.optimizer.reload_model_params()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return workers.write_model(tmp_path_factory.mktemp("model"), "qwen3_moe", num_experts=8)


@on_engines(2, timeout=600)
def test_a_loop_replays_where_it_is_configured(model: Path) -> None:
    """A step of `train` with KL and packed rows."""
    differences = {}
    for replays in (False, True):
        generate = {"router_replay": replays, "check_compute": "off"}
        with workers.build_worker(model, {"micro_batch_size": 1}, generate) as worker:
            with worker.train_context():
                tie_experts(worker)
            config = GrpoConfig(
                **{
                    "steps": 1,
                    "prompts_per_step": 2,
                    "samples_per_prompt": 4,
                    "max_tokens": 8,
                    "learning_rate": 1e-3,
                },
                **{"kl_coefficient": 0.01, "pack": True, "stop_token_ids": tuple(range(8))},
            )
            (row,) = train(worker, PROMPTS[:2], reward, config)
            differences[replays] = row["logprob_diff"]
    assert differences[True] < 1e-4
    assert differences[False] > 1e-2


def reward(_prompt: Any, completion: Completion) -> float:
    return sum(token % 2 for token in completion.token_ids) / 8

"""Steps drawn ahead by a real server: versions of tokens, resuming, and refused settings."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_engine import ActorHybridWorker, Completion
from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, FileError, GenerationError
from hybrid_engine.messages import encode
from hybrid_engine.rl import GrpoConfig, Loop, train
from hybrid_engine.rl.group_queue import GroupQueue
from hybrid_engine.rl.run_files import Row
from tests.harness.errors import refused, violated
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.harness.vllm_server import FILLED, PLAIN, serving
from tests.hybrid_engine.rl.stand_ins import stand_in
from tests.hybrid_engine.serving.test_requests import replay
from tests.hybrid_engine.serving.test_servers import config_of, write_model
from tests.hybrid_engine.tools.programs import read_lines

Served = tuple[str, str]
"""A model, and the address of its server."""
LENGTH = 64
PROMPTS = [[first, 3, 4] for first in range(5, 12)]
SERVED = {"servers": ["http://127.0.0.1:1"], "release_weights": False, "server_max_lag": 2}
SETTINGS: Values = {
    **{
        "steps": 5,
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "max_tokens": 48,
        "learning_rate": 3e-3,
    },
    **{"epochs": 1, "minibatches": 2, "save_every": 100, "log_completions_every": 1},
}
TOLERANCE = 1e-4
"""Tolerance of float32 log-probabilities of two implementations."""


@dataclass
class Run:
    """Rows of a run, and each drawn completion with its prompt and log-probabilities."""

    rows: list[Row]
    drawn: list[Any]


def run(served: Served, out: Path, settings: Values, killed: Path | None = None) -> Run:
    """Train. `killed` receives the run's files as a kill after step 3 would leave them."""
    drawn: list[Any] = []

    def reward(prompt: list[int], completion: Completion) -> float:
        drawn.append(
            (*prompt, *completion.token_ids, *(value.hex() for value in completion.logprobs))
        )
        return sum(token % 2 for token in completion.token_ids) / 4

    generate = {
        "release_weights": False,
        "server_max_lag": 2,
        "verify": "off",
        "max_model_len": LENGTH,
    }
    model, url = served
    config = config_of(model, [url], {"seq_length": LENGTH, "micro_batch_size": 2}, **generate)
    with ActorHybridWorker(config) as worker:

        def export() -> None:
            with worker.train_context():
                worker.save_hf_checkpoint(out.parent / f"{out.name}-v{worker.train.version}")

        def on_step(row: Row) -> None:
            export()
            if killed is not None and row["step"] == 3:
                shutil.copytree(out, killed)

        export()
        rows = train(
            worker,
            PROMPTS,
            reward,
            GrpoConfig(**{**SETTINGS, **settings}),
            out=out,
            on_step=on_step,
        )
    return Run(rows, drawn)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("queue")
    model = write_model(directory / "model", "qwen2", max_position_embeddings=LENGTH)
    arguments = ("--max-model-len", str(LENGTH))
    with serving(model, directory / "server", *FILLED, *PLAIN, *arguments) as server:
        yield model, server.url


@pytest.mark.slow
@pytest.mark.timeout(600)
@on_engines(1)
def test_steps_are_drawn_ahead(served: Served, tmp_path: Path) -> None:
    """No token is older than the bound, and only its version's weights give its probability."""
    assert all(
        "staleness_max" not in row for row in run(served, tmp_path / "0", {"max_staleness": 0}).rows
    )
    rows = run(served, tmp_path / "2", {"max_staleness": 2}).rows
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0]["staleness_max"] == 0
    assert max(row["staleness_max"] for row in rows) in (1, 2)
    assert all(0 <= row["staleness_mean"] <= row["staleness_max"] <= 2 for row in rows)
    assert all(
        row["generation_wait_seconds"] >= 0 and 0 <= row["queue_length"] <= 3 for row in rows
    )
    lines = [
        (step, line)
        for step in range(1, 6)
        for line in read_lines(tmp_path / "2" / "completions" / f"step-{step:06d}.jsonl")
    ]
    samples: Any = [
        SimpleNamespace(prompt=line["prompt"], tokens=line["token_ids"]) for _, line in lines
    ]
    log_probs = {
        version: replay(str(tmp_path / f"2-v{version}"), samples) for version in range(0, 10, 2)
    }
    distinct = 0
    for number, (step, line) in enumerate(lines):
        versions = torch.tensor(line["weight_versions"])
        assert len(versions) == len(line["token_ids"])
        assert set(versions.tolist()) <= {2 * (step - 1 - age) for age in range(3)}
        received = torch.tensor(line["logprobs"])
        for version in set(versions.tolist()):
            is_own = versions == version
            assert torch.allclose(
                log_probs[version][number][0][is_own], received[is_own], rtol=0, atol=TOLERANCE
            )
        newest = log_probs[2 * (step - 1)][number][0]
        distinct += not torch.allclose(newest, received, rtol=0, atol=TOLERANCE)
    assert distinct > 0  # some tokens are stale indeed


@pytest.mark.slow
@pytest.mark.timeout(600)
@on_engines(1)
def test_a_killed_run_learns_the_same_completions(served: Served, tmp_path: Path) -> None:
    saving = {"max_staleness": 1, "save_every": 1}
    whole = run(served, tmp_path / "whole", saving, tmp_path / "killed")
    resumed = run(served, tmp_path / "killed", saving)
    assert [row["staleness_max"] for row in whole.rows] == [0, 1, 1, 1, 1]
    assert whole.drawn[-len(resumed.drawn) :] == resumed.drawn
    assert len(resumed.drawn) == 8 * len(resumed.rows)
    for row, again in zip(whole.rows[-len(resumed.rows) :], resumed.rows, strict=True):
        same = ("step", "reward", "loss", "grad_norm", "staleness_mean", "weight_version")
        assert [row[name] for name in same] == [again[name] for name in same]


@pytest.mark.parametrize(
    ("changed", "key", "code"),
    [
        ({"servers": []}, "GrpoConfig.max_staleness", "needs-servers"),
        ({"release_weights": True}, "generate_config.release_weights", "needs-weights"),
        ({"server_pause": "abort"}, "generate_config.server_pause", "conflicting-keys"),
        ({"server_max_lag": 1}, "generate_config.server_max_lag", "below-updates"),
    ],
)
def test_settings_that_cannot_draw_ahead_are_refused(changed: Values, key: str, code: str) -> None:
    config = GrpoConfig(max_staleness=1, minibatches=2)
    worker = stand_in()
    worker.config.generate_config = GenerateConfig(**SERVED)
    Loop(worker, "ab", lambda prompt, completion: 1.0, config)
    worker.config.generate_config = GenerateConfig(**{**SERVED, **changed})
    with violated(ConfigError, (key, code)):
        Loop(worker, "ab", lambda prompt, completion: 1.0, config)


def queue_without_engines() -> GroupQueue:
    worker = stand_in()
    worker.config.generate_config = GenerateConfig(**SERVED)
    return Loop(worker, "ab", lambda prompt, completion: 1.0, GrpoConfig(max_staleness=1)).queue


@pytest.mark.slow  # imports vLLM
def test_a_token_beyond_the_bound_is_an_error(tmp_path: Path) -> None:
    """Servers report versions; a wrong report is not learned from."""
    queue = queue_without_engines()
    queue._published = [4, 6]
    groups = [[Completion((7, 8), (-1.0, -1.0), "stop", versions=(4, 6))]]
    assert queue.staleness(groups) == [1, 0]
    queue._published = [6, 8]
    with refused(GenerationError, "too-stale", "version 4", "6, 8"):
        queue.staleness(groups)
    damaged = tmp_path / "queue.msgpack"
    damaged.write_bytes(encode(([1], {4: 7})))
    queue._worker.rank = 0
    with pytest.raises(FileError, match=str(damaged)):
        queue.load(tmp_path, 3)

"""Results that a run saves on the way: the best checkpoint, exports, and the place in a stream of prompts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine import ActorHybridWorker, Completion
from hybrid_engine.errors import ConfigError
from hybrid_engine.rl import GrpoConfig, train
from hybrid_engine.rl.run_files import Row, RunFiles
from tests.harness.errors import has_violations
from tests.harness.launch import Ranks
from tests.hybrid_engine.rl.test_prompt_source import Stream
from tests.hybrid_engine.rl.test_resuming import FSDP2, read_lines, read_weights
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ACCURACY = {0: 0.0, 1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3}
SETTINGS: dict[str, Any] = {
    **{"steps": 4, "prompts_per_step": 2, "samples_per_prompt": 2, "max_tokens": 4, "learning_rate": 1e-2},
    **{"evaluate_every": 1, "save_every": 1, "keep_best": "accuracy", "export_every": 2},
}
KILLED_AFTER = 3


class TokenStream(Stream):
    """The stream, with token ids as prompts."""

    def __iter__(self) -> Any:
        for text in super().__iter__():
            yield [int(text.rsplit("/", 1)[1]) + 4, 3, 4]


def run(model: Path, out: Path, killed: Path | None = None) -> list[Any]:
    """Train; return the prompts of all rewards. `killed` gets the files as a kill after step 3 leaves them."""
    drawn: list[Any] = []

    def reward(prompt: list[int], completion: Completion) -> float:
        drawn.append((prompt, tuple(completion.token_ids)))
        return sum(token % 2 for token in completion.token_ids) / 4

    with workers.build_worker(model, FSDP2) as worker:

        def evaluate(_worker: ActorHybridWorker) -> Mapping[str, float]:
            return {"accuracy": ACCURACY[worker.train.version]}

        def copy_run(row: Row) -> None:
            if killed is not None and worker.rank == 0 and row["step"] == KILLED_AFTER:
                shutil.copytree(out, killed)

        prompts = TokenStream(5, has_passes=True)
        train(worker, prompts, reward, GrpoConfig(**SETTINGS), out=out, evaluate=evaluate, on_step=copy_run)
    return drawn


def test_a_resumed_run_goes_on_in_its_stream_and_keeps_the_best(engines: Ranks, tmp_path: Path) -> None:
    model = workers.write_model(tmp_path / "model", "qwen3", num_hidden_layers=2)
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    calls = {"whole": (run, (model, whole, killed)), "resumed": (run, (model, killed))}
    results = engines.launch_in_turn(2, calls)
    drawn, drawn_again = (results[name][0] for name in calls)
    assert [prompt[0] - 4 for prompt, _ in drawn[::2]] == [1, 2, 3, 4, 5, 1, 2, 3]
    assert drawn[4 * KILLED_AFTER :] == drawn_again
    assert read_lines(whole) == read_lines(killed)
    for out in (whole, killed):
        assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
        assert sorted(path.name for path in (out / "exports").iterdir()) == ["step-000002", "step-000004"]
    exports = [(whole / "exports" / f"step-00000{step}" / "model.safetensors").read_bytes() for step in (2, 4)]
    assert exports[1] == read_weights(whole)["model.safetensors"]
    assert exports[0] != exports[1]
    assert all(0 < row["reshard_fill_seconds"] < row["reshard_seconds"] for row in RunFiles(whole).metrics.rows())


def refused(model: Path) -> None:
    with workers.build_worker(model, FSDP2) as worker:
        settings = GrpoConfig(**{**SETTINGS, "keep_best": "acuracy"})
        with pytest.raises(ConfigError, check=has_violations(("GrpoConfig.keep_best", "unknown-column"))):
            train(worker, [[5, 3, 4]], lambda _prompt, _completion: 1.0, settings)


def test_a_column_that_no_row_has_is_refused_in_the_first_step(engines: Ranks, tmp_path: Path) -> None:
    engines.launch_in_turn(1, {0: (refused, (workers.write_model(tmp_path / "model", "qwen3", num_hidden_layers=1),))})

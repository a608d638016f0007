"""A run goes on from its own directory, and refuses that of another run or program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.rl import GrpoConfig
from hybrid_engine.rl.run_files import RunFiles


def written(out: Path, *, steps: int, complete: int | None, **settings: Any) -> RunFiles:
    """A run's files after so many steps."""
    files, config = RunFiles(out), GrpoConfig(**settings).shared()
    assert files.begin(config) == 0
    for step in range(1, steps + 1):
        files.metrics.append({"step": step})
        files.checkpoint(step).mkdir(parents=True)
        if step == complete:
            files.complete(step, config)
    return files


@pytest.mark.parametrize(("complete", "kept"), [(None, 0), (2, 2), (3, 3)])
def test_a_run_goes_on_from_its_complete_checkpoint(tmp_path: Path, complete: int | None, kept: int) -> None:
    files = written(tmp_path / "out", steps=3, complete=complete)
    assert files.begin(GrpoConfig(steps=200, save_every=7, evaluate_every=3).shared()) == kept
    assert [row["step"] for row in files.metrics.rows()] == list(range(1, kept + 1))
    assert [path.name for path in tmp_path.glob("out/checkpoints/*")] == ([f"step-{kept:06d}"] if kept else [])


def test_other_settings_are_named(tmp_path: Path) -> None:
    files = written(tmp_path / "out", steps=1, complete=1, schedule="cosine", seed=1)
    with pytest.raises(ConfigError) as caught:
        files.begin(GrpoConfig(schedule="cosine", steps=7, temperature=0.5, seed=1).shared())
    assert [found.key for found in caught.value.findings] == ["GrpoConfig.steps", "GrpoConfig.temperature"]
    assert len(files.metrics.rows()) == 1


@pytest.mark.parametrize(("name", "text"), [("run.json", '{"rl_config": {}}'), ("mine.txt", "")])
def test_what_is_not_a_run_is_left_alone(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="is not a run of train"):
        RunFiles(tmp_path).begin(GrpoConfig().shared())
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, text)]

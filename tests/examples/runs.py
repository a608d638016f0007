"""Directories of runs, for the tests of `examples.gpt_rl.run_state`."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.gpt_rl.run_state import Progress, RunDirectory
from hybrid_engine.errors import ConfigError, FileError

FINGERPRINT = {
    "world_size": 2,
    "actor_config": {"lr": 0.1},
    "generate_config": {"seed": 0},
    "rl_config": {"seed": 0, "epochs": 1},
}


def complete(run: RunDirectory, iteration: int) -> None:
    run.weights(iteration).mkdir(parents=True)
    (run.weights(iteration) / "rank0000.pt").write_text("weights")
    run.complete_checkpoint(Progress(iteration, {"iteration": iteration, "reward": 0.5}))


def names(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.checkpoints.glob("iteration-*"))


def contents(path: Path) -> dict[str, bytes | None]:
    """Every file below and every directory (None)."""
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


def check_refused(run: RunDirectory, *words: str, resume: bool = True) -> None:
    """With these words; nothing has changed, nor does a later step change anything."""
    before = contents(run.path)
    with pytest.raises((ConfigError, FileError)) as caught:
        if resume:
            run.require_resumable(FINGERPRINT)
        else:
            run.start_over(FINGERPRINT)
    for word in (str(run.path), *words):
        assert word in str(caught.value)
    assert contents(run.path) == before

"""A rank, or a job of two, is killed in a save: the old or the new checkpoint loads whole."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.kills import kill_before
from tests.harness.launch import Ranks
from tests.zoo.tiny_models import Zoo

LOADED = "loaded"
"""File with the version that the ranks of a start have loaded and compared."""


@dataclass(frozen=True)
class Instant:
    """A kill of "one" rank or "all", before a step of the save on `rank` that changes a file.

    `wait`: as of the save.
    """

    rank: int
    step: int
    victims: str
    wait: bool


NEVER = Instant(0, sys.maxsize, "all", wait=True)


def resume_and_save(model: Path, root: Path, instant: Instant) -> int:
    """Load the checkpoint, train, save with the kill, and train; return the steps of the save."""
    from tests.hybrid_engine.backends.fsdp.actors import actor, state_of, train

    with actor(model, seed=9) as parts:
        engine = parts.engine
        checkpoints = parts.checkpoints
        job = checkpoints._job
        if (root / "saves").exists():
            checkpoints.load(root / "saves")
            assert repr(state_of(engine)) == (root / f"version-{engine.model.version}").read_text()
        job.agreement.conclude("all ranks have compared")
        version = engine.model.version
        train(engine, version)
        state = repr(state_of(engine))
        if job.rank == 0:
            (root / LOADED).write_text(str(version))
            (root / f"version-{version + 1}").write_text(state)
        pids = job.agreement.gather(os.getpid(), int)
        num_steps = kill_before(
            instant.step if job.rank == instant.rank else NEVER.step,
            pids if instant.victims == "all" else [os.getpid()],
        )
        checkpoints.save(root / "saves", wait=instant.wait)
        train(engine, version + 1)
        checkpoints.close()
        return num_steps()


@pytest.mark.parametrize("num_kills", [6, pytest.param(60, marks=pytest.mark.faults)])
def test_a_killed_save_leaves_the_old_or_the_new_checkpoint(
    ranks: Ranks, tmp_path: Path, num_kills: int
) -> None:
    """Kill at instants spread over the whole save; each start checks what the last kill left."""
    model = Zoo(tmp_path).path("qwen2")
    receipt = tmp_path / LOADED

    def start(instant: Instant) -> list[int]:
        receipt.unlink(missing_ok=True)
        return ranks.launch(resume_and_save, 2, model, tmp_path, instant, timeout=100)

    start(NEVER)
    instants = [
        Instant(rank, step, victims, wait)
        for rank, num_steps in enumerate(start(NEVER))
        for step, victims, wait in itertools.product(
            range(num_steps), ("one", "all"), (True, False)
        )
    ]
    version = 1
    for number in range(num_kills):
        instant = instants[(2 * number + 1) * len(instants) // (2 * num_kills)]
        with pytest.raises(AssertionError):
            start(instant)
        loaded = int(receipt.read_text())
        left = sorted(path.name for path in (tmp_path / "saves").iterdir())
        print(f"version {loaded} loaded whole; {instant}, leaving {left}")
        assert loaded - version in (0, 1), instant
        version = loaded
    start(NEVER)
    assert int(receipt.read_text()) - version in (0, 1)
    assert len(list((tmp_path / "saves").iterdir())) == 2

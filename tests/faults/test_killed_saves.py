"""A rank, or a whole job of two, is killed in a save: the old or the new checkpoint loads whole.

python -m tests.faults.test_killed_saves 60 7  # kills, seed; prints starts and findings
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.test_killed_runs import Findings, check_kills, kill_often
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


def kill_saves(directory: Path, num_kills: int, seed: int, log: Callable[[str], None]) -> Findings:
    """Kill at instants spread over the whole save; each start checks what the last kill left."""
    findings = Findings()
    model = Zoo(directory).path("qwen2")

    receipt = directory / LOADED
    launcher = Ranks(with_engines=False)

    def start(instant: Instant) -> list[int]:
        findings.starts += 1
        return launcher.launch(resume_and_save, 2, model, directory, instant, timeout=100)

    start(NEVER)
    instants = [
        Instant(rank, step, victims, wait)
        for rank, num_steps in enumerate(start(NEVER))
        for step, victims, wait in itertools.product(
            range(num_steps), ("one", "all"), (True, False)
        )
    ]
    log(f"{len(instants)} instants")
    first = random.Random(seed).random()
    places = ((number + first) * len(instants) / num_kills for number in range(num_kills))
    version = 1
    for instant in [*(instants[int(place)] for place in places), NEVER]:
        receipt.unlink()
        failure = ""
        try:
            start(instant)
        except AssertionError as error:
            failure = str(error)
            findings.kills[f"{instant.victims} on rank {instant.rank}"] += 1
        loaded = int(receipt.read_text()) if receipt.exists() else -1
        left = sorted(path.name for path in (directory / "saves").iterdir())
        log(f"version {loaded} loaded whole; {instant}, leaving {left}")
        is_expected = bool(failure) if instant is not NEVER else len(left) == 2 and not failure
        if loaded - version not in (0, 1) or not is_expected:
            findings.wrong.append(f"{instant} of version {version}, loaded as {loaded}: {failure}")
            break
        version = loaded
    return findings


@pytest.mark.parametrize("num_kills", [6, pytest.param(60, marks=pytest.mark.faults)])
@pytest.mark.ranks
def test_a_killed_save_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, num_kills: int) -> None:
    check_kills(kill_saves, tmp_path, num_kills)


if __name__ == "__main__":
    kill_often(kill_saves, *sys.argv[1:])

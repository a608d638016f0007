"""Runs that are killed, interrupted or fail anywhere go on by the same call, and lose nothing."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hybrid_engine.errors import (
    ArgumentError,
    ConfigError,
    FileError,
    HybridEngineError,
    StateError,
)
from hybrid_engine.ranks.job import Job
from hybrid_engine.rl.run_files import RunFiles
from tests.harness.errors import refused, violated
from tests.harness.kills import accepted_flips, kill_at_every_step
from tests.harness.launch import on_engines
from tests.hybrid_engine.rl.light_runs import ALONE, LightWorker, contents, run
from tests.zoo.workers import write_model

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "run"
    run(out)
    return contents(out)


def saved_step(out: Path) -> int:
    progress = RunFiles(out).progress()
    return 0 if progress is None else progress.step


@pytest.mark.slow
def test_a_run_goes_on_after_a_kill_at_every_step_of_its_work_on_files(
    whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    num_kills = 0
    with mock.patch("os.fsync"):  # only a power cut needs it
        for num_kills in kill_at_every_step(
            lambda: run(out), lambda: shutil.rmtree(out, ignore_errors=True)
        ):
            run(out)
            assert contents(out) == whole, f"killed before step {num_kills}"
    print(f"{num_kills} kills")
    assert num_kills > 150


CAUSE = OSError("the network is down")


def fail(error: BaseException = CAUSE) -> None:
    raise error


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def at(
    where: str, step: int, act: Callable[..., object], *arguments: Any
) -> Callable[[str, int], None]:
    """Return an `on_call` that acts in one place and step."""
    return lambda place, number: act(*arguments) if (place, number) == (where, step) else None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("disturbance", "error", "step"),
    [
        (("tracker", 1, fail), ArgumentError, 0),
        (("prompts", 3, fail), ArgumentError, 2),
        (("evaluate", 3, fail), ArgumentError, 3),
        (("on_step", 3, fail), ArgumentError, 3),
        (("should_stop", 3, fail), ArgumentError, 2),
        (("export", 2, fail, FileError("the network is down", code="file-failed")), FileError, 2),
        (("tracker", 1, sys.exit, CAUSE), ArgumentError, 0),
        (("prompts", 3, sys.exit, CAUSE), ArgumentError, 2),
        (("evaluate", 3, sys.exit, CAUSE), ArgumentError, 3),
        (("export", 2, sys.exit, CAUSE), ArgumentError, 2),
        (("evaluate", 3, send, signal.SIGINT), None, 3),
        (("evaluate", 3, send, signal.SIGTERM), None, 3),
        (("evaluate", 3, send, signal.SIGINT, signal.SIGINT), KeyboardInterrupt, 2),
        (("evaluate", 3, os.chdir, "/"), None, 4),
    ],
)
def test_a_disturbed_run_goes_on(
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    disturbance: tuple[Any, ...],
    error: type[BaseException] | None,
    step: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with nullcontext() if error is None else pytest.raises(error) as caught:
        run(Path("run"), on_call=at(*disturbance))
    if error in (ArgumentError, FileError):
        assert str(CAUSE) in str(caught.value)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    out = tmp_path / "run"
    assert saved_step(out) == step
    run(out)
    files = contents(out)
    assert {name: files.get(name) for name in whole} == whole


def test_a_checkpoint_that_was_completed_at_the_second_attempt_is_read(tmp_path: Path) -> None:
    errors = iter([OSError(errno.ENOSPC, "full")])

    def replace(path: Path, target: Path) -> Path:
        if target.name == "progress.json":
            for error in errors:
                raise error
        return rename(path, target)

    rename = Path.replace
    with mock.patch.object(Path, "replace", replace), pytest.raises(FileError):
        run(tmp_path)
    assert saved_step(tmp_path) == 2


SAVED = {"prompts": 2, "evaluate": 3, "on_step": 3, "should_stop": 2}
"""The step that is saved when a function of the user fails in step 3."""


# Only rank 0 calls on_step.
@on_engines({2: [f"{where} {rank}" for where in SAVED for rank in range(1 + (where != "on_step"))]})
def test_a_failure_of_one_rank_is_known_on_all_and_costs_no_step(tmp_path: Path, case: str) -> None:
    where, rank = case.split()
    error = CAUSE if rank == "1" else SystemExit(str(CAUSE))
    with (
        closing(Job.join(60)) as job,
        pytest.raises(HybridEngineError, match=re.escape(str(CAUSE))),
    ):
        run(
            tmp_path,
            job,
            on_call=at(where if str(job.rank) == rank else "", 3, fail, error),
            save_every=100,
        )
    assert saved_step(tmp_path) == SAVED[where]


def test_a_flipped_bit_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """`train` reads the progress before the engines are built; their files have checksums of their
    own.
    """
    run(tmp_path)
    paths = [path for path in RunFiles(tmp_path).checkpoint(4).iterdir() if path.is_file()]
    assert {path.name for path in paths} == {"checksums.json", "progress.json", "prompts.pt"}
    assert accepted_flips(paths, lambda: saved_step(tmp_path), every=7) == []


def test_adapters_of_experts_are_in_the_model_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", "qwen3_moe", max_position_embeddings=4096)
    worker = LightWorker(ALONE, model, lora={})
    run(tmp_path / "run", worker=worker)
    assert "no adapter" in capsys.readouterr().out
    assert not (tmp_path / "run" / "adapter").exists()
    with refused(StateError, "no-adapters", "linear_fc1, linear_fc2", "save_hf_checkpoint"):
        worker.save_adapters(tmp_path / "adapter")


def test_steps_are_saved_by_the_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = []
    clock = itertools.count(
        0, 10.0
    )  # minutes, read as a step begins, when it was learned, and saved
    # Of the loop alone: other threads read the clock, too.
    with mock.patch("hybrid_engine.rl.loop.time", mock.Mock(monotonic=lambda: 60 * next(clock))):
        run(
            tmp_path,
            on_call=at("on_step", 3, lambda: saved.append(saved_step(tmp_path))),
            save_every=100,
            save_minutes=35,
        )
    assert saved == [2]
    first, phase, headings, *lines, flat, last = capsys.readouterr().out.splitlines()
    assert first == f"run in {tmp_path}, first checkpoint in 35 minutes, or after step 4"
    assert phase == "step 0/4: evaluate ..."  # other phases are replaced here
    assert headings == "    step    reward   length  logp diff  switch s  seconds      left"
    left = ["0:00:02", "0:00:01", "0:00:00", "-"]
    seen = [line.split() for line in lines]
    assert [(words[0], words[6]) for words in seen] == [
        (f"{n}/4", left[n - 1]) for n in range(1, 5)
    ]
    assert [words[-2] for words in seen] == ["accuracy"] * 4, "figures of the user"
    assert flat.startswith("no step had a gradient")
    assert last.startswith(f"4 steps; the model is in {tmp_path}/model, ")


def test_named_settings_change_within_a_run_and_are_recorded(tmp_path: Path) -> None:
    run(tmp_path, on_call=at("on_step", 2, send, signal.SIGUSR1))
    settings = (tmp_path / "run.json").read_text()
    new: Any = {"learning_rate": 1e-3, "reward_weights": {"reward": 0.5}, "seed": 5}
    worker = LightWorker(ALONE, optimizer={"clip_grad": 0.5})
    for changed, *violation in (
        ([*new], "actor_config.optimizer.clip_grad", "differs-from-run"),
        (["ratio"], "changed", "cannot-change"),
        (None, "changed", "cannot-change"),
        (new, "changed", "cannot-change"),
    ):
        with violated(ConfigError, tuple(violation)):
            run(tmp_path, worker=worker, changed=changed, **new)
    run(tmp_path, worker=worker, changed=[*new, "actor_config.optimizer.clip_grad"], **new)
    assert (tmp_path / "run-until-000002.json").read_text() == settings
    assert run(tmp_path, worker=worker, **new) == [], "the new settings are those of the run"


def test_a_column_that_no_row_has_is_refused_in_the_first_step(tmp_path: Path) -> None:
    with violated(ConfigError, ("GrpoConfig.keep_best", "unknown-column")):
        run(tmp_path, keep_best="acuracy")
    assert saved_step(tmp_path) == 1

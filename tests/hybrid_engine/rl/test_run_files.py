"""Files of a run: resuming, retention of checkpoints, locks and refused directories."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.config.keys import HybridConfig
from hybrid_engine.errors import ConfigError, FileError
from hybrid_engine.rl import GrpoConfig, PpoConfig
from hybrid_engine.rl.config import shared_engine_settings
from hybrid_engine.rl.run_files import Progress, RunFiles
from hybrid_engine.rl.trackers import Events
from tests.harness.errors import has_violation, has_violations, refused
from tests.harness.values import Values

SETTINGS: Values = {
    "world_size": 2,
    "actor_config": {"lr": 0.1},
    "rl_config": {"seed": 0, "epochs": 1},
}


def begun(out: Path, settings: Values = SETTINGS, **options: Any) -> RunFiles:
    files = RunFiles(out, **options)
    files.lock().close()
    files.begin(settings)
    return files


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    files = begun(tmp_path / "run", num_kept=2)
    for step in (0, 10, 20):
        complete(files, step)
        files.metrics.append({"step": step, "reward": 0.5})
    return files


def complete(run: RunFiles, step: int) -> None:
    run.weights(step).mkdir(parents=True, exist_ok=True)
    run.complete(Progress({"step": step, "reward": 0.5}))


def has_differences(*keys: str) -> Callable[[BaseException], bool]:
    """Return a check that an error lists exactly these settings as different from the run's."""
    return has_violations(*((key, "differs-from-run") for key in keys))


def step_names(run: RunFiles) -> list[str]:
    return sorted(path.name.removeprefix("step-") for path in run.checkpoints.iterdir())


@pytest.mark.parametrize(
    ("num_kept", "expected"), [(1, ["000000", "000030"]), (2, ["000000", "000020", "000030"])]
)
def test_the_first_and_the_newest_checkpoints_are_kept(
    run: RunFiles, num_kept: int, expected: list[str]
) -> None:
    run = RunFiles(run.out, num_kept=num_kept)
    complete(run, 30)
    assert step_names(run) == expected
    for step in (999_990, 1_000_000, 1_000_010):
        complete(run, step)
    numbers = ["1000000", "1000010"][-num_kept:]
    assert step_names(run) == ["000000", *numbers], "sorted by number, not by name"


@pytest.mark.parametrize(("is_lowest_best", "expected"), [(False, "000020"), (True, "000030")])
def test_the_best_checkpoint_is_kept(tmp_path: Path, is_lowest_best: bool, expected: str) -> None:
    run = begun(tmp_path / "run", best="accuracy", is_lowest_best=is_lowest_best)
    rows = {10: 0.5, 20: 0.9, 30: 0.1, 40: 0.9, 50: float("nan"), 60: 0.5}
    for step, accuracy in rows.items():
        complete(run, step)
        run.metrics.append({"step": step, "accuracy": accuracy})
        run.metrics.append(
            {"step": step + 1, "reward": 1.0}
        )  # without a checkpoint, and without the column
    assert step_names(run) == [expected, "000060"]
    assert run.best_step() == int(expected)
    # The rows decide, so a resumed run goes on with the best checkpoint of the run before.
    run = begun(run.out, best="accuracy", is_lowest_best=is_lowest_best)
    complete(run, 70)
    assert step_names(run) == [expected, "000070"]


def test_options_that_may_change_are_not_compared(tmp_path: Path) -> None:
    run = begun(tmp_path / "run", GrpoConfig(seed=1).shared())
    complete(run, 1)
    run.check(GrpoConfig(seed=1, steps=200, save_every=7, evaluate_every=3).shared())
    changed = [f"GrpoConfig.{name}" for name in ("schedule", "steps", "temperature")]
    with pytest.raises(ConfigError, check=has_differences(*changed)):
        run.check(GrpoConfig(seed=1, temperature=0.5, schedule="cosine").shared())
    with pytest.raises(
        ConfigError, check=has_violation("out", "not-a-run", "of GrpoConfig, not of PpoConfig")
    ):
        run.check(PpoConfig(seed=1).shared())


RL: Values = {"seed": 0, "epochs": 1}
CRITIC: Values = {"lr": 0.5, "lora": None}
DEFAULTS: Values = {"rl_config": {"seed": 5, "clip": 0.2}, "critic": CRITIC}
NOW: Values = {**SETTINGS, "rl_config": {**RL, "clip": 0.2}, "critic": CRITIC}


@pytest.mark.parametrize(
    ("changed", "defaults", "key", "values"),
    [
        ({}, DEFAULTS, "", ""),
        ({"rl_config": {**RL, "clip": 0.3}}, DEFAULTS, "rl_config.clip", "has 0.2, this one 0.3"),
        ({}, {**DEFAULTS, "rl_config": {}}, "rl_config.clip", "has None, this one 0.2"),
        (
            {"critic": {"lr": 0.5, "lora": {"rank": 8}}},
            DEFAULTS,
            "critic.lora",
            "has None, this one {",
        ),
        (
            {"rl_config": {"seed": 0, "clip": 0.2}},
            DEFAULTS,
            "rl_config.epochs",
            "has 1, this one None",
        ),
    ],
)
def test_an_older_run_resumes_with_defaults_of_new_options(
    run: RunFiles, changed: Values, defaults: Values, key: str, values: str
) -> None:
    now = {**NOW, **changed}
    differing = pytest.raises(ConfigError, check=has_violation(key, "differs-from-run", values))
    with differing if key else nullcontext():
        run.check(now, defaults=defaults)
    run.begin(now)
    run.check(now, defaults={})


def test_paths_memory_and_speed_may_change(tmp_path: Path) -> None:
    def settings(critic: Values, **generate: Any) -> Values:
        actor = {"fsdp": {"activation_checkpointing": bool(generate)}}
        values = {
            "model": "/one",
            "critic_config": critic,
            "actor_config": actor,
            "generate_config": generate,
        }
        return shared_engine_settings(HybridConfig.model_validate(values), 2)

    optimizer = {"schedule": {"lr_warmup_steps": 3}}
    run = begun(tmp_path / "run", settings({"model": "/two", "optimizer": optimizer}))
    complete(run, 1)
    critic = {"model": "/three", "offload": False}
    memory = {
        "offload_train_param": False,
        "release_weights": False,
        "enforce_eager": True,
        "max_num_seqs": 8,
    }
    speed = {"transport": "collective", "incremental": "auto", "server_ports": "10000-20000"}
    run.check(settings({**critic, "optimizer": optimizer}, **memory, **speed))
    changed = ("critic_config.optimizer.schedule", "generate_config.infer_tensor_parallel_size")
    with pytest.raises(ConfigError, check=has_differences(*changed)):
        run.check(settings(critic, **memory, infer_tensor_parallel_size=2))


@pytest.mark.parametrize("resume", [True, False])
def test_a_foreign_directory_is_refused(run: RunFiles, resume: bool) -> None:
    for change in (lambda path: path.write_text('{"seed": 3}'), Path.unlink):
        change(run.out / "run.json")
        with pytest.raises(ConfigError, check=has_violation("out", "not-a-run", str(run.out))):
            run.check(SETTINGS, resume)
    assert step_names(run) == ["000000", "000010", "000020"]


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_without_a_checkpoint_begins_again_and_keeps_its_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resume: bool
) -> None:
    """A run may be killed before or during its first checkpoint, more than once."""
    run = begun(tmp_path / "run")
    for place in (run.out, run.checkpoints):
        place.mkdir(exist_ok=True)
        (place / "notes.txt").write_text("mine")
    for attempt in (1, 2):
        run.metrics.append({"step": 1, "attempt": attempt})
        run.weights(2).mkdir(parents=True)
        if not resume:
            complete(run, 2)
        rows = run.metrics.path.read_bytes()
        changed = {**SETTINGS, "world_size": attempt}  # nothing is trained, or it is dropped
        run.check(changed, resume)
        run.begin(changed, resume)
        assert (run.progress(), run.metrics.rows(), step_names(run)) == (None, [], ["notes.txt"])
        assert (run.out / f"metrics.{attempt}.jsonl").read_bytes() == rows
        assert f"rows of metrics are now metrics.{attempt}.jsonl" in caplog.text
    files = {"checkpoints", "lock", "metrics.1.jsonl", "metrics.2.jsonl", "notes.txt", "run.json"}
    assert {path.name for path in run.out.iterdir()} == files


def test_events_of_an_attempt_are_hidden_by_the_next_one(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for attempt in (1, 2):
        events = Events(tmp_path)
        for step in range(1, 5 - attempt):
            events.add(step, {"step": step, "reward": attempt})
        events.close()
    shown = EventAccumulator(str(tmp_path)).Reload().Scalars("train/reward")
    assert [(event.step, event.value) for event in shown] == [(1, 2), (2, 2)]


def test_a_run_with_missing_checkpoints_is_refused(run: RunFiles) -> None:
    shutil.rmtree(run.checkpoints)
    rows = run.metrics.rows()
    with pytest.raises(
        ConfigError, check=has_violation("out", "checkpoint-is-missing", "first-checkpoint")
    ):
        run.check(SETTINGS)
    assert run.metrics.rows() == rows
    run.check(SETTINGS, resume=False)


def test_a_row_too_long_to_be_read_is_not_written(run: RunFiles) -> None:
    rows = run.metrics.rows()
    too_long = {"step": 30, "text": "x" * (1 << 20)}
    with refused(FileError, "row-too-long", "metrics.jsonl", str((1 << 20) - 1)):
        run.metrics.append(too_long)
    with refused(FileError, "row-too-long", "progress.json"):
        run.complete(Progress(too_long))
    longest = {"step": 30, "text": "x" * ((1 << 20) - 26)}  # with JSON's characters and newline
    assert len(json.dumps(longest)) == (1 << 20) - 2
    run.metrics.append(longest)
    assert run.metrics.rows() == [*rows, longest]
    assert run.progress() == Progress({"step": 20, "reward": 0.5})


def test_a_damaged_row_is_named(run: RunFiles) -> None:
    run.metrics.path.write_text('{"step": 0}\nno json\n{"step": 1}\n')
    with refused(FileError, "damaged-row", str(run.metrics.path), "line 2"):
        run.check(SETTINGS)


def test_a_directory_is_locked_by_one_job_and_not_by_its_forks(run: RunFiles) -> None:
    """Processes of a reward's pool can outlive a killed rank."""
    run.lock()  # in no variable, so it ends at once
    lock = run.lock()
    holder = f"process {os.getpid()} "
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"x")
        signal.pause()  # outlives the parent's lock
    try:
        assert os.read(reading, 1) == b"x", "the child runs"
        with pytest.raises(
            ConfigError, check=has_violation("out", "run-is-locked", str(run.out), holder)
        ):
            run.lock()
        lock.close()
        run.lock().close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_symlinked_lock_is_not_followed(run: RunFiles, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (run.out / "lock").unlink()
    (run.out / "lock").symlink_to(tmp_path / "mine")
    with refused(FileError, "file-failed", str(run.out / "lock")):
        run.lock()
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_long_run_is_read_line_by_line(run: RunFiles) -> None:
    rows = [{"step": step, "text": "x" * 1000} for step in range(3000)]
    run.metrics.path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tracemalloc.start()
    assert run.metrics.has(2999)
    run.metrics.cut_after(1500)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 19, "bytes; the file has 3 MB"
    assert [row["step"] for row in run.metrics.rows()] == list(range(1501))

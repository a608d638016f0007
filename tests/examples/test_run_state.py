"""The files of a run: what counts, what is dropped, what is kept, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from examples.gpt_rl.run_state import Progress, RunDirectory
from hybrid_engine.errors import ConfigError, FileError

SETTINGS = {"world_size": 2, "actor_config": {"lr": 0.1}, "rl_config": {"seed": 0, "epochs": 1}}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.lock().close()
    directory.start_over(SETTINGS)
    for iteration in (0, 10, 20):
        complete(directory, iteration)
        directory.append_row({"iteration": iteration, "reward": 0.5})
    return directory


def complete(run: RunDirectory, iteration: int) -> None:
    run.weights(iteration).mkdir(parents=True, exist_ok=True)
    run.complete_checkpoint(Progress(iteration, {"iteration": iteration, "reward": 0.5}))


def names(run: RunDirectory) -> list[str]:
    return sorted(path.name.removeprefix("iteration-") for path in run.checkpoints.iterdir())


def test_a_directory_that_is_not_there_yet_is_free(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "new" / "run")
    run.check(SETTINGS)
    assert (run.progress(), run.rows()) == (None, [])
    assert list(tmp_path.iterdir()) == []


def test_the_reference_and_the_two_newest_are_kept(run: RunDirectory) -> None:
    complete(run, 30)
    assert names(run) == ["0000", "0020", "0030"]
    for iteration in (9990, 10000, 10010):
        complete(run, iteration)
    assert names(run) == ["0000", "10000", "10010"], "numbers, not names"


def test_a_resumed_run_repeats_what_has_no_complete_checkpoint(run: RunDirectory) -> None:
    run.append_row({"iteration": 21})
    run.weights(30).mkdir(parents=True)
    with run.metrics.path.open("a") as file:
        file.write('{"iteration": 22, "rew')
    assert run.progress() == Progress(20, {"iteration": 20, "reward": 0.5})
    run.check(SETTINGS)
    run.resume(run.progress())
    run.append_row({"iteration": 21})
    assert [row["iteration"] for row in run.rows()] == [0, 10, 20, 21]
    assert names(run) == ["0000", "0010", "0020"]


def test_other_settings_are_refused_key_by_key_but_not_for_a_new_run(run: RunDirectory) -> None:
    other = {**SETTINGS, "rl_config": {"seed": 1, "epochs": 1}, "actor_config": {"lr": 0.2}}
    with pytest.raises(ConfigError) as caught:
        run.check(other)
    assert [finding.key for finding in caught.value.findings] == ["actor_config.lr", "rl_config.seed"]
    run.check(other, resume=False)
    run.start_over(other)
    assert (run.progress(), run.rows()) == (None, [])
    run.check(SETTINGS)  # nothing was trained yet


def test_starting_over_removes_the_run_and_nothing_else(run: RunDirectory) -> None:
    for place in (run.path, run.checkpoints):
        (place / "notes.txt").write_text("mine")
    run.start_over(SETTINGS)
    assert names(run) == ["notes.txt"]
    assert {path.name for path in run.path.iterdir()} == {"checkpoints", "lock", "notes.txt", "run.json"}


@pytest.mark.parametrize("resume", [True, False])
def test_a_directory_of_something_else_is_refused(run: RunDirectory, resume: bool) -> None:
    (run.path / "run.json").unlink()
    with pytest.raises(ConfigError, match="it is not a run"):
        run.check(SETTINGS, resume)
    assert names(run) == ["0000", "0010", "0020"]


def test_rows_without_a_checkpoint_are_not_taken_for_a_new_run(run: RunDirectory) -> None:
    for path in run.checkpoints.glob("*/progress.json"):
        path.unlink()
    with pytest.raises(FileError, match="no complete checkpoint"):
        run.check(SETTINGS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", "{"),
        ("metrics.jsonl", '{"iteration": 0}\nno json\n{"iteration": 1}\n'),
        ("checkpoints/iteration-0020/progress.json", '{"iteration": 2'),
    ],
)
def test_a_damaged_file_is_named(run: RunDirectory, name: str, content: str) -> None:
    (run.path / name).write_text(content)
    with pytest.raises(FileError, match=name):
        run.check(SETTINGS)


def test_one_job_at_a_time_writes_a_directory(run: RunDirectory) -> None:
    with run.lock(), pytest.raises(ConfigError, match=f"another job is writing .*: process {os.getpid()} "):
        run.lock()
    run.lock().close()

"""The files of a run: what counts, what is dropped, what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.gpt_rl.run_state import Progress, RunDirectory
from hybrid_engine.errors import ConfigError

FINGERPRINT = {"rl": {"seed": 0, "epochs": 1}, "engine": {"actor_config": {"lr": 0.1}}}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.start_over(FINGERPRINT)
    return run


def complete(run: RunDirectory, iteration: int) -> None:
    run.weights(iteration).mkdir(parents=True)
    run.complete_checkpoint(Progress(iteration, {"iteration": iteration, "reward": 0.5}))


def names(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.checkpoints.glob("iteration-*"))


def test_nothing_yet(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.progress() is None
    assert run.rows() == []
    run.require_same(FINGERPRINT)


def test_progress_is_the_latest_complete_checkpoint(directory: RunDirectory) -> None:
    complete(directory, 0)
    complete(directory, 10)
    directory.weights(20).mkdir(parents=True)  # written, then killed
    assert directory.progress() == Progress(10, {"iteration": 10, "reward": 0.5})


def test_the_reference_and_two_more_are_kept(directory: RunDirectory) -> None:
    for iteration in (0, 10, 20, 30):
        complete(directory, iteration)
    assert names(directory) == ["iteration-0000", "iteration-0020", "iteration-0030"]


def test_what_a_killed_run_left_ahead_goes(directory: RunDirectory) -> None:
    for iteration in (0, 10):
        complete(directory, iteration)
    directory.weights(30).mkdir(parents=True)
    complete(directory, 20)
    assert names(directory) == ["iteration-0000", "iteration-0010", "iteration-0020"]


def test_rows_after_the_checkpoint_are_dropped(directory: RunDirectory) -> None:
    for iteration in range(4):
        directory.append_row({"iteration": iteration, "reward": None})
    directory.drop_rows_after(2)
    directory.append_row({"iteration": 3, "reward": 1.0})
    assert [row["iteration"] for row in directory.rows()] == [0, 1, 2, 3]
    assert directory.rows()[3]["reward"] == 1.0


def test_a_row_that_was_cut_off_does_not_count(directory: RunDirectory) -> None:
    directory.append_row({"iteration": 0})
    with directory.metrics_file.open("a") as file:
        file.write('{"iteration": 1, "rew')
    assert directory.rows() == [{"iteration": 0}]
    directory.drop_rows_after(0)
    directory.append_row({"iteration": 1})
    assert directory.rows() == [{"iteration": 0}, {"iteration": 1}]


def test_another_configuration_is_refused_key_by_key(directory: RunDirectory) -> None:
    directory.require_same(FINGERPRINT)
    other = {"rl": {"seed": 1, "epochs": 1}, "engine": {"actor_config": {"lr": 0.2}}}
    with pytest.raises(ConfigError) as caught:
        directory.require_same(other)
    assert [finding.key for finding in caught.value.findings] == ["engine.actor_config.lr", "rl.seed"]
    assert "--no-resume" in str(caught.value)


def test_starting_over_removes_the_run_and_nothing_else(directory: RunDirectory) -> None:
    complete(directory, 0)
    directory.append_row({"iteration": 0})
    (directory.path / "notes.txt").write_text("mine")
    directory.start_over({"rl": {"seed": 2}})
    assert directory.progress() is None
    assert directory.rows() == []
    assert (directory.path / "notes.txt").read_text() == "mine"
    directory.require_same({"rl": {"seed": 2}})

"""The files of a run: what counts, what is dropped, what is kept, what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from examples.gpt_rl import settings
from examples.gpt_rl.run_state import Progress, RunDirectory
from examples.gpt_rl.settings import load_settings
from examples.gpt_rl.train import claim
from hybrid_engine.errors import ConfigError, FileError
from tests.examples.runs import FINGERPRINT, check_refused, complete, contents, names

MIB = 1 << 20
CONFIG = Path(settings.__file__).parent / "configs" / "tp2_to_dp2.yaml"
SETTINGS = load_settings(CONFIG, 2).model_copy(update={"world_size": 1})  # one rank waits for no other


def test_nothing_yet(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "new" / "run"):
        run = RunDirectory(path)
        assert run.progress() is None
        assert run.rows() == []
        run.require_same(FINGERPRINT)
        run.require_resumable(FINGERPRINT)
        run.require_replaceable()
    assert list(tmp_path.iterdir()) == []


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


def test_a_checkpoint_that_could_not_be_written_goes(directory: RunDirectory) -> None:
    complete(directory, 0)
    directory.discard_incomplete(10)
    directory.weights(10).mkdir(parents=True)  # written, but then not progress.json
    directory.discard_incomplete(10)
    assert names(directory) == ["iteration-0000"]
    for iteration in (0, 10):  # 0 is there already, and stays
        incomplete = directory.checkpoint(iteration) / "weights.incomplete"
        incomplete.mkdir(parents=True)
        (incomplete / "rank0000.pt").write_text("half")
        directory.discard_incomplete(iteration)
    assert names(directory) == ["iteration-0000"]
    assert directory.progress().iteration == 0
    assert directory.weights(0).is_dir()


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
    other = {**FINGERPRINT, "rl_config": {"seed": 1, "epochs": 1}, "actor_config": {"lr": 0.2}}
    with pytest.raises(ConfigError) as caught:
        directory.require_same(other)
    assert [finding.key for finding in caught.value.findings] == ["actor_config.lr", "rl_config.seed"]
    assert "--no-resume" in str(caught.value)


def test_a_setting_that_is_younger_than_the_run_may_have_its_default(directory: RunDirectory) -> None:
    now = {**FINGERPRINT, "later": {"incremental": "auto", "incremental_mb": 512}}
    directory.require_same(now, FINGERPRINT)
    with pytest.raises(ConfigError) as caught:
        directory.require_same(now, {**FINGERPRINT, "later": {"incremental_mb": 512}})
    assert [finding.key for finding in caught.value.findings] == ["later.incremental_mb"]


def test_starting_over_removes_the_run_and_nothing_else(directory: RunDirectory) -> None:
    complete(directory, 0)
    directory.append_row({"iteration": 0})
    (directory.path / "notes.txt").write_text("mine")
    directory.start_over({**FINGERPRINT, "world_size": 4})
    assert directory.progress() is None
    assert directory.rows() == []
    assert (directory.path / "notes.txt").read_text() == "mine"
    directory.require_same({**FINGERPRINT, "world_size": 4})


# -- numbers, not names ----------------------------------------------------------------------------------------------


def test_checkpoints_are_in_the_order_of_their_numbers(directory: RunDirectory) -> None:
    for iteration in (0, 9980, 9990, 10000):
        complete(directory, iteration)
    assert names(directory) == ["iteration-0000", "iteration-10000", "iteration-9990"]
    complete(directory, 10010)
    assert names(directory) == ["iteration-0000", "iteration-10000", "iteration-10010"]


# -- what a run may start in -----------------------------------------------------------------------------------------


def test_an_attempt_that_kept_nothing_is_no_hindrance(tmp_path: Path) -> None:
    for name in ("lock", "log-rank0.txt", "log-rank13.txt", "run.json.incomplete"):
        (tmp_path / name).write_text("x")
    run = RunDirectory(tmp_path)
    run.require_resumable(FINGERPRINT)
    run.start_over(FINGERPRINT)
    run.require_resumable({**FINGERPRINT, "world_size": 4})  # nothing was trained yet
    (run.weights(0).with_name("weights.incomplete")).mkdir(parents=True)
    run.require_resumable(FINGERPRINT)
    run.start_over(FINGERPRINT)
    assert names(run) == []


def test_a_run_goes_on(under_way: RunDirectory) -> None:
    before = contents(under_way.path)
    under_way.require_resumable(FINGERPRINT)
    assert contents(under_way.path) == before
    with pytest.raises(ConfigError, match="world_size"):
        under_way.require_resumable({**FINGERPRINT, "world_size": 4})


def test_checkpoints_without_latest_are_refused(under_way: RunDirectory) -> None:
    under_way.latest_file.unlink()
    check_refused(under_way, "latest is missing", "3 checkpoint(s)", "Write iteration-0020", "--no-resume")
    shutil.rmtree(under_way.checkpoints)
    check_refused(under_way, "latest is missing", "rows in metrics.jsonl", "--no-resume")


def test_a_checkpoint_after_the_first_is_not_taken_for_a_beginning(directory: RunDirectory) -> None:
    """Neither `latest` nor progress.json is there, but weights that somebody may want."""
    directory.weights(30).mkdir(parents=True)
    check_refused(directory, "latest is missing", "1 checkpoint(s)")


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_without_its_configuration_is_refused(under_way: RunDirectory, resume: bool) -> None:
    (under_way.path / "run.json").unlink()
    check_refused(under_way, "checkpoints, metrics.jsonl", "no run.json", "another --out", resume=resume)


@pytest.mark.parametrize("resume", [True, False])
def test_a_directory_of_something_else_is_refused(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "checkpoints" / "precious").mkdir(parents=True)
    (tmp_path / "checkpoints" / "precious" / "w.bin").write_text("weights")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "events.out.tfevents.1").write_text("events")
    check_refused(RunDirectory(tmp_path), "checkpoints", "no run.json", "another --out", resume=resume)
    (tmp_path / "run.json").write_text('{"command": "sleep 1"}')
    check_refused(RunDirectory(tmp_path), "run.json", "not the configuration of a run", resume=resume)


FOREIGN = ("precious/w.bin", "iteration-best/w.bin", "iteration-0010/notes.txt", "iteration-010/w.bin", "readme")


@pytest.mark.parametrize("name", FOREIGN)
def test_starting_over_spares_what_others_put_below_checkpoints(under_way: RunDirectory, name: str) -> None:
    path = under_way.checkpoints / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    shown = name if name.startswith("iteration-0010") else name.split("/")[0]
    check_refused(under_way, shown, "no run has written", "another --out", resume=False)
    under_way.require_resumable(FINGERPRINT)
    for iteration in (30, 40, 50):  # nor does a run that goes on remove it
        complete(under_way, iteration)
    assert path.read_text() == "mine"
    assert not under_way.weights(10).exists()


def test_starting_over_follows_no_links(under_way: RunDirectory, tmp_path: Path) -> None:
    """A checkpoint that was moved to an archive, and linked."""
    archive = tmp_path / "archive"
    under_way.checkpoint(10).rename(archive)
    under_way.checkpoint(10).symlink_to(archive)
    before = contents(archive)
    under_way.start_over(FINGERPRINT)
    assert contents(archive) == before
    assert names(under_way) == []


def test_a_disk_without_room_for_another_checkpoint(under_way: RunDirectory) -> None:
    under_way.require_room()
    free = shutil.disk_usage(under_way.path).free
    weights = under_way.weights(20) / "rank0000.pt"
    with weights.open("wb") as file:
        file.truncate(free + (1 << 40))  # sparse: it takes nothing
    with pytest.raises(FileError, match=r"checkpoints: too little space: the next checkpoint needs [\d,.]+ MB"):
        under_way.require_room()


def test_what_a_killed_save_left_does_not_take_the_room_of_the_next(
    small_disk: Path,
) -> None:
    """It goes when the run is taken up."""
    run = RunDirectory(small_disk / "run")
    run.start_over(SETTINGS.fingerprint())
    for iteration in (0, 10):
        complete(run, iteration)
    (run.weights(10) / "rank0000.pt").write_bytes(bytes(MIB // 2))
    for place in (
        run.checkpoint(0) / "weights.incomplete",
        run.weights(20),
        run.checkpoint(30) / "weights.incomplete",
    ):
        place.mkdir(parents=True)
        (place / "rank0000.pt").write_bytes(bytes(MIB // 4 * 3 // 2))
    with pytest.raises(FileError, match=r"too little space: the next checkpoint needs 0\.5 MB, 0\.4 MB are free"):
        run.require_room()
    claim(run, SETTINGS, resume=True, rank=0).close()
    run.require_room()
    assert names(run) == ["iteration-0000", "iteration-0010"]
    assert run.weights(10).is_dir()
    assert not list(run.path.rglob("*.incomplete"))


def test_a_save_that_was_begun_again_leaves_earlier_checkpoints_alone(under_way: RunDirectory) -> None:
    """Also those that lack progress.json: the first is the reference."""
    for iteration in (0, 10):
        (under_way.checkpoint(iteration) / "progress.json").unlink()
    before = contents(under_way.path)
    under_way.recover()
    assert contents(under_way.path) == before


def test_a_kill_before_the_first_latest_loses_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.start_over(SETTINGS.fingerprint())
    complete(run, 0)
    run.latest_file.unlink()
    before = contents(run.path)
    claim(run, SETTINGS, resume=True, rank=0).close()
    run.lock_file.unlink()
    assert contents(run.path) == {**before, "checkpoints/latest": b"iteration-0000\n"}

    run.latest_file.unlink()
    with pytest.raises(ConfigError, match="world_size"):
        run.require_resumable({**SETTINGS.fingerprint(), "world_size": 4})
    run.append_row({"iteration": 1})
    with pytest.raises(FileError, match="latest is missing"):
        run.require_resumable(SETTINGS.fingerprint())

"""A run's directory that is damaged, and a /dev/shm that is too small. See also test_run_directory.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.gpt_rl.run_state import RunDirectory
from tests.faults.job import Job
from tests.faults.running import can_mount

pytestmark = [pytest.mark.faults, pytest.mark.engines]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("surroundings"))


@pytest.mark.parametrize("damage", ["latest", "progress.json", "__1_0.distcp"])
def test_a_damaged_directory_is_refused_and_left_as_it_is(
    job: Job, tmp_path: Path, damage: str, record: Callable[..., None]
) -> None:
    """The file is named. Each damages a copy of its own."""
    if not job.rows():
        assert job.run(None, "rl_config.iterations=1").status == 0
    copy = Job(tmp_path)
    shutil.copytree(job.out, copy.out)
    (path,) = RunDirectory(copy.out).checkpoint(copy.iteration).rglob(damage)
    if damage == "progress.json":
        path.write_text(path.read_text()[:20])
    else:
        _flip_bytes(path)
    before = _files(copy.out)
    outcome = copy.run(None, "rl_config.iterations=2")
    record(fault=f"damaged: {damage}", **{**outcome.row(), "seconds": round(outcome.total_seconds, 1)})
    assert outcome.status not in (0, None), outcome.terminal
    assert damage in outcome.terminal, outcome.terminal
    assert _files(copy.out) == before, "something was changed"


def test_too_small_shared_memory_is_said_before_vllm_is_built(tmp_path: Path, record: Callable[..., None]) -> None:
    if not can_mount():
        pytest.skip("this user may not mount a small /dev/shm")
    small = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    job = Job(tmp_path, generate={"infer_tensor_parallel_size": 2}, prefix=small)
    outcome = job.run(None)
    record(fault="/dev/shm of 1 MB", **{**outcome.row(), "seconds": round(outcome.total_seconds, 1)})
    assert outcome.status not in (0, None)
    assert outcome.leftovers == []
    for text in ("/dev/shm", "1.0 MiB are free", "8.0 MiB", "--shm-size"):
        assert text in outcome.message, outcome.terminal
    assert outcome.total_seconds < 100


def _flip_bytes(path: Path) -> None:
    """In the middle, where the weights are."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(255 - byte for byte in content[middle : middle + 8])
    path.write_bytes(content)


def _files(directory: Path) -> dict[str, bytes]:
    """Of a run, but for logs and the lock."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith("log-") and path.name != "lock"
    }

"""What goes wrong around a job: its launcher, its disk, /dev/shm, its directory, another job."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.job import Job
from tests.faults.running import can_mount

pytestmark = [pytest.mark.faults, pytest.mark.engines]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("surroundings"))


def test_a_second_job_is_refused_and_ranks_end_with_their_launcher(job: Job, record: Callable[..., None]) -> None:
    with job.started() as running:
        running.wait_for(lambda: len(job.rows()) >= 2)
        second = job.run(None, timeout=100)
        record(
            fault="a second job in the same directory", **{**second.row(), "seconds": round(second.total_seconds, 1)}
        )
        running.launcher.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        running.wait(60)
    outcome = running.outcome(killed)
    rows = job.rows()
    again = job.run(None, "--iterations", str(len(rows)))
    record(fault="SIGKILL of torchrun", **outcome.row(), resumed=again.status == 0)
    assert second.status not in (0, None) and "another job" in second.message, second.terminal
    assert outcome.survivors == [] and outcome.seconds is not None and outcome.seconds < 10
    assert [row["iteration"] for row in rows] == list(range(len(rows)))
    assert again.status == 0, again.terminal
    assert [row["iteration"] for row in job.rows()] == list(range(len(rows) + 1))


@pytest.mark.parametrize("damage", ["latest", "progress.json", "rank0001.pt"])
def test_a_damaged_directory_is_refused_and_left_as_it_is(
    job: Job, tmp_path: Path, damage: str, record: Callable[..., None]
) -> None:
    """The file is named. Damaged is a copy of the run above."""
    assert job.rows(), "runs after the case before"
    copy = Job(tmp_path)
    shutil.copytree(job.out, copy.out)
    newest = copy.out / "checkpoints" / (copy.out / "checkpoints" / "latest").read_text().strip()
    (path,) = (copy.out / "checkpoints").glob("latest") if damage == "latest" else newest.rglob(damage)
    if damage == "latest":
        path.unlink()
    elif damage == "progress.json":
        path.write_text(path.read_text()[:20])
    else:
        _flip_bytes(path)
    before = _files(copy.out)
    outcome = copy.run(None, "--iterations", str(len(job.rows())))
    record(fault=f"damaged: {damage}", **{**outcome.row(), "seconds": round(outcome.total_seconds, 1)})
    assert outcome.status not in (0, None) and damage in outcome.terminal, outcome.terminal
    assert _files(copy.out) == before, "something was changed"


def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(
    small_disk: Path, tmp_path: Path, record: Callable[..., None]
) -> None:
    job = Job(tmp_path, out=small_disk / "run")
    outcome = job.run(None, timeout=120)
    left = [str(path) for path in job.out.rglob("*incomplete*")]
    (small_disk / "filler").unlink()
    last = len(job.rows())
    again = job.run(None, "--iterations", str(last))
    seconds = round(outcome.total_seconds, 1)
    record(fault="full disk", **{**outcome.row(), "seconds": seconds}, resumed=again.status == 0)
    assert outcome.status not in (0, None) and outcome.leftovers == []
    assert "No space left" in outcome.message or "full" in outcome.message, outcome.terminal
    assert str(small_disk) in outcome.message
    assert left == []
    assert again.status == 0, again.terminal


def test_too_small_shared_memory_is_said_before_vllm_is_built(tmp_path: Path, record: Callable[..., None]) -> None:
    if not can_mount():
        pytest.skip("this user may not mount a small /dev/shm")
    small = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    job = Job(tmp_path, generate={"infer_tensor_parallel_size": 2}, prefix=small)
    outcome = job.run(None)
    record(fault="/dev/shm of 1 MB", **{**outcome.row(), "seconds": round(outcome.total_seconds, 1)})
    assert outcome.status not in (0, None) and outcome.leftovers == []
    for text in ("/dev/shm", "1.0 MiB are free", "8.0 MiB", "--shm-size"):
        assert text in outcome.message, outcome.terminal
    assert outcome.total_seconds < 100


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """With room for one checkpoint beside `filler`, not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = os.getuid() == 0 and _mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk))
    if not mounted:
        pytest.skip("this user may not mount a small file system")
    try:
        (disk / "filler").write_bytes(b"\1" * (48 << 20))
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


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

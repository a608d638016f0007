"""Damaged files of a run: each is refused in one line, with its path and a way back."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.gpt_rl.run_lock import take_lock
from examples.gpt_rl.run_state import RunDirectory
from hybrid_engine.errors import FileError
from tests.examples.runs import FINGERPRINT, check_refused

DEEP = "[" * 100_000
BINARY = bytes(range(256))
PROGRESS = "checkpoints/iteration-0020/progress.json"
ROW = b'{"iteration": 0, "reward": 0.5}\n'


@pytest.mark.parametrize(
    "content",
    [b"", BINARY, b"iteration-0030\n", b"../../elsewhere\n", b"/etc\n", b"iteration-0020/..\n", b".\n",
     b"iteration-20\n", b"iteration-0010\niteration-0020\n", b"iteration-" + b"9" * 5000, b"a\0b"],
)  # fmt: skip
def test_damaged_latest(under_way: RunDirectory, content: bytes) -> None:
    under_way.latest_file.write_bytes(content)
    check_damaged(under_way, under_way.latest_file, "Write iteration-0020, the newest complete checkpoint, into it")


@pytest.mark.parametrize(
    "content",
    [b"", BINARY, b"{", b"3", b"null", b"[]", b"{}", DEEP.encode(), b'{"iteration": 20}', b'{"row": {}}',
     b'{"iteration": "20", "row": {"iteration": 20}}', b'{"iteration": 20, "row": 5}',
     b'{"iteration": 20, "row": {"iteration": true}}', b'{"iteration": 10, "row": {"iteration": 10}}',
     b'{"iteration": 20, "row": {"iteration": 20, "loss": "small"}}', b'{"iteration": 20, "row": {}}'],
)  # fmt: skip
def test_damaged_progress(under_way: RunDirectory, content: bytes) -> None:
    path = under_way.checkpoint(20) / "progress.json"
    path.write_bytes(content)
    check_damaged(under_way, path, f"write iteration-0010 into {under_way.latest_file}")


def test_missing_progress(under_way: RunDirectory) -> None:
    path = under_way.checkpoint(20) / "progress.json"
    path.unlink()
    check_damaged(under_way, path, f"write iteration-0010 into {under_way.latest_file}")
    under_way.latest_file.write_text("iteration-0010\n")
    under_way.require_resumable(FINGERPRINT)
    assert under_way.progress().iteration == 10


def test_the_way_back_ends(under_way: RunDirectory) -> None:
    assert "start over with --no-resume" in under_way.way_back(0)


@pytest.mark.parametrize("content", [b"", BINARY, b"{", b"3", b"null", b"{}", DEEP.encode(), b'{"rl_config": {}}'])
def test_damaged_configuration(under_way: RunDirectory, content: bytes) -> None:
    path = under_way.path / "run.json"
    path.write_bytes(content)
    check_damaged(under_way, path, "another --out")
    check_refused(under_way, "run.json", resume=False)


@pytest.mark.parametrize(
    "line",
    [b"", BINARY.replace(b"\n", b""), b"{", b"3", b"null", b"{}", DEEP.encode(), b'{"iteration": "1"}',
     b'{"iteration": -1}', b'{"iteration": 1, "reward": [1]}'],
)  # fmt: skip
def test_damaged_metrics(under_way: RunDirectory, line: bytes) -> None:
    under_way.metrics_file.write_bytes(ROW + line + b"\n" + ROW)
    check_damaged(under_way, under_way.metrics_file, "line 2", "the run goes on without that row")


def test_without_metrics_a_run_goes_on(under_way: RunDirectory) -> None:
    under_way.metrics_file.unlink()
    under_way.require_resumable(FINGERPRINT)
    assert under_way.rows() == []


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "checkpoints/latest", PROGRESS])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_something_else_of_that_name(under_way: RunDirectory, name: str, make: Callable[[Path], None]) -> None:
    """Nothing waits for a pipe."""
    path = under_way.path / name
    path.unlink()
    make(path)
    check_damaged(under_way, path, "not a file")


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "checkpoints/latest", PROGRESS])
def test_a_link_out_of_the_run_is_not_followed(under_way: RunDirectory, tmp_path: Path, name: str) -> None:
    path, elsewhere = under_way.path / name, tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    check_damaged(under_way, path, f"is a link to '{elsewhere}'")


def test_a_lock_that_is_no_file_stays_as_it_is(under_way: RunDirectory, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    under_way.lock_file.unlink(missing_ok=True)
    under_way.lock_file.symlink_to(precious)
    with pytest.raises(FileError, match=r"lock is not a file of a run\. Remove it"):
        take_lock(under_way.lock_file)
    assert precious.read_text() == "mine"


def test_a_file_that_is_far_too_large_is_not_read(under_way: RunDirectory) -> None:
    with under_way.latest_file.open("ab") as file:
        file.truncate(1 << 40)  # sparse: it takes nothing
    check_damaged(under_way, under_way.latest_file, "larger than 16,777,216 bytes")


def check_damaged(run: RunDirectory, path: Path, *words: str) -> None:
    """A FileError of one line, short, with path and remedy."""
    with pytest.raises(FileError) as caught:
        run.require_resumable(FINGERPRINT)
    message = str(caught.value)
    for word in (str(path), *words):
        assert word in message
    assert "\n" not in message
    assert len(message) < 600

"""Files on real file systems: full, read-only, limited, or of a process killed at any step."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybrid_engine.errors import ConfigError, FileError, StateError, Violation
from hybrid_engine.files.durable import (
    append_text,
    naming,
    recover_directory,
    replace_directory,
    sync,
    write_text,
)
from tests.harness.errors import refused
from tests.harness.kills import kill_at_every_step
from tests.harness.small_disks import file_size_limit

MIB = 1 << 20


# name -> (function that raises, part of the message)
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: (path / "no").read_text(), "no such file or directory"),
    "cut short": (lambda path: pickle.loads(b"\x80"), "damaged or cut short (UnpicklingError: "),
    "empty pickle": (lambda path: pickle.loads(b""), "damaged or cut short (EOFError: "),
    "json": (
        lambda path: json.loads("{"),
        "damaged or cut short (JSONDecodeError: Expecting property name",
    ),
    "deep json": (lambda path: json.loads("[" * 100_000), "damaged or cut short (RecursionError"),
    "utf-8": (lambda path: b"\xff".decode(), "damaged or cut short (UnicodeDecodeError: "),
    "directory": (lambda path: path.read_text(), "is a directory"),
    "long name": (lambda path: (path / ("x" * 300)).write_text(""), "file name too long"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_errors_name_the_file(name: str, tmp_path: Path) -> None:
    fault, message = FAULTS[name]
    with (
        pytest.raises(FileError) as caught,
        naming("reading the settings", tmp_path, "Write them again"),
    ):
        fault(tmp_path)
    assert str(caught.value).startswith(f"reading the settings {tmp_path}: {message}")
    assert str(caught.value).endswith(
        "Write them again" if "damaged" in message else "its file system allows"
    )
    assert caught.value.__cause__ is not None
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_other_errors_are_not_wrapped() -> None:
    config_error = ConfigError([Violation("key", "wrong", "Correct it")])
    for error in (
        config_error,
        StateError("no"),
        KeyboardInterrupt(),
        KeyError("a"),
        TypeError("b"),
        FileError("c"),
    ):
        with pytest.raises(type(error)) as caught, naming("reading", "there"):
            raise error
        assert caught.value is error


class Unpicklable:
    """Fails while it is pickled, like tensors on a device without memory."""

    def __reduce__(self):
        raise RuntimeError("CUDA out of memory")


def test_memory_errors_are_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank0000.pt"
    with (
        pytest.raises(RuntimeError, match="CUDA out of memory"),
        naming("writing", path),
        path.open("wb") as file,
    ):
        torch.save({"a": Unpicklable()}, file)


def test_a_handled_system_error_is_not_the_cause(tmp_path: Path) -> None:
    damaged = refused(FileError, "file-failed", "damaged", "ValueError: no number")
    with damaged, naming("reading", tmp_path, "Write it again"):
        try:
            (tmp_path / "optional").read_text()
        except FileNotFoundError:
            raise ValueError("no number") from None


def test_exceeding_a_limit_keeps_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    write_text(path, "old")
    with file_size_limit(1000), refused(FileError, "file-failed", f"writing {path}", "too large"):
        write_text(path, "x" * 2000)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_during_torch_save_is_reported(small_disk: Path) -> None:
    """torch's message is "unexpected pos 704 vs 598"."""
    path = small_disk / "rank0000.pt"
    values = (f"writing the checkpoint {path}", "no space left", f"0.0 MB free on {small_disk}")
    with (
        refused(FileError, "file-failed", *values),
        naming("writing the checkpoint", path),
        path.open("wb") as file,
    ):
        torch.save({"a": torch.zeros(MIB)}, file)


def test_a_killed_write_leaves_old_or_new(tmp_path: Path) -> None:
    path = tmp_path / "text"

    def prepare() -> None:
        write_text(path, "old")

    contents = [
        path.read_text() for _ in kill_at_every_step(lambda: write_text(path, "new"), prepare)
    ]
    assert set(contents) == {"old", "new"}
    assert contents == sorted(contents, reverse=True)


def test_lines_are_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_text(path, "1\n2\n")
    with path.open("a") as file:
        file.write("cut sh")
    append_text(path, "3\n")
    assert path.read_text() == "1\n2\n3\n"
    with (
        file_size_limit(10),
        refused(FileError, "file-failed", f"appending to {path}", "too large"),
    ):
        append_text(path, "4\n" * 10)
    assert path.read_text() == "1\n2\n3\n"
    path.write_text("x" * 200_000)
    append_text(path, "1\n")
    assert path.read_text() == "1\n"


def test_a_complete_last_line_is_kept_and_a_removal_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"a": 2}')
    with file_size_limit(20), pytest.raises(FileError):
        append_text(path, '{"a": 3}\n')
    assert path.read_text() == '{"a": 1}\n{"a": 2}'
    append_text(path, '{"a": 3}\n')
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n'
    assert caplog.messages == []
    for rest in ("1", '{"a": 4', "[" * 100_000):  # 1 can be the beginning of 12
        path.write_text(f"1\n{rest}")
        append_text(path, "2\n")
        assert path.read_text() == "1\n2\n"
        assert f"{path}: removed the last {len(rest)} bytes" in caplog.messages[-1]


def make_directory(path: Path, text: str) -> Path:
    path.mkdir()
    for name in ("a", "b"):
        (path / name).write_text(text)
    return path


def texts(path: Path) -> set[str]:
    assert {entry.name for entry in path.iterdir()} == {"a", "b"}
    return {entry.read_text() for entry in path.iterdir()}


def test_a_killed_replacement_leaves_the_old_or_new_directory(tmp_path: Path) -> None:
    """Killed before every system call. Between the renames the old directory has another name."""
    target = tmp_path / "target"
    new = tmp_path / "target.incomplete"
    tried = []

    def prepare() -> None:
        for path in (target, new):
            shutil.rmtree(path, ignore_errors=True)
        make_directory(target, "old")
        make_directory(new, "new")

    for _ in kill_at_every_step(lambda: replace_directory(new, target), prepare):
        assert not target.exists() or texts(target) in ({"old"}, {"new"})
        recover_directory(target)
        tried.append(texts(target))
        assert not list(tmp_path.glob("*.replaced*"))
    assert tried == sorted(tried, key=lambda contents: contents == {"new"})
    assert (tried[0], tried[-1]) == ({"old"}, {"new"})
    assert not new.exists()
    shutil.rmtree(target)
    replace_directory(make_directory(new, "first"), target)
    assert texts(target) == {"first"}


def test_a_failed_sync_is_an_error(tmp_path: Path) -> None:
    sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "nothing")

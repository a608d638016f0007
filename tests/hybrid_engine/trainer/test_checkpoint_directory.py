"""Whose a directory is, the manifest says; it is read as what it is: a file that somebody may have changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_engine.errors import ConfigError, FileError
from hybrid_engine.trainer import checkpoint_directory
from hybrid_engine.trainer.checkpoint_directory import (
    MANIFEST,
    contents_of,
    names_in_manifest,
    new_checkpoint,
    require_as_written,
)

ENTRY = {"nbytes": 1, "crc32": "00000000"}


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[",
        "[" * 100_000,
        [],
        5,
        {},
        {"files": []},
        *({"files": {name: ENTRY}} for name in ("../x", "/etc/x", "a/b")),
    ],
)
def test_a_manifest_that_is_none_is_refused_in_one_line(manifest: Any, tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    path.write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    for read in (lambda: names_in_manifest(tmp_path), lambda: require_as_written(tmp_path / "rank0000.pt")):
        with pytest.raises(FileError) as caught:
            read()
        assert str(path) in str(caught.value)
        assert "Resume from an older checkpoint" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_sound_one_lists_its_files(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"files": {"rank0001.pt": ENTRY, "rank0000.pt": ENTRY}}))
    assert names_in_manifest(tmp_path) == ["rank0000.pt", "rank0001.pt"]


ALONE: Any = SimpleNamespace(
    rank=0,
    agreement=SimpleNamespace(phase=lambda name: nullcontext(), gather=lambda value, phase: [value]),
)
"""A job of one rank."""


def save(directory: Any, text: str = "new", between: Callable[[], object] = lambda: None) -> None:
    with new_checkpoint(directory, ALONE) as new:
        path = new.path / "rank0000.pt"
        path.write_text(text)
        new.contents[path.name] = contents_of(path)
        between()


def contents_below(directory: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


def unlisted(directory: Path) -> None:
    save(directory)
    (directory / "rank0001.pt").touch()


def linked(directory: Path) -> None:
    save(directory)
    (directory / "rank0000.pt").rename(directory.with_name("elsewhere"))
    (directory / "rank0000.pt").symlink_to(directory.with_name("elsewhere"))


def with_files(*names: str, manifest: str | None = None) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        directory.mkdir()
        for name in names:
            (directory / name).write_text("precious")
        if manifest is not None:
            (directory / MANIFEST).write_text(manifest)

    return make


# what is in the directory -> the names that are not ours
FOREIGN: dict[str, tuple[Callable[[Path], None], str]] = {
    "torch's checkpoint": (with_files("__0_0.distcp", ".metadata"), ".metadata, __0_0.distcp"),
    "another program's": (with_files("rank0000.pt"), "rank0000.pt"),
    "another program's manifest": (with_files("a.js", manifest='{"name": "x"}'), "a.js, manifest.json"),
    "an empty manifest": (with_files("rank0000.pt", manifest='{"files": {}}'), "rank0000.pt"),
    "a damaged manifest": (with_files("rank0000.pt", manifest="{"), "manifest.json, rank0000.pt"),
    "a file more": (unlisted, "rank0001.pt"),
    "a link": (linked, "rank0000.pt"),
    "a directory while it was written": (
        lambda path: [with_files(manifest='{"files": null}\n')(path), (path / "a").mkdir()][0],
        "a",
    ),
}


@pytest.mark.parametrize("ending", ["", ".incomplete", ".replaced", ".replaced.removed"])
@pytest.mark.parametrize("case", FOREIGN)
def test_what_no_manifest_of_ours_lists_is_never_replaced(tmp_path: Path, case: str, ending: str) -> None:
    make, names = FOREIGN[case]
    make(tmp_path / f"saved{ending}")
    before = contents_below(tmp_path)
    with pytest.raises(ConfigError) as caught:
        save(tmp_path / "saved")
    assert f"saved{ending} holds files that are not a checkpoint's: {names}. " in str(caught.value)
    assert contents_below(tmp_path) == before


def test_ours_are_replaced_whole_damaged_or_begun(tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    for spoil in (
        lambda: None,
        lambda: (directory / "rank0000.pt").unlink(),
        lambda: (directory / "rank0000.pt").write_text("flipped"),
        lambda: with_files("__0_0.distcp", manifest='{"files": null}\n')(directory.with_name("saved.incomplete")),
        lambda: with_files("manifest.json.incomplete")(directory.with_name("saved.incomplete")),
        lambda: with_files()(directory.with_name("saved.incomplete")),
    ):
        save(directory, "old")
        spoil()
        save(directory)
        assert (directory / "rank0000.pt").read_text() == "new"
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_what_comes_while_a_checkpoint_is_written_stays(tmp_path: Path) -> None:
    save(tmp_path / "saved", "old")
    with pytest.raises(ConfigError, match=r"not a checkpoint's: notes\.txt"):
        save(tmp_path / "saved", between=lambda: (tmp_path / "saved" / "notes.txt").touch())
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {MANIFEST, "rank0000.pt", "notes.txt"}
    assert (tmp_path / "saved" / "rank0000.pt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_the_working_directory_and_those_above_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    for place in (".", "..", tmp_path / "a"):
        with pytest.raises(ConfigError, match="is the working directory, or above it"):
            save(place)
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a" / "b"]
    assert Path.cwd() == tmp_path / "a" / "b"
    save("c")
    assert (tmp_path / "a" / "b" / "c" / MANIFEST).is_file()


def test_a_mount_point_is_found_out_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {Path("/"), Path("/proc")} <= checkpoint_directory._mount_points()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"36 35 98:0 /a {tmp_path}/with\\040space rw - ext4 /dev/a rw\n")
    monkeypatch.setattr(checkpoint_directory, "_MOUNTS", mounts)
    (tmp_path / "with space").mkdir()
    with pytest.raises(ConfigError, match=r"with space is a mount point, which stays\. Name a directory below it"):
        save(tmp_path / "with space", between=pytest.fail)
    assert not (tmp_path / "with space.incomplete").exists()
    save(tmp_path / "with space" / "below")


@pytest.mark.parametrize("path", [None, 5, b"saved", "", "~nobody-of-that-name/saved"])
def test_what_is_no_path_is_refused_in_words(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"directory: .* is not a path"):
        save(path)
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/saved")
    assert (tmp_path / "saved" / MANIFEST).is_file()


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_a_copy(path: Path) -> None:
    path.with_name("copy").write_text("new")
    path.symlink_to(path.with_name("copy"))


@pytest.mark.parametrize("name", ["rank0000.pt", MANIFEST])
@pytest.mark.parametrize("make", [make_pipe, link_to_zeros, link_to_a_copy, Path.mkdir])
def test_pipes_links_and_devices_are_refused_before_they_are_opened(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    save(tmp_path / "saved")
    (tmp_path / "saved" / name).unlink()
    make(tmp_path / "saved" / name)
    with pytest.raises(FileError, match="it is not a regular file" if name != MANIFEST else "it has no manifest"):
        require_as_written(tmp_path / "saved" / "rank0000.pt")

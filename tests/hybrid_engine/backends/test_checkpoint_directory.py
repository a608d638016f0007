"""The manifest of a checkpoint is read as what it is: a file that somebody may have changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.backends.checkpoint_directory import MANIFEST, names_in_manifest, require_as_written
from hybrid_engine.errors import FileError

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

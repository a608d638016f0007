"""Files from other users: only regular files are read, up to a limit."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.files.model_files import CONFIG, INDEX, companions_digest, weight_files
from hybrid_engine.files.reading import open_regular, read_regular
from tests.harness.errors import violated


def test_a_regular_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(ValueError, match="it is larger than 4 bytes"):
        read_regular(path, 4)
    with open_regular(path, follow_links=False) as file:
        assert file.read() == b"12345"
    with pytest.raises(ValueError, match="symbolic link"):
        read_regular(tmp_path / "link", 5, follow_links=False)


def test_memory_depends_on_the_file_and_not_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    tracemalloc.start()
    assert read_regular(tmp_path / "file", 1 << 32) == b"12345"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert b"VmRSS" in read_regular("/proc/self/status", 1 << 20), "reports size 0"


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_an_irregular_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    makers = {
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "directory": Path.mkdir,
    }
    makers[kind](path)
    with pytest.raises(ValueError, match="it is not a regular file"):
        read_regular(path, 5)
    assert len(os.listdir("/proc/self/fd")) < 1000


def test_an_index_with_odd_names_is_refused_shortly(tmp_path: Path) -> None:
    for name in ("x" * 5000, "\ud800"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": name}}))
        with violated(ConfigError, ("path", "missing-files")) as caught:
            weight_files(tmp_path)
        assert len(str(caught.value)) < 600


def test_the_digest_of_configuration_and_tokenizer_ignores_the_path(tmp_path: Path) -> None:
    digests = []
    for number, (name, text) in enumerate(
        [("vocab.json", "{}"), ("vocab.json", "{}"), ("vocab.json", "[]"), ("x", "")]
    ):
        place = tmp_path / str(number)
        place.mkdir()
        (place / CONFIG).write_text("{}")
        (place / name).write_text(text)
        digests.append(companions_digest(place))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3, "other files must not count"

"""Models by id: huggingface_hub's client, its cache on disk, and a small server for the Hub."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.config import load_config
from hybrid_engine.errors import ConfigError, FileError, Violation
from hybrid_engine.files.hub import HubSnapshot, find_model
from hybrid_engine.files.model_files import INDEX, SINGLE, weight_files
from tests.harness.errors import refused, violated

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": "{}",
    "tokenizer_config.json": "{}",
    "README.md": "#",
    SINGLE: "weights",
    "extra.bin": "?",
}
SHARDS = {INDEX: json.dumps({"weight_map": {"a": "one.safetensors"}}), "one.safetensors": "weights"}
REPOSITORIES: dict[str, dict[str, str]] = {
    "org/single": FILES,
    "org/sharded": {"config.json": "{}", "consolidated.safetensors": "twice", **SHARDS},
    "org/pickled": {"config.json": "{}", "pytorch_model.bin": ""},
}


class FakeHub(BaseHTTPRequestHandler):
    """Answers the requests of huggingface_hub for a download: commit, list of files, contents."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/")
        for repository, files in REPOSITORIES.items():
            if path in (f"api/models/{repository}", f"api/models/{repository}/revision/main"):
                return self._answer(json.dumps({"id": repository, "sha": COMMIT, "siblings": []}))
            if path.startswith(f"api/models/{repository}/revision/"):
                return self._refuse(404, "RevisionNotFound")
            if path == f"api/models/{repository}/tree/{COMMIT}":
                kind = {"type": "file", "oid": "0" * 40}
                return self._answer(
                    json.dumps([{**kind, "path": name, "size": len(files[name])} for name in files])
                )
            if path.startswith(f"{repository}/resolve/{COMMIT}/"):
                return self._answer(files[path.rpartition("/")[2]])
        if "gated" in path:
            return self._refuse(403, "GatedRepo")
        return self._refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hash(text) & 0xFFFFFFFF:08x}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text.encode())

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Write no log."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Cache of a client that is online."""
    from huggingface_hub import constants, hf_api

    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", site)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", site + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(hf_api.api, "endpoint", site)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path / "cache"
    server.shutdown()
    server.server_close()


def refusal(name: str, revision: str | None = None) -> Violation:
    with pytest.raises(ConfigError) as caught:
        find_model(name, revision)
    (violation,) = caught.value.findings
    return violation


def test_paths_are_never_looked_up_on_the_hub(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_model("./org/single") == Path("org/single")
    monkeypatch.chdir(tmp_path)
    config = {"model": "./org/single", "critic_config": {"model": "./org/sharded"}}
    for directory in (None, tmp_path / "beside"):
        with pytest.raises(ConfigError) as caught:
            load_config(config, 1, directory=directory)
        assert str((directory or tmp_path) / "org" / "single" / "config.json") in str(caught.value)
    assert not hub.exists()


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_weights_are_downloaded_after_the_configuration(hub: Path) -> None:
    directory = find_model("org/single")
    assert directory == hub / "models--org--single" / "snapshots" / COMMIT
    assert names_in(directory) == {"config.json", "tokenizer_config.json"}
    snapshot = HubSnapshot.at(directory)
    assert snapshot == HubSnapshot("org/single", COMMIT, hub) == HubSnapshot.in_cache("org/single")
    assert [HubSnapshot.in_cache(name) for name in ("org/other", "a/path/to", str(directory))] == [
        None
    ] * 3
    snapshot.download()
    assert names_in(directory) == {"config.json", "tokenizer_config.json", SINGLE}
    assert (directory / SINGLE).read_text() == "weights"


def test_the_indexed_weights_are_downloaded(hub: Path) -> None:
    directory = find_model("org/sharded", COMMIT)
    HubSnapshot.at(directory).download()
    assert names_in(directory) == {"config.json", *SHARDS}


def test_cached_models_are_used_without_a_network(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    directory = find_model("org/single", "main")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model("org/single") == find_model("org/single", "main") == directory
    with violated(ConfigError, ("model", "not-in-cache")):
        HubSnapshot.at(directory).download()
    assert "run `hf download org/other`" in refusal("org/other").remedy


def test_refusals_of_the_hub_have_a_remedy(hub: Path) -> None:
    assert refusal("org/gated").code == "gated-model"
    assert "hf auth login" in refusal("org/gated").remedy
    assert refusal("org/unknown").code == "unknown-model"
    violation = refusal("org/single", "v9")
    assert (violation.key, violation.code) == ("revision", "unknown-revision")
    assert "v9" in violation.problem
    pickled = HubSnapshot.at(find_model("org/pickled"))
    with violated(ConfigError, ("model", "no-weights")):
        pickled.download()


def test_an_existing_path_is_not_a_model_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert find_model("org/name") == Path("org/name")
    assert find_model("org/name/config.json") == Path("org/name")
    assert find_model("name", relative_to=tmp_path / "org") == tmp_path / "org" / "name"
    assert find_model("./nowhere") == Path("nowhere")
    assert find_model("a/b/c") == Path("a/b/c")
    assert refusal("org/name", "main").code == "revision-of-a-path"


@pytest.mark.parametrize(
    "path",
    ["models--org--name/snapshots/main", f"snapshots/{COMMIT}", f"a--b--c/snapshots/{COMMIT}"],
)
def test_other_directories_are_not_snapshots(path: str) -> None:
    assert HubSnapshot.at(Path("/cache") / path) is None


def test_weight_files_come_from_the_index_or_the_only_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE).touch()
    assert weight_files(tmp_path) == [SINGLE]
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}})
    )
    assert weight_files(tmp_path) == ["a.safetensors", "b.safetensors"]


FAR = {f"t{number}": f"{number}.safetensors" for number in range(9)}


# name -> (file, its text, code of the violation)
REFUSED: dict[str, tuple[str, str, str]] = {
    "nothing": ("config.json", "{}", "no-weights"),
    "a pickle": ("pytorch_model-00001-of-00002.bin", "", "pickled-weights"),
    "files missing": (INDEX, json.dumps({"weight_map": FAR}), "missing-files"),
    **{
        f"an index of {name!r}": (INDEX, json.dumps({"weight_map": {"a": name}}), "invalid-index")
        for name in ("../a.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", None, 5, ["a"])
    },
    **{
        f"an index with {text}": (INDEX, text, "invalid-index")
        for text in (
            "[]",
            "null",
            "{}",
            '{"weight_map": null}',
            '{"weight_map": {}}',
            '{"weight_map": 5}',
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_weights_are_refused(tmp_path: Path, name: str) -> None:
    file, text, code = REFUSED[name]
    (tmp_path / file).write_text(text)
    with violated(ConfigError, ("model", code)):
        weight_files(tmp_path, "model")


def test_a_truncated_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {')
    with refused(FileError, "file-failed", str(tmp_path / INDEX)):
        weight_files(tmp_path)

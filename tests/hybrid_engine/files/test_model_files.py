"""Which files hold a model's weights, and what is said where none does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_engine.errors import ConfigError, FileError
from hybrid_engine.files.model_files import INDEX, SINGLE, weight_files


def test_files_by_the_index_or_the_one_there_is(tmp_path: Path) -> None:
    (tmp_path / SINGLE).touch()
    assert weight_files(tmp_path) == [SINGLE]
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    assert weight_files(tmp_path) == ["a.safetensors", "b.safetensors"]


FAR = {f"t{number}": f"{number}.safetensors" for number in range(9)}


# name -> (file, its text, what is said of it)
REFUSED: dict[str, tuple[str, str, str]] = {
    "nothing": ("config.json", "{}", f"has neither {INDEX} nor {SINGLE}"),
    "a pickle": ("pytorch_model-00001-of-00002.bin", "", "in pytorch_model-00001-of-00002.bin, a pickle"),
    "files missing": (INDEX, json.dumps({"weight_map": FAR}), "names missing files: 0.safetensors, 1.safetensors, "),
    **{
        f"an index of {name!r}": (INDEX, json.dumps({"weight_map": {"a": name}}), "names files outside its directory")
        for name in ("../a.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", None, 5, ["a"])
    },
    **{
        f"an index with {text}": (INDEX, text, "has no weight_map")
        for text in ("[]", "null", "{}", '{"weight_map": null}', '{"weight_map": {}}', '{"weight_map": 5}')
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_missing_is_said(tmp_path: Path, name: str) -> None:
    file, text, problem = REFUSED[name]
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError) as caught:
        weight_files(tmp_path, "model")
    (found,) = caught.value.findings
    assert found.key == "model"
    assert problem in found.problem


def test_an_index_that_is_cut_short(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {')
    with pytest.raises(FileError, match=f"reading {tmp_path / INDEX}: damaged or cut short"):
        weight_files(tmp_path)

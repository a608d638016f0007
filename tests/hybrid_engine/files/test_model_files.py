"""Which files hold a model's weights, and what is said where none does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.files.model_files import INDEX, SINGLE, weight_files


def test_files_by_the_index_or_the_one_there_is(tmp_path: Path) -> None:
    (tmp_path / SINGLE).touch()
    assert weight_files(tmp_path) == [SINGLE]
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    assert weight_files(tmp_path) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    ("files", "problem", "remedy"),
    [
        ({}, f"has neither {INDEX} nor {SINGLE}", "Name the directory of a safetensors checkpoint"),
        ({"pytorch_model-00001-of-00002.bin": ""}, "in pytorch_model-00001-of-00002.bin, a pickle", "save_pretrained"),
        (
            {INDEX: json.dumps({"weight_map": {f"t{number}": f"{number}.safetensors" for number in range(9)}})},
            "names missing files: 0.safetensors, 1.safetensors, 2.safetensors, 3.safetensors, 4.safetensors and 4 more",
            "Complete the download",
        ),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, files: dict[str, str], problem: str, remedy: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        weight_files(tmp_path, "model")
    (found,) = caught.value.findings
    assert found.key == "model"
    assert problem in found.problem
    assert remedy in found.remedy

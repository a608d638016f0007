"""Headers of damaged or hostile safetensors files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from hybrid_engine.backends.huggingface import safetensors_files as files
from hybrid_engine.errors import ConfigError, FileError
from hybrid_engine.files import model_files
from tests.harness.errors import refused, violated

WHOLE = save({"a": torch.ones(2)})
HEADER = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}
DAMAGED = {
    "empty": b"",
    "huge header": struct.pack("<Q", 1 << 60) + b"{}",
    "no JSON": struct.pack("<Q", 2) + b"{x",
    "cut data": WHOLE[:-1],
    "more data": WHOLE + b"1",
    "gap": struct.pack("<Q", len(json.dumps(HEADER))) + json.dumps(HEADER).encode() + bytes(12),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / model_files.SINGLE
    path.write_bytes(DAMAGED[name])
    with refused(FileError, "file-failed", f"reading {path}", "damaged"):
        files.stored_tensors(tmp_path)


def test_duplicate_tensors_and_unsupported_dtypes_are_refused(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    weight_map = {"a": "x.safetensors", "b": "y.safetensors"}
    (tmp_path / model_files.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with violated(ConfigError, ("path", "tensor-in-two-files")) as caught:
        files.stored_tensors(tmp_path)
    assert all(name in str(caught.value) for name in (" a ", "x.safetensors", "y.safetensors"))
    save_file({"a": torch.ones(2, dtype=torch.uint64)}, tmp_path / "x.safetensors")
    with violated(ConfigError, ("model", "unsupported-dtype")):
        files.stored_tensors(tmp_path, "model")

"""Reading files of Hugging Face checkpoints that are damaged or hostile."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hybrid_engine.backends.huggingface import safetensors_files as files
from hybrid_engine.errors import ConfigError, FileError, HybridEngineError
from hybrid_engine.files import model_files
from tests.hybrid_engine.backends.huggingface.saves import save


@pytest.mark.parametrize("position", [20, 100, -1])
def test_a_flipped_byte_is_found(tmp_path: Path, position: int) -> None:
    save(tmp_path)
    path = tmp_path / model_files.SINGLE
    contents = bytearray(path.read_bytes())
    contents[position] ^= 1
    path.write_bytes(contents)
    with pytest.raises(HybridEngineError, match=str(path)):
        files.stored_tensors(tmp_path)
        files.verify_checksum(path)


def test_files_of_other_programs_have_no_checksum(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / model_files.SINGLE)
    assert files.stored_tensors(tmp_path).keys() == {"a"}
    assert not files.verify_checksum(tmp_path / model_files.SINGLE)


def with_header(header: object, data: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# name -> (contents of the file, part of the message)
DAMAGED = {
    "empty": (b"", "unpack requires a buffer of 8 bytes"),
    "huge header": (struct.pack("<Q", 1 << 60) + b"{}", "a header of 1,152,921,504,606,846,976 bytes, over the"),
    "cut header": (struct.pack("<Q", 100) + b"{}", "a header of 2 bytes, expected 100"),
    "no JSON": (struct.pack("<Q", 2) + b"{x", "JSONDecodeError"),
    "no UTF-8": (struct.pack("<Q", 3) + b'"\xff"', "UnicodeDecodeError"),
    "a list": (with_header([1]), "the header is a list"),
    "a number": (with_header({"a": 5}), "a has no dtype, shape or offsets"),
    "no shape": (with_header({"a": {"dtype": "F32"}}), "a has no dtype, shape or offsets"),
    "shape of text": (with_header({"a": entry(shape=["1"])}), "a has invalid shape ['1']"),
    "negative": (with_header({"a": entry(shape=[-1])}), "a has invalid shape [-1]"),
    "cut data": (with_header({"a": entry()}, b"123"), "by its header"),
    "more data": (with_header({"a": entry()}, b"12345"), "by its header"),
    "gap": (with_header({"a": entry(offsets=[4, 8])}, b"12345678"), "a is at [4, 8], expected at [0, 4]"),
    "size": (with_header({"a": entry(shape=[2])}, b"1234"), "a is at [0, 4], expected at [0, 8]"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    contents, message = DAMAGED[name]
    path = tmp_path / model_files.SINGLE
    path.write_bytes(contents)
    with pytest.raises(FileError) as caught:
        files.stored_tensors(tmp_path)
    assert str(caught.value).startswith(f"reading {path}: damaged or cut short (")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", None, 5, ["a"]])
def test_an_index_names_files_of_its_directory(tmp_path: Path, name: object) -> None:
    (tmp_path / model_files.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match="names files outside its directory"):
        files.stored_tensors(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "null", "{}", '{"weight_map": null}', '{"weight_map": {}}', '{"weight_map": 5}']
)
def test_an_index_without_a_map(tmp_path: Path, text: str) -> None:
    (tmp_path / model_files.INDEX).write_text(text)
    with pytest.raises(ConfigError, match=f"{tmp_path / model_files.INDEX} has no weight_map"):
        files.stored_tensors(tmp_path)


def test_an_index_that_is_cut_short(tmp_path: Path) -> None:
    (tmp_path / model_files.INDEX).write_text('{"weight_map": {')
    with pytest.raises(FileError, match=f"reading {tmp_path / model_files.INDEX}: damaged or cut short"):
        files.stored_tensors(tmp_path)


def test_index_without_its_files(tmp_path: Path) -> None:
    (tmp_path / model_files.INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ConfigError, match="missing files: model-00001-of-00002"):
        files.stored_tensors(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    weight_map = {"a": "x.safetensors", "b": "y.safetensors"}
    (tmp_path / model_files.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"has a in both x\.safetensors and y\.safetensors"):
        files.stored_tensors(tmp_path)

"""Every reader of settings returns a value or raises a short ConfigError that names the file."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from examples.gpt_rl import settings as rl_settings
from examples.gpt_rl import task
from hybrid_engine.config import load_config
from hybrid_engine.errors import ConfigError, shortened
from hybrid_engine.files.documents import MAX_YAML_NBYTES, apply_overrides, read_json, read_yaml
from hybrid_engine.megatron_script.script_settings import read_settings
from megatron_patches.engines import ReshardingOptions
from tests.harness.errors import violated
from tests.harness.launch import REPO_ROOT

LONGEST_MESSAGE = 4000


INVALID: dict[str, bytes] = {
    "deep": b"model: " + b"[" * 1_200,
    "UTF-16": "model: x".encode("utf-16"),
    "Latin-1": "model: grün".encode("latin-1"),
    "control characters": b"model: \x00\x01",
    "large": b"model: x\n" + b"# x\n" * MAX_YAML_NBYTES,
    "long alias": b"model: *" + b"a" * 200_000,
    "long number": b"model: " + b"1" * 10_000,
    "no boolean": b"model: !!bool x",
    "no number": b'model: !!int ""',
    "no time": b"model: !!timestamp x",
    "no date": b"model: 2024-99-99",
    "an object": b"model: !!python/object/apply:os.system [true]",
    "a list as key": b"? [1]\n: 2",
    "a section twice": b"actor_config: {seed: 1}\nmodel: x\nactor_config: {seed: 2}",
    "two documents": b"a: 1\n---\nb: 2",
    "a list": b"- model",
    "empty": b"",
    "a number": b"5",
    "NUL in the model": b'model: "a\\0b"\nrl_config: {data: "a\\0b"}',
    "long model": b"model: " + b"x" * 100_000 + b"\nrl_config: {data: " + b"x" * 100_000 + b"}",
    "numbers as keys": b"5: 1\n7: 2",
    "many unknown keys": b"\n".join(b"key%d: 1" % i for i in range(2000)),
    "long key": b"x" * 1000 + b": 1",
    "sections that are none": b"model: x\nactor_config: 5\ngenerate_config: [1]\nrl_config: "
    b"x\nsampling: 5",
}


def read_script(config: Path, prompts: Path | None = None) -> Any:
    args = Namespace(
        rank=1, world_size=1, optimizer="adam", params_dtype="torch.float32", num_experts=None
    )
    options = ReshardingOptions(enabled=True, config=config, prompts=prompts, output=config.parent)
    return read_settings(
        SimpleNamespace(options=options, args=args, transformer_config=lambda: SimpleNamespace())
    )


def read_prompts(path: Path) -> Any:
    """Read the script's other file, lines of JSON."""
    return read_script(Path("no configuration"), path)


READERS: dict[str, Callable[[Path], Any]] = {
    "configuration": lambda path: load_config(path, 1),
    "example": lambda path: rl_settings.load_settings(path, 1),
    "script": read_script,
    "prompts": read_prompts,
}


def refusal(reader: Callable[[Path], Any], path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        reader(path)
    return str(caught.value)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_file_is_refused_with_a_short_message(
    reader: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(INVALID[name])
    message = refusal(READERS[reader], path)
    assert max(map(len, message.splitlines())) < LONGEST_MESSAGE
    assert len(message) < 200 * LONGEST_MESSAGE
    about_contents = {"NUL in the model", "long model", "numbers as keys", "sections that are none"}
    assert str(path) in message or name in about_contents or "unknown key" in message


@pytest.mark.parametrize("reader", ["configuration", "example", "script"])
def test_lines_of_another_file_are_not_repeated(reader: str, tmp_path: Path) -> None:
    """Each line of /etc/shadow, for example, is a YAML key."""
    path = tmp_path / "shadow"
    path.write_text("root:$y$j9T$secret:19000:0:99999:7:::\nuser:$6$secret:19000:0:99999:7:::\n")
    message = refusal(READERS[reader], path)
    assert f"{path} has 2 top-level keys that cannot be names of settings" in message
    assert "secret" not in message


@pytest.mark.parametrize("reader", [*READERS, "problems"])
@pytest.mark.parametrize(
    "name",
    [
        "missing",
        "directory",
        "pipe",
        "/dev/zero",
        "NUL\0",
        "long" * 2000,
        "no UTF-8 \udcff",
        "\ud800",
    ],
)
def test_a_path_without_a_regular_file_is_refused(reader: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "directory":
        path.mkdir()
    if name == "pipe":
        os.mkfifo(path)
    message = refusal(READERS.get(reader, task.load_problems), path)
    assert str(path.parent) in message.encode().decode()  # must be printable
    assert len(message) < LONGEST_MESSAGE


@pytest.mark.parametrize(
    "content", [b"\xff\xfe[", b"[" * 100_000, b'{"prompt": 1}', b"1" * 10_000, b'"' + b"x" * 10_000]
)
def test_invalid_problems_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(content)
    message = refusal(task.load_problems, tmp_path / "train.jsonl")
    assert "train.jsonl" in message
    assert len(message) < LONGEST_MESSAGE


@pytest.mark.parametrize("content", [
    b"[]", b'"x"', b"null", b"5", b"[" * 100_000, b"\xff\xfe", b"1" * 10_000, b"",
                                     b'{"hidden_size": 8, "hidden_size": 16}'])  # fmt: skip
def test_a_model_config_without_keys_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert str(tmp_path / "config.json") in refusal(
        lambda path: load_config({"model": str(path)}, 1), tmp_path
    )


def test_yaml_is_read_as_by_pyyaml(tmp_path: Path) -> None:
    """A few anchors, merges and a byte order mark are allowed."""
    text = (
        "base: &base {lr: 1.5, use: true}\none: {<<: *base, lr: 2}\ntwo: [*base, *base]\nnothing:\n"
    )
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    assert read_yaml(path, "key") == yaml.safe_load(text)
    path.write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_yaml(path, "key") == read_json(path, "key", "") == {"a": 1}
    path.write_text('a: {"": 1, "": 2}')
    with violated(ConfigError, ("key", "not-yaml")):
        read_yaml(path, "key")
    path.write_text('{"a": 1, "a": 1}')  # duplicate keys with equal values
    assert read_json(path, "key", "") == {"a": 1}


def test_a_message_shows_the_beginning_of_a_value_only() -> None:
    value: Any = ["x" * 50]
    for _ in range(40):
        value = [value] * 9
    assert len(shortened(value)) == 200
    assert shortened(value).endswith("…")
    assert shortened(10**100_000) == "a number of 332193 bits"
    assert shortened({"a": [1, 2.5, None]}) == "{'a': [1, 2.5, None]}"
    assert shortened("x" * 300)[0] == "'"


def test_off_and_no_are_words_where_a_key_has_them(tmp_path: Path) -> None:
    """YAML reads both as false, which other keys, such as vLLM's arguments, mean."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: examples/gpt_rl/model\nrandom_weights: yes\n"
        "generate_config: {verify: off, incremental: off, vllm: {enable_chunked_prefill: no}}\n"
    )
    values = read_yaml(path, "configuration")
    values["model"] = str(REPO_ROOT / "examples" / "gpt_rl" / "model")
    assert list(apply_overrides(values, ["generate_config.check_compute=off"])) == []
    config = load_config(values, 1)
    generate = config.generate_config
    assert (generate.verify, generate.incremental, generate.check_compute) == ("off",) * 3
    assert config.random_weights is True
    assert generate.vllm == {"enable_chunked_prefill": False}

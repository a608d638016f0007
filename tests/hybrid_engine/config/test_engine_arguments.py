"""generate_config.vllm: who may give an argument that makes vLLM run somebody's code."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import yaml

from hybrid_engine.config import FromProgram, HybridConfig, load_config
from hybrid_engine.config.fsdp_rules import generate_values
from hybrid_engine.errors import ConfigError
from tests.hybrid_engine.config.test_config import MODEL, write_model

CODE = {"trust_remote_code": True, "worker_extension_cls": "somebody.Extension", "logits_processors": ["somebody:It"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", MODEL)


def test_no_file_names_code_and_a_program_may(model: Path, tmp_path: Path) -> None:
    read_source = pytest.importorskip("hybrid_engine.attaching.live_config").read_source  # imports torch
    values = {"model": str(model), "random_weights": True, "generate_config": {"vllm": CODE}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    keys = {f"generate_config.vllm.{name}" for name in CODE}
    for source in (path, values, read_source(path)[0]):  # a mapping: a program may have read it from a file
        with pytest.raises(ConfigError) as caught:
            load_config(source, 1)
        assert {found.key for found in caught.value.findings} == keys
        assert all("FromProgram" in found.remedy for found in caught.value.findings)
    config = load_config({**values, "generate_config": {"vllm": FromProgram(CODE)}}, 1)
    assert dict(config.generate_config.vllm) == CODE
    again = [config, pickle.loads(pickle.dumps(config)), read_source(config)[0]]
    again.append({**values, "generate_config": generate_values({"vllm": FromProgram(CODE)})})
    for source in again:  # who gave them is not forgotten on the way
        found = source if isinstance(source, HybridConfig) else load_config(source, 1)
        assert isinstance(found.generate_config.vllm, FromProgram)


def test_a_tag_of_yaml_makes_no_arguments_of_a_programs(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    tag = "!!python/object/new:hybrid_engine.config.values.FromProgram"
    path.write_text(f"model: {model}\nrandom_weights: true\ngenerate_config:\n  vllm: {tag} {{a: 1}}\n")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(path, 1)

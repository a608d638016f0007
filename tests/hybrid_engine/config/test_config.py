"""Configurations that are accepted, and the keys of those that are refused: all at once, with
remedies.
"""

from __future__ import annotations

import json
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_engine.config import FromProgram, HybridConfig, load_config
from hybrid_engine.config.loading import generate_values, read_train_config
from hybrid_engine.errors import ConfigError
from tests.hybrid_engine.tools.programs import run_python

MODEL = {
    **{
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "head_dim": 8,
    },
    **{
        "intermediate_size": 48,
        "vocab_size": 130,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a model and a file, whose paths are relative to it."""
    for name in ("model", "jobs"):
        (tmp_path / name).mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def values(**dotted: Any) -> dict[str, Any]:
    """Return nested settings, `actor_config__lora__rank=4`, for the model in this directory."""
    settings: dict[str, Any] = {"model": "model", "random_weights": True}
    for key, value in dotted.items():
        *sections, name = key.split("__")
        section = settings
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return settings


def refused(source: Any, world_size: Any = 1, read: Any = load_config) -> dict[str, str]:
    """Return the remedy of each violation by key."""
    with pytest.raises(ConfigError) as caught:
        read(source, world_size) if read is not generate_values else read(source)
    assert all(
        item.problem and item.remedy and str(item) in str(caught.value)
        for item in caught.value.findings
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(
        caught.value
    )  # errors travel between ranks
    return {item.key: item.remedy for item in caught.value.findings}


def test_a_file_and_a_mapping_are_equal_but_for_the_base_of_paths(home: Path) -> None:
    given = values(
        generate_config__trace="one.json", actor_config__optimizer__lr="1e-6", model="../model"
    )
    Path("jobs/a.yaml").write_text(yaml.safe_dump(given))  # YAML 1.1 reads 1e-6 as text
    config = load_config("jobs/a.yaml", 2)
    assert (
        config
        == load_config(home / "jobs/a.yaml", 2)
        == load_config(given, 2, directory=home / "jobs")
    )
    assert (config.generate_config.trace, config.actor_config.optimizer.lr) == (
        home / "jobs/one.json",
        1e-6,
    )
    assert config.model.is_absolute()
    assert config.hf_config() == MODEL
    assert load_config(values(), 1) == HybridConfig(model=Path("model"), random_weights=True)
    with pytest.raises(Exception, match="frozen"):
        config.model = Path("/elsewhere")


def test_weights_are_needed_unless_they_are_the_callers_or_random(home: Path) -> None:
    lacking = {**values(actor_config__tensor_model_parallel_size=3), "random_weights": False}
    assert refused(lacking, 2).keys() == {"model", "actor_config.tensor_model_parallel_size"}
    bare = {"model": "model"}
    assert load_config(bare, 1, own_weights=True) == HybridConfig(model=Path("model"))
    Path("model/model.safetensors.index.json").write_text('{"weight')
    assert refused(bare).keys() == {"model"}
    Path("model/model.safetensors.index.json").unlink()
    Path("model/model.safetensors").touch()
    assert load_config(bare, 1) == load_config("model", 1) == HybridConfig(model=Path("model"))


IMPOSSIBLE = [  # a key and values, each of which is reported under a key that begins with it
    ("actor_config.optimizer.lr", INF, NAN),
    ("actor_config.optimizer.adam_eps", INF),
    ("actor_config.optimizer.adam_beta1", NAN),
    ("actor_config.lora.alpha", INF),
    ("actor_config.lora.rank", 10**9),
    ("actor_config.seed", 2**70, -5, True),
    ("actor_config.tensor_model_parallel_size", True, 3),
    ("actor_config.pipeline_model_parallel_size", 10**9),
    ("actor_config.micro_batch_size", 10**30),
    ("actor_config.noop_layers", [10**9]),
    (
        "actor_config.pipeline_model_parallel_layout",
        "E" * 10**6,
        "Et*999999999|L",
        "E(t|)*99999999999L",
        "Et*９９９|L",
    ),
    ("actor_config.frozen_parameters", ["*"], ["embedding.*", "decoder.*", "output_layer.*"]),
    ("generate_config.timeout_seconds", INF, 1e300, 1e-9, 0, NAN),
    ("generate_config.bucket_mb", 10**15, 0, True),
    ("generate_config.kv_cache_mb", 10**12),
    ("generate_config.max_model_len", 1),
    ("generate_config.seed", 2**70, -5),
    ("revision", "main"),
    ("model", "org/nowhere", 5),
    ("critic_config.model", "org/nowhere"),
]


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, *bad in IMPOSSIBLE for value in bad]
)
def test_impossible_values_are_refused(home: Path, key: str, value: Any) -> None:
    assert any(name.startswith(key) for name in refused(values(**{key.replace(".", "__"): value})))


@pytest.mark.parametrize("world_size", [0, -1, True, 10**9, 2.0, "2", None])
def test_impossible_world_sizes_are_refused(home: Path, world_size: Any) -> None:
    assert refused(values(), world_size).keys() == {"world_size"}


def test_all_violations_are_reported_at_once_with_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {
        "actor_config__pipeline_model_parallel_size": 3,
        "actor_config__sequence_parallel": True,
    }
    sizes |= {"generate_config__dtype": "float32", "generate_config__infer_data_parallel_size": 5}
    assert refused(values(**sizes), 6).keys() == {key.replace("__", ".") for key in sizes}
    Path("a.yaml").write_text("generation_config: {}")
    with pytest.raises(ConfigError, match=r"invalid configuration in a\.yaml \(3\)"):
        load_config("a.yaml", 0)
    for variable, keys in {"2": set(), "two": {"world_size"}, "0": {"world_size"}}.items():
        monkeypatch.setenv("WORLD_SIZE", variable)
        two = values(actor_config__tensor_model_parallel_size=2)
        assert refused(two, None).keys() == keys if keys else load_config(two)


PROPOSED = {  # unknown key -> beginning of the remedy
    "generation_config": "Did you mean generate_config?",
    "actor": "Use actor_config",
    "lr": "Use actor_config.optimizer.lr",
    "critic_config.lr": "Use critic_config.optimizer.lr",
    "actor_config.offload": "Use generate_config.offload_train_param, ",
    "generate_config.offload": "Use offload_train_param, offload_train_grad, "
    "offload_train_optimizer",
    "actor_config.dp": "Leave it out: it is the number of ranks over TP x PP x CP",
    "generate_config.prefetch": "Leave it out: optimizer state always comes back behind "
    "forward and backward passes",
    "generate_config.temperature": "Pass a Sampling to generate_sequences",
    "actor_config.revision": "Use revision at the top level",
    "actor_config.lora.rnak": "Did you mean rank?",
    "actor_config.optimizer.betas": "Use adam_beta1, adam_beta2",
    "actor_config.weight_decy": "Did you mean actor_config.optimizer.weight_decay?",
    "critic_config.tensor_model_parallel_size": "Use actor_config.tensor_model_parallel_size",
    "generate_config.tensor_model_parallel_size": "Use infer_tensor_parallel_size",
    "critic_config.color": "Nearest keys: offload, model, optimizer, micro_batch_size, ",
    "generate_config.max_num_batched_tokens": "Put it under generate_config.vllm",
    "EP": "Use actor_config.expert_model_parallel_size, generate_config.",
}


def test_the_remedy_of_an_unknown_key_names_the_intended_key(home: Path) -> None:
    remedies = refused(values(**{key.replace(".", "__"): 1 for key in PROPOSED}))
    assert {key: remedies[key][: len(PROPOSED[key])] for key in PROPOSED} == PROPOSED


@pytest.mark.parametrize(
    "change", [None, {"architectures": ["BertModel"]}, "{not json", {**MODEL, "hidden_size": None}]
)
def test_unusable_models_are_refused(home: Path, change: Any) -> None:
    Path("model/config.json").write_text(
        change if isinstance(change, str) else json.dumps(change or [])
    )
    assert refused(values()).keys() == {
        "hidden_size" if isinstance(change, dict) and "vocab_size" in change else "model"
    }


def test_reading_a_configuration_needs_no_engine() -> None:
    heavy = "{'torch', 'megatron', 'vllm', 'transformers'}"
    code = f"import sys, hybrid_engine.config; sys.exit(bool({heavy} & {{*sys.modules}}))"
    run_python("-c", code, status=0)


def test_code_may_be_named_by_programs_but_not_by_files(home: Path) -> None:
    read_source = import_module("hybrid_engine.attaching.attachment").read_source
    code = {
        "trust_remote_code": True,
        "worker_extension_cls": "somebody.Extension",
        "logits_processors": ["some:It"],
    }
    Path("a.yaml").write_text(yaml.safe_dump(values(generate_config__vllm=code)))
    for source in ("a.yaml", values(generate_config__vllm=code), read_source("a.yaml")[0]):
        remedies = refused(source)
        assert remedies.keys() == {f"generate_config.vllm.{name}" for name in code}
        assert all("FromProgram" in remedy for remedy in remedies.values())
    config = load_config(values(generate_config__vllm=FromProgram(code)), 1)
    again = generate_values({"vllm": FromProgram(code)})  # copies still count as given by a program
    for source in (
        config,
        pickle.loads(pickle.dumps(config)),
        load_config(values(generate_config=again), 1),
    ):
        assert isinstance(source.generate_config.vllm, FromProgram)
        assert dict(source.generate_config.vllm) == code


def test_short_keys_of_another_program(home: Path) -> None:
    short = {"tp_size": 2, "dp_type": "none", "model": "directory", "max_model_len": 64}
    long = {
        "infer_tensor_parallel_size": 2,
        "infer_data_parallel_size": 1,
        "model": "directory",
        "max_model_len": 64,
    }
    assert generate_values(short) == long
    wrong = {
        "tp_size": 0,
        "pp_size": 10**9,
        "timeout_seconds": INF,
        "seed": 2**80,
        "dp_type": [1],
        "tp_sise": 2,
    }
    wrong |= {"model": 5, "infer_expert_parallel_size": "x"}
    assert refused(wrong, read=generate_values).keys() == {f"rollout_config.{key}" for key in wrong}
    uneven = {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD", "replicas": 3}}
    assert refused(uneven, 2, read_train_config).keys() == {"train_config.fsdp_config.replicas"}
    for value in (5, "tp_size", [1]):
        assert refused(value, read=generate_values).keys() == {"rollout_config"}
        assert refused(value, read=read_train_config).keys() == {"train_config"}

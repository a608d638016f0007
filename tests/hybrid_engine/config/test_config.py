"""Accepted configurations; all errors are reported at once, with key and remedy."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_engine.config import FromProgram, HybridConfig, load_config
from hybrid_engine.config.loading import generate_values, read_train_config
from hybrid_engine.errors import ConfigError, Violation
from tests.harness.errors import has_violations

MODEL = {
    **{"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 4, "hidden_size": 32},
    **{"intermediate_size": 48, "vocab_size": 130, "num_attention_heads": 4, "num_key_value_heads": 2},
    "head_dim": 8,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", MODEL)


def write_model(directory: Path, values: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return directory


def violations(
    model: Path,
    world_size: int,
    actor_config: dict[str, Any] | None = None,
    generate_config: dict[str, Any] | None = None,
    **others: Any,
) -> dict[str, Violation]:
    """Return violations by key; each must have a problem and a remedy."""
    sections = {"actor_config": actor_config or {}, "generate_config": generate_config or {}}
    with pytest.raises(ConfigError) as caught:
        load_config({"model": model, "random_weights": True, **sections, **others}, world_size)
    findings = caught.value.findings
    assert all(isinstance(finding, Violation) and finding.problem and finding.remedy for finding in findings)
    assert all(str(finding) in str(caught.value) for finding in findings)
    return {finding.key: finding for finding in findings}


def test_yaml_and_mapping_are_equal(model: Path, tmp_path: Path) -> None:
    values = {
        "model": str(model),
        "random_weights": True,
        "actor_config": {"tensor_model_parallel_size": 2, "optimizer": {"lr": 1e-4}, "params_dtype": "float32"},
        "generate_config": {"infer_data_parallel_size": 2, "bucket_mb": 3},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    from_file = load_config(file, 2)
    assert from_file == load_config(str(file), 2) == load_config(values, 2)
    assert from_file.actor_config.optimizer.lr == 1e-4
    assert from_file.generate_config.bucket_mb == 3
    assert from_file.hf_config() == MODEL


def test_relative_paths_start_at_the_directory_of_the_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"model": "../model", "random_weights": True, "generate_config": {"trace": "traces/one.json"}}
    file = tmp_path / "configs" / "config.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(values))
    monkeypatch.chdir(file.parent)
    for config in (load_config("config.yaml", 1), load_config(values, 1, directory=file.parent)):
        assert config.model.is_absolute()
        assert config.model.samefile(model)
        assert config.generate_config.trace == file.parent / "traces/one.json"
    from_mapping = load_config(values, 1)
    assert (from_mapping.model, from_mapping.generate_config.trace) == (Path("../model"), Path("traces/one.json"))
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/config.yaml", 1).model.samefile(model)


def test_a_missing_model_is_reported_with_the_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for key, values in {
        "model": {"model": "org/nowhere"},
        "critic_config.model": {"model": str(model), "critic_config": {"model": "org/nowhere"}},
    }.items():
        file.write_text(yaml.safe_dump(values))
        with pytest.raises(ConfigError) as caught:
            load_config(file, 1)
        assert str(caught.value).startswith(f"invalid configuration in {file} (1):")
        assert [finding.key for finding in caught.value.findings] == [key]


def test_missing_weights_are_reported_unless_they_are_not_needed(model: Path) -> None:
    lacking = violations(model, 2, {"tensor_model_parallel_size": 3}, random_weights=False)
    assert lacking.keys() == {"model", "actor_config.tensor_model_parallel_size"}
    assert load_config({"model": model}, 1, own_weights=True) == HybridConfig(model=model)
    (model / "model.safetensors.index.json").write_text('{"weight')  # damaged JSON
    assert violations(model, 1, random_weights=False).keys() == {"model"}
    (model / "model.safetensors.index.json").unlink()
    (model / "model.safetensors").touch()
    assert load_config({"model": model}, 1) == HybridConfig(model=model)
    assert violations(model, 1, revision="main").keys() == {"revision"}


def test_defaults_are_valid(model: Path) -> None:
    config = load_config({"model": model, "random_weights": True}, 1)
    assert config == HybridConfig(model=model, random_weights=True)
    with pytest.raises(Exception, match="frozen"):
        config.model = Path("/elsewhere")


def test_every_impossible_setting_is_reported_at_once(model: Path) -> None:
    actor = {
        **{f"{kind}_parallel_size": 2 for kind in ("context", "expert_model", "expert_tensor")},
        **{"pipeline_model_parallel_size": 3, "sequence_parallel": True, "overlap_param_gather": True},
    }
    sizes = {"tensor": 2, "pipeline": 5, "data": 5, "expert": 2}
    generate = {"dtype": "float32", **{f"infer_{kind}_parallel_size": size for kind, size in sizes.items()}}
    reported = violations(model, 6, actor, generate)
    assert reported.keys() == {f"actor_config.{key}" for key in actor} | {f"generate_config.{key}" for key in generate}
    message = str(reported["generate_config.infer_data_parallel_size"])
    assert message.startswith("generate_config.infer_data_parallel_size: TP 2 x PP 5 x DP 5 is not the world size 6. ")


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


INF = float("inf")
NAN = float("nan")
IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("actor_config.optimizer.lr", "actor_config.optimizer.adam_eps"), (INF, NAN)),
    "actor_config.optimizer.adam_beta1": (NAN,),
    "actor_config.lora.alpha": (INF,),
    "actor_config.lora.rank": (10**9,),
    "actor_config.seed": (2**70, -5, True),
    "actor_config.tensor_model_parallel_size": (True,),
    "actor_config.pipeline_model_parallel_size": (10**9,),
    "actor_config.micro_batch_size": (10**30,),
    "actor_config.noop_layers": ([10**9],),
    "actor_config.pipeline_model_parallel_layout": (
        *("E" * 10**6, "Et*999999999|L", "E(t|)*99999999999999999999L", "Et*９９９|L"),
    ),
    "actor_config.frozen_parameters": (["*"], ["embedding.*", "decoder.*", "output_layer.*"]),
    "generate_config.timeout_seconds": (INF, 1e300, 1e-9, 0, NAN),
    "generate_config.bucket_mb": (10**15, 0, True),
    "generate_config.kv_cache_mb": (10**12,),
    "generate_config.max_model_len": (1,),
    "generate_config.seed": (2**70, -5),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in IMPOSSIBLE.items() for value in values])
def test_impossible_numbers_are_refused(model: Path, key: str, value: Any) -> None:
    # The huge numbers would take minutes if they were expanded before the check.
    assert any(name.startswith(key) for name in violations(model, 1, **nested(key, value)))


@pytest.mark.parametrize("world_size", [0, -1, True, 10**9, 2.0, "2", None])
def test_impossible_world_sizes_are_refused(model: Path, world_size: Any) -> None:
    assert violations(model, world_size).keys() == {"world_size"}


def test_numbers_may_be_text(model: Path) -> None:
    values = {"model": model, "random_weights": True, **nested("actor_config.optimizer.lr", "1e-6")}
    assert load_config(values, 1).actor_config.optimizer.lr == 1e-6  # YAML 1.1 reads 1e-6 as text


def test_every_wrong_key_and_value_is_reported_at_once(model: Path) -> None:
    actor = {"tensor_parallel_size": 2, "params_dtype": "int8", "optimizer": {"learning_rate": 1}, "lora": {"rnak": 4}}
    generate = {"infer_tensor_parallel_size": 0, "gpu_memory_utilisation": 0.4, "transport": "carrier pigeon"}
    assert violations(model, 2, actor, generate, generation_config={}).keys() == {
        "actor_config.tensor_parallel_size",
        "actor_config.params_dtype",
        "actor_config.optimizer.learning_rate",
        "actor_config.lora.rnak",
        "generate_config.infer_tensor_parallel_size",
        "generate_config.gpu_memory_utilisation",
        "generate_config.transport",
        "generation_config",
    }


# Unknown key -> beginning of the remedy.
PROPOSED = {
    "generation_config": "Did you mean generate_config?",
    "actor": "Use actor_config",
    "lr": "Use actor_config.optimizer.lr",
    "actor_config.lr": "Use actor_config.optimizer.lr",
    "critic_config.lr": "Use critic_config.optimizer.lr",
    "actor_config.offload": "Use generate_config.offload_train_param, ",
    "generate_config.offload": "Use offload_train_param, offload_train_grad, offload_train_optimizer",
    "actor_config.dp": "Leave it out: it is the number of ranks over TP x PP x CP",
    "actor_config.gradient_accumulation_steps": "Leave it out",
    "generate_config.temperature": "Pass a Sampling to generate_sequences",
    "actor_config.revision": "Use revision at the top level",
    "actor_config.max_model_len": "Use generate_config.max_model_len",
    "actor_config.tp": "Use tensor_model_parallel_size",
    "actor_config.lora.rnak": "Did you mean rank?",
    "actor_config.optimizer.betas": "Use adam_beta1, adam_beta2",
    "actor_config.optimizer.warmup_steps": "Did you mean actor_config.optimizer.schedule.lr_warmup_steps?",
    "actor_config.weight_decy": "Did you mean actor_config.optimizer.weight_decay?",
    "critic_config.tensor_model_parallel_size": "Use actor_config.tensor_model_parallel_size",
    "generate_config.tensor_model_parallel_size": "Use infer_tensor_parallel_size",
    "generate_config.tensor_parallel_size": "Did you mean infer_tensor_parallel_size?",
    "critic_config.color": "Known keys: model, pipeline_model_parallel_layout, params_dtype",
}


@pytest.mark.parametrize("key", PROPOSED)
def test_the_remedy_of_an_unknown_key_names_the_intended_key(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"model": "none", **nested(key, 1)}, 1)
    (finding,) = caught.value.findings
    assert finding.key == key
    assert finding.remedy.startswith(PROPOSED[key])


def test_the_world_size_defaults_to_the_environment(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model": model, "random_weights": True, "actor_config": {"tensor_model_parallel_size": 2}}
    monkeypatch.setenv("WORLD_SIZE", "2")
    load_config(values)
    for invalid in ("two", "0"):
        monkeypatch.setenv("WORLD_SIZE", invalid)
        with pytest.raises(ConfigError, check=has_violations(("world_size", "out-of-range"))):
            load_config(values)


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("generation_config: {}")
    with pytest.raises(ConfigError, match=f"invalid configuration in {file} \\(2\\)") as caught:
        load_config(file, 1)
    # Errors travel between ranks.
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("contents", "key"),
    [
        (None, "model"),
        ({"architectures": ["BertModel"]}, "model"),
        ("{not json", "model"),
        ({name: value for name, value in MODEL.items() if name != "hidden_size"}, "hidden_size"),
    ],
)
def test_unusable_models_are_refused(tmp_path: Path, contents: Any, key: str) -> None:
    if contents is not None:
        write_model(tmp_path / "model", contents)
    assert violations(tmp_path / "model", 1).keys() == {key}


def test_reading_a_configuration_needs_no_engine() -> None:
    # Errors are reported at once, also on machines without Megatron and vLLM.
    code = (
        "import sys, hybrid_engine.config\n"
        "heavy = {'torch', 'megatron', 'vllm', 'transformers'} & {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


CODE = {"trust_remote_code": True, "worker_extension_cls": "somebody.Extension", "logits_processors": ["somebody:It"]}


def test_code_may_be_named_by_programs_but_not_by_files(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="live objects are of torch")
    read_source = import_module("hybrid_engine.attaching.attachment").read_source
    values = {"model": str(model), "random_weights": True, "generate_config": {"vllm": CODE}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    keys = {f"generate_config.vllm.{name}" for name in CODE}
    for source in (path, values, read_source(path)[0]):  # a mapping may have been read from a file
        with pytest.raises(ConfigError) as caught:
            load_config(source, 1)
        assert {finding.key for finding in caught.value.findings} == keys
        assert all("FromProgram" in finding.remedy for finding in caught.value.findings)
    config = load_config({**values, "generate_config": {"vllm": FromProgram(CODE)}}, 1)
    assert dict(config.generate_config.vllm) == CODE
    again = [config, pickle.loads(pickle.dumps(config)), read_source(config)[0]]
    again.append({**values, "generate_config": generate_values({"vllm": FromProgram(CODE)})})
    for source in again:  # copies still count as given by a program
        copied = source if isinstance(source, HybridConfig) else load_config(source, 1)
        assert isinstance(copied.generate_config.vllm, FromProgram)


def test_wrong_values_are_reported_by_the_key_of_the_caller() -> None:
    wrong = {
        "tp_size": 0,
        "pp_size": 10**9,
        "timeout_seconds": float("inf"),
        "seed": 2**80,
        "dp_type": [1],
        "tp_sise": 2,
        "model": 5,
    }
    with pytest.raises(ConfigError) as caught:
        generate_values({**wrong, "infer_expert_parallel_size": "x"})
    expected = {f"rollout_config.{key}" for key in (*wrong, "infer_expert_parallel_size")}
    assert {finding.key for finding in caught.value.findings} == expected


@pytest.mark.parametrize("value", [5, "tp_size", [1], {5: 1}])
def test_values_other_than_mappings_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="rollout_config"):
        generate_values(value)
    with pytest.raises(ConfigError, match="train_config"):
        read_train_config(value, 1)


def test_short_names_and_the_model_are_accepted() -> None:
    values = generate_values({"tp_size": 2, "dp_type": "none", "model": "directory", "max_model_len": 64})
    assert values == {
        **{"infer_tensor_parallel_size": 2, "infer_data_parallel_size": 1},
        **{"model": "directory", "max_model_len": 64},
    }

"""Configurations: what is accepted, and that everything wrong is said at once, with key and remedy."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.config.proposals import ELSEWHERE, paths_of
from hybrid_engine.errors import ConfigError, HybridEngineError, Violation

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 130,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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
    actor: dict[str, Any] | None = None,
    generate: dict[str, Any] | None = None,
    **others: Any,
) -> dict[str, Violation]:
    """Key -> violation; every one has a problem and a remedy."""
    values = {"model": model, "random_weights": True, "actor_config": actor or {}, "generate_config": generate or {}}
    with pytest.raises(ConfigError) as caught:
        load_config({**values, **others}, world_size)
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


def test_relative_paths_of_a_file_begin_at_its_directory(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"model": "../model", "random_weights": True, "generate_config": {"trace": "traces/one.json"}}
    file = tmp_path / "configs" / "config.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(values))
    monkeypatch.chdir(file.parent)
    for found in (load_config("config.yaml", 1), load_config(values, 1, directory=file.parent)):
        assert found.model.is_absolute()
        assert found.model.samefile(model)
        assert found.generate_config.trace == file.parent / "traces/one.json"
    from_mapping = load_config(values, 1)
    assert (from_mapping.model, from_mapping.generate_config.trace) == (Path("../model"), Path("traces/one.json"))
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/config.yaml", 1).model.samefile(model)


def test_a_model_that_cannot_be_had_is_one_of_a_file(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for key, values in {
        "model": {"model": "org/nowhere"},
        "critic_config.model": {"model": str(model), "critic_config": {"model": "org/nowhere"}},
    }.items():
        file.write_text(yaml.safe_dump(values))
        with pytest.raises(ConfigError) as caught:
            load_config(file, 1)
        assert str(caught.value).startswith(f"invalid configuration in {file} (1):")
        assert [found.key for found in caught.value.findings] == [key]


def test_weights_are_there_or_not_asked_for(model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"model": model, "actor_config": {"tensor_model_parallel_size": 3}}, 2)
    found = next(each for each in caught.value.findings if each.key == "model")
    assert f"{model} has neither model.safetensors.index.json nor model.safetensors" in found.problem
    assert found.remedy.startswith("Name the directory of a safetensors checkpoint, or set random_weights: true")
    assert len(caught.value.findings) > 1
    assert load_config({"model": model}, 1, own_weights=True) == HybridConfig(model=model)
    (model / "model.safetensors.index.json").write_text('{"weight')
    damaged = violations(model, 1, random_weights=False)["model"]
    assert "model.safetensors.index.json: damaged or cut short" in damaged.problem
    (model / "model.safetensors.index.json").unlink()
    (model / "model.safetensors").touch()
    assert load_config({"model": model}, 1) == HybridConfig(model=model)
    assert violations(model, 1, revision="main")["revision"].remedy == "Leave it out, or name a model on the Hub"


def test_defaults_are_sound(model: Path) -> None:
    config = load_config({"model": model, "random_weights": True}, 1)
    assert config == HybridConfig(model=model, random_weights=True)
    with pytest.raises(Exception, match="frozen"):
        config.model = Path("/elsewhere")


@pytest.mark.parametrize(
    ("world_size", "actor", "generate"),
    [
        (2, {"tensor_model_parallel_size": 2}, {}),
        (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, {"infer_tensor_parallel_size": 2}),
        (4, {"tensor_model_parallel_size": 4}, {"infer_tensor_parallel_size": 4}),  # more ranks than kv heads
        (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, {}),
        (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}, {"infer_data_parallel_size": 2}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 8}, {"dtype": "bfloat16"}),
    ],
)
def test_sound_layouts(model: Path, world_size: int, actor: dict[str, Any], generate: dict[str, Any]) -> None:
    config = load_config(
        {"model": model, "random_weights": True, "actor_config": actor, "generate_config": generate}, world_size
    )
    assert actor.items() <= config.actor_config.model_dump().items()
    assert generate.items() <= config.generate_config.model_dump().items()


def test_three_ways_on_two_ranks(model: Path) -> None:
    found = violations(model, 2, {"tensor_model_parallel_size": 3}, {"infer_tensor_parallel_size": 3})
    assert found.keys() == {"actor_config.tensor_model_parallel_size", "generate_config.infer_tensor_parallel_size"}
    with pytest.raises(ConfigError) as caught:
        load_config({"model": model, "random_weights": True, "actor_config": {"tensor_model_parallel_size": 3}}, 2)
    message = str(caught.value)
    assert message.startswith("invalid configuration (")
    assert (
        "actor_config.tensor_model_parallel_size: TP 3 x PP 1 x CP 1 = 3 does not divide the world size 2. "
        "Choose sizes whose product divides it" in message
    )
    assert "3 does not divide the number of attention heads 4" in message
    assert "3 neither divides nor is a multiple of the 2 key/value heads" in message


def test_every_impossible_setting_is_reported_at_once(model: Path) -> None:
    found = violations(
        model,
        6,
        {
            "pipeline_model_parallel_size": 3,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "sequence_parallel": True,
            "use_distributed_optimizer": False,
            "overlap_param_gather": True,
            "params_dtype": "float32",
        },
        {
            "infer_tensor_parallel_size": 2,
            "infer_pipeline_parallel_size": 5,
            "infer_data_parallel_size": 5,
            "infer_expert_parallel_size": 2,
            "dtype": "bfloat16",
        },
    )
    assert found.keys() == {
        "actor_config.pipeline_model_parallel_size",
        "actor_config.context_parallel_size",
        "actor_config.expert_model_parallel_size",
        "actor_config.expert_tensor_parallel_size",
        "actor_config.sequence_parallel",
        "actor_config.overlap_param_gather",
        "generate_config.infer_pipeline_parallel_size",
        "generate_config.infer_tensor_parallel_size",
        "generate_config.infer_data_parallel_size",
        "generate_config.infer_expert_parallel_size",
        "generate_config.dtype",
    }
    assert "4 layers do not divide into 3 stages" in str(found["actor_config.pipeline_model_parallel_size"])
    assert "TP 2 x PP 5 x DP 5 is not the world size 6" in str(found["generate_config.infer_data_parallel_size"])
    assert "bfloat16, but weights are sent in float32" in str(found["generate_config.dtype"])


def test_stages_that_do_not_exist(model: Path) -> None:
    found = violations(model, 1, {"virtual_pipeline_model_parallel_size": 2})
    assert "without pipeline parallelism" in found["actor_config.virtual_pipeline_model_parallel_size"].problem
    uneven = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4}
    chunks = violations(model, 2, uneven)["actor_config.virtual_pipeline_model_parallel_size"]
    assert "4 chunks do not divide a stage of 2 layers" in chunks.problem
    odd = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 9}
    assert "2 does not divide the sequence length 9" in violations(model, 2, odd)["actor_config.seq_length"].problem


@pytest.mark.parametrize(
    ("section", "values"),
    [
        *(
            ("actor_config", {"optimizer": {key: float("inf")}})
            for key in ("lr", "weight_decay", "adam_eps", "clip_grad")
        ),
        *(("actor_config", {"optimizer": {key: float("nan")}}) for key in ("lr", "adam_beta1")),
        ("actor_config", {"lora": {"alpha": float("inf")}}),
        ("actor_config", {"lora": {"rank": 10**9}}),
        *(("actor_config", {"seed": seed}) for seed in (2**70, -5, True)),
        ("actor_config", {"tensor_model_parallel_size": True}),
        ("actor_config", {"pipeline_model_parallel_size": 10**9}),
        ("actor_config", {"micro_batch_size": 10**30}),
        ("actor_config", {"make_vocab_size_divisible_by": 10**12}),
        ("actor_config", {"noop_layers": [10**9]}),
        ("actor_config", {"pipeline_model_parallel_layout": "E" * 10**6}),
        ("actor_config", {"pipeline_model_parallel_layout": "Et*999999999|L"}),
        ("actor_config", {"pipeline_model_parallel_layout": "E(t|)*99999999999999999999L"}),
        ("actor_config", {"pipeline_model_parallel_layout": "Et*９９９|L"}),
        ("actor_config", {"frozen_parameters": ["*"]}),
        ("actor_config", {"frozen_parameters": ["embedding.*", "decoder.*", "output_layer.*"]}),
        *(("generate_config", {"timeout_seconds": value}) for value in (float("inf"), 1e300, 1e-9, 0, float("nan"))),
        *(("generate_config", {"bucket_mb": value}) for value in (10**15, 0, True)),
        ("generate_config", {"kv_cache_mb": 10**12}),
        ("generate_config", {"max_model_len": 1}),
        ("generate_config", {"max_num_seqs": 10**12}),
        *(("generate_config", {"seed": seed}) for seed in (2**70, -5)),
    ],
)
def test_numbers_that_no_job_has_are_refused(model: Path, section: str, values: dict[str, Any]) -> None:
    """At once: nothing is made of them first."""
    kinds = {"actor_config": "actor", "generate_config": "generate"}
    found = violations(model, 1, **{kinds[section]: values})
    (key, value), *_ = values.items()
    wanted = f"{section}.{key}" + (f".{next(iter(value))}" if isinstance(value, dict) else "")
    assert any(name.startswith(wanted) for name in found), found


@pytest.mark.parametrize("world_size", [0, -1, True, 10**9, 2.0, "2", None])
def test_numbers_of_ranks_that_cannot_be_are_refused(model: Path, world_size: Any) -> None:
    assert violations(model, world_size).keys() == {"world_size"}


def test_texts_and_large_numbers_stay_possible(model: Path) -> None:
    """YAML 1.1 takes 1e-6 for a text."""
    actor = {"optimizer": {"lr": "1e-6", "clip_grad": 1e10}, "seed": 2**31 - 1, "frozen_parameters": ["embedding.*"]}
    generate = {"timeout_seconds": 86400, "bucket_mb": 65536, "kv_cache_mb": 2**20}
    config = load_config(
        {"model": model, "random_weights": True, "actor_config": actor, "generate_config": generate}, 1
    )
    assert config.actor_config.optimizer.lr == 1e-6


def test_every_wrong_key_and_value_is_reported_at_once(model: Path) -> None:
    found = violations(
        model,
        2,
        {
            "tensor_parallel_size": 2,
            "params_dtype": "int8",
            "optimizer": {"learning_rate": 1, "weight_decy": 0},
            "lora": {"rnak": 4},
        },
        {"infer_tensor_parallel_size": 0, "gpu_memory_utilisation": 0.4, "transport": "carrier pigeon"},
    )
    assert found.keys() == {
        "actor_config.tensor_parallel_size",
        "actor_config.params_dtype",
        "actor_config.optimizer.learning_rate",
        "actor_config.optimizer.weight_decy",
        "actor_config.lora.rnak",
        "generate_config.infer_tensor_parallel_size",
        "generate_config.gpu_memory_utilisation",
        "generate_config.transport",
    }
    assert found["actor_config.tensor_parallel_size"].remedy == "Did you mean tensor_model_parallel_size"
    assert found["actor_config.optimizer.weight_decy"].remedy == "Did you mean weight_decay"
    assert found["actor_config.lora.rnak"].remedy == "Did you mean rank"
    assert found["actor_config.optimizer.learning_rate"].remedy == "Use lr"
    assert found["generate_config.gpu_memory_utilisation"].remedy == "Did you mean gpu_memory_utilization"
    assert "found 'carrier pigeon'" in found["generate_config.transport"].problem


PROPOSED = {
    "actor": "Use actor_config",
    "lr": "Use actor_config.optimizer.lr",
    "offload": "Use generate_config.offload_train_param, generate_config.offload_train_grad and generate_config.",
    "actor_config.offload": "Use generate_config.offload_train_param, ",
    "actor_config.dp": "Leave it out: it is the number of ranks over TP x PP x CP",
    "actor_config.data_parallel_size": "Leave it out: it is the number of ranks",
    "actor_config.revision": "Use revision at the top level",
    "actor_config.gradient_accumulation_steps": "Leave it out: an update accumulates the rows of a rank / micro_batch",
    "generate_config.temperature": "Pass Sampling(temperature=...) to generate_sequences",
    "generate_config.n": "Pass Sampling(n=...) to generate_sequences",
    "generate_config.max_new_tokens": "Pass Sampling(max_tokens=...) to generate_sequences",
    "critic_config.lr": "Use critic_config.optimizer.lr",
    "actor_config.lr": "Use actor_config.optimizer.lr",
    "actor_config.max_model_len": "Use generate_config.max_model_len",
    "actor_config.tp": "Use tensor_model_parallel_size",
    "actor_config.optimizer.betas": "Use adam_beta1 and adam_beta2",
    "actor_config.optimizer.warmup_steps": "Did you mean actor_config.optimizer.schedule.lr_warmup_steps",
    "actor_config.weight_decy": "Did you mean actor_config.optimizer.weight_decay",
    "critic_config.tensor_model_parallel_size": "Use actor_config.tensor_model_parallel_size",
    "generate_config.tensor_model_parallel_size": "Use infer_tensor_parallel_size",
    "generate_config.offload": "Use offload_train_param, offload_train_grad and offload_train_optimizer",
    "generate_config.tensor_parallel_size": "Did you mean infer_tensor_parallel_size",
    "critic_config.color": "Known keys: model, pipeline_model_parallel_layout, params_dtype",
    "generate_config.size": "Known keys: infer_tensor_parallel_size",
}
"""Unknown key -> how the remedy begins."""


@pytest.mark.parametrize("key", PROPOSED)
def test_an_unknown_key_is_answered_with_the_key_that_is_meant(key: str) -> None:
    values: dict[str, Any] = {"model": "none"}
    *parents, last = key.split(".")
    section = values
    for part in parents:
        section = section.setdefault(part, {})
    section[last] = 1
    with pytest.raises(ConfigError) as caught:
        load_config(values, 1)
    (found,) = caught.value.findings
    assert found.key == key
    assert found.remedy.startswith(PROPOSED[key])


def test_every_name_of_another_framework_stands_for_keys_that_exist() -> None:
    known = {path[-1] for path in paths_of(HybridConfig)}
    assert set().union(*ELSEWHERE.values()) <= known


def test_the_number_of_ranks_is_the_environments_where_none_is_passed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"model": model, "random_weights": True, "actor_config": {"tensor_model_parallel_size": 2}}
    monkeypatch.setenv("WORLD_SIZE", "2")
    load_config(values)
    for told, problem in (("two", "'two' ranks"), ("0", "0 ranks"), (None, "is not given, and WORLD_SIZE is not set")):
        monkeypatch.delenv("WORLD_SIZE")
        if told is not None:
            monkeypatch.setenv("WORLD_SIZE", told)
        with pytest.raises(ConfigError, match=f"world_size: .*{problem}"):
            load_config(values)
        monkeypatch.setenv("WORLD_SIZE", "2")


def test_a_files_name_is_said_with_what_is_wrong_in_it(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("generation_config: {}")
    with pytest.raises(ConfigError, match=f"invalid configuration in {file} \\(2\\)") as caught:
        load_config(file, 1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_unknown_sections_and_a_missing_model(model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"generation_config": {}}, 1)
    by_key = {finding.key: finding for finding in caught.value.findings}
    assert by_key.keys() == {"model", "generation_config"}
    assert by_key["generation_config"].remedy == "Did you mean generate_config"
    assert by_key["model"].problem == "is missing"
    assert by_key["model"].remedy.startswith("Add it: directory of a Hugging Face model, or its id on the Hub")


def test_models_that_cannot_be_used(tmp_path: Path) -> None:
    nowhere = violations(tmp_path / "nowhere", 1)["model"]
    assert "nowhere/config.json cannot be read: No such file" in nowhere.problem
    unknown = violations(write_model(tmp_path / "a", {"architectures": ["BertModel"]}), 1)["model"]
    assert "BertModel" in unknown.problem
    assert "LlamaForCausalLM" in unknown.problem
    incomplete = {name: value for name, value in MODEL.items() if name != "hidden_size"}
    missing = violations(write_model(tmp_path / "b", incomplete), 1)["hidden_size"]
    assert missing.problem == f"is missing, in {tmp_path / 'b' / 'config.json'}"
    assert "is not JSON" in violations(write_model(tmp_path / "c", "{not json"), 1)["model"].problem


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken, empty = tmp_path / "broken.yaml", tmp_path / "empty.yaml"
    broken.write_text("model: [")
    empty.write_text("")
    for file, text in ((broken, "broken.yaml"), (tmp_path / "none.yaml", "none.yaml"), (empty, "configuration")):
        with pytest.raises(HybridEngineError, match=text):
            load_config(file, 1)


def test_reading_a_configuration_needs_no_engine() -> None:
    """So that mistakes are reported at once and on machines without Megatron and vLLM."""
    code = (
        "import sys, hybrid_engine.config\n"
        "heavy = {'torch', 'megatron', 'vllm', 'transformers'} & {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])

"""Configuration: the committed files are sound, and everything wrong is reported at once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.gpt_rl import settings
from hybrid_engine.errors import ConfigError

CONFIGS = Path(settings.__file__).parent / "configs"
WORLD_SIZES = {"tp2_to_dp2.yaml": 2, "tp2pp2_to_tp2dp2.yaml": 4, "fsdp2_to_dp.yaml": 2}


@pytest.fixture
def values() -> dict[str, Any]:
    """The committed file for two ranks, with absolute paths."""
    values = yaml.safe_load((CONFIGS / "tp2_to_dp2.yaml").read_text())
    values["model"] = str((CONFIGS / values["model"]).resolve())
    values["rl_config"]["data"] = str((CONFIGS / values["rl_config"]["data"]).resolve())
    return values


def write(directory: Path, values: dict[str, Any]) -> Path:
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def violations(directory: Path, values: dict[str, Any], world_size: int = 2) -> dict[str, str]:
    """Key -> what the loader says about it."""
    with pytest.raises(ConfigError) as caught:
        settings.load_settings(write(directory, values), world_size)
    return {finding.key: str(finding) for finding in caught.value.findings}


@pytest.mark.parametrize("name", WORLD_SIZES)
def test_committed_files_are_sound(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # paths are relative to the file
    loaded = settings.load_settings(CONFIGS / name, WORLD_SIZES[name])
    assert loaded.engine.actor_config.seed == loaded.engine.generate_config.seed == loaded.rl.seed


def test_all_layouts_are_the_same_task() -> None:
    first, *others = (yaml.safe_load((CONFIGS / name).read_text()) for name in WORLD_SIZES)
    for other in others:
        assert first["rl_config"] == other["rl_config"]
        assert first["model"] == other["model"]


def test_a_run_with_fsdp_may_go_on_with_another_number_of_ranks() -> None:
    prints = [settings.load_settings(CONFIGS / "fsdp2_to_dp.yaml", ranks).fingerprint() for ranks in (2, 4)]
    assert prints[0] == prints[1]


def test_overrides_stand_in_place_of_the_files_values() -> None:
    texts = ["actor_config.optimizer.clip_grad=0.5", "rl_config.warm_up.max_steps=7", "generate_config.trace=null"]
    loaded = settings.load_settings(CONFIGS / "tp2_to_dp2.yaml", 2, overrides=texts)
    assert loaded.engine.actor_config.optimizer.clip_grad == 0.5
    assert loaded.rl.warm_up.max_steps == 7
    assert loaded.rl.warm_up.batch_size == 128
    assert loaded.title() == "Two-digit sums: Megatron TP=2 to vLLM DP=2, seed 0"


def test_all_wrong_overrides_are_reported() -> None:
    texts = ["iterations", "model.path=x", "rl_config.seed=[", "rl_config.iteration=3", "actor_config.seq_length=-1"]
    with pytest.raises(ConfigError) as caught:
        settings.load_settings(CONFIGS / "tp2_to_dp2.yaml", 2, overrides=texts)
    found = {finding.key: str(finding) for finding in caught.value.findings}
    assert "Write KEY=VALUE" in found["'iterations'"]
    assert "model is no section" in found["model.path"]
    assert "cannot be read" in found["rl_config.seed"]
    assert "unknown key" in found["rl_config.iteration"]
    assert "actor_config.seq_length" in found


def test_what_was_chosen_is_what_differs_from_the_defaults() -> None:
    loaded = settings.load_settings(CONFIGS / "fsdp2_to_dp.yaml", 2)
    whole, chosen = loaded.fingerprint(), loaded.fingerprint(exclude_defaults=True)
    assert chosen["generate_config"]["max_model_len"] == 16
    assert "incremental" in whole["generate_config"].keys() - chosen["generate_config"].keys()


def test_every_key_of_the_committed_files_is_documented() -> None:
    for section in (settings.RLConfig, settings.WarmUpConfig):
        assert all(field.description for field in section.model_fields.values())


def test_options_win(tmp_path: Path, values: dict[str, Any]) -> None:
    values["actor_config"]["seed"] = 5
    path = write(tmp_path, values)
    assert settings.load_settings(path, 2).engine.actor_config.seed == 5
    loaded = settings.load_settings(path, 2, iterations=7, seed=11)
    assert (loaded.rl.iterations, loaded.rl.seed) == (7, 11)
    assert loaded.engine.actor_config.seed == loaded.engine.generate_config.seed == 11


def test_a_schedule_is_refused_where_the_example_sets_the_rate(tmp_path: Path, values: dict[str, Any]) -> None:
    values["actor_config"]["optimizer"] = {"lr": 1e-3, "schedule": {"lr_warmup_steps": 5}}
    assert "rl_config.learning_rate" in violations(tmp_path, values)["actor_config.optimizer.schedule"]


def test_everything_wrong_is_reported_at_once(tmp_path: Path, values: dict[str, Any]) -> None:
    values["rl_config"].update({"iteration": 3, "samples_per_prompt": 1, "temperature": "hot"})
    values["rl_config"]["warm_up"]["steps"] = 3
    values["actor_config"]["tensor_model_parallel_size"] = 3
    found = violations(tmp_path, values)
    assert {
        "rl_config.iteration",
        "rl_config.samples_per_prompt",
        "rl_config.temperature",
        "rl_config.warm_up.steps",
        "actor_config.tensor_model_parallel_size",
    } <= found.keys()
    assert "Known keys" in found["rl_config.iteration"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("seed", value) for value in (2**80, -1, True, 1.5)),
        *((key, float("inf")) for key in ("learning_rate", "kl_coefficient", "temperature")),
        ("temperature", 2.5),  # vLLM's limit
        ("temperature", float("nan")),
        ("temperature", True),
        ("samples_per_prompt", 20_000),
        ("max_tokens", 0),
        ("iterations", 10**30),
        ("data", "a\0b"),
        ("data", "x" * 10_000),
    ],
)
def test_numbers_that_no_run_has_are_refused(tmp_path: Path, values: dict[str, Any], key: str, value: Any) -> None:
    values["rl_config"][key] = value
    assert f"rl_config.{key}" in violations(tmp_path, values)


@pytest.mark.parametrize(
    ("section", "key", "value", "blamed"),
    [
        ("actor_config", "seq_length", 9, "actor_config.seq_length"),
        ("generate_config", "max_model_len", 10, "generate_config.max_model_len"),
        ("rl_config", "max_tokens", 12, "actor_config.seq_length"),
        ("rl_config", "minibatches", 3, "rl_config.minibatches"),
        ("rl_config", "prompts_per_iteration", 8192, "rl_config.prompts_per_iteration"),
        ("rl_config", "data", "nowhere", "rl_config.data"),
        ("rl_config", "warm_up", {"batch_size": 100}, "rl_config.warm_up.batch_size"),
    ],
)
def test_what_does_not_fit_together(
    tmp_path: Path, values: dict[str, Any], section: str, key: str, value: Any, blamed: str
) -> None:
    values[section][key] = value
    assert blamed in violations(tmp_path, values)


def test_missing_data_directory_setting(tmp_path: Path, values: dict[str, Any]) -> None:
    del values["rl_config"]["data"]
    assert "is missing" in violations(tmp_path, values)["rl_config.data"]


def test_vocabulary_of_another_model(tmp_path: Path, values: dict[str, Any]) -> None:
    config = (Path(values["model"]) / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"vocab_size": 14', '"vocab_size": 32'))
    values["model"] = str(tmp_path)
    assert "vocab_size 32" in violations(tmp_path, values)["model"]


def test_held_out_problems_in_the_training_data(tmp_path: Path, values: dict[str, Any]) -> None:
    lines = ['{"prompt": "01+01=", "answer": "002", "demonstration": "002"}', '{"prompt": "01+02=", "answer": "003"}']
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "held_out.jsonl").write_text(lines[0])
    values["rl_config"].update({"data": str(tmp_path), "prompts_per_iteration": 2})
    with pytest.raises(ConfigError) as caught:
        settings.load_settings(write(tmp_path, values), 2)
    text = str(caught.value)
    assert "1 held-out prompts are in train.jsonl" in text
    assert "without a demonstration" in text


@pytest.mark.parametrize("text", [None, "a: [", "- 1", "rl_config: 3"])
def test_unreadable_files(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError):
        settings.load_settings(path, 2)


def test_fingerprint_ignores_only_how_long_and_how_often(tmp_path: Path, values: dict[str, Any]) -> None:
    path = write(tmp_path, values)
    first = settings.load_settings(path, 2).fingerprint()
    longer = copy.deepcopy(values)
    longer["rl_config"].update({"iterations": 99, "checkpoint_every": 1, "evaluate_every": 3})
    assert settings.load_settings(write(tmp_path, longer), 2).fingerprint() == first
    assert settings.load_settings(path, 2, seed=3).fingerprint() != first

"""The recipe for Qwen2.5-0.5B: its configuration, its plan and its rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hybrid_engine import Completion, load_config
from hybrid_engine.rl.run_settings import RunSettings
from tests.harness.launch import REPO_ROOT
from tests.hybrid_engine.tools.programs import invoke
from tests.zoo.families import write_config
from tests.zoo.published_configs import QWEN2_5_0_5B
from tests.zoo.tokenizers import save_characters

RECIPE = REPO_ROOT / "examples" / "recipes" / "qwen2.5_0.5b_gsm8k.yaml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_config(tmp_path, QWEN2_5_0_5B)
    return tmp_path


def test_the_configuration_is_valid(model: Path) -> None:
    values = yaml.safe_load(RECIPE.read_text())
    assert values["model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    values.pop("run")
    config = load_config({**values, "model": str(model), "random_weights": True}, world_size=8)
    assert config.generate_config.max_model_len == config.actor_config.seq_length


def test_the_plan_receives_the_minimum_and_fits(model: Path) -> None:
    arguments = [RECIPE, f"model={model}", "--ranks", "8", "--device-gib", "80", "--json"]
    plan = json.loads(invoke("plan", *arguments).stdout)
    assert plan["memory"]["device"]["fits"]
    assert plan["bytes"]["received"] == plan["bytes"]["least"]
    assert plan["model"]["served_bytes"] == 988_065_536  # 494 million parameters in bfloat16.
    received = plan["bytes"]["received"]["mean"] / plan["model"]["served_bytes"]
    assert received == pytest.approx(0.5, abs=0.001)  # Half of all that tensor parallelism shards.


def test_the_run_asks_for_the_number_after_four_hashes(model: Path, tmp_path: Path) -> None:
    save_characters(model)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1 + 1?", "answer": "so\n#### 2"}))
    overrides = [f"{key}={rows}" for key in ("run.data.source", "run.evaluation.source")]
    overrides += ["run.data.subset=null", f"model={model}", "random_weights=true"]
    settings = RunSettings.read(RECIPE, overrides, 8)
    (prompt,) = settings.prompts
    assert prompt["prompt"][0]["content"].startswith("1 + 1?\nThink")
    texts = {"so\n#### 2": 1.0, "#### 3": 0.0, "two": 0.0}
    completions = [Completion((), (), "stop", drawn_text=text) for text in texts]
    assert [settings.reward(prompt, completion) for completion in completions] == [*texts.values()]

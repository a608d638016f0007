"""The recipe for Qwen2.5-0.5B: its configuration, its plan and its rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from examples.recipes.grpo_gsm8k import Problem, number_in, prompt_of, read_problems, reward
from hybrid_engine import Completion, load_config
from hybrid_engine.tools.cli import app
from tests.harness.launch import REPO_ROOT
from tests.zoo.published_configs import QWEN2_5_0_5B

RECIPE = REPO_ROOT / "examples" / "recipes" / "qwen2.5_0.5b_gsm8k.yaml"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_0_5B))
    return tmp_path


def test_the_configuration_is_valid(model: Path) -> None:
    values = yaml.safe_load(RECIPE.read_text())
    assert values["model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    config = load_config({**values, "model": str(model), "random_weights": True}, world_size=8)
    assert config.generate_config.max_model_len == config.actor_config.seq_length


def test_the_plan_receives_the_minimum_and_fits(model: Path) -> None:
    arguments = [str(RECIPE), f"model={model}", "--ranks", "8", "--device-gib", "80", "--json"]
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["memory"]["device"]["fits"]
    assert plan["bytes"]["received"] == plan["bytes"]["least"]
    assert plan["model"]["served_bytes"] == 988_065_536  # 494 million parameters in bfloat16.
    received = plan["bytes"]["received"]["mean"] / plan["model"]["served_bytes"]
    assert received == pytest.approx(0.5, abs=0.001)  # Half of all that tensor parallelism shards.


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 * 24 = 72.\n#### 72", 72),
        ("#### 1,250.50 dollars", 1250.5),
        ("#### 3, no: #### -4.", -4),
        ("#### 1.000.000", 1.0),
        ("#### 3..5", 3),
        ("#### .5", None),
        ("72", None),
        ("####", None),
    ],
)
def test_the_last_number_after_four_hashes_counts(text: str, number: float | None) -> None:
    assert number_in(text) == number


def test_rewards_compare_with_the_answer_of_the_prompt() -> None:
    prompt = prompt_of(Problem("1 + 1?", 2.0))
    assert prompt["prompt"][0]["content"].startswith("1 + 1?")
    texts = {"so\n#### 2": 1.0, "#### 3": 0.0, "two": 0.0}
    rewards = [reward(prompt, Completion((), (), "stop", drawn_text=text)) for text in texts]
    assert rewards == list(texts.values())


def test_a_problem_without_an_answer_is_named(tmp_path: Path) -> None:
    rows = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "4"}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2: .*#### number"):
        read_problems(path)
    path.write_text(json.dumps(rows[0]))
    assert read_problems(path) == [Problem("1 + 1?", 2.0)]

"""The recipe for Qwen2.5-0.5B: its configuration, planned with the numbers of the published model; its rewards."""

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


def test_the_configuration_keeps_all_rules(model: Path) -> None:
    values = yaml.safe_load(RECIPE.read_text())
    assert values["model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    config = load_config({**values, "model": str(model), "random_weights": True}, world_size=8)
    assert config.generate_config.max_model_len == config.actor_config.seq_length


def test_its_plan_moves_the_least_and_fits(model: Path) -> None:
    words = [str(RECIPE), f"model={model}", "--ranks", "8", "--device-gib", "80", "--json"]
    ended = CliRunner().invoke(app, ["plan", *words])
    assert ended.exit_code == 0, ended.output
    answer = json.loads(ended.stdout)
    assert answer["memory"]["device"]["fits"]
    assert answer["bytes"]["received"] == answer["bytes"]["least"]
    assert answer["model"]["served_bytes"] == 988_065_536  # 494 million parameters in bfloat16
    lacking = answer["bytes"]["received"]["mean"] / answer["model"]["served_bytes"]
    assert lacking == pytest.approx(0.5, abs=0.001)  # half of what tensor parallelism cuts


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


def test_a_reward_knows_the_answer_of_its_prompt() -> None:
    prompt = prompt_of(Problem("1 + 1?", 2.0))
    assert prompt["prompt"][0]["content"].startswith("1 + 1?")
    texts = {"so\n#### 2": 1.0, "#### 3": 0.0, "two": 0.0}
    given = [reward(prompt, Completion((), (), "stop", drawn_text=text)) for text in texts]
    assert given == list(texts.values())


def test_a_problem_without_an_answer_is_named(tmp_path: Path) -> None:
    rows = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "4"}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"data\.jsonl, line 2: .*#### number"):
        read_problems(path)
    path.write_text(json.dumps(rows[0]))
    assert read_problems(path) == [Problem("1 + 1?", 2.0)]

"""A run from one file: prompts and rewards that it names, and everything that is wrong with it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hybrid_engine.errors import ConfigError, StateError
from hybrid_engine.rl.config import GrpoConfig, PpoConfig
from hybrid_engine.rl.rewards import NAMED_REWARDS, HeldOut, pass_at
from hybrid_engine.rl.run_settings import RunSettings
from tests.harness.errors import refused, violated
from tests.harness.launch import REPO_ROOT
from tests.harness.values import Values
from tests.hybrid_engine.rl.stand_ins import ALONE

ROWS = [
    {"question": f"{n} + 1?", "prompt": f"Say {n}", "answer": str(n + 1), "level": n}
    for n in range(3)
]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Return a function that writes a file of a run, with changes of its section."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    rewards = "def shortest(prompt, completion): return -len(completion.text)"
    (tmp_path / "own_rewards.py").write_text(rewards)

    def write_file(**changes: Any) -> Path:
        run = {
            "data": {"source": "rows.jsonl"},
            "reward": "exact_answer",
            "grpo": {"steps": 2},
            "out": "o",
        }
        engines = {"model": str(REPO_ROOT / "examples/gpt_rl/model"), "random_weights": True}
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({**engines, "run": {**run, **changes}}))
        return path

    return write_file


def test_a_file_names_all_arguments_of_train(write: Any) -> None:
    evaluation = {"source": "rows.jsonl", "samples": 4}
    path = write(evaluation=evaluation, reward={"short": "own_rewards.py:shortest"})
    settings = RunSettings.read(path, ["run.grpo.steps=7", "actor_config.seq_length=32"], 1)
    assert isinstance(settings.config, GrpoConfig)
    assert (settings.config.steps, settings.engines.actor_config.seq_length) == (7, 32)
    assert settings.config.key("pack") == "run.grpo.pack"
    assert settings.config.shared().keys() == {"GrpoConfig"}, "a run in Python has the same record"
    assert settings.prompts[1] == {**ROWS[1], "prompt": [{"role": "user", "content": "Say 1"}]}
    assert settings.reward["short"](settings.prompts[0], SimpleNamespace(text="four")) == -4
    assert isinstance(settings.evaluate, HeldOut)


@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        ({"template": "{question} ({level})"}, [{"role": "user", "content": "0 + 1? (0)"}]),
        (
            {"system": "Be brief."},
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 0"}],
        ),
        ({"prompt": "question", "chat": False}, "0 + 1?"),
    ],
)
def test_prompts_are_made_of_columns(write: Any, data: dict[str, Any], prompt: Any) -> None:
    path = write(data={"source": "rows.jsonl", "answer": "level", **data})
    settings = RunSettings.read(path, (), 1)
    assert settings.prompts[0] == {**ROWS[0], "prompt": prompt, "answer": 0}


def test_the_section_selects_the_algorithm(write: Any) -> None:
    path = write()
    values = yaml.safe_load(path.read_text())
    values["run"]["ppo"] = values["run"].pop("grpo")
    path.write_text(yaml.safe_dump(values | {"critic_config": {}}))
    assert isinstance(RunSettings.read(path, (), 1).config, PpoConfig)


def test_everything_that_is_wrong_is_said_at_once(write: Any) -> None:
    path = write(data={"source": "rows.jsonl", "colum": 1}, grpo={"num_steps": 1}, out=None)
    with pytest.raises(ConfigError) as caught:
        RunSettings.read(path, ["generate_config.max_model_len=0", "nothing"], 1)
    remedies = {violation.key: violation.remedy for violation in caught.value.findings}
    assert remedies.keys() == {
        "'nothing'",
        "generate_config.max_model_len",
        "run.grpo.num_steps",
        "run.data.colum",
        "run.out",
    }
    assert remedies["run.grpo.num_steps"] == "Did you mean steps?"


@pytest.mark.parametrize(
    ("changes", "key", "code"),
    [
        ({"ppo": {}}, "run", "no-algorithm"),
        ({"grpo": 3}, "run.grpo", "not-a-mapping"),
        ({"reward": "own_rewards:longest"}, "run.reward", "unknown-reward"),
        ({"reward": "own_rewards:__name__"}, "reward", "not-callable"),
        ({"data": {"source": "rows.jsonl", "template": "{task}"}}, "run.data", "unknown-column"),
        ({"data": {"source": "rows.jsonl", "answer": "soluton"}}, "run.data", "unknown-column"),
        ({"data": {"source": "absent.jsonl"}}, "run.data.source", "unreadable-data"),
        ({"evaluation": {"source": "absent.parquet"}}, "run.evaluation.source", "unreadable-data"),
        ({"evaluation": {"source": "test[:200]"}}, "run.evaluation.source", "part-of-a-file"),
        ({"data": {"source": "rows.jsonl", "subset": "main"}}, "run.data.subset", "part-of-a-file"),
    ],
)
def test_what_cannot_be_used_is_refused(write: Any, changes: Values, key: str, code: str) -> None:
    with violated(ConfigError, (key, code)):
        RunSettings.read(write(**changes), (), 1)


@pytest.mark.parametrize(
    ("answer", "text", "exact", "equal"),
    [
        ("72", "72", 1, 1),
        ("so 70 + 2\n#### 1,072", "well\n#### 1072 eggs.\n\nDone", 1, 1),
        ("#### 72", "72", 0, 1),
        ("#### 72", "#### 72.0", 1, 1),
        ("Paris", " paris", 1, 0),
        ("72", "It is 72", 0, 1),
        (r"\frac{1}{2}", r"thus \boxed{0.5}", 0, 1),
        ("72", "#### 27", 0, 0),
        ("72", "", 0, 0),
    ],
)
def test_rewards_by_name(answer: str, text: str, exact: float, equal: float) -> None:
    completion = SimpleNamespace(text=text)
    rewards = {
        name: reward({"answer": answer}, completion) for name, reward in NAMED_REWARDS.items()
    }
    assert rewards == {"exact_answer": exact, "math": equal}


def test_math_is_refused_where_it_cannot_be_interrupted() -> None:
    with ThreadPoolExecutor() as pool:
        called = pool.submit(NAMED_REWARDS["math"], {"answer": "1"}, SimpleNamespace(text="1"))
    with refused(StateError, "not-the-main-thread"):
        called.result()


def test_no_file_beside_a_run_replaces_a_library(write: Any, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise SystemExit")
    settings = RunSettings.read(write(reward={"m": "math", "s": "own_rewards:shortest"}), (), 1)
    assert settings.reward["m"]({"answer": "1"}, SimpleNamespace(text="1")) == 1


def test_pass_at_is_the_share_of_choices_with_one_that_passes() -> None:
    for n in range(1, 6):
        for passing in range(n + 1):
            for k in range(1, n + 1):
                passes = [min(choice) < passing for choice in combinations(range(n), k)]
                assert pass_at(k, n, passing) == pytest.approx(sum(passes) / len(passes))


@pytest.mark.parametrize(("samples", "temperature"), [(1, 0.0), (4, 0.7)])
def test_held_out_prompts_are_drawn_and_scored(samples: int, temperature: float) -> None:
    asked = []

    def generate(prompts: list[Any], sampling: Any) -> list[list[Any]]:
        asked.append((prompts, sampling))
        texts = [["", *[prompt] * (sampling.n - 1)] for prompt in prompts]
        return [[SimpleNamespace(text=text) for text in group] for group in texts]

    worker: Any = SimpleNamespace(generate_sequences=generate, job=ALONE)
    prompts = [{"prompt": "a", "answer": "a"}, {"prompt": "b", "answer": "c"}]
    config = GrpoConfig(temperature=0.7, max_tokens=5, stop=["."])
    figures = HeldOut(prompts, NAMED_REWARDS["exact_answer"], config, samples=samples)(worker)
    ((texts, sampling),) = asked
    assert texts == ["a", "b"]
    assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (temperature, 5, (".",))
    if samples == 1:
        assert figures == {"held_out_reward": 0, "held_out_pass_1": 0}
    else:  # three of four pass for the first prompt, none for the second
        passed = {f"held_out_pass_{k}": share for k, share in {1: 3 / 8, 2: 0.5, 4: 0.5}.items()}
        assert figures == {"held_out_reward": 3 / 8, **passed}

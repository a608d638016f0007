"""Characters, problems and reward of the task, and the committed data."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.gpt_rl import make_data, task
from hybrid_engine.errors import ConfigError
from tests.zoo.families import read_config

EXAMPLE = Path(task.__file__).parent
SUM = task.Problem("07+35=", "042")


@given(st.text(alphabet=task.CHARACTERS))
def test_encoding_and_decoding_restore_the_text(text: str) -> None:
    assert task.decode(task.encode_response(text)) == text


def test_tokens_fit_the_model() -> None:
    config = read_config(EXAMPLE / "model")
    ids = [*task.encode(task.CHARACTERS), task.END, task.PADDING]
    assert sorted(ids) == list(range(task.VOCAB_SIZE)) == list(range(config["vocab_size"]))
    assert (config["eos_token_id"], config["pad_token_id"]) == (task.END, task.PADDING)
    assert config["vocab_size"] % 64, "the example must show a vocabulary that needs padding"
    assert config["head_dim"] >= 32, "vLLM's attention on CPU requires at least 32"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (task.encode_response("042"), 1.0),
        (task.encode_response("032"), 0.0),
        (task.encode_response("42"), 0.0),
        (task.encode("042"), 0.0),  # Without END: cut off.
        ([*task.encode("042"), task.PADDING], 0.0),
        ([*task.encode("04"), task.PADDING, task.END], 0.0),
        ([task.END], 0.0),
        ([], 0.0),
    ],
)
def test_reward(response: list[int], expected: float) -> None:
    assert task.reward(SUM, response) == expected


def test_all_bad_lines_are_reported(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "1+1=", "answer": "2"}',
        "no json",
        '{"prompt": "1-1=", "answer": "0"}',
        '{"prompt": "1+1="}',
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        task.load_problems(path)
    assert [finding.key for finding in caught.value.findings] == [
        f"{path}:{number}" for number in (2, 3, 4)
    ]


def test_committed_data_equals_the_output_of_the_script() -> None:
    files = make_data.make_problems()
    assert set(files) == {path.name for path in (EXAMPLE / "data").iterdir()}
    for name, problems in files.items():
        assert (EXAMPLE / "data" / name).read_text() == make_data.to_json_lines(problems)
        assert task.load_problems(EXAMPLE / "data" / name) == problems

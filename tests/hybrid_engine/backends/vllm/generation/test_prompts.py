"""Prompts in every form, and what cannot be one; no vLLM."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_engine.backends.vllm.engine_settings import Completion
from hybrid_engine.backends.vllm.generation.model_tokenizer import ModelTokenizer
from hybrid_engine.backends.vllm.generation.prompts import check_token_ids, in_form_of, token_ids_of
from hybrid_engine.errors import ConfigError, StateError
from tests.zoo.tokenizers import save_numbers

CHAT = [{"role": "system", "content": "1"}, {"role": "user", "content": "2 3"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    path = tmp_path_factory.mktemp("model")
    save_numbers(path)
    return ModelTokenizer(str(path))


@pytest.mark.parametrize(
    ("prompts", "token_ids"),
    [
        (["1 2", "3"], [[1, 2], [3]]),
        ([CHAT, CHAT[1:]], [[7, 1, 7, 2, 3, 8], [7, 2, 3, 8]]),
        ([[1, 2], (3,), range(4, 6), np.array([6, 7]), torch.tensor([8])], [[1, 2], [3], [4, 5], [6, 7], [8]]),
        ([[np.int64(1)]], [[1]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([], []),
        (np.array(["1 2", "3"], dtype=object), [[1, 2], [3]]),
    ],
    ids=["texts", "chats", "lists", "a list of numpy's", "a tensor", "nothing", "verl's arrays"],
)
def test_every_form_becomes_token_ids(tokenizer: ModelTokenizer, prompts: Any, token_ids: list[list[int]]) -> None:
    found = token_ids_of(prompts, tokenizer)
    assert found == token_ids
    assert all(type(token) is int for each in found for token in each), "vLLM's requests hold no others"


def test_a_mask_takes_padding_away_on_both_sides(tokenizer: ModelTokenizer) -> None:
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    assert token_ids_of(torch.tensor([[0, 1, 2], [3, 4, 0]]), tokenizer, mask) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("1 2", "prompts: got '1 2'. Pass a list of prompts"),
        ({"input_ids": [[1]]}, "with attention_mask=attention_mask"),
        (None, "prompts: got None"),
        ([{"prompt": "1"}], "prompts[0]: a dict of prompt; pass its text or its messages. Pass texts, chats"),
        (CHAT, "prompts[1]: a message outside of a chat"),
        ([1, 2], "prompts[0]: 1, outside of a list"),
        ([["1", 2]], "prompts[0]: a list with '1'"),
        ([[True]], "prompts[0]: a list with True"),
        ([b"ab"], "prompts[0]: got b'ab'"),
        ([[1.5]], "prompts[0]: a list with 1.5"),
        ([CHAT, "1"], "prompts[1]: a text, but prompts[0] is a chat"),
        ([np.array([1.0])], "prompts[0]: float64 of shape (1,)"),
        ([torch.zeros(2, 2, dtype=torch.int64)], "prompts[0]: torch.int64 of shape (2, 2)"),
        ([[{"content": "1"}]], "prompts[0]: a chat with a message without role or content"),
        ([CHAT, [{"role": "tool", "content": "1"}]], "prompts[1]: the model's chat template refuses it: no tools here"),
        (torch.ones(2, 2, dtype=torch.bool), "prompts: torch.bool of shape (2, 2)"),
        (torch.ones(2, dtype=torch.int64), "prompts: torch.int64 of shape (2,)"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_named_with_its_place(tokenizer: ModelTokenizer, prompts: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        token_ids_of(prompts, tokenizer)
    assert message in str(caught.value)


def test_every_token_list_that_cannot_be_completed_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check_token_ids([[], [1] * 60, [500], [1]], max_tokens=8, limit=64, vocabulary=130)
    assert [finding.key for finding in caught.value.findings] == ["prompts[0]", "prompts[1]", "prompts[2]"]
    assert "it has no tokens" in str(caught.value)
    assert "60 tokens and 8 to generate, but 64 fit together" in str(caught.value)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([5, 6, 7], "prompts[0]: 5, outside of a list. Pass a list of token ids for each sequence: [[5, 6, 7]], not"),
        ([[True, False]], "prompts[0]: a list with "),
        ([bytearray(b"ab")], "prompts[0]: got bytearray(b'ab')"),
        ("text", "prompts: got 'text'"),
        (5, "prompts: got 5"),
    ],
)
def test_only_lists_of_token_ids_are_scored(prompts: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_token_ids(prompts, max_tokens=1, limit=64, vocabulary=130)
    assert message in str(caught.value)


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_a_directory_without_a_tokenizer_is_named(model_type: str, tmp_path: Path) -> None:
    """For Qwen2 transformers makes an empty tokenizer, in which every text has no tokens."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    with pytest.raises(ConfigError) as caught:
        token_ids_of(["1"], ModelTokenizer(str(tmp_path)))
    assert f"{tmp_path} has no tokenizer" in str(caught.value)


def test_a_tokenizer_without_a_template_takes_no_chats(tmp_path: Path) -> None:
    save_numbers(tmp_path, template=None)
    tokenizer = ModelTokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="has no chat template"):
        token_ids_of([CHAT], tokenizer)
    assert token_ids_of(["1"], tokenizer) == [[1]]


def test_text_is_made_when_it_is_asked_for(tokenizer: ModelTokenizer) -> None:
    fresh = ModelTokenizer(tokenizer.model_dir)
    ended = Completion((1, 9, 2, 3), (), "stop", stop_reason=3, tokenizer=fresh)
    assert "loaded" not in vars(fresh)
    assert ended.text == "1 2", "neither special tokens nor the one that ended it"
    assert Completion((1, 2), (), "length", tokenizer=fresh).text == "1 2"
    assert Completion((1, 2), (), "stop", "2", drawn_text="1 ", tokenizer=fresh).text == "1 "
    assert "loaded" not in vars(pickle.loads(pickle.dumps(fresh))), "a copy reads the files again"
    with pytest.raises(StateError):
        _ = Completion((1,), (), "stop").text


def test_completions_take_the_form_of_their_prompts(tokenizer: ModelTokenizer) -> None:
    completions = [[Completion((3,), (), "length", tokenizer=tokenizer)], [Completion((4, 5), (), "length")]]
    rows = in_form_of(torch.tensor([[1, 2], [6, 7]]), completions, pad_token_id=0)
    assert rows.tolist() == [[1, 2, 3, 0], [6, 7, 4, 5]]
    assert in_form_of([CHAT], completions[:1], 0) == [["3"]]
    assert in_form_of([[1, 2], [6, 7]], completions, 0) is completions
    assert in_form_of(torch.ones(0, 2, dtype=torch.int64), [], 0).shape == (0, 2)

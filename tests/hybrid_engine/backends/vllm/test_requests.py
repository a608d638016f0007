"""Requests to vLLM: samplings, prompts, templates, the end of a rollout, and caches."""

from __future__ import annotations

import pickle
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hybrid_engine.backends.vllm.completing import seeded
from hybrid_engine.backends.vllm.engine_settings import Completion, InferenceSettings, Sampling
from hybrid_engine.backends.vllm.images import ImagePrompt
from hybrid_engine.backends.vllm.prompts import (
    ModelTokenizer,
    check_token_ids,
    in_form_of,
    token_ids_of,
)
from hybrid_engine.backends.vllm.requests import (
    Request,
    asked_for,
    require_answers,
    sampling_params,
    zero_caches,
)
from hybrid_engine.errors import ArgumentError, ConfigError, ModelError, StateError
from hybrid_engine.layouts.parallelism import InferenceParallelism
from hybrid_engine.messages import decode
from tests.harness.errors import has_violations, refused, violated, violations_of
from tests.harness.values import Values
from tests.zoo.tokenizers import save_numbers

CHAT = [{"role": "system", "content": "1"}, {"role": "user", "content": "2 3"}]


# -- settings --------------------------------------------------------------------------------------


def without_addresses(value: object) -> str:
    """Return an id of a case that is the same in every process."""
    return re.sub(r" at 0x\w+", "", str(value))


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        (InferenceParallelism(0), "world_size"),
        (InferenceParallelism(4, tensor=3), "tensor"),
        (InferenceParallelism(4, expert=3), "expert"),
        (InferenceParallelism(2, rank_order=(1, 1)), "rank_order"),
    ],
)
def test_impossible_sizes_are_refused(sizes: InferenceParallelism, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        InferenceSettings("model", sizes)
    assert [finding.key for finding in caught.value.findings] == [key]


WRONG_SAMPLING: list[Values] = [
    *({"n": value} for value in ("n", 1.5, True, None, 0, 10**6)),
    *({"temperature": value} for value in (float("nan"), float("inf"), "hot", None, True, -1, 2.5)),
    *({"top_p": value} for value in (float("nan"), "x", 0, 7)),
    *({"top_k": value} for value in (-1, 1.5, 2**40)),
    *({"max_tokens": value} for value in ("abc", 0, 2**40, 1.0)),
    *({"seed": value} for value in (-1, 2**70, 1.5, False)),
    *({"stop_token_ids": value} for value in (5, "12", [-1], ["x"], [1.5], None, {1: 2}, [2**40])),
    *({key: value} for key in ("logprobs", "ignore_eos") for value in (1, None, "yes")),
    *({"stop": value} for value in (5, [1], [""], None, b"x", ["a", None])),
    {"temperature": 0.005},
    *({"min_p": value} for value in ("x", None, True, -0.1, 1.5)),
    *({"repetition_penalty": value} for value in (float("inf"), float("nan"), None, 0, -1)),
    *({"min_tokens": value} for value in (-1, 1.5, None)),
]


@pytest.mark.parametrize("values", WRONG_SAMPLING, ids=str)
def test_invalid_samplings_are_refused_by_the_constructor(values: Values) -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(**values)
    (finding,) = caught.value.findings
    assert finding.key == f"sampling.{next(iter(values))}"
    assert finding.remedy


TOGETHER: list[Values] = [{"min_tokens": 17}, {"n": 2, "temperature": 0.0}]


@pytest.mark.slow
@pytest.mark.parametrize("values", TOGETHER, ids=str)
def test_combinations_of_values_are_checked_by_vllm(values: Values) -> None:
    with violated(ArgumentError, ("sampling", "refused-by-vllm")) as caught:
        sampling_params(Sampling(**values))
    assert next(iter(values)) in caught.value.findings[0].problem
    assert ".." not in str(caught.value)


def test_all_errors_of_a_sampling_are_reported_at_once() -> None:
    keys = ("n", "max_tokens", "logprobs")
    with violated(ConfigError, *((f"sampling.{key}", "invalid-value") for key in keys)) as caught:
        Sampling(n="n", max_tokens=-1, logprobs=2)
    assert "-1" in caught.value.findings[1].problem


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(ArgumentError) as caught:
        Sampling(max_new_tokens=5, temprature=1, do_sample=True)
    assert [(finding.key, finding.remedy) for finding in caught.value.findings][:2] == [
        ("sampling.max_new_tokens", "Use max_tokens"),
        ("sampling.temprature", "Use temperature"),
    ]
    assert "Use one of n, temperature" in caught.value.findings[2].remedy
    assert pickle.loads(pickle.dumps(Sampling(n=2))) == replace(Sampling(), n=2) == Sampling(2)


@pytest.mark.slow
def test_all_errors_of_a_list_are_reported_at_once() -> None:
    from vllm import SamplingParams

    samplings: Any = [
        Sampling(),
        Sampling(min_tokens=17),
        5,
        SamplingParams(prompt_logprob_token_ids=[[1]]),
    ]
    with pytest.raises(ArgumentError) as caught:
        asked_for(samplings, 3, sampling_params)
    assert violations_of(caught.value) == [
        ("sampling", "wrong-length"),
        ("sampling[1]", "refused-by-vllm"),
        ("sampling[2]", "wrong-type"),
        ("sampling[3].prompt_logprob_token_ids", "not-supported"),
    ]


@pytest.mark.slow
def test_every_prompt_has_its_own_sampling() -> None:
    from vllm import SamplingParams

    samplings = [
        Sampling(n=2, seed=3),
        SamplingParams(
            temperature=np.float64(0.0), logit_bias={np.int64(5): np.float32(1)}, stop=["x"]
        ),
        Sampling(seed=4),
    ]
    parameters = asked_for(samplings, 3, sampling_params)
    streams = seeded(parameters, [[5]] * 3)
    assert [params.seed for params in parameters] == [3, None, 4], (
        "a sampling that prompts may share must not change"
    )
    assert [params.seed is None for params in streams] == [False, True, False]
    for params, stream in zip(parameters, streams, strict=True):
        received = decode(Request.of([5], stream).sampling, SamplingParams)
        assert received == stream
        params.seed = stream.seed
        assert received == params


def test_stop_tokens_may_be_a_list_and_stop_a_single_string() -> None:
    assert Sampling(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    assert Sampling(stop="x").stop == Sampling(stop=["x"]).stop == ("x",)


# -- prompts ---------------------------------------------------------------------------------------


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
        (
            [[1, 2], (3,), range(4, 6), np.array([6, 7]), torch.tensor([8])],
            [[1, 2], [3], [4, 5], [6, 7], [8]],
        ),
        ([[np.int64(1)]], [[1]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([], []),
        (np.array(["1 2", "3"], dtype=object), [[1, 2], [3]]),
    ],
    ids=["texts", "chats", "lists", "a list of numpy's", "a tensor", "nothing", "verl's arrays"],
)
def test_every_form_of_prompts_becomes_token_ids(
    tokenizer: ModelTokenizer, prompts: Any, token_ids: list[list[int]]
) -> None:
    actual = token_ids_of(prompts, tokenizer)
    assert actual == token_ids
    # vLLM's requests accept no integers of numpy or torch.
    assert all(type(token) is int for prompt in actual for token in prompt)


def test_a_mask_removes_padding_on_both_sides(tokenizer: ModelTokenizer) -> None:
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    assert token_ids_of(torch.tensor([[0, 1, 2], [3, 4, 0]]), tokenizer, mask) == [[1, 2], [3, 4]]


def weather(city: str, days: int = 1) -> str:
    """Return a weather forecast.

    Args:
        city: name of the city.
        days: from today.
    """
    return f"{city} {days}"


def without_hints(city):  # type: ignore[no-untyped-def]
    return city


SHOWN = (
    "{% for tool in tools or [] %}{{ tool.function.parameters.properties | length }} {% endfor %}"
    "{% if is_brief %}6 {% endif %}"
    "{% for message in messages %}7 {{ message['content'] }} {% if not loop.last "
    "%}5 {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}8{% endif %}"
)


@pytest.mark.parametrize(
    ("chat", "token_ids"),
    [
        ({}, [7, 1, 5, 7, 2, 3, 8]),
        ({"tools": [weather]}, [2, 7, 1, 5, 7, 2, 3, 8]),
        (
            {"tools": [{"function": {"parameters": {"properties": {"a": {}}}}}]},
            [1, 7, 1, 5, 7, 2, 3, 8],
        ),
        ({"chat_template_kwargs": {"is_brief": True}}, [6, 7, 1, 5, 7, 2, 3, 8]),
        ({"chat_template_kwargs": {"chat_template": "4"}}, [4]),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}", "x": 4, "documents": []}}, [4]),
        ({"add_generation_prompt": False}, [7, 1, 5, 7, 2, 3]),
        ({"continue_final_message": True}, [7, 1, 5, 7, 2, 3]),
        ({"tools": None, "chat_template_kwargs": None}, [7, 1, 5, 7, 2, 3, 8]),
    ],
    ids=without_addresses,
)
def test_a_template_gets_tools_and_variables(
    tmp_path: Path, chat: Any, token_ids: list[int]
) -> None:
    save_numbers(tmp_path, SHOWN)
    assert token_ids_of([CHAT], ModelTokenizer(str(tmp_path)), None, chat) == [token_ids]


@pytest.mark.parametrize(
    ("prompts", "chat", "expected"),
    [
        ([[1]], {"stream": True}, [("stream", "no-streaming")]),
        ([[1]], {"temperature": 1}, [("temperature", "unknown-argument")]),
        ([[1]], {"sampling_params": 1}, [("sampling_params", "unknown-argument")]),
        (torch.tensor([[1]]), {"chat_template_kwargs": {}, "tools": []}, []),
        (
            torch.tensor([[1]]),
            {"chat_template_kwargs": {"x": 1}},
            [("chat_template_kwargs", "argument-of-chats")],
        ),
        (
            ["1"],
            {"tools": [weather], "continue_final_message": True},
            [("tools", "argument-of-chats"), ("continue_final_message", "argument-of-chats")],
        ),
        (
            [CHAT],
            {"chat_template_kwargs": {"x": 1, "chat_template": "{{ thinking }}"}},
            [("chat_template_kwargs.x", "unknown-variable")],
        ),
        ([CHAT], {"tools": weather}, [("tools", "not-a-list")]),
        (
            [CHAT],
            {
                "tools": [weather, without_hints, 5],
                "chat_template_kwargs": {"tokenize": False},
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            [
                ("tools[1]", "no-schema"),
                ("tools[2]", "no-schema"),
                ("chat_template_kwargs.tokenize", "reserved-name"),
                ("add_generation_prompt", "conflicting-arguments"),
            ],
        ),
    ],
    ids=without_addresses,
)
def test_all_wrong_arguments_of_templates_are_reported_at_once(
    tokenizer: ModelTokenizer, prompts: Any, chat: Any, expected: list[tuple[str, str]]
) -> None:
    refused = violated(ArgumentError, *expected)
    with refused if expected else nullcontext():
        token_ids_of(prompts, tokenizer, None, chat)


@pytest.mark.parametrize(
    ("prompts", "key", "code"),
    [
        ("1 2", "prompts", "not-a-list"),
        ({"input_ids": [[1]]}, "prompts", "not-a-list"),
        ([{"prompt": "1"}], "prompts[0]", "invalid-prompt"),
        (CHAT, "prompts[1]", "invalid-prompt"),
        ([1, 2], "prompts[0]", "invalid-prompt"),
        ([[True]], "prompts[0]", "invalid-prompt"),
        ([b"ab"], "prompts[0]", "invalid-prompt"),
        ([[1.5]], "prompts[0]", "invalid-prompt"),
        ([CHAT, "1"], "prompts[1]", "mixed-prompts"),
        ([np.array([1.0])], "prompts[0]", "invalid-prompt"),
        ([torch.zeros(2, 2, dtype=torch.int64)], "prompts[0]", "invalid-prompt"),
        ([[{"content": "1"}]], "prompts[0]", "invalid-prompt"),
        ([CHAT, [{"role": "tool", "content": "1"}]], "prompts[1]", "refused-by-template"),
        (torch.ones(2, 2, dtype=torch.bool), "prompts", "wrong-shape"),
        (torch.ones(2, dtype=torch.int64), "prompts", "wrong-shape"),
    ],
    ids=str,
)
def test_invalid_prompts_are_named_with_their_index(
    tokenizer: ModelTokenizer, prompts: Any, key: str, code: str
) -> None:
    with pytest.raises(ArgumentError, check=has_violations((key, code), exactly=False)):
        token_ids_of(prompts, tokenizer)


def test_all_token_lists_that_cannot_be_completed_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check_token_ids([[], [1] * 60, [500], [1]], max_tokens=8, limit=64, vocabulary=130)
    assert violations_of(caught.value) == [
        ("prompts[0]", "empty-prompt"),
        ("prompts[1]", "prompt-too-long"),
        ("prompts[2]", "out-of-vocabulary"),
    ]
    assert all(number in caught.value.findings[1].problem for number in ("60", "8", "64"))


@pytest.mark.parametrize(
    ("prompts", "key"),
    [
        ([5, 6, 7], "prompts[0]"),
        ([[True, False]], "prompts[0]"),
        ([bytearray(b"ab")], "prompts[0]"),
        *((prompts, "prompts") for prompts in ("text", 5)),
    ],
)
def test_only_lists_of_token_ids_can_be_scored(prompts: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_token_ids(prompts, max_tokens=1, limit=64, vocabulary=130)
    assert caught.value.findings[0].key == key


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_a_directory_without_a_tokenizer_is_named(model_type: str, tmp_path: Path) -> None:
    # For Qwen2 transformers would build a tokenizer that finds no tokens in any text.
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    with violated(ConfigError, ("model", "no-tokenizer")) as caught:
        token_ids_of(["1"], ModelTokenizer(str(tmp_path)))
    assert str(tmp_path) in str(caught.value)


def test_a_tokenizer_without_a_template_refuses_chats(tmp_path: Path) -> None:
    save_numbers(tmp_path, template=None)
    tokenizer = ModelTokenizer(str(tmp_path))
    with violated(ConfigError, ("prompts", "no-chat-template")):
        token_ids_of([CHAT], tokenizer)
    assert token_ids_of(["1"], tokenizer) == [[1]]


def test_text_is_decoded_on_access(tokenizer: ModelTokenizer) -> None:
    fresh = ModelTokenizer(tokenizer.model_dir)
    # 9 is a special token.
    ended = Completion((1, 9, 2, 3), (), "stop", stop_reason=3, tokenizer=fresh)
    assert "loaded" not in vars(fresh)
    assert ended.text == "1 2", "special and stop tokens must be left out"
    assert Completion((1, 2), (), "length", tokenizer=fresh).text == "1 2"
    assert Completion((1, 2), (), "stop", "2", drawn_text="1 ", tokenizer=fresh).text == "1 "
    assert "loaded" not in vars(pickle.loads(pickle.dumps(fresh))), "a loaded tokenizer was pickled"
    with refused(StateError, "no-tokenizer"):
        _ = Completion((1,), (), "stop").text


def test_completions_have_the_form_of_their_prompts(tokenizer: ModelTokenizer) -> None:
    completions = [
        [Completion((3,), (), "length", tokenizer=tokenizer)],
        [Completion((4, 5), (), "length")],
    ]
    rows = in_form_of(torch.tensor([[1, 2], [6, 7]]), completions, pad_token_id=0)
    assert rows.tolist() == [[1, 2, 3, 0], [6, 7, 4, 5]]
    assert in_form_of([CHAT], completions[:1], 0) == [["3"]]
    assert in_form_of([[1, 2], [6, 7]], completions, 0) is completions
    assert in_form_of(torch.ones(0, 2, dtype=torch.int64), [], 0).shape == (0, 2)


# -- caches ----------------------------------------------------------------------------------------


def test_images_with_another_number_of_tokens_in_vllm_are_named() -> None:
    output = SimpleNamespace(prompt_token_ids=[1, 9, 9], outputs=[None])
    request = Request.of(
        ImagePrompt([1, 9, 9, 9], [1, 9], [Image.new("RGB", (1, 1))], {}), Sampling()
    )
    with refused(ModelError, "image-tokens-differ", "has 4 tokens", "3 by vLLM"):
        require_answers([output], [request], [1])


def test_every_byte_of_every_kind_of_cache_is_zeroed() -> None:
    memory = torch.full((64,), torch.nan)  # with unused elements at its end
    attention = memory[:24].view(2, 3, 4)
    latent = memory[24:54].view(5, 6)
    convolution, state, draft, held = (torch.full((8,), torch.nan) for _ in range(4))
    caches = [attention, latent, (convolution, [state]), draft.view(torch.int32), torch.tensor([])]
    layers = {str(number): SimpleNamespace(kv_cache=cache) for number, cache in enumerate(caches)}
    config = SimpleNamespace(static_forward_context={**layers, "without": SimpleNamespace()})
    # `held` is in no layer, only in the runner.
    runner = SimpleNamespace(
        kv_caches=[attention, held], vllm_config=SimpleNamespace(compilation_config=config)
    )
    zero_caches(runner)
    assert not any(tensor.any() for tensor in (memory, convolution, state, draft, held))

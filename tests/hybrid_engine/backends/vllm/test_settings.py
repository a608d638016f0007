"""Settings that cannot be: refused where they are made, with what can be instead."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from hybrid_engine.backends.vllm.engine_settings import InferenceSettings, Sampling
from hybrid_engine.backends.vllm.generation.sampling_params import sampling_params
from hybrid_engine.errors import ArgumentError, ConfigError
from hybrid_engine.layouts.parallelism import InferenceParallelism


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (InferenceParallelism(4, tensor=0), "tensor: 0 is not a valid size"),
        (InferenceParallelism(0), "world_size: 0 is not a valid size"),
        (InferenceParallelism(4, tensor=3), "tensor: TP 3 x PP 1 = 3 does not divide the world size 4"),
        (InferenceParallelism(8, tensor=2, expert=3), "expert: 3 is not a multiple of TP 2"),
        (InferenceParallelism(4, expert=3), "expert: EP 3 x PP 1 = 3 does not divide the world size 4"),
        (InferenceParallelism(3, rank_order=(0, 1)), "rank_order: it does not name each of the 3 ranks"),
        (InferenceParallelism(2, rank_order=(1, 1)), "Name every rank from 0 to 1 once"),
    ],
)
def test_impossible_sizes_are_refused(sizes: InferenceParallelism, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        InferenceSettings("model", sizes)
    assert message in str(caught.value)


WRONG_SAMPLING: list[dict[str, Any]] = [
    *({"n": value} for value in ("n", 1.5, True, None, 0, -1, 10**6)),
    *({"temperature": value} for value in (float("nan"), float("inf"), "hot", None, True, -1, 2.5)),
    *({"top_p": value} for value in (float("nan"), "x", None, 0, 7)),
    *({"top_k": value} for value in (-1, 1.5, 2**40, "x")),
    *({"max_tokens": value} for value in ("abc", -5, 2**40, 1.0, 0)),
    *({"seed": value} for value in ("x", -1, 2**70, 1.5, False)),
    *({"stop_token_ids": value} for value in (5, "12", [-1], ["x"], [1.5], None, {1: 2}, [2**40])),
    *({key: value} for key in ("logprobs", "ignore_eos") for value in (1, None, "yes")),
    *({"stop": value} for value in (5, [1], [""], None, b"x", ["a", None])),
    *({"min_p": value} for value in ("x", None, True, -0.1, 1.5)),
    *({"repetition_penalty": value} for value in (float("inf"), float("nan"), None, 0, -1)),
    *({"min_tokens": value} for value in (-1, 1.5, None)),
]


@pytest.mark.parametrize("values", WRONG_SAMPLING, ids=str)
def test_sampling_that_cannot_be_is_refused_where_it_is_made(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(**values)
    (finding,) = caught.value.findings
    assert finding.key == f"sampling.{next(iter(values))}"
    assert finding.remedy


TOGETHER: list[dict[str, Any]] = [{"min_tokens": 17}, {"n": 2, "temperature": 0.0}]


@pytest.mark.slow
@pytest.mark.parametrize("values", TOGETHER, ids=str)
def test_what_values_mean_together_vllm_checks(values: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"sampling: vLLM refuses it: .*{next(iter(values))}"):
        sampling_params(Sampling(**values))


def test_everything_wrong_with_sampling_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(n="n", temperature="hot", top_p=None, top_k="k", max_tokens=-1, seed=-1, logprobs=2, stop_token_ids=5)
    assert len(caught.value.findings) == 8
    assert "sampling.max_tokens: Input should be greater than or equal to 1, found -1. Correct" in str(caught.value)


def test_an_unknown_name_is_answered_with_ours() -> None:
    with pytest.raises(ArgumentError) as caught:
        Sampling(max_new_tokens=5, temprature=1, do_sample=True)
    assert [(found.key, found.remedy) for found in caught.value.findings][:2] == [
        ("sampling.max_new_tokens", "Use max_tokens"),
        ("sampling.temprature", "Use temperature"),
    ]
    assert "Use one of n, temperature" in caught.value.findings[2].remedy
    assert pickle.loads(pickle.dumps(Sampling(n=2))) == replace(Sampling(), n=2) == Sampling(2)


def test_stop_tokens_may_be_a_list_and_a_stop_string_alone() -> None:
    assert Sampling(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    assert Sampling(stop="x").stop == Sampling(stop=["x"]).stop == ("x",)

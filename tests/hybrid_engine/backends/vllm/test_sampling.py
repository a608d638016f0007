"""Samples depend only on seed, prompt and number; log-probabilities fit the distribution."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.backends.vllm import InferenceEngine, Sampling
from hybrid_engine.backends.vllm.completing import seeded
from hybrid_engine.backends.vllm.prompts import Prompts
from tests.harness.launch import Ranks, of_all_ranks, on_engines
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import Drawn, build, job, sizes
from tests.zoo.tokenizers import save_numbers

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm.requests import Samplings

CONFIG = {**support.LLAMA, "torch_dtype": "float32"}
PROMPTS = [[2, 3, 4, 5], [6, 7], [8, 10, 11, 12, 13], [14, 15]]
SAMPLING = Sampling(n=4, max_tokens=8, ignore_eos=True, seed=10)
SAMPLINGS = [
    replace(SAMPLING, n=1, max_tokens=3),
    replace(SAMPLING, n=1, seed=None, temperature=0.0),
    replace(SAMPLING, seed=11, temperature=0.5),
    replace(SAMPLING, n=2),
]
LUKEWARM = Sampling(temperature=0.7, max_tokens=8, ignore_eos=True, seed=1)


# -- seeds -----------------------------------------------------------------------------------------

prompt_lists = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=12)


@given(calls=st.lists(st.tuples(st.integers(0, 3), prompt_lists), min_size=2, max_size=4))
def test_a_stream_depends_on_seed_prompt_and_repetition(
    calls: list[tuple[int, list[list[int]]]],
) -> None:
    by_key: dict[tuple[int, tuple[int, ...], int], int] = {}
    for seed, prompts in calls:
        num_before: Counter[tuple[int, ...]] = Counter()
        streams = seeded([Sampling(seed=seed)] * len(prompts), prompts)
        for prompt, stream in zip(
            map(tuple, prompts), (sampling.seed for sampling in streams), strict=True
        ):
            assert stream is not None
            assert by_key.setdefault((seed, prompt, num_before[prompt]), stream) == stream
            num_before[prompt] += 1
    # Room for all completions of a prompt.
    assert all(later - earlier > 2**14 for earlier, later in pairwise(sorted(by_key.values())))


# -- engines ---------------------------------------------------------------------------------------


def build_filled(path: Path, vllm: dict[str, int] | None = None) -> InferenceEngine:
    weights = support.random_weights(CONFIG, 0, torch.float32)
    support.write_checkpoint(path, CONFIG, weights)
    if job().rank == 0:
        save_numbers(path)
    job().agreement.conclude("tokenizer")
    engine = build(str(path), CONFIG, sizes=sizes(), dtype="float32", vllm=vllm or {})
    support.write_by_records(engine.adaptor, weights)
    return engine


def draw(path: Path) -> dict[str, Drawn]:
    """Draw completions of PROMPTS in many ways; return them by way."""
    engine = build_filled(path)

    def drawn(prompts: Prompts, sampling: Samplings = SAMPLING, **arguments: Any) -> Drawn:
        groups = engine.generate_over_replicas(prompts, sampling, **arguments)
        return [[completion.token_ids for completion in group] for group in groups]

    indices = range(4)[job().rank :: job().world_size]
    ranks_prompts = [[PROMPTS[0], PROMPTS[1]], [PROMPTS[0], PROMPTS[2], PROMPTS[0]]][
        : job().world_size
    ]
    # Padding on the left.
    padded = torch.tensor([[0] * (5 - len(prompt)) + prompt for prompt in PROMPTS])
    outcomes = {
        "whole": drawn(PROMPTS),
        "split, the last first": [drawn([prompt])[0] for prompt in reversed(PROMPTS)][::-1],
        "texts": drawn([" ".join(map(str, prompt)) for prompt in PROMPTS]),
        "rows": drawn(padded, attention_mask=padded > 0),
        "repeated": drawn([PROMPTS[1], PROMPTS[0], PROMPTS[1]]),
        "next seed": drawn(PROMPTS, replace(SAMPLING, seed=11)),
        "fewer of each": drawn(PROMPTS, replace(SAMPLING, n=2)),
        "no seed": drawn(PROMPTS, replace(SAMPLING, seed=None)),
        "a list": drawn(PROMPTS, [SAMPLING] * 4),
        "samplings": drawn(PROMPTS, SAMPLINGS),
        "one by one": [
            drawn([prompt], sampling)[0]
            for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
        ],
        "lists of ranks": drawn(
            [PROMPTS[i] for i in indices], [SAMPLINGS[i] for i in indices], data="local"
        ),
        "local": drawn(ranks_prompts[job().rank], data="local"),
        "of all ranks": drawn([prompt for prompts in ranks_prompts for prompt in prompts]),
    }
    engine.shutdown()
    return outcomes


@pytest.fixture(scope="module")
def alone(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Drawn]:
    """Completions of one rank."""
    (drawn,) = engines.launch(draw, 1, tmp_path_factory.mktemp("alone"), timeout=600)
    return drawn


def check(drawn: dict[str, Drawn], alone: dict[str, Drawn]) -> None:
    """Check that completions depend neither on replicas nor on the form of a call."""
    for way in ("whole", "split, the last first", "texts", "rows", "a list"):
        assert drawn[way] == alone["whole"], way
    assert drawn["samplings"] == alone["samplings"] == drawn["one by one"]
    assert [len(group) for group in drawn["samplings"]] == [1, 1, 4, 2]
    assert len(drawn["samplings"][0][0]) == 3
    assert drawn["repeated"] == alone["repeated"]
    assert drawn["repeated"][:2] == [alone["whole"][1], alone["whole"][0]]
    assert [group[:2] for group in alone["whole"]] == drawn["fewer of each"]
    # Completions of equal prompts come from different streams.
    separate = [drawn["whole"], drawn["next seed"], drawn["no seed"], drawn["repeated"][2:]]
    completions = [completion for groups in separate for group in groups for completion in group]
    assert len(set(completions)) == len(completions) == 4 * 4 * 3 + 4


@pytest.mark.slow
def test_completions_do_not_depend_on_forms_of_calls(alone: dict[str, Drawn]) -> None:
    check(alone, alone)
    assert alone["lists of ranks"] == alone["samplings"]
    assert alone["local"] == alone["of all ranks"]


@on_engines(2, timeout=600)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_completions_do_not_depend_on_replicas(alone: dict[str, Drawn], tmp_path: Path) -> None:
    drawn = draw(tmp_path)
    check(drawn, alone)
    assert drawn["lists of ranks"] == alone["samplings"][job().rank :: 2]
    first, second = of_all_ranks(drawn["local"])
    assert drawn["of all ranks"] == first + second


@on_engines(1, timeout=600)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_completions_do_not_depend_on_parts_of_prompts(
    alone: dict[str, Drawn], tmp_path: Path
) -> None:
    """On a CPU, vLLM cannot move the generator of a request back after a part; a step computes at
    most 8 tokens.
    """
    engine = build_filled(tmp_path, vllm={"max_num_batched_tokens": 8})
    groups = engine.generate_over_replicas(PROMPTS, SAMPLING)
    engine.shutdown()
    assert [[completion.token_ids for completion in group] for group in groups] == alone["whole"]


@on_engines(1, timeout=600)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_log_probabilities_are_those_of_the_sampled_distribution(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    engine = build_filled(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for sampling in (LUKEWARM, replace(LUKEWARM, top_k=5), replace(LUKEWARM, temperature=0.0)):
        (completion,) = engine.generate(PROMPTS[:1], sampling)[0]
        assert completion.temperature == (sampling.temperature or 1.0)
        sequence = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = (
                model(sequence).logits[0, len(completion.prompt_token_ids) - 1 : -1]
                / completion.temperature
            )
        # Smallest logit within top-k.
        least = logits.topk(sampling.top_k or logits.shape[-1], dim=-1).values[:, -1:]
        expected = (
            logits.where(logits >= least, -torch.inf)
            .log_softmax(-1)
            .gather(-1, sequence[0, -8:, None])[:, 0]
        )
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
        # Log-probabilities of the unmodified logits would fail the comparison.
        plain = (
            (logits * completion.temperature)
            .log_softmax(-1)
            .gather(-1, sequence[0, -8:, None])[:, 0]
        )
        assert bool(((expected - plain).abs() > 0.01).any()) == (completion.temperature != 1)
    engine.shutdown()

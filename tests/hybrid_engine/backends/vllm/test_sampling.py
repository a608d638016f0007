"""What is drawn depends on the seed, the prompt and the number of the completion alone; and log-probabilities are those
of the distribution that it was drawn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.backends.vllm import Completion, InferenceEngine, Sampling
from hybrid_engine.backends.vllm.prompts import Prompts
from hybrid_engine.backends.vllm.replica_exchange import stream_seeds
from hybrid_engine.ranks.job import Job
from tests.harness.launch import Outcomes, Ranks
from tests.hybrid_engine.backends.vllm import support
from tests.hybrid_engine.backends.vllm.asking import Drawn, build, job, sizes
from tests.zoo.tokenizers import save_numbers

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm.requests import Samplings

CONFIG = {**support.LLAMA, "torch_dtype": "float32"}
PROMPTS = [[2, 3, 4, 5], [6, 7], [8, 10, 11, 12, 13], [14, 15]]
SAMPLING = Sampling(n=4, max_tokens=8, ignore_eos=True, seed=10)
EACH = [
    replace(SAMPLING, n=1, max_tokens=3),
    replace(SAMPLING, n=1, seed=None, temperature=0.0),
    replace(SAMPLING, seed=11, temperature=0.5),
    replace(SAMPLING, n=2),
]
WAYS = {"temperature": {"temperature": 0.7}, "top-k": {"temperature": 0.7, "top_k": 5}, "greedy": {"temperature": 0.0}}


# -- seeds -------------------------------------------------------------------------------------------------------------

prompt_lists = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=12)


@given(calls=st.lists(st.tuples(st.integers(0, 3), prompt_lists), min_size=2, max_size=4))
def test_a_stream_is_that_of_a_seed_a_prompt_and_its_repetition(calls: list[tuple[int, list[list[int]]]]) -> None:
    """Whatever else is in a call; and different ones are far enough apart for all completions of each."""
    by_key: dict[tuple[int, tuple[int, ...], int], int] = {}
    for seed, prompts in calls:
        num_before: Counter[tuple[int, ...]] = Counter()
        found = stream_seeds(seed, prompts, "global", cast(Job, SimpleNamespace()))
        for prompt, stream in zip(map(tuple, prompts), found, strict=True):
            assert stream is not None
            assert by_key.setdefault((seed, prompt, num_before[prompt]), stream) == stream
            num_before[prompt] += 1
    streams = sorted(by_key.values())
    assert all(later - earlier > 2**14 for earlier, later in pairwise(streams))


def test_without_a_seed_there_is_none() -> None:
    assert stream_seeds(None, PROMPTS, "local", cast(Job, SimpleNamespace())) == [None] * 4


# -- engines -----------------------------------------------------------------------------------------------------------


def built(directory: str, **chosen: int) -> InferenceEngine:
    base = Path(directory)
    weights = support.random_weights(CONFIG, 0, torch.float32)
    path = support.write_checkpoint(base, CONFIG, weights)
    if job().rank == 0:
        save_numbers(base)
    job().agreement.conclude("tokenizer")
    engine = build(path, CONFIG, sizes=sizes(**chosen), dtype="float32")
    support.write_by_records(engine.adaptor, weights)
    return engine


def draw(directory: str, **chosen: int) -> dict[str, Drawn]:
    """By way of asking."""
    engine = built(directory, **chosen)

    def drawn(prompts: Prompts, sampling: Samplings = SAMPLING, **how: Any) -> Drawn:
        groups = engine.generate_over_replicas(prompts, sampling, **how)
        return [[one.token_ids for one in group] for group in groups]

    own = range(4)[job().rank :: job().world_size]
    ranks_prompts = [[PROMPTS[0], PROMPTS[1]], [PROMPTS[0], PROMPTS[2], PROMPTS[0]]][: job().world_size]
    padded = torch.tensor([[0] * (5 - len(prompt)) + prompt for prompt in PROMPTS])
    found = {
        "whole": drawn(PROMPTS),
        "split, the last first": [*reversed([group for prompt in reversed(PROMPTS) for group in drawn([prompt])])],
        "texts": drawn([" ".join(map(str, prompt)) for prompt in PROMPTS]),
        "rows": drawn(padded, attention_mask=padded > 0),
        "repeated": drawn([PROMPTS[1], PROMPTS[0], PROMPTS[1]]),
        "next seed": drawn(PROMPTS, replace(SAMPLING, seed=11)),
        "fewer of each": drawn(PROMPTS, replace(SAMPLING, n=2)),
        "no seed": drawn(PROMPTS, replace(SAMPLING, seed=None)),
        "a list": drawn(PROMPTS, [SAMPLING] * 4),
        "of each": drawn(PROMPTS, EACH),
        "one by one": [group for prompt, one in zip(PROMPTS, EACH, strict=True) for group in drawn([prompt], one)],
        "lists of ranks": drawn([PROMPTS[rank] for rank in own], [EACH[rank] for rank in own], data="local"),
        "local": drawn(ranks_prompts[job().rank], data="local"),
        "of all ranks": drawn([prompt for own in ranks_prompts for prompt in own]),
    }
    engine.shutdown()
    return found


def score(directory: str) -> dict[str, list[Completion]]:
    """Completions by way of sampling, of one prompt."""
    engine = built(directory)
    sampled = {
        name: engine.generate(PROMPTS[:1], Sampling(max_tokens=8, ignore_eos=True, seed=1, **values))[0]
        for name, values in WAYS.items()
    }
    engine.shutdown()
    return sampled


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of one rank."""
    base = tmp_path_factory.mktemp("alone")
    calls = {"drawn": (draw, (str(base / "drawn"),)), "scored": (score, (str(base / "scored"),))}
    return engines.launch_in_turn(1, calls, timeout=600)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_who_is_asked_and_how_changes_no_completion(engines: Ranks, outcomes: Outcomes, tmp_path: Path) -> None:
    (alone,) = outcomes["drawn"]
    found: Sequence[dict[str, Drawn]] = engines.launch(draw, 2, str(tmp_path), timeout=600)
    for of_rank in (alone, *found):
        assert all(
            of_rank[way] == alone["whole"] for way in ("whole", "split, the last first", "texts", "rows", "a list")
        )
        assert of_rank["of each"] == alone["of each"] == of_rank["one by one"]
        assert [len(group) for group in of_rank["of each"]] == [1, 1, 4, 2]
        assert len(of_rank["of each"][0][0]) == 3
        assert of_rank["repeated"][:2] == [alone["whole"][1], alone["whole"][0]]
        assert [group[:2] for group in alone["whole"]] == of_rank["fewer of each"]
        everything = [of_rank[way] for way in ("whole", "next seed", "no seed")] + [of_rank["repeated"][2:]]
        tokens = [one for groups in everything for group in groups for one in group]
        assert len(set(tokens)) == len(tokens) == 4 * 4 * 3 + 4, "no two of them share a stream"
    assert alone["lists of ranks"] == alone["of each"]
    assert [found[rank]["lists of ranks"] for rank in (0, 1)] == [alone["of each"][rank::2] for rank in (0, 1)]
    assert alone["local"] == alone["of all ranks"]
    assert found[0]["local"] + found[1]["local"] == found[0]["of all ranks"] == found[1]["of all ranks"]
    assert found[0]["repeated"] == found[1]["repeated"] == alone["repeated"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_are_those_of_what_was_drawn_from(outcomes: Outcomes, way: str, tmp_path: Path) -> None:
    """Against transformers: of logits over the temperature, of as many as top-k leaves."""
    from transformers import AutoModelForCausalLM

    path = support.write_checkpoint(tmp_path, CONFIG, support.random_weights(CONFIG, 0, torch.float32))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    (found,) = outcomes["scored"]
    (one,) = found[way]
    sampling = Sampling(**WAYS[way])
    assert one.temperature == (sampling.temperature or 1.0)
    sequence = torch.tensor([[*one.prompt_token_ids, *one.token_ids]])
    with torch.no_grad():
        logits = model(sequence).logits[0, len(one.prompt_token_ids) - 1 : -1] / one.temperature
    least = logits.topk(sampling.top_k or logits.shape[-1], dim=-1).values[:, -1:]
    expected = logits.where(logits >= least, -torch.inf).log_softmax(-1).gather(-1, sequence[0, -8:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=1e-5, rtol=0)
    plain = (logits * one.temperature).log_softmax(-1).gather(-1, sequence[0, -8:, None])[:, 0]
    assert bool(((expected - plain).abs() > 0.01).any()) == (way != "greedy"), "so that the difference is seen"

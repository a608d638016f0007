"""Experts of each token that vLLM returns, however the token was computed (`generate_config.router_replay`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.backends.vllm import Completion, InferenceEngine, Sampling, internals
from hybrid_engine.errors import ArgumentError
from tests.harness.errors import has_violations
from tests.harness.launch import Call, Outcomes, Ranks
from tests.harness.values import Values
from tests.hybrid_engine.backends.vllm.asking import build, sizes
from tests.hybrid_engine.backends.vllm.support import QWEN3_MOE, random_weights, write_by_records, write_config

MODEL = {**QWEN3_MOE, "num_hidden_layers": 3, "num_experts": 8, "mlp_only_layers": [0]}
# The first two share a prefix of a block; together they need more blocks than there are.
PROMPTS = [list(range(2, 42)), [*range(2, 40), 99, 98], list(range(50, 93)), [7, 8, 9]]
DRAWN = Sampling(max_tokens=20, ignore_eos=True)
SQUEEZED: Values = {
    "block_size": 32,
    "num_gpu_blocks_override": 6,  # of which one is never used
    "long_prefill_token_threshold": 16,
}
LIKELIEST = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=False)
DRAFTS: Values = {
    "speculative_config": {
        **{"method": "ngram", "num_speculative_tokens": 3},
        **{"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    }
}


@contextmanager
def engine(directory: str, **settings: Any) -> Iterator[InferenceEngine]:
    path = write_config(Path(directory), MODEL)
    built = build(path, MODEL, router_replay=True, dtype="float32", **settings)
    write_by_records(built.adaptor, random_weights(MODEL, 1, torch.float32))
    built.reset_caches()
    yield built
    built.shutdown()


def experts_of(completion: Completion) -> torch.Tensor:
    """Return the experts [tokens, layers, k] of a completion, in ascending order."""
    routed = completion.routed_experts
    assert routed is not None
    numbers = torch.frombuffer(bytearray(routed.numbers), dtype=torch.int16)
    return numbers.view(-1, routed.num_layers, routed.top_k).sort(-1).values


@dataclass(frozen=True)
class Returned:
    """Completions with their experts, and experts of the same tokens computed at once.

    Attributes:
        token_ids: of each prompt and completion.
        experts: of each.
        at_once: of each as a prompt, computed in one step.
        num_preempted: sequences that were preempted.
    """

    token_ids: list[tuple[int, ...]]
    experts: list[torch.Tensor]
    at_once: list[torch.Tensor]
    num_preempted: int


def complete(directory: str, tensor: int, arguments: Values, sampling: Sampling = DRAWN) -> list[Returned]:
    """Complete the prompts twice, the second time with cached prefixes."""
    with engine(directory, sizes=sizes(tensor=tensor), vllm=arguments) as built:
        scheduler = internals.core_of(built.llm).scheduler
        num_preempted = 0
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_preempted
            num_preempted += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counted
        rounds = []
        for _ in range(2):
            completions = [group[0] for group in built.generate(PROMPTS, sampling)]
            token_ids = [(*each.prompt_token_ids, *each.token_ids) for each in completions]
            rounds.append((token_ids, [experts_of(each) for each in completions], num_preempted))
        scheduler._preempt_request = preempt
    # An engine of its own, without anything cached.
    with engine(directory, sizes=sizes(tensor=tensor)) as built:
        return [
            Returned(token_ids, experts, [computed_at_once(built, sequence) for sequence in token_ids], number)
            for token_ids, experts, number in rounds
        ]


def computed_at_once(built: InferenceEngine, sequence: Sequence[int]) -> torch.Tensor:
    built.reset_caches()
    ((completion,),) = built.generate([sequence], Sampling(temperature=0.0, max_tokens=1, ignore_eos=True))
    return experts_of(completion)[:-1]


def fail_half_way(directory: str) -> list[Returned]:
    """Generate again after a step that failed, and refuse a setting that shifts experts."""
    from vllm import SamplingParams

    with engine(directory) as built:
        step = built.llm.llm_engine.step

        def failing() -> Any:
            step()
            raise RuntimeError("injected")

        built.llm.llm_engine.step = failing
        with pytest.raises(RuntimeError, match="injected"):
            built.generate(PROMPTS, DRAWN)
        del built.llm.llm_engine.step
        with pytest.raises(
            ArgumentError, check=has_violations(("sampling.routed_experts_prompt_start", "not-supported"))
        ):
            built.generate(PROMPTS, SamplingParams(routed_experts_prompt_start=2))
        built.prompt_logprobs(PROMPTS)
        built.reset_caches()
        completions = [group[0] for group in built.generate(PROMPTS, DRAWN)]
        return [experts_of(each) for each in completions]


CASES = {"plenty of memory": (1, {}), "little memory": (1, SQUEEZED), "drafts": (1, DRAFTS, LIKELIEST)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, directory: str) -> Outcomes:
    calls: dict[str, Call] = {name: (complete, (directory, *case)) for name, case in CASES.items()}
    calls["failure"] = fail_half_way, (directory,)
    return engines.launch_in_turn(1, calls, timeout=600)


def assert_complete(rounds: Sequence[Returned]) -> None:
    for returned in rounds:
        for token_ids, experts, at_once in zip(returned.token_ids, returned.experts, returned.at_once, strict=True):
            # The last token was sampled, but not computed.
            assert experts.shape == (len(token_ids) - 1, 3, 2)
            assert torch.equal(experts, at_once)
            assert not experts[:, 0].any()  # a dense layer
            for layer in (1, 2):
                assert (experts[:, layer, 0] < experts[:, layer, 1]).all()
                # so that shifted experts would differ
                assert (experts[1:, layer] != experts[:-1, layer]).any()


@pytest.mark.parametrize("name", CASES)
def test_every_computed_token_has_the_experts_of_a_computation_at_once(outcomes: Outcomes, name: str) -> None:
    """With chunks of prompts, cached prefixes and preempted sequences."""
    (rounds,) = outcomes[name]
    assert_complete(rounds)
    assert (rounds[0].num_preempted > 0) == (name == "little memory")


def test_every_rank_of_a_replica_has_the_same_experts(engines: Ranks, directory: str) -> None:
    first, second = engines.launch(complete, 2, directory, 2, {}, timeout=600)
    assert_complete(first)
    assert_complete(second)
    assert all(map(torch.equal, first[0].experts, second[0].experts))


def test_a_failed_call_leaves_no_experts(outcomes: Outcomes) -> None:
    ((rounds,), (after,)) = outcomes["plenty of memory"], outcomes["failure"]
    assert all(map(torch.equal, rounds[0].experts, after))

"""Experts of each token that vLLM returns, however the token was computed
(`generate_config.router_replay`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hybrid_engine.backends.vllm import Completion, InferenceEngine, Sampling, internals
from hybrid_engine.errors import ArgumentError
from tests.harness.errors import has_violations
from tests.harness.launch import of_all_ranks, on_engines
from tests.harness.values import Values
from tests.hybrid_engine.backends.vllm.asking import build, sizes
from tests.hybrid_engine.backends.vllm.support import (
    QWEN3_MOE,
    random_weights,
    write_by_records,
    write_config,
)

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
def engine(directory: Path, **settings: Any) -> Iterator[InferenceEngine]:
    path = write_config(directory, MODEL)
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


def check_experts(path: Path, tensor: int, arguments: Values, sampling: Sampling = DRAWN) -> int:
    """Complete the prompts twice, the second time with cached prefixes, and compare with a
    computation at once.

    Returns the number of preempted sequences of the first time.
    """
    with engine(path, sizes=sizes(tensor=tensor), vllm=arguments) as built:
        scheduler = internals.core_of(built.llm).scheduler
        with mock.patch.object(
            scheduler, "_preempt_request", wraps=scheduler._preempt_request
        ) as preempt:
            completions = [group[0] for group in built.generate(PROMPTS, sampling)]
            num_preempted = preempt.call_count
            completions += [group[0] for group in built.generate(PROMPTS, sampling)]
    # An engine of its own, without anything cached.
    with engine(path, sizes=sizes(tensor=tensor)) as built:
        for completion in completions:
            token_ids = (*completion.prompt_token_ids, *completion.token_ids)
            experts = experts_of(completion)
            # The last token was sampled, but not computed.
            assert experts.shape == (len(token_ids) - 1, 3, 2)
            assert torch.equal(experts, computed_at_once(built, token_ids))
            assert not experts[:, 0].any()  # a dense layer
            for layer in (1, 2):
                assert (experts[:, layer, 0] < experts[:, layer, 1]).all()
                # so that shifted experts would differ
                assert (experts[1:, layer] != experts[:-1, layer]).any()
            assert all(map(torch.equal, of_all_ranks(experts), [experts] * tensor))
    return num_preempted


def computed_at_once(built: InferenceEngine, sequence: Sequence[int]) -> torch.Tensor:
    built.reset_caches()
    ((completion,),) = built.generate(
        [sequence], Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
    )
    return experts_of(completion)[:-1]


CASES = {
    "plenty of memory": ({}, DRAWN),
    "little memory": (SQUEEZED, DRAWN),
    "drafts": (DRAFTS, LIKELIEST),
}


@on_engines(1, timeout=600)
@pytest.mark.parametrize("name", CASES)
def test_every_computed_token_has_the_experts_of_a_computation_at_once(
    tmp_path: Path, name: str
) -> None:
    """Also with chunks of prompts, cached prefixes and preempted sequences."""
    num_preempted = check_experts(tmp_path, 1, *CASES[name])
    assert (num_preempted > 0) == (name == "little memory")


@on_engines(2, timeout=600)
def test_every_rank_of_a_replica_has_the_same_experts(tmp_path: Path) -> None:
    check_experts(tmp_path, 2, {})


@on_engines(1, timeout=600)
def test_a_failed_call_leaves_no_experts(tmp_path: Path) -> None:
    """Also a setting that shifts experts is refused."""
    from vllm import SamplingParams

    with engine(tmp_path) as built:
        before = [experts_of(group[0]) for group in built.generate(PROMPTS, LIKELIEST)]
        step = built.llm.llm_engine.step

        def fail() -> None:
            step()
            raise RuntimeError("injected")

        with (
            mock.patch.object(built.llm.llm_engine, "step", fail),
            pytest.raises(RuntimeError, match="injected"),
        ):
            built.generate(PROMPTS, LIKELIEST)
        refusal = has_violations(("sampling.routed_experts_prompt_start", "not-supported"))
        with pytest.raises(ArgumentError, check=refusal):
            built.generate(PROMPTS, SamplingParams(routed_experts_prompt_start=2))
        built.prompt_logprobs(PROMPTS)
        built.reset_caches()
        after = [experts_of(group[0]) for group in built.generate(PROMPTS, LIKELIEST)]
        assert all(map(torch.equal, before, after))

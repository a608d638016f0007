"""The job of stage 2: a Qwen3 model, its configuration, and what is asked of vLLM; the same in every process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hybrid_engine.backends.vllm.engine_settings import Sampling
from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.tools.verify.cases import SEQ_LENGTH
from tests.gpu.sizes import MEMORY_SHARE, Sizes, sizes_of
from tests.zoo.families import write_config
from tests.zoo.published_configs import QWEN3_8B

GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
_NOT_COMPILED = {"transformer": {"bias_activation_fusion": False, "bias_dropout_fusion": False}}
"""Fusions that Megatron leaves to torch.compile."""
_PROMPT_LENGTHS = (5, 17, 8, 30)


@dataclass(frozen=True)
class SmallJob:
    """The job of one process; making it writes the model's config.json.

    Attributes:
        directory: of all processes, with the model's config.json below `model`.
        device: "cuda" or "cpu".
        eager: without CUDA graphs, and without compilation on either side.
        vllm: further engine arguments of vLLM.
    """

    directory: Path
    device: str
    eager: bool
    vllm: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        others = {"bos_token_id": 0, "eos_token_id": 1}
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        write_config(self.directory / "model", {**QWEN3_8B, **self.sizes.model, **others})

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.device)

    @property
    def checkpoint(self) -> Path:
        return self.directory / ("eager" if self.eager else "graphs") / "checkpoint"

    @property
    def answers(self) -> Path:
        """Where they leave their completions of these weights, as JSON: of each prompt tokens and log-probabilities."""
        return self.checkpoint.with_name("completions.json")

    def read_answers(self) -> list[Answer]:
        """Skips the check where they left none."""
        if not self.answers.is_file():
            pytest.skip("both engines left no completions: see test_stage2b_together.py")
        return [Answer(*pair) for pair in json.loads(self.answers.read_text())]

    def config(self) -> HybridConfig:
        return load_config(
            {
                "model": str(self.directory / "model"),
                "random_weights": True,
                "actor_config": {
                    "params_dtype": self.sizes.params_dtype,
                    "seq_length": SEQ_LENGTH,
                    "optimizer": {"lr": 1e-3},
                    "overrides": _NOT_COMPILED if self.eager else {},
                },
                "generate_config": {
                    "verify": "full",
                    "max_model_len": 2 * SEQ_LENGTH,
                    "max_num_seqs": 16,
                    "bucket_mb": self.sizes.bucket_mb,
                    "kv_cache_mb": self.sizes.kv_cache_mb,
                    "gpu_memory_utilization": MEMORY_SHARE,
                    "enforce_eager": self.eager,
                    "timeout_seconds": 120,
                    "vllm": dict(self.vllm),
                },
            },
            world_size=1,
        )

    def prompts(self) -> list[list[int]]:
        return [[(7 * start + 3 * at) % 500 for at in range(length)] for start, length in enumerate(_PROMPT_LENGTHS)]


class Answer(NamedTuple):
    """A completion: its tokens, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


MOST_APART = 0.1
"""Nats between two engines that compute the same in batches of other sizes, for which bfloat16 has other kernels."""


def differences_of_answers(found: Sequence[Answer], expected: Sequence[Answer]) -> str:
    """Say where completions of engines that batch otherwise differ first; "" where they do not, but for ties.

    Up to the first token that differs the contexts are the same, and both tokens are the most probable there: engines
    that compute the same find them about as probable. From there on the contexts differ.
    """
    for prompt, (one, other) in enumerate(zip(found, expected, strict=True)):
        for at, pair in enumerate(zip(zip(*one, strict=True), zip(*other, strict=True), strict=True)):
            (token, logprob), (expected_token, expected_logprob) = pair
            if abs(logprob - expected_logprob) > MOST_APART:
                there = f"token {expected_token} with {expected_logprob:.3f} nats"
                return f"prompt {prompt}, position {at}: token {token} with {logprob:.3f} nats, not {there}"
            if token != expected_token:
                break
    return ""


def differences(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> str:
    """Say where completions differ first; "" where they do not."""
    for prompt, (one, other) in enumerate(zip(found, expected, strict=True)):
        if list(one) != list(other):
            at = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), "the end")
            return f"prompt {prompt} differs from token {at} on: {list(one)}, not {list(other)}"
    return ""

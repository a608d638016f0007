"""The job of stage 2, the same in every process: a Qwen3 model, its configuration, and prompts."""

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
    """The job of a process. The constructor writes the model's config.json.

    Attributes:
        directory: directory of all processes; holds the model's config.json below `model`.
        device: "cuda" or "cpu".
        eager: without CUDA graphs, and without compilation on either side.
        vllm: further engine arguments of vLLM.
    """

    directory: Path
    device: str
    eager: bool
    vllm: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = {"bos_token_id": 0, "eos_token_id": 1}
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        write_config(self.directory / "model", {**QWEN3_8B, **self.sizes.model, **tokens})

    @property
    def sizes(self) -> Sizes:
        return sizes_of(self.device)

    @property
    def checkpoint(self) -> Path:
        return self.directory / ("eager" if self.eager else "graphs") / "checkpoint"

    @property
    def answers(self) -> Path:
        """JSON file of both engines' completions: tokens and log-probabilities per prompt."""
        return self.checkpoint.with_name("completions.json")

    def read_answers(self) -> list[Answer]:
        """Return the completions of both engines; skip the check if there are none."""
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
        return [
            [(7 * start + 3 * index) % 500 for index in range(length)]
            for start, length in enumerate(_PROMPT_LENGTHS)
        ]


class Answer(NamedTuple):
    """Tokens of a completion and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


MAX_NATS = 0.1
"""Largest difference between log-probabilities of other bfloat16 kernels."""


def differences_of_answers(actual: Sequence[Answer], expected: Sequence[Answer]) -> str:
    """Return the first difference between completions of engines with other batches; "" if they
    differ by ties only.

    Up to the first other token the contexts are equal, and there both tokens are the most probable:
    engines that compute the same have about the same log-probability for both. Later contexts
    differ and are not compared.
    """
    for prompt, (answer, reference) in enumerate(zip(actual, expected, strict=True)):
        columns = zip(*answer, *reference, strict=True)
        for index, (token, logprob, expected_token, expected_logprob) in enumerate(columns):
            if abs(logprob - expected_logprob) > MAX_NATS:
                instead = f"token {expected_token} with {expected_logprob:.3f} nats"
                return (
                    f"prompt {prompt}, position {index}: token {token} with "
                    f"{logprob:.3f} nats, not {instead}"
                )
            if token != expected_token:
                break
    return ""


def differences(actual: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> str:
    """Return the first difference between completions; "" if there is none."""
    for prompt, (tokens, reference) in enumerate(zip(actual, expected, strict=True)):
        if list(tokens) != list(reference):
            pairs = enumerate(zip(tokens, reference, strict=False))
            start = next((index for index, pair in pairs if pair[0] != pair[1]), "the end")
            return (
                f"prompt {prompt} differs from token {start} on: {list(tokens)}, not "
                f"{list(reference)}"
            )
    return ""

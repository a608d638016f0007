"""The job of stage 2: a Qwen3 model, its configuration, and what is asked of vLLM; the same in every process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_engine.backends.vllm.engine_settings import Sampling
from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.verification.cases import SEQ_LENGTH
from tests.zoo.families import write_config
from tests.zoo.published_configs import QWEN3_8B

GREEDY = Sampling(temperature=0.0, max_tokens=16, ignore_eos=True)
_ADAM_NBYTES = 18  # of a parameter with bfloat16
_TINY = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
}
_ON_A_GPU = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12, "vocab_size": 32000},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}
_NUM_PARAMETERS = 0.75e9
"""Of the model on a GPU."""
NEEDED_ON_HOST = int(1.5 * _ADAM_NBYTES * _NUM_PARAMETERS)
"""Bytes that must be free with a GPU: what is offloaded, and libraries."""
MEMORY_SHARE, KV_CACHE_MB = 0.3, 512
"""vLLM's on a GPU: it refuses to start where less than this share is free after its communicators are made."""
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
        sizes = _ON_A_GPU if self.device == "cuda" else _TINY
        others = {"max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1}
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        write_config(self.directory / "model", {**QWEN3_8B, **sizes, **others})

    @property
    def checkpoint(self) -> Path:
        return self.directory / ("eager" if self.eager else "graphs") / "checkpoint"

    @property
    def answers(self) -> Path:
        """Where they leave their completions of these weights, as JSON."""
        return self.checkpoint.with_name("completions.json")

    def config(self) -> HybridConfig:
        on_gpu = self.device == "cuda"
        return load_config(
            {
                "model": str(self.directory / "model"),
                "random_weights": True,
                "actor_config": {
                    "params_dtype": "bfloat16" if on_gpu else "float32",
                    "seq_length": SEQ_LENGTH,
                    "optimizer": {"lr": 1e-3},
                    "overrides": _NOT_COMPILED if self.eager else {},
                },
                "generate_config": {
                    "verify": "full",
                    "max_model_len": 2 * SEQ_LENGTH,
                    "max_num_seqs": 16,
                    "bucket_mb": 64 if on_gpu else 1,
                    "kv_cache_mb": KV_CACHE_MB if on_gpu else 8,
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


def differences(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> str:
    """Say where completions differ first; "" where they do not."""
    for prompt, (one, other) in enumerate(zip(found, expected, strict=True)):
        if list(one) != list(other):
            at = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), "the end")
            return f"prompt {prompt} differs from token {at} on: {list(one)}, not {list(other)}"
    return ""

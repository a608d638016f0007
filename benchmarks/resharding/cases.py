"""Cases: models, given by their config.json, and pairs of layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.config import GenerateConfig, HybridConfig, load_config
from tests.zoo.published_configs import QWEN3_8B

QWEN2_5: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
"""Qwen2.5-0.5B in its real sizes. Its 2 key/value heads allow TP=1 and TP=2."""

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 24,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""A small Qwen3-MoE: 24 layers with 32 experts of 3 tensors each are 2,304 expert tensors."""

TINY: dict[str, Any] = {
    **QWEN2_5,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 64,
}
"""Model for tests of the benchmarks."""

QWEN3_1_7B: dict[str, Any] = {
    **QWEN3_8B,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
SMALL: dict[str, Any] = {
    **QWEN3_1_7B,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 4096,
}
"""Model for switches over the GPU in software: 29.4 million parameters, in tensors that are large
enough for memory of their own in vLLM."""
QWEN3_4B: dict[str, Any] = {
    **QWEN3_8B,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
}

MODELS = {
    "qwen2.5-0.5b": QWEN2_5,
    "qwen3-moe-2304": QWEN3_MOE,
    "qwen3-1.7b": QWEN3_1_7B,
    "qwen3-4b": QWEN3_4B,
    "qwen3-8b": QWEN3_8B,
    "small": SMALL,
    "tiny": TINY,
}


_TRAIN_KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_INFER_KEYS = {
    "tp": "infer_tensor_parallel_size",
    "pp": "infer_pipeline_parallel_size",
    "ep": "infer_expert_parallel_size",
}


def _keys(text: str, names: dict[str, str]) -> dict[str, int]:
    """Convert `tp=2,pp=2` to keys of the configuration."""
    sizes = dict(part.split("=") for part in text.split(","))
    return {names[name]: int(size) for name, size in sizes.items() if name != "dp"}


@dataclass(frozen=True)
class Case:
    """A model and two layouts; the data parallel size follows from the number of ranks.

    Attributes:
        in_quick: part of `--quick`.
        trains: with gradients and optimizer; otherwise training holds frozen weights only, which
            takes less memory.
        bucket_mb: generate_config.bucket_mb.
    """

    model: str
    ranks: int
    train: str
    infer: str
    in_quick: bool = False
    trains: bool = False
    bucket_mb: int = GenerateConfig().bucket_mb

    @property
    def name(self) -> str:
        return f"{self.model}: {self.train} -> {self.infer} on {self.ranks}"

    def write_model(self, directory: Path) -> Path:
        """Write config.json to a directory of the model below `directory`; return it."""
        path = directory / self.model
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(MODELS[self.model], indent=2))
        return path

    def config(
        self, directory: Path, vllm: Mapping[str, Any] | None = None, **generate: Any
    ) -> HybridConfig:
        """Build the configuration, with the model below `directory`. Raises ConfigError.

        `vllm` has additional engine arguments, `generate` additional keys of generate_config.
        """
        training = _keys(self.train, _TRAIN_KEYS)
        inference = _keys(self.infer, _INFER_KEYS)
        values = {
            "model": str(self.write_model(directory)),
            "random_weights": True,
            "actor_config": {
                **training,
                # avoids padding, which other contenders do not support
                "make_vocab_size_divisible_by": 32,
                "sequence_parallel": training.get("tensor_model_parallel_size", 1) > 1
                and "num_experts" in MODELS[self.model],
                "params_dtype": "bfloat16",
                "seq_length": 64,
                "frozen_parameters": [] if self.trains else ["*"],
            },
            "generate_config": {
                **inference,
                "max_model_len": 64,
                "max_num_seqs": 4,
                "kv_cache_mb": 64,
                "bucket_mb": self.bucket_mb,
                "vllm": dict(vllm or {}),
                **(ON_A_GPU if torch.cuda.is_available() else {}),
                **generate,
            },
        }
        return load_config(values, self.ranks, weights_only=True)


ON_A_GPU = {"gpu_memory_utilization": 0.2, "enforce_eager": True}
"""Leaves room for Megatron's weights; capturing graphs would only lengthen the start."""

DENSE = "qwen2.5-0.5b"
EXPERTS = "qwen3-moe-2304"

CASES: tuple[Case, ...] = (
    Case(DENSE, 2, "tp=2", "tp=1,dp=2"),
    Case(DENSE, 4, "tp=2,pp=2", "tp=2,dp=2", in_quick=True),
    Case(EXPERTS, 2, "ep=2,dp=2", "tp=2", in_quick=True),
    Case(EXPERTS, 4, "ep=4,dp=4", "tp=2,dp=2"),
)

GPU_CASES = (
    Case("qwen3-1.7b", 1, "tp=1", "tp=1", in_quick=True),
    Case("qwen3-8b", 1, "tp=1", "tp=1"),
)
"""Cases on a machine with a GPU."""

TINY_CASE = Case("tiny", 2, "tp=2", "tp=1,dp=2")
"""Runs with `--only tiny` alone."""


def chosen(
    only: str, quick: bool, *, trains: bool = False, buckets: Sequence[int] = ()
) -> list[Case]:
    """Return the cases of a run, sorted by the number of ranks, for each size of bucket in MB."""
    if only == TINY_CASE.model:
        cases = [TINY_CASE]
    else:
        candidates = GPU_CASES if torch.cuda.is_available() else CASES
        cases = [case for case in candidates if only in case.name and (case.in_quick or not quick)]
    return [
        replace(case, trains=trains, bucket_mb=bucket_mb)
        for case in sorted(cases, key=lambda case: case.ranks)
        for bucket_mb in buckets or (case.bucket_mb,)
    ]

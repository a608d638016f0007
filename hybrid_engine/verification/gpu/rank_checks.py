"""Stage 3, two or more GPUs: layouts, experts, NCCL, the order of ranks, and reads from GPU to GPU.

    python -m hybrid_engine.verification.gpu.rank_checks GPUS VLLM_ARGUMENTS RESULTS

Each layout is a case of `verify` on ranks of its own: every vLLM parameter bitwise what vLLM's own loader gives, and
both engines compute what transformers computes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hybrid_engine.files.scratch import scratch_directory
from hybrid_engine.verification.cases import Case, case_of
from hybrid_engine.verification.gpu.checks import CannotCheckError, Check, Planned, judged, run_checks
from hybrid_engine.verification.gpu.flat_models import ModelShape
from hybrid_engine.verification.gpu.gpus import Gpu
from hybrid_engine.verification.gpu.memory_checks import BUCKET_NBYTES, REPEAT, pull_checks
from hybrid_engine.verification.gpu.needs import what_a_gpu_lacks
from hybrid_engine.verification.gpu.pull_figures import PullTask
from hybrid_engine.verification.gpu.small_job import KV_CACHE_MB, MEMORY_SHARE
from hybrid_engine.verification.verify import SCRATCH_PREFIX, run_cases

_PULLING = "pulling from GPU to GPU"
_LAYERS = 2
_MEMORY = {"gpu_memory_utilization": MEMORY_SHARE, "kv_cache_mb": KV_CACHE_MB}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
_QWEN3_MOE = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.001,
}
_TRAIN = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_INFER = {"tp": "infer_tensor_parallel_size", "ep": "infer_expert_parallel_size"}


def _sizes(text: str) -> dict[str, int]:
    return {key: int(size) for key, _, size in (part.partition("=") for part in text.split(","))}


@dataclass(frozen=True)
class LayoutCheck:
    """A case.

    Attributes:
        name: of its check.
        train, infer: sizes.
        model: config.json of the model whose form the small one has.
        generate: keys of `generate_config`.
        needs: planned checks that must have gone well before.
    """

    name: str
    train: str
    infer: str
    model: Mapping[str, Any] = field(default_factory=lambda: _QWEN3)
    generate: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Of the job."""
        return math.prod(size for key, size in _sizes(self.train).items() if key in ("tp", "pp", "dp"))

    def case(self, vllm: Mapping[str, Any], directory: Path) -> Case:
        """The case of `verify`; its models are written below `directory`. Raises ConfigError."""
        (directory / "model").mkdir()
        (directory / "model" / "config.json").write_text(json.dumps(self.model))
        actor: dict[str, Any] = {_TRAIN[key]: size for key, size in _sizes(self.train).items() if key != "dp"}
        generate = {_INFER[key]: size for key, size in _sizes(self.infer).items()}
        model, small, actor = directory / "model", directory / "small", {**actor, "params_dtype": "bfloat16"}
        case = case_of(self.name, model, small, self.num_ranks, actor, generate, _LAYERS)
        keys = {"enforce_eager": True, "vllm": dict(vllm), **_MEMORY, **case.generate, **self.generate}
        return replace(case, generate=keys)


LAYOUT_CHECKS = (
    LayoutCheck(  # where it may not be read, this cannot be asked for, and the others' ranks send messages
        "TP 2 to 1, memory of the other GPU read",
        *("tp=2,dp=1", "tp=1"),
        generate={"transport": "shared_memory"},
        needs=(_PULLING,),
    ),
    LayoutCheck("TP 2 to 1, NCCL", "tp=2,dp=1", "tp=1", generate={"transport": "collective"}),
    LayoutCheck("PP 2 to TP 2, CUDA graphs", "pp=2,dp=1", "tp=2", generate={"enforce_eager": False}),
    LayoutCheck("experts, EP 2 to TP 2", "ep=2,etp=1,dp=2", "tp=2", _QWEN3_MOE),
    LayoutCheck("experts, EP 2 to EP 2", "ep=2,etp=1,dp=2", "tp=2,ep=2", _QWEN3_MOE),
    LayoutCheck("ranks out of order, CUDA graphs", "tp=2,pp=2,dp=1", "tp=4", generate={"enforce_eager": False}),
)


def checked(layout: LayoutCheck, gpus: Sequence[Gpu], vllm: Mapping[str, Any]) -> Iterator[Check]:
    """The verdict of `verify`, on the first of these GPUs. Raises CannotCheckError where they are not enough."""
    if len(gpus) < layout.num_ranks:
        raise CannotCheckError(f"needs {layout.num_ranks} GPUs, and {len(gpus)} are seen")
    needed = enumerate(gpus[: layout.num_ranks])
    if lacking := [text for index, gpu in needed for text in what_a_gpu_lacks(3, index, gpu)]:
        raise CannotCheckError("; ".join(lacking))
    with scratch_directory(SCRATCH_PREFIX) as directory:
        # check-gpu ends this process, and the ranks with it, when its budget is over
        (verdict,) = run_cases([layout.case(vllm, directory)], layout.num_ranks, math.inf)
    figure = f"{verdict.num_parameters} parameters bitwise in {verdict.seconds:.0f} s"
    note = "; ".join(verdict.faults)
    yield judged(layout.name, not verdict.faults, figure, note=note, seconds=verdict.seconds)


def pulled() -> Iterator[Check]:
    """A process on each of two GPUs reads the other's memory."""
    yield from pull_checks(PullTask(("cuda:0", "cuda:1"), ModelShape(2), BUCKET_NBYTES, REPEAT), is_judged=True)


def planned(gpus: Sequence[Gpu], vllm: Mapping[str, Any]) -> list[Planned]:
    """In order."""
    layouts = [Planned(layout.name, partial(checked, layout, gpus, vllm), layout.needs) for layout in LAYOUT_CHECKS]
    return [Planned(_PULLING, pulled), *layouts]


def main(gpus: str, vllm: str, results: str) -> None:
    """Run the stage; each case starts its own ranks."""
    seen = [Gpu(**{**gpu, "users": tuple(gpu["users"])}) for gpu in json.loads(gpus)]
    run_checks(planned(seen, json.loads(vllm)), Path(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

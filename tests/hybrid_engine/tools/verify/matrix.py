"""The matrix: training layouts x inference layouts x model families, each with both real engines.

    python -m tests.hybrid_engine.tools.verify.matrix [--only SUBSTRING] [--json FILE] [--suite]
    [--record]

Every case is one run of `tools/verify/verify.py`: three switches with changing weights, after which
vLLM's parameters are bitwise as its loader sets them, logits of both engines match transformers,
and bytes are minimal. The plan of each cell is the recorded one (golden.json).

A sample is in the test suite (`in_suite`): every family once, on few ranks, with float16, bfloat16
by messages, virtual stages, both deliveries of adapters, and vLLM's pipeline and expert
parallelism.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from hybrid_engine.tools.verify.cases import Case, case_of
from hybrid_engine.tools.verify.comparison import Verdict
from hybrid_engine.tools.verify.verify import run_cases
from tests.gpu.sizes import MEMORY_SHARE, is_software_gpu, sizes_of
from tests.harness.values import Values
from tests.hybrid_engine.tools.verify import golden
from tests.zoo.families import INFER_KEYS, TRAIN_KEYS, write_config
from tests.zoo.published_configs import PUBLISHED

_TRAIN_FLAGS: dict[str, Values] = {
    "sp": {"sequence_parallel": True},
    "bf16": {"params_dtype": "bfloat16"},
    "fp16": {"params_dtype": "float16"},
    "overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "replicated": {"use_distributed_optimizer": False},
    "embedding+loss": {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
}


@dataclass(frozen=True)
class Combination:
    """Cell of the matrix.

    `train` and `infer` are parallel sizes and flags: "tp2 pp2 sp" is TP 2 and PP 2 with sequence
    parallelism; other ranks are data parallel. "fsdp2 replicas2" is FSDP2. `actor` and `generate`
    are further keys.
    """

    family: str
    num_ranks: int
    train: str
    infer: str
    in_suite: bool = False
    actor: Values = field(default_factory=dict)
    generate: Values = field(default_factory=dict)
    model: Values = field(default_factory=dict)
    num_layers: int = 4
    label: str = ""

    @property
    def name(self) -> str:
        label = f" ({self.label})" if self.label else ""
        return (
            f"{self.family}: {self.train or 'dp'} -> {self.infer or 'dp'} on "
            f"{self.num_ranks}{label}"
        )

    def case(self, directory: Path) -> Case:
        """Return the case for `verify`, with its small model below `directory`."""
        published = write_config(directory / "published", {**PUBLISHED[self.family], **self.model})
        actor = {"params_dtype": "float32"}
        for word in self.train.split():
            actor |= _TRAIN_FLAGS.get(word, {})
        actor |= _fsdp(self.train) or _keys(self.train, TRAIN_KEYS)
        generate = {**of_this_machine(), **_keys(self.infer, INFER_KEYS), **self.generate}
        actor |= self.actor
        return case_of(
            self.name,
            published,
            directory / "model",
            self.num_ranks,
            actor,
            generate,
            self.num_layers,
        )


def of_this_machine() -> Values:
    """Return keys of `generate_config` for a machine with CUDA, where ranks share GPUs."""
    if not torch.cuda.is_available():
        return {}
    sizes = sizes_of("cuda")
    memory = {"gpu_memory_utilization": MEMORY_SHARE, "kv_cache_mb": sizes.kv_cache_mb}
    checks = (
        {"check_compute": "off"} if is_software_gpu() else {}
    )  # takes as long as the comparison
    return {"enforce_eager": True, "vllm": dict(sizes.vllm), **memory, **checks}


def _keys(words: str, names: dict[str, str]) -> dict[str, int]:
    """Return the sizes of a side: "tp2 sp" -> {"tensor_model_parallel_size": 2}."""
    sizes = (
        re.fullmatch(r"([a-z]+)(\d+)", word) for word in words.split() if word not in _TRAIN_FLAGS
    )
    return {names[size[1]]: int(size[2]) for size in sizes if size}


def _fsdp(words: str) -> Values:
    if not words.startswith("fsdp"):
        return {}
    replicas = int(words.partition(" replicas")[2] or 1)
    strategy = "FULL_SHARD" if replicas == 1 else "HYBRID_SHARD"
    return {"fsdp": {"sharding_strategy": strategy, "replicas": replicas}}


ONE_KV_HEAD = {"num_attention_heads": 8, "num_key_value_heads": 1}
TWO_KV_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
SIX_HEADS = {"hidden_size": 768, "num_attention_heads": 6, "num_key_value_heads": 6}

LORA = {"lora": {"rank": 4}}
APART = {"lora_delivery": "adapter"}
BY_MESSAGES = {"transport": "collective"}
COMPRESSED = {"compress_reshard": True}
UNTIED = {"tie_word_embeddings": False}
FROZEN = ["embedding.*", "decoder.layers.1.*", "*.linear_proj.weight"]


@dataclass(frozen=True)
class _Layout:
    """Both sides of a cell, used with several families."""

    num_ranks: int
    train: str
    infer: str
    generate: Values = field(default_factory=dict)
    label: str = ""


_SHARDED = (
    _Layout(2, "fsdp2", ""),
    _Layout(2, "fsdp2", "tp2", COMPRESSED, "compressed"),
    _Layout(2, "fsdp2", "pp2"),
    _Layout(4, "fsdp4", "tp2", BY_MESSAGES, "by messages"),
    _Layout(4, "fsdp4", "tp4"),
    _Layout(4, "fsdp4", "tp2 pp2", COMPRESSED, "compressed"),
    _Layout(4, "fsdp2 replicas2", "tp2"),
    _Layout(4, "fsdp2 replicas2", "tp2 pp2", COMPRESSED, "compressed"),
)
_SHARDED_EXPERTS = (
    _Layout(2, "fsdp2", "ep2"),
    _Layout(4, "fsdp4", "tp2 ep4"),
    _Layout(4, "fsdp2 replicas2", "tp2 ep2", COMPRESSED, "compressed"),
)
_UNEVEN = (_Layout(3, "fsdp3", ""), _Layout(3, "fsdp3", "pp3", COMPRESSED, "compressed"))
"""Neither rows nor experts divide by 3."""
_SHARDED_FAMILIES: tuple[tuple[str, Values, str, tuple[_Layout, ...]], ...] = (
    ("qwen2.5", UNTIED, "biases, untied", _SHARDED + _UNEVEN),
    ("qwen2.5", {}, "", _SHARDED + _UNEVEN),
    ("qwen3-moe", {}, "", _SHARDED + _SHARDED_EXPERTS + _UNEVEN),
    ("deepseek-v3", {}, "", _SHARDED + _SHARDED_EXPERTS + _UNEVEN),
    *(
        (family, {}, "", _SHARDED[:1])
        for family in ("llama-2", "qwen3", "mixtral", "deepseek-v2", "gemma-2", "gemma-3")
    ),
    *((family, {}, "", _SHARDED[1:2]) for family in ("llama-3", "glm-4-0414", "gpt-2")),
)


def _sharded_cells() -> Iterator[Combination]:
    """Yield cells of FSDP2: all layouts of four families, and one layout of each other family.

    GLM-4 is excluded: vLLM serves it by transformers' class, and patches the class of the trained
    model.
    """
    for family, model, kind, layouts in _SHARDED_FAMILIES:
        for layout in layouts:
            label = ", ".join(filter(None, (kind, layout.label)))
            in_suite = family == "qwen3-moe" and layout is _SHARDED[1]
            sides = (layout.num_ranks, layout.train, layout.infer)
            yield Combination(
                family, *sides, in_suite, generate=layout.generate, model=model, label=label
            )


def _hybrid(
    family: str,
    num_ranks: int,
    train: str,
    infer: str,
    pattern: str,
    generate: Values | None = None,
) -> Combination:
    label = f"HybridModel {pattern}"
    actor = {"hybrid_layer_pattern": pattern}
    return Combination(
        family, num_ranks, train, infer, actor=actor, generate=generate or {}, label=label
    )


_HYBRID: tuple[Combination, ...] = (
    _hybrid("llama-3", 2, "tp2", "", "*-*-*-*-"),
    _hybrid("llama-3", 2, "pp2 bf16", "tp2", "*-*-*-|*-", BY_MESSAGES),
    _hybrid("qwen3", 2, "pp2", "pp2", "*-*|-*-*-"),
    _hybrid("qwen2.5", 4, "tp2 pp2 sp", "tp4", "*-|*|-*-|*-"),
    _hybrid("qwen3-moe", 2, "ep2", "tp2", "*E*E*E*E"),
    _hybrid("qwen3-moe", 4, "pp2 ep2", "tp2 ep4", "*E*|E*E*E"),
    _hybrid("mixtral", 4, "tp2 sp ep2 etp1 bf16", "tp4", "*E*E*E*E"),
    _hybrid("deepseek-v2", 2, "ep2", "tp2", "+-+E+E+E"),
)
_HAS_HYBRID = Version(importlib.metadata.version("megatron-core")) >= Version("0.19.0")


def _cells(*names: str, **settings: Any) -> Iterator[Combination]:
    """Yield cells by their names without a label."""
    for name in names:
        family, train, infer, num_ranks, suite = re.split(": | -> | on |, |$", name, maxsplit=4)
        sides = ("" if side == "dp" else side for side in (train, infer))
        yield Combination(family, int(num_ranks), *sides, bool(suite), **settings)


MATRIX: tuple[Combination, ...] = (
    *_sharded_cells(),
    *(_HYBRID if _HAS_HYBRID else ()),
    # dense: tensor, pipeline, data parallelism, up and down
    *_cells(
        "llama-2: tp2 -> dp on 2",
        "llama-2: dp -> tp2 on 2",
        "llama-2: tp2 bf16 -> tp2 on 2",
        "llama-2: tp2 fp16 -> dp on 2, in the suite",
        "llama-3: pp2 -> tp2 on 2",
        "llama-3: tp2 -> pp2 on 2, in the suite",
        "llama-3: tp4 -> tp2 on 4",
        "llama-3: tp2 sp -> tp4 on 4",
        "llama-3: tp2 pp2 -> tp2 pp2 on 4",
        "llama-3: pp4 -> tp4 on 4",
    ),
    *_cells(
        "llama-3: pp2 bf16 -> tp2 on 2, in the suite",
        "llama-3: tp2 pp2 bf16 -> tp4 on 4",
        generate=BY_MESSAGES,
        label="by messages",
    ),
    *_cells(
        "llama-3: tp2 pp2 -> tp4 pp2 on 8",
        "llama-3: tp4 pp2 -> tp2 on 8",
    ),
    # few key/value heads
    *_cells(
        "llama-3: tp4 -> tp4 on 4",
        "llama-3: tp2 -> tp4 on 4",
        model=ONE_KV_HEAD,
        label="one kv head",
    ),
    *_cells(
        "qwen3: tp4 -> tp2 on 4", "qwen3: tp2 -> tp4 on 4", model=TWO_KV_HEADS, label="two kv heads"
    ),
    # sizes that are not multiples
    Combination("qwen3", 6, "tp2 pp3", "tp3", model=SIX_HEADS, num_layers=6),
    *_cells(
        "qwen3: tp3 pp2 -> tp2 on 6",
        "qwen2.5: tp3 -> tp2 on 6",
        "llama-2: tp3 -> pp3 on 3",
        model=SIX_HEADS,
    ),
    # tied embeddings, over stages and virtual stages
    *_cells(
        "qwen2.5: tp2 -> dp on 2",
        "qwen2.5: pp2 -> pp2 on 2",
        "qwen2.5: tp2 pp2 -> tp2 on 4",
        "qwen2.5: pp2 vpp2 -> tp2 on 2, in the suite",
        "qwen2.5: tp2 pp2 vpp2 sp -> dp on 4",
        "qwen2.5: pp2 -> tp2 pp2 on 4",
    ),
    Combination("qwen2.5", 3, "pp3 vpp2", "pp3", num_layers=6),
    # uneven pipelines
    Combination("qwen3", 2, "pp2 first1", "tp2", num_layers=3),
    Combination("qwen3", 4, "pp4 first1 last1", "tp2 pp2", num_layers=6),
    Combination("qwen3", 2, "pp2 embedding+loss", "pp2", num_layers=4),
    Combination(
        "qwen3",
        4,
        "tp2 pp2",
        "tp2",
        actor={"pipeline_model_parallel_layout": "Et|t*3L"},
        label="layout",
    ),
    Combination(
        "qwen2.5",
        4,
        "pp2 vpp2",
        "tp2 pp2",
        actor={"pipeline_model_parallel_layout": "E|t*2|t|tL"},
        label="layout",
    ),
    Combination(
        "qwen3", 2, "pp2", "tp2", actor={"noop_layers": [1, 4]}, label="layers 1 and 4 do nothing"
    ),
    Combination(
        "qwen3",
        2,
        "pp2",
        "pp2",
        num_layers=5,
        actor={"noop_layers": [5]},
        label="uneven both, no-op layer",
    ),
    # vocabulary and optimizers
    Combination(
        "qwen3", 2, "tp2", "", actor={"make_vocab_size_divisible_by": 128}, label="padded to 256"
    ),
    *_cells(
        "qwen3: vocab1 -> tp2 on 2",
        "qwen3: overlap -> tp2 on 2",
        "qwen3: tp2 overlap bf16 -> tp4 on 4",
        "qwen3: tp2 replicated -> dp on 2",
    ),
    # adapters, merged during the switch; frozen weights
    *_cells(
        "qwen3: tp2 sp -> dp on 2",
        "llama-3: pp2 bf16 -> tp2 on 2",
        "llama-2: tp2 replicated -> dp on 2",
        actor=LORA,
        label="adapters",
    ),
    Combination(
        "deepseek-v2",
        2,
        "ep2",
        "tp2",
        actor={"lora": {"target_modules": ["linear_proj", "linear_kv_up_proj"]}},
        label="adapters",
        in_suite=True,
    ),
    *_cells(
        "qwen3: tp2 sp -> dp on 2, in the suite",
        "llama-2: pp2 -> tp2 on 2",
        actor=LORA,
        generate=APART,
        label="adapters apart",
    ),
    *_cells(
        "qwen3-moe: ep2 -> tp2 on 2, in the suite",
        "qwen3-moe: tp2 sp etp2 -> ep2 on 2",
        "mixtral: tp2 sp ep2 etp1 -> tp2 on 2",
        actor=LORA,
        label="adapters",
    ),
    *_cells(
        "qwen3: dp -> tp2 on 2",
        "qwen2.5: tp2 replicated -> pp2 on 2",
        actor={"frozen_parameters": FROZEN},
        label="frozen",
    ),
    # float32 in training, cast to bfloat16 at the source
    Combination("qwen3", 2, "tp2", "", generate=COMPRESSED, label="compressed"),
    Combination(
        "llama-3",
        2,
        "pp2",
        "tp2",
        generate={**COMPRESSED, **BY_MESSAGES},
        label="compressed messages",
    ),
    Combination("qwen3-moe", 2, "ep2", "tp2", generate=COMPRESSED, label="compressed"),
    # rank order
    Combination(
        "qwen3", 4, "tp4", "tp2", generate={"infer_rank_order": "sequential"}, label="sequential"
    ),
    *_cells(
        "qwen3: tp4 pp2 -> tp2 pp2 on 8",
    ),
    # context parallel ranks are replicas
    *_cells(
        "qwen3: tp2 cp2 -> tp4 on 4",
        "qwen3-moe: cp2 ep2 -> tp2 on 4",
    ),
    # experts
    *_cells(
        "qwen3-moe: ep2 -> tp2 on 2",
        "qwen3-moe: ep2 -> ep2 on 2, in the suite",
        "qwen3-moe: tp2 sp ep2 etp1 -> tp2 on 4",
        "qwen3-moe: ep4 -> tp2 ep2 on 4",
        "qwen3-moe: ep2 -> ep4 on 4",
    ),
    Combination("qwen3-moe", 3, "ep3", "ep3", model={"num_experts": 12}, label="12 experts"),
    *_cells(
        "qwen3-moe: tp2 sp ep2 etp2 -> tp4 on 4",
        "qwen3-moe: pp2 ep2 -> tp2 ep4 on 4",
        "qwen3-moe: pp2 vpp2 ep2 -> tp4 on 4",
        "qwen3-moe: tp2 sp etp2 -> tp2 pp2 on 4",
        "qwen3-moe: tp2 sp ep4 etp1 overlap -> tp2 ep2 on 4",
        "qwen3-moe: tp2 sp pp2 ep2 etp1 -> tp4 ep8 on 8",
        "qwen3-moe: tp2 sp ep4 etp2 -> tp2 pp2 ep2 on 8",
        "mixtral: ep2 -> tp2 on 2, in the suite",
        "mixtral: tp2 sp etp2 -> ep2 on 2",
        "mixtral: tp2 sp ep2 etp1 bf16 -> tp4 on 4",
        "mixtral: pp2 ep2 -> tp2 pp2 on 4",
    ),
    # latent attention, shared experts, router bias, multi-token prediction
    *_cells(
        "deepseek-v2: ep2 -> tp2 on 2",
        "deepseek-v2: tp2 sp ep2 etp1 -> tp2 ep2 on 4",
        "deepseek-v2: pp2 ep2 -> tp4 on 4",
        "deepseek-v3: dp -> tp2 on 2",
        "deepseek-v3: tp2 sp ep2 etp1 -> tp2 ep2 on 2, in the suite",
        "deepseek-v3: tp2 sp ep2 etp1 -> tp2 ep2 on 4",
        "deepseek-v3: pp2 ep2 -> tp2 ep4 on 4",
        "deepseek-v3: ep4 bf16 -> tp2 pp2 on 4",
        "deepseek-v3: tp2 sp pp2 ep2 etp1 -> tp4 on 8",
    ),
    # other families
    *_cells(
        "glm-4: tp2 -> dp on 2, in the suite",
        "glm-4: tp2 pp2 -> tp4 on 4",
        "glm-4-0414: tp2 -> pp2 on 2",
        "glm-4-0414: dp -> tp2 on 2, in the suite",
        "gemma-2: tp2 -> dp on 2",
        "gemma-2: pp2 -> tp2 on 2, in the suite",
        "gemma-2: tp2 pp2 -> tp2 pp2 on 4",
        "gemma-3: tp2 -> pp2 on 2",
        "gemma-3: pp2 -> tp2 on 2, in the suite",
        "gpt-2: tp2 -> dp on 2",
        "gpt-2: pp2 -> tp2 on 2, in the suite",
        "gpt-2: tp2 pp2 -> tp2 pp2 on 4",
    ),
)

CASES_PER_LAUNCH = 12


Run = Callable[[Sequence[Case], int], list[Verdict]]
"""Runs cases on a number of ranks, which describe their plans (`golden.main`)."""
_RUN: Run = functools.partial(run_cases, module=golden.__name__)


def run(
    combinations: Sequence[Combination], directory: Path, run_cases: Run = _RUN
) -> Iterator[tuple[Combination, Verdict]]:
    """Run the cells, all with the same number of ranks in one launch; yield results as they
    arrive."""
    cases = {
        combination.name: combination.case(directory / str(n))
        for n, combination in enumerate(combinations)
    }
    for combination in combinations:
        cases[combination.name].config(
            combination.num_ranks
        )  # raises for an invalid cell before any runs
    for num_ranks in sorted({combination.num_ranks for combination in combinations}):
        same = [combination for combination in combinations if combination.num_ranks == num_ranks]
        for start in range(0, len(same), CASES_PER_LAUNCH):
            group = same[start : start + CASES_PER_LAUNCH]
            verdicts = run_cases([cases[combination.name] for combination in group], num_ranks)
            yield from zip(group, verdicts, strict=True)


def main() -> int:
    """Run the matrix and print a line per cell; return the number of failed cells as exit
    status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--ranks", type=int, default=0, help="cells with this number of ranks")
    parser.add_argument("--suite", action="store_true", help="only cells of the test suite")
    parser.add_argument("--json", type=Path, help="write all verdicts here")
    parser.add_argument(
        "--record", action="store_true", help="record the cells that run in golden.json"
    )
    arguments = parser.parse_args()
    chosen = [cell for cell in MATRIX if arguments.only in cell.name]
    if arguments.ranks:
        chosen = [cell for cell in chosen if cell.num_ranks == arguments.ranks]
    if arguments.suite:
        chosen = [cell for cell in chosen if cell.in_suite]
    started = time.perf_counter()
    verdicts = []
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="matrix-") as directory:
        for _, verdict in run(chosen, Path(directory)):
            verdicts.append(verdict)
            if arguments.record:
                golden.record(verdict, [cell.name for cell in MATRIX])
            faults = golden.faults(verdict, golden.read())
            num_failed += bool(faults)
            print(_line(verdict, faults), flush=True)
            if arguments.json:
                arguments.json.write_text(
                    json.dumps([verdict.as_dict() for verdict in verdicts], indent=1)
                )
    print(
        f"{len(verdicts)} combinations, {num_failed} failed, {time.perf_counter() - started:.0f} s"
    )
    return num_failed


def _line(verdict: Verdict, faults: Sequence[str]) -> str:
    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.1e}"

    words = [
        "FAILED" if faults else "ok",
        verdict.name,
        f"{verdict.num_parameters} parameters",
        f"{verdict.bytes_received} of {verdict.bytes_least} B",
        f"{verdict.trainer} {figure(verdict.training)}",
        f"vllm {figure(verdict.vllm)}",
        f"{verdict.seconds:.0f} s",
    ]
    return "  ".join(words) + "".join(f"\n    {fault}" for fault in faults)


if __name__ == "__main__":
    sys.exit(main())

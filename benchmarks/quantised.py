"""Bytes and log-probabilities of rollouts in bf16, fp8, mxfp8, mxfp4 and nvfp4.

    python -m benchmarks.quantised --json FILE [--methods fp8 nvfp4]

Measured: a switch from FSDP2 to vLLM on one rank, with a small Qwen3 of random weights, and vLLM's
log-probabilities of random tokens, compared with those in bf16. vLLM computes on the CPU with
kernels of torch (tests/zoo/block_formats.py) that dequantise weights; activations stay in bf16.
Counted: the bytes of one copy of published models whose projections are quantised.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launching import figures_of_ranks, main_or_rank, parser_of, write_figures
from hybrid_engine import HybridEngine
from hybrid_engine.models import table_for
from hybrid_engine.models.block_quantization import BLOCK_METHODS, BlockQuantization
from hybrid_engine.models.quantization_configs import block_config, format_in
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.layout import DTYPE_NBYTES
from tests.zoo import block_formats, sharded_models
from tests.zoo.families import served_config, write_config
from tests.zoo.published_configs import QWEN3_8B, QWEN3_30B_A3B

SIZES = {
    **{"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    **{"vocab_size": 1024, "torch_dtype": "bfloat16"},
}
UNQUANTISED = "bf16"
PUBLISHED = {"Qwen3-8B": QWEN3_8B, "Qwen3-30B-A3B": QWEN3_30B_A3B}


def main() -> None:
    """Count and measure; print and write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--methods", nargs="+", choices=BLOCK_METHODS, default=list(BLOCK_METHODS))
    arguments = parser.parse_args()
    methods = [UNQUANTISED, *arguments.methods]
    job = {"methods": methods}
    figures = figures_of_ranks("benchmarks.quantised", job, 1, timeout=1800)
    for name, config in PUBLISHED.items():
        table = table_for(config)
        for method in methods:
            figures[method][f"{name}_bytes"] = nbytes_of(table, method)
    for method, row in figures.items():
        print(f"{method:6}", ", ".join(f"{name} {value:.6g}" for name, value in row.items()))
    write_figures(arguments.json, figures)


def nbytes_of(table: ModelTable, method: str) -> int:
    """Return the bytes of one copy of a model whose projections are quantised."""
    served = table
    if method != UNQUANTISED:
        form = format_in(block_config({}, method) or {})
        names = [name for name in table.shapes if name.endswith("_proj.weight")]
        served = BlockQuantization(dict(zip(names, names, strict=True)), form).served(table)
    total = 0
    for name, shape in served.shapes.items():
        itemsize = DTYPE_NBYTES[served.dtypes.get(name, "bfloat16")]
        total += torch.Size(shape).numel() * itemsize
    return total


def run_rank(values: dict[str, Any]) -> None:
    """Switch with every method; write the figures."""
    dist.init_process_group("gloo")  # outlives the engines
    figures = {}
    rows = torch.randint(SIZES["vocab_size"], (8, 48), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as directory, block_formats.kernels_in_torch():
        path = write_config(Path(directory), served_config("qwen3", **SIZES))
        exact = None
        for method in values["methods"]:
            nbytes, scored = switch(path, method, rows)
            exact = scored if exact is None else exact
            gaps = (scored - exact).abs()
            figures[method] = {
                "switch_bytes": nbytes,
                "largest_difference": float(gaps.max()),
                "mean_difference": float(gaps.mean()),
            }
    Path(values["out"]).write_text(json.dumps(figures))
    dist.destroy_process_group()


def switch(path: Path, method: str, rows: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return the bytes of a switch, and vLLM's log-probabilities [num_rows, length - 1]."""
    torch.manual_seed(0)
    model = sharded_models.from_config(path)
    settings = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_mb": 32, "verify": "full"}
    if method != UNQUANTISED:
        settings["quantization"] = method
    engine = HybridEngine(
        model=model,
        rollout_config={"model": str(path), **settings},
        train_config={"fsdp_config": {}},
        compress_reshard=True,
    )
    with engine.rollout_context():
        report: Any = engine.sharding.last_report
        scored = torch.stack(engine.inference.prompt_logprobs(rows.tolist()))
    engine.shutdown()
    return report.bytes_own + report.bytes_received, scored


if __name__ == "__main__":
    main_or_rank(main, run_rank)

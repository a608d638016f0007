"""Time and memory of planning against the number of ranks and of tensors; no device and no weights are needed.

    python -m benchmarks.planning [--json FILE] [--repeat N]

Four series, every point in a process of its own:

    dense     318 tensors, 64 to 2,048 ranks, training TP=4 x PP=4, inference TP=2
    experts   DeepSeek-V3's 46,181 tensors, 64 to 2,048 ranks, training TP=8 x PP=8 x EP=8, inference TP=8 x EP=8
    tensors   8 to 256 experts in each of 58 layers, 512 ranks, the same layouts
    target    DeepSeek-V3, 2,048 ranks, training TP=8 x PP=16 x EP=32, inference TP=8 with EP=8 and EP=32

`exponent` is the slope of log(seconds) over log(size) between the two largest sizes: 1 is linear.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it is started by its path

from benchmarks.launching import parser_of, write_figures
from hybrid_engine.config import GenerateConfig
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.planning.planner import plan_sides
from hybrid_engine.planning.rank_order import rank_order
from hybrid_engine.planning.summary import summarize

RANKS = (64, 128, 256, 512, 1024, 2048)
RANKS_PER_HOST = 8

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
}
DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 35,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Point:
    """One job to plan."""

    series: str
    size: int
    config: dict[str, Any]
    train: TrainParallelism
    infer: InferenceParallelism


@dataclass(frozen=True)
class Figures:
    """Seconds of each step, and bytes of the process at its largest.

    Attributes:
        layouts: of all ranks, both sides. summary: bytes of all ranks. order: the best rank order. rank_plan: every
            transfer of one rank.
    """

    series: str
    size: int
    num_ranks: int
    num_tensors: int
    layouts: float
    summary: float
    order: float
    rank_plan: float
    transfers: int
    peak_nbytes: int


def points() -> Iterator[Point]:
    """All of them."""
    ends = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
    for ranks in RANKS:
        train = TrainParallelism(
            ranks, tensor=4, pipeline=4, **{ends[0]: 9, ends[1]: 8}
        )  # 35 = 9 + 9 + 9 + 8
        yield Point("dense", ranks, DENSE, train, InferenceParallelism(ranks, tensor=2))
    for ranks in RANKS:
        yield Point(
            "experts",
            ranks,
            DEEPSEEK_V3,
            _experts(ranks),
            InferenceParallelism(ranks, tensor=8, expert=8),
        )
    for experts in (8, 16, 32, 64, 128, 256):
        # a token's experts are of 4 of 8 groups
        config = {
            **DEEPSEEK_V3,
            "n_routed_experts": experts,
            "num_experts_per_tok": min(8, experts // 2),
        }
        yield Point(
            "tensors", experts, config, _experts(512), InferenceParallelism(512, tensor=8, expert=8)
        )
    for expert in (8, 32):
        train = TrainParallelism(
            2048, tensor=8, pipeline=16, expert=32, expert_tensor=1, **{ends[1]: 1}
        )
        yield Point(
            "target",
            expert,
            DEEPSEEK_V3,
            train,
            InferenceParallelism(2048, tensor=8, expert=expert),
        )


def _experts(ranks: int) -> TrainParallelism:
    return TrainParallelism(
        ranks, tensor=8, pipeline=8, expert=8, expert_tensor=1, num_layers_in_last_pipeline_stage=5
    )


def measure(point: Point) -> Figures:
    """Plan one job, step by step."""
    table = table_for(point.config)
    train, infer = point.train, point.infer
    hosts = [rank // RANKS_PER_HOST for rank in range(train.world_size)]
    unserved = [name for name in table.shapes if not table.is_served(name)]
    times = [time.perf_counter()]
    source, destination = training_side(table, train), inference_side(table, infer)
    times.append(time.perf_counter())
    summary = summarize(source.holdings, destination.holdings, hosts)
    times.append(time.perf_counter())
    rank_order("auto", source.holdings, destination.holdings, hosts, infer.tensor)
    times.append(time.perf_counter())
    bucket_nbytes, rank = GenerateConfig().bucket_mb * 1024**2, train.world_size // 2
    plan = plan_sides(source, destination, hosts, bucket_nbytes, unserved, rank)
    times.append(time.perf_counter())
    if (summary.received != summary.lower_bound).any():
        raise AssertionError("more is received than the least")
    layouts, bytes_of_all, order, rank_plan = (
        after - before for before, after in itertools.pairwise(times)
    )
    transfers = sum(len(bucket.transfers) for bucket in plan.buckets)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sizes = point.series, point.size, train.world_size, len(table.shapes)
    return Figures(*sizes, layouts, bytes_of_all, order, rank_plan, transfers, peak)


def best_of(point: Point, repeat: int) -> Figures:
    """The fastest of some runs, each in a fresh process."""
    context = multiprocessing.get_context("spawn")
    runs = []
    for _ in range(repeat):
        with context.Pool(1) as pool:
            runs.append(pool.apply(measure, (point,)))
    return min(runs, key=_total)


def _total(figures: Figures) -> float:
    return figures.layouts + figures.summary + figures.order + figures.rank_plan


def exponents(rows: Sequence[Figures]) -> dict[str, float]:
    """Growth of a series between its two largest sizes; steps and their sum."""
    before, after = sorted(rows, key=lambda row: row.size)[-2:]
    step = math.log(after.size / before.size)
    names = ("layouts", "summary", "order", "rank_plan")
    grown = {name: math.log(getattr(after, name) / getattr(before, name)) / step for name in names}
    return {**grown, "all": math.log(_total(after) / _total(before)) / step}


def main() -> None:
    """Measure everything, print a table for each series, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--repeat", type=int, default=2, help="runs of each point; the fastest counts"
    )
    parser.add_argument("--series", nargs="*", help="only these series")
    arguments = parser.parse_args()
    rows: dict[str, list[Figures]] = {}
    for point in points():
        if not arguments.series or point.series in arguments.series:
            rows.setdefault(point.series, []).append(best_of(point, arguments.repeat))
    growth = {name: exponents(series) for name, series in rows.items() if name != "target"}
    for name, series in rows.items():
        _print(name, series, growth.get(name))
    figures = {name: [asdict(row) for row in series] for name, series in rows.items()}
    write_figures(arguments.json, {"figures": figures, "exponents": growth})


def _print(name: str, rows: Sequence[Figures], growth: dict[str, float] | None) -> None:
    columns = (
        "size",
        "ranks",
        "tensors",
        "layouts",
        "summary",
        "order",
        "one rank's plan",
        "transfers",
        "peak MiB",
    )
    table = Table(title=f"{name}: seconds", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        seconds = (f"{value:.3f}" for value in (row.layouts, row.summary, row.order, row.rank_plan))
        counts = (str(value) for value in (row.size, row.num_ranks, row.num_tensors))
        table.add_row(*counts, *seconds, str(row.transfers), f"{row.peak_nbytes / 2**20:.0f}")
    if growth is not None:
        steps = (f"{growth[step]:.2f}" for step in ("layouts", "summary", "order", "rank_plan"))
        table.add_section()
        table.add_row("exponent", "", "", *steps, f"all {growth['all']:.2f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()

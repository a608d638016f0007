"""Time and memory of planning by the number of ranks and of tensors, without devices and weights.

    python -m benchmarks.planning [--json FILE] [--repeat N]

Four series; each point runs in a separate process:

    dense     318 tensors, 64 to 2,048 ranks, TP=4 x PP=4 to TP=2
    experts   DeepSeek-V3's 46,181 tensors, 64 to 2,048 ranks, TP=8 x PP=8 x EP=8 to TP=8 x EP=8
    tensors   8 to 256 experts in each of 58 layers, 512 ranks, the same layouts
    target    DeepSeek-V3, 2,048 ranks, TP=8 x PP=16 x EP=32 to TP=8 with EP=8 and EP=32

`exponent` is the slope of log(seconds) over log(size) between the two largest sizes: 1 is linear.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.launching import parser_of, write_figures
from hybrid_engine.config import GenerateConfig
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models import table_for
from hybrid_engine.planning.planner import plan_sides
from hybrid_engine.planning.rank_order import rank_order
from hybrid_engine.planning.summary import summarize
from tests.zoo.published_configs import DEEPSEEK_V3

RANKS = (64, 128, 256, 512, 1024, 2048)
RANKS_PER_HOST = 8

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
    """A job to plan."""

    series: str
    size: int
    config: dict[str, Any]
    train: TrainParallelism
    infer: InferenceParallelism


@dataclass(frozen=True)
class Figures:
    """Seconds of each step, and the peak memory of the process in bytes.

    Attributes:
        layouts: seconds for the layouts of all ranks of both sides.
        summary: seconds to sum up the bytes of all ranks.
        order: seconds to find the best rank order.
        rank_plan: seconds to plan every transfer of one rank.
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
    """Yield the points of all series."""
    for ranks in RANKS:
        train = TrainParallelism(
            ranks,
            tensor=4,
            pipeline=4,
            num_layers_in_first_pipeline_stage=9,
            num_layers_in_last_pipeline_stage=8,  # 35 = 9 + 9 + 9 + 8
        )
        yield Point("dense", ranks, DENSE, train, InferenceParallelism(ranks, tensor=2))
    for ranks in RANKS:
        infer = InferenceParallelism(ranks, tensor=8, expert=8)
        yield Point("experts", ranks, DEEPSEEK_V3, _experts(ranks), infer)
    infer = InferenceParallelism(512, tensor=8, expert=8)
    for experts in (8, 16, 32, 64, 128, 256):
        # with 8 experts in 8 groups, a token cannot have 8 experts of 4 groups
        config = {
            **DEEPSEEK_V3,
            "n_routed_experts": experts,
            "num_experts_per_tok": min(8, experts // 2),
        }
        yield Point("tensors", experts, config, _experts(512), infer)
    train = TrainParallelism(
        2048,
        tensor=8,
        pipeline=16,
        expert=32,
        expert_tensor=1,
        num_layers_in_last_pipeline_stage=1,
    )
    for expert in (8, 32):
        infer = InferenceParallelism(2048, tensor=8, expert=expert)
        yield Point("target", expert, DEEPSEEK_V3, train, infer)


def _experts(ranks: int) -> TrainParallelism:
    return TrainParallelism(
        ranks, tensor=8, pipeline=8, expert=8, expert_tensor=1, num_layers_in_last_pipeline_stage=5
    )


def measure(point: Point) -> Figures:
    """Plan a job step by step."""
    table = table_for(point.config)
    num_ranks = point.train.world_size
    hosts = [rank // RANKS_PER_HOST for rank in range(num_ranks)]
    unserved = [name for name in table.shapes if not table.is_served(name)]
    times = [time.perf_counter()]
    source = training_side(table, point.train)
    destination = inference_side(table, point.infer)
    times.append(time.perf_counter())
    summary = summarize(source, destination, hosts)
    times.append(time.perf_counter())
    rank_order("auto", source, destination, hosts, point.infer.tensor)
    times.append(time.perf_counter())
    bucket_nbytes = GenerateConfig().bucket_mb * 1024**2
    plan = plan_sides(source, destination, hosts, bucket_nbytes, unserved, num_ranks // 2)
    times.append(time.perf_counter())
    if (summary.received != summary.lower_bound).any():
        raise AssertionError("ranks receive more than the least possible bytes")
    return Figures(
        point.series,
        point.size,
        num_ranks,
        len(table.shapes),
        *(after - before for before, after in itertools.pairwise(times)),
        transfers=sum(len(bucket.transfers) for bucket in plan.buckets),
        peak_nbytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def best_of(point: Point, repeat: int) -> Figures:
    """Return the fastest of `repeat` runs, each in a fresh process."""
    context = multiprocessing.get_context("spawn")
    runs = []
    for _ in range(repeat):
        with context.Pool(1) as pool:
            runs.append(pool.apply(measure, (point,)))
    return min(runs, key=_total)


def _total(figures: Figures) -> float:
    return figures.layouts + figures.summary + figures.order + figures.rank_plan


def exponents(rows: Sequence[Figures]) -> dict[str, float]:
    """Return the growth of each step and of their sum between the two largest sizes of a series."""
    before, after = sorted(rows, key=lambda row: row.size)[-2:]
    step = math.log(after.size / before.size)
    names = ("layouts", "summary", "order", "rank_plan")
    grown = {name: math.log(getattr(after, name) / getattr(before, name)) / step for name in names}
    return {**grown, "all": math.log(_total(after) / _total(before)) / step}


def main() -> None:
    """Measure, print a table per series, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--repeat", type=int, default=2, help="runs per point; the fastest counts")
    parser.add_argument("--series", nargs="*", help="only these series")
    arguments = parser.parse_args()
    rows: dict[str, list[Figures]] = {}
    for point in points():
        if point.series in (arguments.series or [point.series]):
            rows.setdefault(point.series, []).append(best_of(point, arguments.repeat))
    growth = {name: exponents(series) for name, series in rows.items() if name != "target"}
    for name, series in rows.items():
        _print(name, series, growth.get(name))
    figures = {name: [asdict(row) for row in series] for name, series in rows.items()}
    write_figures(arguments.json, {"figures": figures, "exponents": growth})


def _print(name: str, rows: Sequence[Figures], growth: dict[str, float] | None) -> None:
    table = Table(title=f"{name}: seconds", title_justify="left")
    sizes = ("size", "ranks", "tensors")
    steps = ("layouts", "summary", "order", "plan of one rank")
    for column in (*sizes, *steps, "transfers", "peak MiB"):
        table.add_column(column, justify="right")
    for row in rows:
        seconds = (f"{value:.3f}" for value in (row.layouts, row.summary, row.order, row.rank_plan))
        counts = (str(value) for value in (row.size, row.num_ranks, row.num_tensors))
        table.add_row(*counts, *seconds, str(row.transfers), f"{row.peak_nbytes / 2**20:.0f}")
    if growth is not None:
        exponent = (f"{growth[step]:.2f}" for step in ("layouts", "summary", "order", "rank_plan"))
        table.add_section()
        table.add_row("exponent", "", "", *exponent, f"all {growth['all']:.2f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()

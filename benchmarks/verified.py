"""Costs of `generate_config.verify` and savings of `incremental`, in seconds of a switch to vLLM.

    python -m benchmarks.verified --json FILE [--model qwen2.5-0.5b] [--modes full kept]
                                  [--runs 5] [--rounds 2]

Two ranks, a transformers model sharded by FSDP2 in bfloat16, vLLM with TP=2. The modes take turns,
so that a slowdown of the machine affects all of them.

    off, sample, full   `verify`; phase "verify" computes and compares digests
    written, kept       `incremental: auto` with every weight written between two switches, or none;
                        phase "compare" computes the digests of all weights

"copy" is the floor of a switch: a plain copy of the same bytes into new memory.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fsdp import random_model
from benchmarks.launching import figures_of_ranks, main_or_rank, parser_of, write_figures
from benchmarks.resharding.cases import MODELS
from benchmarks.resharding.measuring import gather
from hybrid_engine import HybridEngine
from hybrid_engine.ranks.torch_internals import copy_each
from hybrid_engine.switch.states import State

INCREMENTAL = {"incremental": "auto", "incremental_mb": 2048}
MODES: dict[str, dict[str, Any]] = {
    **{verify: {"verify": verify} for verify in ("off", "sample", "full")},
    **dict.fromkeys(("written", "kept"), INCREMENTAL),
}
PHASES = ("verify", "commit", "compare")
FIGURES = (
    "switch_seconds",
    *(f"{phase}_seconds" for phase in PHASES),
    "copy_seconds",
    "bytes_sent",
)
NUM_RANKS = 2


def main() -> None:
    """Measure; print and write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen2.5-0.5b")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=list(MODES),
        help="modes in addition to off (default: all)",
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="timed switches per mode and round (default: 5)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="(default: 2)")
    arguments = parser.parse_args()
    figures = figures_of_ranks(
        "benchmarks.verified", {**vars(arguments), "json": None}, NUM_RANKS, 1800
    )
    for mode, row in figures.items():
        print(f"{mode:8}", ", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    write_figures(arguments.json, figures)


def run_rank(values: dict[str, Any]) -> None:
    """Run all modes on one rank; rank 0 writes the figures."""
    dist.init_process_group("gloo")  # outlives the engines
    seconds: dict[str, list[list[float]]] = {mode: [] for mode in ("off", *values["modes"])}
    for _ in range(values["rounds"]):
        for mode in seconds:
            seconds[mode] += switches(values["model"], mode, values["runs"])
    figures = {}
    for mode, rows in seconds.items():
        medians = [statistics.median(column) for column in zip(*rows, strict=True)]
        figures[mode] = dict(zip(FIGURES, medians, strict=True)) | {"num_switches": len(rows)}
    for mode in figures:
        figures[mode]["ratio"] = figures[mode]["switch_seconds"] / figures["off"]["switch_seconds"]
    if dist.get_rank() == 0:
        Path(values["out"]).write_text(json.dumps(figures))
    dist.destroy_process_group()


@torch.no_grad()
def switches(model_name: str, mode: str, num_runs: int) -> list[list[float]]:
    """Return `FIGURES` of each switch to vLLM; each figure is the maximum over ranks."""
    model = random_model(MODELS[model_name], torch.bfloat16)
    if mode == "written":
        model.requires_grad_()
    engine = HybridEngine(
        model=model,
        rollout_config={
            "tp_size": NUM_RANKS,
            "max_model_len": 64,
            "max_num_seqs": 4,
            **MODES[mode],
        },
        train_config={"fsdp_config": {}},
    )
    written: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine.sharding.enter(State.INFER)  # the first switch allocates
    engine.sharding.enter(State.TRAIN)
    rows = []
    for _ in range(num_runs):
        buffers = list(engine.train.weights.buffers().values())
        for parameter in written:
            parameter.to_local().neg_()  # changes every weight without an optimizer
        copies = [torch.empty_like(flat) for flat in buffers]
        started = time.perf_counter()
        copy_each(copies, buffers)
        copy_seconds = time.perf_counter() - started
        report: Any = engine.sharding.enter(State.INFER)
        row = (
            report.seconds,
            *(report.seconds_by_phase.get(phase, 0.0) for phase in PHASES),
            copy_seconds,
            report.bytes_own + report.bytes_received,
        )
        rows.append([max(column) for column in zip(*gather(row), strict=True)])
        engine.sharding.enter(State.TRAIN)
    engine.shutdown()
    return rows


if __name__ == "__main__":
    main_or_rank(main, run_rank)

"""What `generate_config.verify` and `incremental` cost, and save: seconds of a switch to vLLM in each mode, in turn.

    python benchmarks/verified.py --json FILE [--model qwen2.5-0.5b] [--modes apart mixed] [--runs 5] [--rounds 2]

Two ranks, a transformers model sharded by FSDP2 in bfloat16, vLLM with TP=2. The modes take turns, so that a machine
that slows down slows all of them. "verify" has digests and their comparison; reading weights back through vLLM's
kernels, where these have packed them, is part of "commit". "written" and "kept" are `incremental: auto` with every
weight written between two switches, and with none: "compare" is what the digests of all weights take, to hold against
a copy of as many bytes ("copy", the floor of what a switch does with them). In "apart" and "mixed" the MLPs are frozen
and all else is written: what is frozen has buckets of its own, as always, or shares them with what is trained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.fsdp import random_model  # noqa: E402
from benchmarks.resharding.cases import MODELS  # noqa: E402
from benchmarks.resharding.measuring import gather  # noqa: E402
from hybrid_engine import HybridEngine  # noqa: E402
from hybrid_engine.backends.fsdp import ShardedModel  # noqa: E402
from hybrid_engine.ranks.launching import run_ranks  # noqa: E402
from hybrid_engine.ranks.torch_internals import copy_each  # noqa: E402
from hybrid_engine.switch.states import State  # noqa: E402

INCREMENTAL = {"incremental": "auto", "incremental_mb": 2048}
MODES: dict[str, dict[str, Any]] = {
    **{verify: {"verify": verify} for verify in ("off", "sample", "full")},
    **dict.fromkeys(("written", "kept", "apart", "mixed"), INCREMENTAL),
}
PHASES = ("verify", "commit", "compare")
BYTES = ("bytes_sent", "bytes_received", "bytes_held")
FIGURES = ("switch_seconds", *(f"{phase}_seconds" for phase in PHASES), "copy_seconds", *BYTES)
NUM_RANKS = 2


def main() -> int:
    """Measure; print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen2.5-0.5b")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="beside off (default: all)")
    parser.add_argument("--runs", type=int, default=5, help="timed switches of a mode in a round (default: 5)")
    parser.add_argument("--rounds", type=int, default=2, help="(default: 2)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="verified-") as directory:
        out = Path(directory) / "figures.json"
        job = json.dumps({**vars(arguments), "json": None, "out": str(out)})
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ended = run_ranks(["-m", "benchmarks.verified", job], NUM_RANKS, timeout=1800, environment=environment)
        if ended.status != 0:
            sys.exit(f"verified: failed:\n{ended.output}")
        figures = json.loads(out.read_text())
    for mode, row in figures.items():
        print(f"{mode:8}", ", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2))
    return 0


def run_rank(job: str) -> None:
    """All modes on one rank; rank 0 writes the figures."""
    values = json.loads(job)
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


def _is_written(mode: str, name: str) -> bool:
    """Whether a parameter is trained in this mode, and so written between two switches."""
    return mode == "written" or (mode in ("apart", "mixed") and ".mlp." not in name)


@torch.no_grad()
def switches(model_name: str, mode: str, num_runs: int) -> list[list[float]]:
    """`FIGURES` of each switch to vLLM, each of the rank with the most of it."""
    model = random_model(MODELS[model_name], torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_written(mode, name))
    frozen = property(lambda _: ()) if mode == "mixed" else ShardedModel.frozen
    with mock.patch.object(ShardedModel, "frozen", frozen):
        engine = HybridEngine(
            model=model,
            rollout_config={"tp_size": NUM_RANKS, "max_model_len": 64, "max_num_seqs": 4, **MODES[mode]},
            train_config={"fsdp_config": {}},
        )
    written: list[Any] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine.sharding.enter(State.INFER)  # the first one allocates
    engine.sharding.enter(State.TRAIN)
    found = []
    for _ in range(num_runs):
        held = list(engine.train.weights.buffers().values())
        for parameter in written:
            parameter.to_local().neg_()
        copies = [torch.empty_like(flat) for flat in held]
        started = time.perf_counter()
        copy_each(copies, held)
        copied = time.perf_counter() - started
        report: Any = engine.sharding.enter(State.INFER)
        phases = (report.seconds_by_phase.get(phase, 0.0) for phase in PHASES)
        sent = report.bytes_own + report.bytes_received
        own = (report.seconds, *phases, copied, sent, report.bytes_received, sum(flat.nbytes for flat in held))
        found.append([max(column) for column in zip(*gather(own), strict=True)])
        engine.sharding.enter(State.TRAIN)
    engine.shutdown()
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        torch.set_num_threads(1)
        run_rank(sys.argv[1])
    else:
        sys.exit(main())

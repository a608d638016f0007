"""Seconds to bring weights to a vLLM server, compared with save and reload, and with one process.

    python -m benchmarks.publish [--model qwen2.5-0.5b] [--runs 5] [--rounds 2] [--json FILE]

Two Megatron ranks with TP=2 hold weights in bfloat16, without gradients and optimizer, on CPU and
gloo, with one thread per process; servers have TP=1. The rows take turns; seconds are medians of
the slowest rank.

publish      switch to a server: calls over HTTP, check of every weight for NaN, parameters to host
             memory, copies into memory that the server had released, vLLM's repacking
save         `save_hf_checkpoint` into `--directory`: check for NaN, each rank writes its part,
             fsync
reload       `reload_weights` of that checkpoint (from the page cache) in a paused server. Trainers
             and server keep their memory, so a device would hold both models
disk         save and reload of the same run
in process   switch of `ActorHybridWorker` without servers, to vLLM in the training ranks. Both
             ranks get a whole copy, twice the bytes of a publish

vLLM 0.32 has no route that loads a path; `POST /collective_rpc` calls `reload_weights` of each
worker. vLLM's own weight transfer is not measured: none of its backends runs on a CPU.

Afterwards both servers must have the same weights by vLLM's checksums. Their tokens and
log-probabilities may differ on CPUs with AMX, where vLLM's reload leaves a tied head with the
packed copy of the former weights (docs/planning.md).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.launching import figures_of_ranks, main_or_rank, parser_of, write_figures
from benchmarks.resharding.cases import MODELS, Case
from benchmarks.resharding.measuring import gather
from hybrid_engine import ActorHybridWorker
from hybrid_engine.config import HybridConfig
from hybrid_engine.serving.clients import HttpServer
from hybrid_engine.switch.states import State
from tests.harness.vllm_server import FILLED, serving

NUM_RANKS = 2
TIMEOUT = 1800.0
OPTIONS = (
    *("--enforce-eager", "--skip-tokenizer-init", "--uvicorn-log-level", "warning"),
    *("--dtype", "bfloat16", "--max-model-len", "64", "--max-num-seqs", "4"),
    *("--kv-cache-memory-bytes", str(64 << 20)),
)
"""Options of every server."""
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


@dataclass
class Rows:
    """Figures of every run by row.

    Attributes:
        seconds: seconds of the slowest rank.
        nbytes: bytes that all destinations received in a run.
        draw_alike: True if both servers draw the same tokens with the same log-probabilities.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    draw_alike: bool = True

    def time(self, row: str, action: Callable[[], object]) -> None:
        """Time an action of all ranks."""
        dist.barrier()
        started = time.perf_counter()
        action()
        self.seconds.setdefault(row, []).append(max(gather(time.perf_counter() - started)))

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the figures of another round."""
        for row, runs in other["seconds"].items():
            self.seconds.setdefault(row, []).extend(runs)
        self.nbytes |= other["nbytes"]
        self.draw_alike &= other["draw_alike"]


def main() -> None:
    """Measure; print and write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen2.5-0.5b")
    parser.add_argument(
        "--runs", type=int, default=5, help="timed runs per row and round (default: 5)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="(default: 2)")
    parser.add_argument(
        "--directory", type=Path, help="for checkpoints (default: the directory of temporary files)"
    )
    arguments = parser.parse_args()
    figures = measure(arguments.model, arguments.runs, arguments.rounds, arguments.directory)
    _print(figures)
    write_figures(arguments.json, figures)


def measure(
    model: str, num_runs: int, num_rounds: int, directory: Path | None = None
) -> dict[str, Any]:
    """Return all figures. Exits if the servers do not have the same weights."""
    rows = Rows()
    loads = [os.getloadavg()[0]]
    with (
        tempfile.TemporaryDirectory(prefix="publish-", dir=directory) as place,
        ExitStack() as ends,
    ):
        # the directory has no weights: trainers fill the first server, the second has random ones
        path = _case(model).write_model(Path(place))
        formats = {"served": FILLED, "loaded": ("--load-format", "dummy")}

        def start(name: str) -> str:
            server = serving(path, Path(place, name), *formats[name], *OPTIONS)
            return ends.enter_context(server).url

        with ThreadPoolExecutor(len(formats)) as pool:
            urls = dict(zip(formats, pool.map(start, formats), strict=True))
        loaded = HttpServer(urls["loaded"], TIMEOUT)
        _call_workers(loaded, "update_config", overrides={"load_config": {"load_format": "auto"}})
        job = {"model": model, "runs": num_runs, "place": place, **urls}
        for _ in range(num_rounds):
            rows.add(figures_of_ranks("benchmarks.publish", job, NUM_RANKS, TIMEOUT))
            loads.append(os.getloadavg()[0])
    return {
        "model": model,
        "rows": {name: summary(rows, name) for name in rows.seconds},
        "draw_alike": rows.draw_alike,
        "load": loads,
    }


def _case(model: str) -> Case:
    return Case(model, NUM_RANKS, "tp=2", "tp=1")


def summary(rows: Rows, name: str) -> dict[str, Any]:
    """Return the figures of a row over all runs and rounds."""
    runs = rows.seconds[name]
    return {
        "seconds": statistics.median(runs),
        "fastest": min(runs),
        "runs": len(runs),
        "nbytes": rows.nbytes.get(name),
        "over_publish": statistics.median(runs) / statistics.median(rows.seconds["publish"]),
    }


def _print(figures: Mapping[str, Any]) -> None:
    title = f"{figures['model']}, Megatron TP={NUM_RANKS} -> a server with TP=1"
    table = Table("", "seconds", "fastest", "GB", "over publish", title=title)
    for name, row in figures["rows"].items():
        nbytes = "" if row["nbytes"] is None else f"{row['nbytes'] / 1e9:.3f}"
        table.add_row(
            name,
            f"{row['seconds']:.3f}",
            f"{row['fastest']:.3f}",
            nbytes,
            f"{row['over_publish']:.2f}",
        )
    console = Console()
    console.print(table)
    if not figures["draw_alike"]:
        console.print("same weights, but the reloaded server draws other tokens: docs/planning.md")
    console.print(
        "load of the machine, before and after each round:",
        *(f"{each:.1f}" for each in figures["load"]),
    )


def run_rank(values: dict[str, Any]) -> None:
    """Run a round on one rank; rank 0 writes the figures."""
    dist.init_process_group("gloo")  # outlives the engines
    rows = Rows()
    config = _case(values["model"]).config(Path(values["place"], f"rank{dist.get_rank()}"))
    _to_servers(config, values, rows)
    _in_process(config, values["runs"], rows)
    if dist.get_rank() == 0:
        Path(values["out"]).write_text(json.dumps(vars(rows)))
    dist.destroy_process_group()


def _to_servers(config: HybridConfig, values: Mapping[str, Any], rows: Rows) -> None:
    generate = config.generate_config.model_copy(update={"servers": (values["served"],)})
    served = HttpServer(values["served"], TIMEOUT)
    loaded = HttpServer(values["loaded"], TIMEOUT)
    checkpoint = str(Path(values["place"], "checkpoint"))
    is_first = dist.get_rank() == 0

    def reload() -> None:
        if is_first:
            loaded.pause("keep", True)
            _call_workers(loaded, "reload_weights", weights_path=checkpoint)
            loaded.resume()

    with ActorHybridWorker(
        config.model_copy(update={"generate_config": generate}), weights_only=True
    ) as worker:
        nbytes = _switch_once(worker)
        worker.save_hf_checkpoint(checkpoint)  # warm-up; the files stay in the page cache
        reload()
        for _ in range(values["runs"]):
            rows.time("publish", lambda: worker.sharding.enter(State.INFER))
            worker.sharding.enter(State.TRAIN)
            rows.time("save", lambda: worker.save_hf_checkpoint(checkpoint))
            rows.time("reload", reload)
        runs = zip(rows.seconds["save"], rows.seconds["reload"], strict=True)
        rows.seconds["disk"] = [save + reload for save, reload in runs]
        rows.nbytes |= dict.fromkeys(("publish", "disk"), nbytes)
        worker.sharding.enter(State.INFER)
        if is_first:
            published = _inspect(served)
            reloaded = _inspect(loaded)
            _require_same(published["sums"], reloaded["sums"])
            rows.draw_alike = published["tokens"] == reloaded["tokens"]
        worker.sharding.enter(State.TRAIN)


def _in_process(config: HybridConfig, num_runs: int, rows: Rows) -> None:
    with ActorHybridWorker(config, weights_only=True) as worker:
        rows.nbytes["in process"] = sum(gather(_switch_once(worker)))
        for _ in range(num_runs):
            rows.time("in process", lambda: worker.sharding.enter(State.INFER))
            worker.sharding.enter(State.TRAIN)


def _switch_once(worker: ActorHybridWorker) -> int:
    """Plan and allocate by a switch; return the bytes that this rank or all servers received."""
    worker.sharding.enter(State.INFER)
    report = worker.sharding.last_report
    assert report is not None
    worker.sharding.enter(State.TRAIN)
    return report.bytes_own + report.bytes_received


def _call_workers(server: HttpServer, method: str, **kwargs: Any) -> None:
    server.post("collective_rpc", {"method": method, "kwargs": kwargs})


def _inspect(server: HttpServer) -> dict[str, Any]:
    """Return checksums of the weights, and drawn tokens with their log-probabilities."""
    body = {
        "prompt": PROMPTS,
        "max_tokens": 4,
        "temperature": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
    }
    answer = server.post("v1/completions", {**body, "return_tokens_as_token_ids": True})
    return {
        "sums": server.post("weight_checker", {"action": "checksum"})["checksums"],
        "tokens": [
            (choice["token_ids"], choice["logprobs"]["token_logprobs"])
            for choice in answer["choices"]
        ],
    }


def _require_same(published: Mapping[str, str], loaded: Mapping[str, str]) -> None:
    """Exit if the checksums of the published and of the reloaded weights differ."""
    names = {*published, *loaded}
    if differ := sorted(name for name in names if published.get(name) != loaded.get(name)):
        sys.exit(f"weights differ between publish and reload: {differ}")


if __name__ == "__main__":
    main_or_rank(main, run_rank)

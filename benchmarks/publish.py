"""Seconds until a vLLM server, a process of its own, has the trainers' weights, beside other ways, in one run.

    python -m benchmarks.publish [--model qwen2.5-0.5b] [--server-tp 1] [--runs 5] [--rounds 2] [--json FILE]

Two Megatron ranks, TP=2, bfloat16, on CPU and gloo, one thread in each process. They hold weights alone: no gradients,
no optimizer. The rows take turns; medians of the slowest rank.

publish      a switch to the server: its calls over HTTP, a look at every weight for NaN, parameters to host memory,
             copies from the trainers' memory into released memory of the server, vLLM's repacking; requests go on
withdraw     the way back: the server gives its memory back, parameters return
save         `save_hf_checkpoint` into `--directory`: a look for NaN, each rank writes its part, fsync
reload       the server is paused, `reload_weights` reads that checkpoint (from the page cache) and repacks, requests go
             on. Trainers keep their memory and the server its own: a device would hold both
disk         save and reload of the same run
in process   the switch of `ActorHybridWorker` without servers, to vLLM in the ranks that train: as publish, without
             HTTP. With `--server-tp 1` each of both ranks has a whole copy, so twice as many bytes come
back         the way back of that
copy         the floor of publish and disk: as many bytes as the server's weights, from memory to memory that were
             touched before, by one thread for each worker of the server
copies       the same for "in process": each rank as many bytes as its vLLM has

vLLM 0.32 has no route of its own that loads a path; `POST /collective_rpc` calls each worker's `reload_weights`. Not
measured: vLLM's own weight transfer, full tensors between `/start_weight_update` and `/finish_weight_update`. Its
backends nccl, ipc, sparse_nccl, nccl_m2n and sharded_rdt call CUDA, and modelexpress is a package and a service of its
own: none runs on a CPU.

Afterwards both servers must have the same weights, by sums of vLLM's own. Whether they also draw the same tokens with
the same log-probabilities is a figure: vLLM's reload leaves a tied head on CPUs with oneDNN's packed copy of the former
weights (docs/certify.md), so there they do not.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also where it is started by its path

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
FLOORS = {"publish": "copy", "disk": "copy", "in process": "copies"}
"""Row -> its floor."""
PLAIN = (
    *(
        "--enforce-eager",
        "--skip-tokenizer-init",
        "--uvicorn-log-level",
        "warning",
        "--dtype",
        "bfloat16",
    ),
    *("--max-model-len", "64", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20)),
)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


@dataclass
class Rows:
    """Seconds of every run by row, and what came.

    Attributes:
        seconds: by row, of the slowest rank.
        nbytes: by row, that all destinations received in one run.
        phases: by row, those of the last run's report.
        draw_alike: whether the reloaded server draws what the published one does.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    draw_alike: bool = True

    def time(self, row: str, action: Callable[[], object]) -> None:
        """Time an action of all ranks."""
        dist.barrier()
        started = time.perf_counter()
        action()
        self.seconds.setdefault(row, []).append(max(gather(time.perf_counter() - started)))

    def add(self, other: Mapping[str, Any]) -> None:
        """What another round has found."""
        for row, runs in other["seconds"].items():
            self.seconds.setdefault(row, []).extend(runs)
        self.nbytes |= other["nbytes"]
        self.phases |= other["phases"]
        self.draw_alike &= other["draw_alike"]


def main() -> None:
    """Measure; print and write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen2.5-0.5b")
    parser.add_argument(
        "--server-tp", type=int, choices=[1, 2], default=1, help="vLLM's tensor parallel size (1)"
    )
    parser.add_argument(
        "--runs", type=int, default=5, help="timed runs of each row in a round (default: 5)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="(default: 2)")
    parser.add_argument(
        "--directory", type=Path, help="for checkpoints; default: where temporary files are"
    )
    arguments = parser.parse_args()
    figures = measure(
        arguments.model, arguments.server_tp, arguments.runs, arguments.rounds, arguments.directory
    )
    _print(figures)
    write_figures(arguments.json, figures)


def measure(
    model: str, server_tp: int, num_runs: int, num_rounds: int, directory: Path | None = None
) -> dict[str, Any]:
    """Every figure. Exits where both servers do not have the same weights."""
    case, rows, loads = (
        Case(model, NUM_RANKS, "tp=2", f"tp={server_tp}"),
        Rows(),
        [os.getloadavg()[0]],
    )
    with (
        tempfile.TemporaryDirectory(prefix="publish-", dir=directory) as place,
        ExitStack() as ends,
    ):
        # its config alone: the one server waits for the trainers, the other begins with what is no model's
        path, sizes = case.write_model(Path(place)), ("--tensor-parallel-size", str(server_tp))
        both = {"served": FILLED, "loaded": ("--load-format", "dummy")}
        with ThreadPoolExecutor(len(both)) as pool:
            started = {
                name: pool.submit(
                    ends.enter_context, serving(path, Path(place, name), *own, *PLAIN, *sizes)
                )
                for name, own in both.items()
            }
            urls = {name: server.result().url for name, server in started.items()}
        loaded = HttpServer(urls["loaded"], TIMEOUT)
        _call_workers(loaded, "update_config", overrides={"load_config": {"load_format": "auto"}})
        job = {"model": model, "server_tp": server_tp, "runs": num_runs, "place": place, **urls}
        for _ in range(num_rounds):
            rows.add(figures_of_ranks("benchmarks.publish", job, NUM_RANKS, TIMEOUT))
            loads.append(os.getloadavg()[0])
    return {
        "model": model,
        "server_tp": server_tp,
        "rows": {
            name: _summary(runs, rows.nbytes.get(name)) for name, runs in rows.seconds.items()
        },
        "over_floor": {name: _ratio(rows, name, floor) for name, floor in FLOORS.items()},
        "over_publish": {name: _ratio(rows, name, "publish") for name in rows.seconds},
        "phases": rows.phases,
        "draw_alike": rows.draw_alike,
        "load": loads,
    }


def _summary(runs: Sequence[float], nbytes: int | None) -> dict[str, Any]:
    fastest, slowest = min(runs), max(runs)
    seconds = statistics.median(runs)
    return {
        "seconds": seconds,
        "fastest": fastest,
        "slowest": slowest,
        "runs": len(runs),
        "nbytes": nbytes,
    }


def _ratio(rows: Rows, one: str, other: str) -> float:
    return statistics.median(rows.seconds[one]) / statistics.median(rows.seconds[other])


def _print(figures: Mapping[str, Any]) -> None:
    title = f"{figures['model']}, Megatron TP={NUM_RANKS} -> a server of TP={figures['server_tp']}"
    table = Table(
        "", "seconds", "fastest", "slowest", "GB", "over the floor", "over publish", title=title
    )
    for name, row in figures["rows"].items():
        times = [f"{row[key]:.3f}" for key in ("seconds", "fastest", "slowest")]
        nbytes = "" if row["nbytes"] is None else f"{row['nbytes'] / 1e9:.3f}"
        over = figures["over_floor"].get(name)
        ratios = "" if over is None else f"{over:.1f}", f"{figures['over_publish'][name]:.2f}"
        table.add_row(name, *times, nbytes, *ratios)
    console = Console()
    console.print(table)
    if not figures["draw_alike"]:
        console.print(
            "both servers have the same weights, but vLLM's reload draws other tokens: see docs/certify.md"
        )
    console.print("not measured: vLLM's own weight transfer, no backend of which runs on a CPU")
    console.print(
        "load of the machine, before and after each round:",
        *(f"{each:.1f}" for each in figures["load"]),
    )


def run_rank(values: dict[str, Any]) -> None:
    """One round on one rank; rank 0 writes the figures."""
    dist.init_process_group("gloo")  # outlives the engines
    case = Case(values["model"], NUM_RANKS, "tp=2", f"tp={values['server_tp']}")
    config, rows = case.config(Path(values["place"], f"rank{dist.get_rank()}")), Rows()
    _to_servers(config, values, rows)
    _in_process(config, values["runs"], rows)
    if dist.get_rank() == 0:
        Path(values["out"]).write_text(json.dumps(vars(rows)))
    dist.destroy_process_group()


def _to_servers(config: HybridConfig, values: Mapping[str, Any], rows: Rows) -> None:
    generate = config.generate_config.model_copy(update={"servers": (values["served"],)})
    served, loaded = HttpServer(values["served"], TIMEOUT), HttpServer(values["loaded"], TIMEOUT)
    checkpoint, is_first = str(Path(values["place"], "checkpoint")), dist.get_rank() == 0

    def reload() -> None:
        if is_first:
            loaded.pause("keep", True)
            _call_workers(loaded, "reload_weights", weights_path=checkpoint)
            loaded.resume()

    with ActorHybridWorker(
        config.model_copy(update={"generate_config": generate}), weights_only=True
    ) as worker:
        nbytes = _switch_once(worker)
        worker.save_hf_checkpoint(checkpoint)
        reload()
        copy = _copy_of(
            nbytes // values["server_tp"] if dist.get_rank() < values["server_tp"] else 0
        )
        for _ in range(values["runs"]):
            rows.time("copy", copy)
            rows.time("publish", lambda: worker.sharding.enter(State.INFER))
            _note_phases(worker, "publish", rows)
            rows.time("withdraw", lambda: worker.sharding.enter(State.TRAIN))
            rows.time("save", lambda: worker.save_hf_checkpoint(checkpoint))
            rows.time("reload", reload)
        runs = zip(rows.seconds["save"], rows.seconds["reload"], strict=True)
        rows.seconds["disk"] = [save + reload for save, reload in runs]
        rows.nbytes |= dict.fromkeys(("copy", "publish", "disk"), nbytes)
        worker.sharding.enter(State.INFER)
        if is_first:
            published, reloaded = _look(served), _look(loaded)
            _require_same(published["sums"], reloaded["sums"])
            rows.draw_alike = published["tokens"] == reloaded["tokens"]
        worker.sharding.enter(State.TRAIN)


def _in_process(config: HybridConfig, num_runs: int, rows: Rows) -> None:
    with ActorHybridWorker(config, weights_only=True) as worker:
        own = _switch_once(worker)
        copy = _copy_of(own)
        for _ in range(num_runs):
            rows.time("copies", copy)
            rows.time("in process", lambda: worker.sharding.enter(State.INFER))
            _note_phases(worker, "in process", rows)
            rows.time("back", lambda: worker.sharding.enter(State.TRAIN))
        rows.nbytes |= dict.fromkeys(("copies", "in process"), sum(gather(own)))


def _switch_once(worker: ActorHybridWorker) -> int:
    """The first switch plans and allocates; returns the bytes that came, to this rank or to all servers."""
    worker.sharding.enter(State.INFER)
    report = worker.sharding.last_report
    assert report is not None
    worker.sharding.enter(State.TRAIN)
    return report.bytes_own + report.bytes_received


def _note_phases(worker: ActorHybridWorker, row: str, rows: Rows) -> None:
    report = worker.sharding.last_report
    assert report is not None
    rows.phases[row] = dict(report.seconds_by_phase)


def _copy_of(nbytes: int) -> Callable[[], object]:
    """Copies so many bytes between memory that was touched before."""
    source, destination = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    return lambda: destination.copy_(source)


def _call_workers(server: HttpServer, method: str, **kwargs: Any) -> None:
    server.post("collective_rpc", {"method": method, "kwargs": kwargs})


def _look(server: HttpServer) -> dict[str, Any]:
    """What a server holds and computes."""
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
            (each["token_ids"], each["logprobs"]["token_logprobs"]) for each in answer["choices"]
        ],
    }


def _require_same(published: Mapping[str, str], loaded: Mapping[str, str]) -> None:
    """The sums of what was published are those of what a server loads from the checkpoint."""
    names = {*published, *loaded}
    if differ := sorted(name for name in names if published.get(name) != loaded.get(name)):
        sys.exit(
            f"weights differ between the server that was published to and the one that reloaded: {differ}"
        )


if __name__ == "__main__":
    main_or_rank(main, run_rank)

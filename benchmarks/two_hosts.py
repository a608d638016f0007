"""Publishing to vLLM servers on another host: bytes over the link and seconds.

    python -m benchmarks.two_hosts [--model qwen2.5-0.5b] [--runs N] [--json FILE]

Two network namespaces simulate two hosts (tests/harness/hosts.py; needs root): two Megatron ranks
with TP=2 in the first, servers with TP=1 and TP=2 in the second, connected by a veth pair. The
interface counts the bytes of both directions, including the headers of its packets of 64 KiB. The
link is memory, not a network: bytes hold anywhere, seconds do not.

    publish          all weights; training parameters stay on the device
    socket           floor: the same bytes from one socket to another over the same link

With `incremental: auto`, servers that keep their weights, and changes between two publishes:

    all              every tensor
    one layer        the tensors of one layer
    one in 1,000     an element of 1,000 in every tensor: all is sent, since buckets are sent whole
    nothing

With `incremental: delta`, the last bit of random elements of every tensor:

    1 % ... all      share of the elements
    nothing
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launching import figures_of_ranks, main_or_rank, parser_of, write_figures
from benchmarks.publish import OPTIONS
from benchmarks.resharding.cases import MODELS, Case
from benchmarks.resharding.measuring import gather
from hybrid_engine import ActorHybridWorker
from hybrid_engine.serving.invitation import TOKEN
from hybrid_engine.switch.states import State
from tests.harness.hosts import ADDRESSES, Host, two_hosts
from tests.harness.vllm_server import FILLED, serving

NUM_RANKS = 2
SERVER_TPS = (1, 2)
TIMEOUT = 1800.0
SECRET = "secret of two hosts"
STAY = {f"offload_train_{kind}": False for kind in ("param", "grad", "optimizer")}
KEPT = {**STAY, "release_weights": False}
JOBS: dict[str, dict[str, Any]] = {
    "whole": STAY,
    "kept": {**KEPT, "incremental": "auto"},
    "delta": {**KEPT, "incremental": "delta"},
}
"""Keys of generate_config by job, in addition to those of the case."""
PORT = 5001
SHARES = {"1 %": 0.01, "6 %": 0.06, "30 %": 0.3, "60 %": 0.6, "all": 1.0, "nothing": 0.0}
"""Shares of the elements that change before a publish with `incremental: delta`."""
SINK = """
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("up", flush=True)
room = bytearray(1 << 20)
while True:
    peer, _ = listener.accept()
    while peer.recv_into(room):
        pass
    peer.sendall(b"x")
    peer.close()
"""


@dataclass
class Rows:
    """Figures of every run by row.

    Attributes:
        seconds: seconds of the slowest rank.
        link: bytes over the link in both directions.
        planned: bytes between hosts according to the report.
        density: share of changed elements, and messages sent as deltas, according to the report.
    """

    host: Host
    seconds: dict[str, list[float]] = field(default_factory=dict)
    link: dict[str, list[int]] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    density: dict[str, tuple[float | None, str]] = field(default_factory=dict)

    def measure(self, row: str, action: Callable[[], object]) -> None:
        """Measure an action of all ranks."""
        dist.barrier()
        # after the barrier, so that no other traffic is on the link
        before = sum(self.host.link_nbytes().values())
        dist.barrier()
        started = time.perf_counter()
        action()
        seconds = max(gather(time.perf_counter() - started))
        self.seconds.setdefault(row, []).append(seconds)
        self.link.setdefault(row, []).append(sum(self.host.link_nbytes().values()) - before)

    def publish(self, row: str, worker: ActorHybridWorker) -> None:
        """Measure a switch to the servers."""
        self.measure(row, lambda: worker.sharding.enter(State.INFER))
        assert worker.sharding.last_report is not None
        report = worker.sharding.last_report
        self.planned[row] = report.bytes_across_hosts
        self.density[row] = (
            report.density,
            f"{report.messages_delta} of {report.messages_delta + report.messages_whole}",
        )


def main() -> None:
    """Measure; print and write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen2.5-0.5b")
    parser.add_argument("--runs", type=int, default=5, help="runs per row (default: 5)")
    parser.add_argument(
        "--gbit", type=float, help="limit of the link from the trainers, Gbit/s (default: none)"
    )
    arguments = parser.parse_args()
    figures = measure(arguments.model, arguments.runs, arguments.gbit)
    for name, row in figures["rows"].items():
        seconds = f"{row['seconds']:7.3f} s (fastest {row['fastest']:.3f})"
        link = f"{row['link'] / 1e6:9.3f} MB (most {row['most'] / 1e6:.3f})"
        density, deltas = row["density"]
        changes = "" if density is None else f", {density:.4%} changed, deltas {deltas}"
        planned = f"{row['planned'] / 1e6:9.3f} MB"
        print(f"{name:22} {seconds}, planned {planned}, over the link {link}{changes}")
    print("load of the machine, before and after:", *(f"{load:.1f}" for load in figures["load"]))
    write_figures(arguments.json, figures)


def measure(model: str, num_runs: int, gbit: float | None = None) -> dict[str, Any]:
    """Return all figures."""
    load_before = os.getloadavg()[0]
    rows: dict[str, Any] = {}
    with (
        two_hosts() as (trainers, away),
        ExitStack() as ends,
        ThreadPoolExecutor(len(SERVER_TPS)) as pool,
    ):
        _case(model).write_model(away.path("/tmp"))
        if gbit is not None:
            trainers.limit_link(gbit)
        sink = [*away.command(), sys.executable, "-c", SINK, away.address, str(PORT)]
        process = ends.enter_context(subprocess.Popen(sink, stdout=subprocess.PIPE))
        ends.callback(process.kill)

        def start(tp: int) -> str:
            options = (*FILLED, *OPTIONS, "--tensor-parallel-size", str(tp))
            place = away.path(f"/tmp/server{tp}")
            server = serving(
                f"/tmp/{model}", place, *options, environment={TOKEN: SECRET}, host=away
            )
            return ends.enter_context(server).url

        urls = list(pool.map(start, SERVER_TPS))
        for name in JOBS:
            job = {
                "model": model,
                "name": name,
                "runs": num_runs,
                "urls": urls,
                "pids": [trainers.pid, away.pid],
            }
            with trainers.network():
                rows |= figures_of_ranks("benchmarks.two_hosts", job, NUM_RANKS, TIMEOUT)
    return {"model": model, "gbit": gbit, "rows": rows, "load": [load_before, os.getloadavg()[0]]}


def _case(model: str) -> Case:
    return Case(model, NUM_RANKS, "tp=2", "tp=1")


def run_rank(values: dict[str, Any]) -> None:
    """Run a job on one rank; rank 0 writes the figures."""
    os.environ[TOKEN] = SECRET
    host = Host(values["pids"][0], ADDRESSES[0])
    dist.init_process_group("gloo")
    rows = Rows(host)
    name = values["name"]
    publish = {"whole": _publish_all, "kept": _publish_changes, "delta": _publish_deltas}[name]
    with host.entered():
        config = _case(values["model"]).config(Path(f"/tmp/rank{dist.get_rank()}"))
        keys = {**JOBS[name], "servers": tuple(values["urls"]), "server_address": host.address}
        generate = config.generate_config.model_copy(update=keys)
        with ActorHybridWorker(
            config.model_copy(update={"generate_config": generate}), weights_only=True
        ) as worker:
            rows.publish(f"{name}: with the join", worker)
            worker.sharding.enter(State.TRAIN)
            for _ in range(values["runs"]):
                publish(worker, rows)
    if dist.get_rank() == 0:
        Path(values["out"]).write_text(
            json.dumps({row: _summary(rows, row) for row in rows.seconds})
        )
    dist.destroy_process_group()


def _publish_all(worker: ActorHybridWorker, rows: Rows) -> None:
    rows.publish("publish", worker)
    nbytes = rows.planned["publish"]
    worker.sharding.enter(State.TRAIN)
    rows.measure("socket", lambda: _send(nbytes))
    rows.planned["socket"] = nbytes


def _send(nbytes: int) -> None:
    """Send `nbytes` from the first rank."""
    if dist.get_rank() == 0:
        part = bytes(1 << 20)
        with socket.create_connection((ADDRESSES[1], PORT)) as peer:
            for start in range(0, nbytes, len(part)):
                peer.sendall(part[: nbytes - start])
            peer.shutdown(socket.SHUT_WR)
            peer.recv(1)  # returns when the other side has received everything


def _publish_changes(worker: ActorHybridWorker, rows: Rows) -> None:
    changes: dict[str, tuple[Callable[[str], bool], int]] = {
        "all": (lambda tensor: True, 1),
        "one layer": (lambda tensor: ".layers.1." in tensor, 1),
        "one in 1,000": (lambda tensor: True, 1000),
        "nothing": (lambda tensor: False, 1),
    }
    for row, (is_changed, every) in changes.items():
        _change(worker, is_changed, every)
        rows.publish(f"kept: {row}", worker)
        worker.sharding.enter(State.TRAIN)


def _publish_deltas(worker: ActorHybridWorker, rows: Rows) -> None:
    for row, share in SHARES.items():
        _flip(worker, share)
        rows.publish(f"delta: {row}", worker)
        worker.sharding.enter(State.TRAIN)


def _flip(worker: ActorHybridWorker, share: float) -> None:
    """Flip the last bit of a share of the elements."""
    for flat in worker.sharding.trainer.weights.buffers().values():
        # limits the memory of the random numbers
        for part in flat.view(torch.int16).split(1 << 24):
            part ^= (torch.rand(part.shape) < share).to(torch.int16)


def _change(worker: ActorHybridWorker, is_changed: Callable[[str], bool], every: int) -> None:
    """Change every `every`-th element of the tensors that `is_changed` selects."""
    weights = worker.sharding.trainer.weights
    buffers = weights.buffers()
    for shard in weights.layout().shards:
        place = shard.place
        if place.buffer.rank == worker.rank and is_changed(shard.region.tensor):
            extent = place.extent(shard.region.lengths)
            with torch.no_grad():
                buffers[place.buffer.name][extent.start : extent.stop : every] += 1.0


def _summary(rows: Rows, row: str) -> Mapping[str, Any]:
    seconds = rows.seconds[row]
    link = rows.link[row]
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "planned": rows.planned[row],
        "link": statistics.median(link),
        "most": max(link),
        "density": rows.density.get(row, (None, "")),
        "runs": len(seconds),
    }


if __name__ == "__main__":
    main_or_rank(main, run_rank)

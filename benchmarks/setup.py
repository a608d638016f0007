"""Set-up of one rank of a large job: what it receives, and its CPU time and memory until it has its plan.

    python -m benchmarks.setup [--model deepseek-v3|llama-3-70b ...] [--ranks N ...] [--json FILE]
    python -m benchmarks.setup --real 2 4 8

The code is that of a job: a rank's layouts become messages, messages become sides, sides a plan with its release
schedule (`setup.rank_plan`). What other ranks say is made by the layout code and read from a file, since there are
no thousands of ranks here; so the time of the network is not in it. Each point is a process of its own.

    bytes_received   what a rank receives of `Agreement.gather` and `Agreement.share`, as those count it
    peak_bytes       resident memory at its highest, beyond that of the imported modules

`--real` starts so many ranks of this machine, in hosts of four, which set up the switch of a small model: seconds,
bytes, and what a rank has made for it: sockets, other descriptors, threads. Ranks share the cores, so its seconds say
little.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.planning import DEEPSEEK_V3, RANKS_PER_HOST
from hybrid_engine.config import GenerateConfig
from hybrid_engine.layouts.inference import inference_side
from hybrid_engine.layouts.parallelism import InferenceParallelism, TrainParallelism
from hybrid_engine.layouts.training import training_side
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.messages import content_digest, encode
from hybrid_engine.models import table_for
from hybrid_engine.ranks.agreement import first_to_have
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.rank_tree import TreeShape
from hybrid_engine.records.holdings import SideLayout, first_members, rank_classes
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.sides import Side, layout_messages
from hybrid_engine.switch.setup import Offer, connect, rank_plan
from hybrid_engine.tools.launching import run_ranks

LLAMA_3_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
MODELS = ("deepseek-v3", "llama-3-70b")
RANKS = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Row:
    """One point.

    Attributes:
        kinds: how many ranks hold something that no rank before them holds, of either side.
        transfers: of this rank.
        peers: ranks that it reads from or is read by, on its host (mapped memory) and on others (messages).
    """

    model: str
    ranks: int
    cpu_seconds: float
    bytes_received: int
    peak_bytes: int
    kinds: tuple[int, int]
    transfers: int
    peers: tuple[int, int]


def sides_of(model: str, ranks: int) -> tuple[SideLayout, SideLayout, list[str]]:
    """Both sides as the layout code computes them, and what no inference rank reads."""
    if model == "deepseek-v3":
        table = table_for(DEEPSEEK_V3)
        train = TrainParallelism(
            ranks,
            tensor=8,
            pipeline=8,
            expert=8,
            expert_tensor=1,
            num_layers_in_last_pipeline_stage=5,
        )
        infer = InferenceParallelism(ranks, tensor=8, expert=8)
    else:
        table = table_for(LLAMA_3_70B)
        train, infer = (
            TrainParallelism(ranks, tensor=8, pipeline=4),
            InferenceParallelism(ranks, tensor=8),
        )
    unserved = [name for name in table.shapes if not table.is_served(name)]
    return training_side(table, train), inference_side(table, infer), unserved


def told_by_ranks(
    side: SideLayout, extra: Sequence[bytes] = ()
) -> tuple[list[list[int]], list[bytes]]:
    """Return what `Agreement.share` returns on every rank: ranks of one class say the same."""
    classes = rank_classes(side.holdings)
    numbers: dict[bytes, int] = {}
    said = [
        [
            numbers.setdefault(message, len(numbers))
            for message in (*layout_messages(side.layout_of(int(first))), *extra)
        ]
        for first in first_members(classes)
    ]
    return [said[kind] for kind in classes], list(numbers)


def received_nbytes(
    rank: int, shape: TreeShape, told: Sequence[Sequence[int]], messages: Sequence[bytes]
) -> int:
    """Bytes that `Agreement.share` brings a rank: digests and lengths of all messages, with their sizes, then these."""
    digests = encode(
        [(content_digest(messages[number]), len(messages[number])) for number in told[0]]
    )
    lent = [sum(len(messages[number]) for number in numbers) for numbers in first_to_have(told)]
    return sum(
        shape.received_nbytes(rank, sizes)
        for sizes in ([8] * len(told), [len(digests)] * len(told), lent)
    )


def _feed(model: str, ranks: int, path: Path) -> list[str]:
    """Write what the ranks say; returns what may stay unread."""
    source, destination, unserved = sides_of(model, ranks)
    for name, side, extra in (
        ("source", source, ()),
        ("destination", destination, (encode(Offer(True, [])),)),
    ):
        told, messages = told_by_ranks(side, extra)
        np.save(path / f"{name}.npy", np.array(told))
        for number, message in enumerate(messages):
            (path / f"{name}.{number}").write_bytes(message)
    return unserved


def _read(path: Path, name: str) -> tuple[list[list[int]], list[bytes]]:
    told = np.load(path / f"{name}.npy").tolist()
    return told, [
        (path / f"{name}.{number}").read_bytes() for number in range(1 + max(map(max, told)))
    ]


def _resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(model: str, ranks: int, path: Path, unserved: Sequence[str]) -> Row:
    """Set up the rank in the middle of the job."""
    before = _resident_nbytes()
    rank, hosts = ranks // 2, [str(each // RANKS_PER_HOST) for each in range(ranks)]
    fed = {name: _read(path, name) for name in ("source", "destination")}
    started = time.process_time()
    source = Side.from_messages(*fed["source"])
    told, messages = fed["destination"]
    own = rank_plan(rank, hosts, source, told, messages, GenerateConfig(), unserved)
    # this rank's own part of the exchange, which its adaptors' layouts go through
    for layout in (source.kind(rank), own.destination.kind(rank)):
        layout_messages(layout)
    seconds = time.process_time() - started
    others: dict[bool, set[int]] = {True: set(), False: set()}
    for transfer in own.plan.transfers():
        (peer,) = {transfer.src_rank, transfer.dst_rank} - {rank} or {rank}
        others[hosts[peer] == hosts[rank]].add(peer)
    others[True].discard(rank)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return Row(
        model,
        ranks,
        seconds,
        sum(received_nbytes(rank, TreeShape(hosts), *each) for each in fed.values()),
        peak,
        (len(source.kinds), len(own.destination.kinds)),
        sum(1 for _ in own.plan.transfers()),
        (len(others[True]), len(others[False])),
    )


def point(model: str, ranks: int) -> Row:
    """Measure in a fresh process."""
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:  # what makes the messages is larger than what reads them
            unserved = pool.apply(_feed, (model, ranks, Path(directory)))
        with context.Pool(1) as pool:
            return pool.apply(measure, (model, ranks, Path(directory), unserved))


@dataclass(frozen=True)
class RealRow:
    """Resources that rank 0 of a real job holds after `connect`, beyond those before `Job.join`."""

    ranks: int
    seconds: float
    bytes_received: int
    sockets: int
    other_descriptors: int
    threads: int


class _Held:
    """Weights of one side that are there: a layout and its buffers, as far as set-up asks."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._buffers = {
            buffer_id.name: allocate_elastic(
                buffer.numel, getattr(torch, buffer.dtype), "cpu", "param"
            )
            for buffer_id, buffer in layout.buffers.items()
        }

    def layout(self) -> Layout:
        return self._layout

    def buffers(self) -> dict[str, torch.Tensor]:
        return self._buffers


def _opened() -> tuple[int, int, int]:
    """Sockets, other descriptors and threads of this process."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    sockets = sum(name.startswith("socket:") for name in names)
    return sockets, len(names) - sockets, len(os.listdir("/proc/self/task"))


def run_rank(out: str) -> None:
    """Be one rank of `--real`."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    table = table_for(
        {**LLAMA_3_70B, "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024}
    )
    sides = (
        training_side(table, TrainParallelism(ranks, tensor=2)),
        inference_side(table, InferenceParallelism(ranks, tensor=1)),
    )
    source, destination = (_Held(side.layout_of(rank)) for side in sides)
    before = _opened()
    with ExitStack() as ends, closing(Job.join(60, host=str(rank // 4))) as job:
        started = time.perf_counter()
        connect(
            job, cast(Any, source), cast(Any, destination), GenerateConfig(timeout_seconds=60), ends
        )
        seconds, after = time.perf_counter() - started, _opened()
        made = (now - then for now, then in zip(after, before, strict=True))
        row = RealRow(ranks, seconds, job.agreement.nbytes_received, *made)
        job.agreement.conclude("measured")
        if rank == 0:
            Path(out).write_text(json.dumps(asdict(row)))


def real(ranks: int) -> RealRow:
    """Set up a real job on this machine."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "row.json"
        ended = run_ranks(["-m", "benchmarks.setup", "--rank", str(out)], ranks, 120)
        if not out.is_file():
            raise RuntimeError(f"{ranks} ranks failed: {ended}")
        return RealRow(**json.loads(out.read_text()))


def main() -> None:
    """Measure, print a table, write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--ranks", nargs="*", type=int, default=RANKS)
    parser.add_argument("--real", nargs="+", type=int, help="real jobs of so many ranks instead")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank(arguments.rank)
        return
    if arguments.real:
        for found in map(real, arguments.real):
            print(json.dumps(asdict(found)))
        return
    rows = [point(model, ranks) for model in arguments.model for ranks in arguments.ranks]
    table = Table()
    for column in (
        "model",
        "ranks",
        "CPU s",
        "MB received",
        "peak MB",
        "kinds",
        "transfers",
        "peers",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            f"{row.ranks:,}",
            f"{row.cpu_seconds:.2f}",
            f"{row.bytes_received / 1e6:.1f}",
            f"{row.peak_bytes / 1e6:.0f}",
            " + ".join(map(str, row.kinds)),
            f"{row.transfers:,}",
            " + ".join(map(str, row.peers)),
        )
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()

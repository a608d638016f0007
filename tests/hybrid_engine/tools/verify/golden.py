"""Recorded plans of the matrix's cells: golden.json, one line per cell.

An entry is the same in every run and on every machine, and contains no names of classes or modules,
so a refactoring leaves it unchanged. Any other order or bucket changes it. `make matrix RECORD=1`
writes it. It is recorded with the versions of requirements-cpu.txt: Megatron's buffers and vLLM's
parameters are part of a plan.

    every rank    look     digest of its plan, numbers of buckets and of transfers to it
    the test      entry    digest of all ranks' digests; transfers of all ranks; bytes of a switch
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from hybrid_engine.planning.plan import ReshardPlan, Transfer
from hybrid_engine.planning.routes import Hosts
from hybrid_engine.records.layout import Buffer, BufferId, Place
from hybrid_engine.tools.verify import comparison, verify
from hybrid_engine.tools.verify.comparison import Verdict
from tests.gpu.sizes import is_software_gpu
from tests.harness.values import Values

if TYPE_CHECKING:
    from hybrid_engine.trainer.worker import ActorHybridWorker

GOLDEN = Path(__file__).with_name("golden.json")
REMEDY = "if intended: make matrix RECORD=1"

Entry = Values


def main(job: str, out: str) -> list[Verdict]:
    """Run `verify.main` on a rank of the matrix, and describe its plan."""
    with ExitStack() as ends:
        if is_software_gpu():  # Triton's interpreter computes ten tokens per second
            ends.enter_context(mock.patch.object(comparison, "_NUM_COMPARED", 1))
        return verify.main(job, out, look=look)


def look(worker: ActorHybridWorker) -> Entry:
    sharding = worker.sharding
    sides = (side.layout().buffers for side in (sharding.training, sharding.inference))
    return part_of(sharding.plan, worker.rank, *sides, worker.job.hosts)


def part_of(
    plan: ReshardPlan,
    rank: int,
    sources: Mapping[BufferId, Buffer],
    destinations: Mapping[BufferId, Buffer],
    hosts: Sequence[str],
) -> Entry:
    """Return this rank's part of a cell's entry.

    Args:

        plan: of this rank.
        sources, destinations: this rank's buffers; other ranks' only if they are in `plan.relays`.
        hosts: by rank.
    """
    digest = hashlib.sha256()
    for line in _lines(plan, rank, sources, destinations, Hosts(hosts).numbers.tolist()):
        digest.update(
            json.dumps(line, default=int).encode() + b"\n"
        )  # numpy's integers are integers
    received = sum(transfer.dst_rank == rank for transfer in plan.transfers())
    return {"plan": digest.hexdigest(), "buckets": len(plan.buckets), "transfers": received}


def _lines(
    plan: ReshardPlan,
    rank: int,
    sources: Mapping[BufferId, Buffer],
    destinations: Mapping[BufferId, Buffer],
    hosts: Sequence[int],
) -> Iterator[list[object]]:
    """Yield a line for every bucket and transfer, in the plan's order.

    Each end is: rank, host, buffer, dtype, first element, strides. Only the rank of an end knows
    its dtype; both ends have the wire's. Buffers of inference have vLLM's names, others are
    numbered in their order of occurrence.
    """
    numbers = {}

    def end(place: Place, buffers: Mapping[BufferId, Buffer], name: str | None) -> list[object]:
        buffer = place.buffer
        if buffer in plan.relays or name is None:
            name = f"#{numbers.setdefault(buffer, len(numbers))}"
        known = plan.relays.get(buffer) or (buffers[buffer] if buffer.rank == rank else None)
        return [
            buffer.rank,
            hosts[buffer.rank],
            name,
            known and known.dtype,
            place.offset,
            *place.strides,
        ]

    def line(step: str, transfer: Transfer) -> list[object]:
        src = end(transfer.src, sources, None)
        dst = end(transfer.dst, destinations, transfer.dst.buffer.name)
        return [step, transfer.tensor, transfer.lengths, src, dst, transfer.nbytes]

    for bucket in plan.buckets:
        yield ["bucket", *bucket.tensors]
        yield from (line("transfer", transfer) for transfer in bucket.transfers)
        yield from (line("fan out", transfer) for transfer in bucket.fan_out)


def entry(verdict: Verdict) -> Entry:
    """Return a cell's entry of golden.json from the verdict over all ranks."""
    ranks = verdict.seen
    digests = " ".join(part["plan"] for part in ranks)
    (buckets,) = {part["buckets"] for part in ranks}  # every rank runs all of them
    return {
        "plan": hashlib.sha256(digests.encode()).hexdigest()[:32],
        "buckets": buckets,
        "transfers": sum(part["transfers"] for part in ranks),
        "bytes_received": verdict.bytes_received,
        "bytes_least": verdict.bytes_least,
    }


def faults(verdict: Verdict, golden: Mapping[str, Entry]) -> list[str]:
    """Return the faults of a cell: the verdict's, or else differences from the recorded entry."""
    if verdict.faults:
        return verdict.faults
    current = entry(verdict)
    recorded = golden.get(verdict.name)
    if recorded is None:
        return [f"not in {GOLDEN.name}; {REMEDY}"]
    keys = [key for key in {**recorded, **current} if recorded.get(key) != current.get(key)]
    return [f"{key}: {current.get(key)}, recorded {recorded.get(key)}; {REMEDY}" for key in keys]


def read(file: Path = GOLDEN) -> dict[str, Entry]:
    return json.loads(file.read_text())


def record(verdict: Verdict, cells: Collection[str], file: Path = GOLDEN) -> None:
    """Write a cell's entry, unless the cell failed. Entries of cells not in `cells` are removed."""
    entries = {name: recorded for name, recorded in read(file).items() if name in cells}
    if not verdict.faults:
        entries[verdict.name] = entry(verdict)
    lines = [f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries)]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

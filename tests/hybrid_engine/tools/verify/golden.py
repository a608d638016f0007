"""The plans of the matrix's cells as they were recorded: golden.json, one line per cell.

An entry is the same in every run and on every machine, and says nothing of classes or modules: a refactoring leaves it
as it is. Whatever moves otherwise, in another order or bucket, changes it. `make matrix RECORD=1` writes it again.
Recorded with the versions of requirements-cpu.txt: Megatron's buffers and vLLM's parameters are part of a plan.

    every rank    look     digest of its own plan, number of buckets, number of transfers that it receives
    the test      entry    one digest of all ranks' digests; transfers of all ranks; bytes of a switch
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from hybrid_engine.planning.plan import ReshardPlan, Transfer
from hybrid_engine.planning.routes import Hosts
from hybrid_engine.records.layout import Buffer, BufferId, Place
from hybrid_engine.tools.verify import comparison, verify
from hybrid_engine.tools.verify.comparison import Verdict
from tests.gpu.sizes import is_software_gpu

if TYPE_CHECKING:
    from hybrid_engine.trainer.worker import ActorHybridWorker

GOLDEN = Path(__file__).with_name("golden.json")
REMEDY = "if it is meant: make matrix RECORD=1"

Entry = dict[str, Any]


def main(job: str, out: str) -> None:
    """`verify.main` with a look at the plan: what each rank of the matrix runs."""
    with ExitStack() as ends:
        if is_software_gpu():  # Triton's interpreter computes ten tokens in a second
            ends.enter_context(mock.patch.object(comparison, "_NUM_COMPARED", 1))
        verify.main(job, out, look=look)


def look(worker: ActorHybridWorker) -> Entry:
    sharding, rank = worker.sharding, worker.rank
    sides = (side.layout().buffers for side in (sharding.training, sharding.inference))
    return part_of(sharding.plan, rank, *sides, worker.job.hosts)


def part_of(
    plan: ReshardPlan,
    rank: int,
    sources: Mapping[BufferId, Buffer],
    destinations: Mapping[BufferId, Buffer],
    hosts: Sequence[str],
) -> Entry:
    """This rank's part of a cell's entry.

    Args:
        plan: of this rank.
        sources, destinations: at least this rank's buffers; of others' only those in `plan.relays` are looked at.
        hosts: by rank.
    """
    digest = hashlib.sha256()
    for line in _lines(plan, rank, sources, destinations, Hosts(hosts).numbers.tolist()):
        digest.update(json.dumps(line, default=int).encode() + b"\n")  # numpy's integers are integers
    received = sum(transfer.dst_rank == rank for transfer in plan.transfers())
    return {"plan": digest.hexdigest(), "buckets": len(plan.buckets), "transfers": received}


def _lines(
    plan: ReshardPlan,
    rank: int,
    sources: Mapping[BufferId, Buffer],
    destinations: Mapping[BufferId, Buffer],
    hosts: Sequence[int],
) -> Iterator[list[object]]:
    """All that moves, in the plan's order.

    Of each end: rank, host, buffer, dtype, first element, strides. Either end's dtype is known to its own rank; both
    give that of the wire. Buffers of inference have vLLM's names, others are counted in the order in which they occur.
    """
    numbers: dict[BufferId, int] = {}

    def end(place: Place, buffers: Mapping[BufferId, Buffer], name: str | None) -> list[object]:
        buffer = place.buffer
        if buffer in plan.relays or name is None:
            name = f"#{numbers.setdefault(buffer, len(numbers))}"
        known = plan.relays.get(buffer) or (buffers[buffer] if buffer.rank == rank else None)
        return [buffer.rank, hosts[buffer.rank], name, known and known.dtype, place.offset, *place.strides]

    def line(step: str, moved: Transfer) -> list[object]:
        ends = end(moved.src, sources, None), end(moved.dst, destinations, moved.dst.buffer.name)
        return [step, moved.tensor, moved.lengths, *ends, moved.nbytes]

    for bucket in plan.buckets:
        yield ["bucket", *bucket.tensors]
        yield from (line("transfer", each) for each in bucket.transfers)
        yield from (line("fan out", each) for each in bucket.fan_out)


def entry(verdict: Verdict) -> Entry:
    """What golden.json says of a cell, from the verdict over all ranks."""
    ranks: list[Entry] = verdict.seen
    digests = " ".join(each["plan"] for each in ranks)
    (buckets,) = {each["buckets"] for each in ranks}  # every rank walks all of them
    return {
        "plan": hashlib.sha256(digests.encode()).hexdigest()[:32],
        "buckets": buckets,
        "transfers": sum(each["transfers"] for each in ranks),
        "bytes_received": verdict.bytes_received,
        "bytes_least": verdict.bytes_least,
    }


def faults(verdict: Verdict, golden: Mapping[str, Entry]) -> list[str]:
    """What is wrong with a cell: the verdict's own faults, else what differs from what was recorded."""
    if verdict.faults:
        return verdict.faults
    found, recorded = entry(verdict), golden.get(verdict.name)
    if recorded is None:
        return [f"not in {GOLDEN.name}; {REMEDY}"]
    keys = [key for key in {**recorded, **found} if recorded.get(key) != found.get(key)]
    return [f"{key}: {found.get(key)}, recorded {recorded.get(key)}; {REMEDY}" for key in keys]


def read(file: Path = GOLDEN) -> dict[str, Entry]:
    entries: dict[str, Entry] = json.loads(file.read_text())
    return entries


def record(verdict: Verdict, cells: Collection[str], file: Path = GOLDEN) -> None:
    """Write a cell's entry anew, unless the cell failed; entries of what is none of `cells` go."""
    entries = {name: each for name, each in read(file).items() if name in cells}
    if not verdict.faults:
        entries[verdict.name] = entry(verdict)
    lines = [f"{json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries)]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

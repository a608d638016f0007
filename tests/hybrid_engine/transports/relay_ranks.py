"""Reshards between two simulated hosts and the four ranks that run them: 0, 1 and 2, 3."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.planning.plan import Bucket, ReshardPlan
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.switch.setup import _gather_handles
from hybrid_engine.transports.context import RelayBuffers, TransportContext
from hybrid_engine.transports.router import TransportSet, export_handles
from tests.hybrid_engine.planning.cases import NOT_WRITTEN, filled_buffers, plan
from tests.hybrid_engine.transports.cases import outcome_of

HOSTS = ("a", "a", "b", "b")
ROWS = 24
COLUMNS = 5


@dataclass(frozen=True)
class Reshard:
    """Layouts of all ranks; values are below 2048, which are exact in float16."""

    source: Layout
    destination: Layout

    def plan(self, **settings: object) -> ReshardPlan:
        return plan(
            self.source,
            self.destination,
            HOSTS,
            **{"bucket_nbytes": 1, "relaying_hosts": HOSTS, **settings},
        )


def rows_of(tensors: list[str], parts: list[tuple[int, int, int]], dtype: str, side: str) -> Layout:
    """Build a layout from (rank, start, stop) rows of every tensor.

    Each part has a separate buffer, and each tensor is a group.
    """
    buffers = {}
    shards = []
    for tensor in tensors:
        for number, (rank, start, stop) in enumerate(parts):
            buffer = BufferId(rank, f"{side} {tensor} {number}")
            buffers[buffer] = Buffer((stop - start) * COLUMNS, dtype, tensor)
            region = Region(tensor, (start, 0), (stop - start, COLUMNS))
            shards.append(Shard(region, Place(buffer, 0, (COLUMNS, 1))))
    return Layout(dict.fromkeys(tensors, (ROWS, COLUMNS)), buffers, tuple(shards))


def random_reshard(seed: int, src_dtype: str, dst_dtype: str) -> Reshard:
    """Cut sources at random, mostly on one host; every rank reads a random window or two."""
    generator = random.Random(seed)
    tensors = [f"t{number}" for number in range(6)]
    cuts = sorted(generator.sample(range(1, ROWS), 2))
    held = [
        (generator.choice((0, 1, 1, 3)), *part)
        for part in zip((0, *cuts), (*cuts, ROWS), strict=True)
    ]
    wanted = []
    for rank in (0, 1, 2, 2, 3, 3):
        wanted.append((rank, generator.randint(0, 10), generator.randint(14, ROWS)))
    return Reshard(
        rows_of(tensors, held, src_dtype, "src"), rows_of(tensors, wanted, dst_dtype, "dst")
    )


RESHARDS = {
    "halves to every rank": lambda: Reshard(
        rows_of(["t0", "t1", "t2"], [(0, 0, 12), (1, 12, 24)], "float32", "src"),
        rows_of(["t0", "t1", "t2"], [(rank, 0, ROWS) for rank in range(4)], "float32", "dst"),
    ),
    **{
        f"{src} to {dst}, {seed}": lambda seed=seed, src=src, dst=dst: random_reshard(
            seed, src, dst
        )
        for seed, (src, dst) in enumerate(
            [
                ("float32", "float32"),
                ("float32", "float16"),
                ("float16", "float32"),
                ("int32", "int32"),
            ]
            * 2
        )
    },
}


class Rank:
    """A rank connected for its part of a reshard plan."""

    def __init__(self, reshard: Reshard, job: Job, **settings: Any) -> None:
        self.rank = job.rank
        self.meet = partial(
            job.agreement.conclude, "until here other ranks may read this rank's buffers"
        )
        self.plan = reshard.plan(rank=self.rank)
        self.expected = self._tensors(reshard.destination)
        self.source = {}
        for name, flat in self._tensors(reshard.source).items():
            self.source[name] = allocate_elastic(flat.numel(), flat.dtype, "cpu", "param").copy_(
                flat
            )
        relays = RelayBuffers(self.rank, self.plan.relays)
        owner = ExitStack()
        exported = export_handles(self.rank, {**self.source, **relays.tensors})
        handles = _gather_handles(job, exported, job.new_host_group(owner))
        self.group, notify_group = job.new_group(owner), job.new_group(owner)
        context = TransportContext(
            self.rank,
            reshard.source.buffers,
            handles,
            self.group,
            destination_buffers=reshard.destination.buffers,
            relays=relays,
            notify_group=notify_group,
            **{"timeout": 60, **settings},
        )
        self.router = TransportSet.connect(context)
        self.router.check(self.plan, exported=handles)
        self.clear()

    def _tensors(self, layout: Layout) -> TensorDict:
        return {
            buffer.name: torch.from_numpy(values).to(getattr(torch, layout.buffers[buffer].dtype))
            for buffer, values in filled_buffers(layout).items()
            if buffer.rank == self.rank
        }

    def clear(self, *, whole: bool = True) -> None:
        """Prepare a fill."""
        self.router.begin(whole=whole)
        self.router.prepare()
        self.destination = {
            name: torch.full_like(flat, NOT_WRITTEN) for name, flat in self.expected.items()
        }

    def negate(self) -> None:
        """Negate all values in any layout and dtype; in float32 only the upper words change."""
        for flat in (*self.source.values(), *self.expected.values()):
            flat.neg_()

    def run(self, index: int, **changes: object) -> str:
        values = {"source": self.source, "destination": self.destination, **changes}
        return outcome_of(lambda: self.router.run(self.plan.buckets[index], **values))

    def following(self, index: int) -> Bucket | None:
        return next(iter(self.plan.buckets[index + 1 :]), None)

    def run_ahead(self, index: int) -> str:
        """Run a bucket while the next bucket's messages are sent."""
        return self.run(index, following=self.following(index))

    def abandon_ahead(self, index: int, reason: str) -> str:
        return outcome_of(
            lambda: self.router.abandon(self.plan.buckets[index], reason, self.following(index))
        )

    def wrong(self, *indices: int) -> list[str]:
        """Return buffers of these buckets' groups (default: all) with wrong values."""
        tensors = [tensor for index in indices for tensor in self.plan.buckets[index].tensors]
        return [
            name
            for name, flat in self.destination.items()
            if (not tensors or name.split()[1] in tensors)
            and not torch.equal(flat, self.expected[name])
        ]

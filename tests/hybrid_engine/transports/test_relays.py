"""Relays on two simulated hosts: data crosses the network once, and failures reach all ranks.

Ranks 0, 1 are on one host, 2, 3 on the other. They are threads, each the late one in turn; what
patches modules or ends by a timeout runs on real ranks.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.planning.plan import Bucket, Link, ReshardPlan
from hybrid_engine.planning.relays import staging_nbytes
from hybrid_engine.ranks.job import Job, join_process_group
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.ranks.world import World
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.switch import setup
from hybrid_engine.switch.setup import _gather_handles
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.context import RelayBuffers, TransportContext
from hybrid_engine.transports.router import TransportSet, export_handles
from tests.harness.launch import of_all_ranks, on_ranks
from tests.harness.rank_threads import RankThreads
from tests.hybrid_engine.planning.cases import (
    NOT_WRITTEN,
    bytes_read,
    filled_buffers,
    network_lower_bound,
    plan,
)
from tests.hybrid_engine.switch.fakes import INFER, NBYTES, TRAIN, Rig
from tests.hybrid_engine.transports.cases import check_error, outcome_of

HOSTS = ("a", "a", "b", "b")
HEADERS_AND_PADDING = 1 << 16
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
        self.job = job
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


def test_relay_buffers_of_a_bucket_do_not_overlap():
    """Buffers of other buckets share bytes: in total, the size of the fullest bucket."""
    result = RESHARDS["halves to every rank"]().plan()
    relays = RelayBuffers(2, result.relays)
    spans: dict[int, list[tuple[int, int]]] = {}
    for buffer_id, buffer in result.relays.items():
        if buffer_id.rank == 2:
            flat = relays.tensors[buffer_id.name]
            assert (flat.numel(), str(flat.dtype)) == (buffer.numel, f"torch.{buffer.dtype}")
            spans.setdefault(int(buffer.group), []).append(
                (flat.data_ptr(), flat.data_ptr() + flat.nbytes)
            )
    assert spans.keys() == {0, 1, 2}
    for of_bucket in spans.values():
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(sorted(of_bucket)))
    assert len({min(of_bucket)[0] for of_bucket in spans.values()}) == 1
    assert export_handles(2, relays.tensors).keys() == {
        buffer_id for buffer_id in result.relays if buffer_id.rank == 2
    }


# -- fills without failures ------------------------------------------------------------------------


def each_byte_enters_a_host_once(job: Job) -> None:
    """Fill twice over the same transports, the second time ahead; most reshards have relays."""
    num_relayed = 0
    for make in RESHARDS.values():
        reshard = make()
        rank = Rank(reshard, job)
        for is_ahead in (False, True):
            rank.clear()
            received: Counter[Link] = Counter()
            rank.meet()
            for bucket in rank.plan.buckets:
                following = rank.following(bucket.index) if is_ahead else None
                report = rank.router.run(bucket, rank.source, rank.destination, following)
                received.update(report.nbytes_by_link)
            assert rank.wrong() == []
        rank.meet()
        rank.router.close()
        count = bytes_read(rank.plan)[rank.rank]
        by_link = {Link.SELF: count.device, Link.HOST: count.host, Link.NETWORK: count.network}
        assert received == Counter(by_link)
        entered: Counter[str] = Counter()
        for host, nbytes in zip(HOSTS, job.agreement.gather(count.network, int), strict=True):
            entered[host] += nbytes
        assert entered == network_lower_bound(reshard.source, reshard.destination, HOSTS)
        num_relayed += any(job.agreement.gather(len(rank.plan.relays), int))
    assert num_relayed > len(RESHARDS) // 2


def each_message_is_sent_in_its_shorter_form(job: Job) -> None:
    """Fill four times: whole, changed, unchanged, whole; in order or one bucket ahead.

    A negated float32 changes one of two words; 16-bit values and int32 are sent whole.
    """
    for name, make in RESHARDS.items():
        rank = Rank(make(), job, sends_deltas=True)
        across = []
        counts: list[Counter[str]] = []
        for number, (whole, is_ahead) in enumerate(
            ((True, True), (False, True), (False, False), (True, False))
        ):
            if number == 1:
                rank.negate()
            rank.clear(whole=whole)
            rank.meet()
            reports = [
                rank.router.run(
                    bucket,
                    rank.source,
                    rank.destination,
                    rank.following(bucket.index) if is_ahead else None,
                )
                for bucket in rank.plan.buckets
            ]
            rank.meet()
            assert rank.wrong() == []
            across.append(sum(report.nbytes_by_link[Link.NETWORK] for report in reports))
            counts.append(sum((report.counts for report in reports), rank.router.trim().counts))
        rank.router.close()
        assert rank.router.trim().counts["bytes_of_copies"] == 0
        planned = bytes_read(rank.plan)[rank.rank].network
        first, changed, unchanged, last = counts
        in_whole_fills = first + last
        assert in_whole_fills["messages_delta"] == in_whole_fills["words_compared"] == 0
        assert across[0] == across[3] == planned
        assert across[2] == unchanged["messages_whole"] == unchanged["words_changed"] == 0
        num_messages = changed["messages_whole"] + changed["messages_delta"]
        assert first["messages_whole"] == num_messages == unchanged["messages_delta"]
        assert len({count["bytes_of_copies"] for count in counts}) == 1
        sums = [
            sum(job.agreement.gather(value, int))
            for value in (planned, across[1], changed["messages_delta"])
        ]
        assert sums[1] < 2 * sums[0], "small messages are half padding"
        if name == "halves to every rank":
            assert 0.7 * sums[0] < sums[1] < 0.9 * sums[0]
            assert sums[2] > 0


@on_ranks(4, timeout=250)
def test_the_manager_relays_if_all_ranks_of_a_host_can() -> None:
    """Switch with relays, with relays on host b only, and with messages."""
    join_process_group(60)
    host = HOSTS[dist.get_rank()]
    quarter = NBYTES // 4
    reports = {}
    for case in ("relayed", "host a cannot", "collective"):
        transport = "collective" if case == "collective" else "auto"
        can_relay = case != "host a cannot" or host != "a"
        with mock.patch.object(setup, "is_elastic", return_value=can_relay):
            rig = Rig(elastic=True, host=host, transport=transport)
        for _ in range(2):
            report = rig.fill()
            rig.assert_is(INFER)
            rig.manager.enter(TRAIN)
        planned = staging_nbytes(rig.manager.plan.buckets, rig.manager.plan.relays, rig.job.rank)
        # Allocated in every switch. Messages within a host are not planned.
        surplus = report.staging_bytes - planned
        assert planned > 0
        assert case == "collective" or 0 <= surplus < HEADERS_AND_PADDING
        rig.close()
        assert report.bytes_received == report.bytes_least == 3 * quarter
        reports[case] = report
    relayed, apart, messages = reports.values()
    assert messages.bytes_by_transport == {"collective": 3 * quarter}
    assert messages.pairs_by_transport == {"collective": 3}
    straight = {"collective": 2 * quarter, "shared_memory": quarter}
    assert (apart.bytes_by_transport == straight) is (host == "a")
    assert set(relayed.bytes_by_transport) == {"collective", "shared_memory"}
    assert sum(relayed.bytes_by_transport.values()) == 3 * quarter
    assert relayed.bytes_by_transport["collective"] == relayed.bytes_across_hosts
    across = of_all_ranks(relayed.bytes_across_hosts)
    assert sum(across[:2]) == sum(across[2:]) == 2 * quarter
    assert min(across) > 0


# -- failures: rank 0 or 1 sends, ranks 2 and 3 relay half each and read the other's half ----------

REASON = "no memory on rank 3"
RELAY_FAILED = ("PeerTransportError", "phase relay arrived", "peer 3", REASON)
"""Parts of the error of rank 2."""


def a_reader_that_abandons_leaves_no_rank_waiting(rank: Rank) -> None:
    first = (
        outcome_of(lambda: rank.router.abandon(rank.plan.buckets[0], REASON))
        if rank.rank == 3
        else rank.run(0)
    )
    if rank.rank == 3:
        assert first == "ok"
    elif rank.rank == 2:
        check_error(first, *RELAY_FAILED, "bucket 0")
    assert [rank.run(1), rank.run(2), rank.wrong(1, 2)] == ["ok", "ok", []]


def a_failed_sender_reaches_readers_of_a_relay_rank(rank: Rank) -> None:
    """Fail in the second bucket; its messages are made while the first is under way."""
    if rank.rank == 0:
        del rank.source["src t1 0"]  # read in the second bucket
    first, failure, last = map(rank.run_ahead, range(3))
    assert [first, last, rank.wrong(0, 2)] == ["ok", "ok", []]
    sender, _, *readers = rank.job.agreement.gather(failure, str)
    fault = "there is no buffer 'src t1 0'"
    check_error(sender, "TransportError", "bucket 1", fault)
    for failure in readers:
        check_error(failure, "PeerTransportError", "bucket 1", fault)
    (via_relay_rank,) = (failure for failure in readers if "phase relay arrived" in failure)
    assert re.search(r"phase relay arrived, peer [23]: the peer failed", via_relay_rank)


def a_relay_rank_that_gives_up_ahead_leaves_no_rank_waiting(rank: Rank) -> None:
    """Give up after the first bucket, while the second is under way; then fill without failure."""
    assert rank.run_ahead(0) == "ok"
    if rank.rank == 3:
        assert [rank.abandon_ahead(index, REASON) for index in (1, 2)] == ["ok", "ok"]
    else:
        second = rank.run_ahead(1)
        if rank.rank == 2:
            check_error(second, *RELAY_FAILED, "bucket 1")
        if second == "ok":
            rank.run_ahead(2)
        else:
            rank.abandon_ahead(2, second)
    rank.clear()
    assert [*map(rank.run_ahead, range(3)), rank.wrong()] == ["ok", "ok", "ok", []]


def fail_in_a_fill(body: Callable[[Rank], None], sends_deltas: bool, job: Job) -> None:
    """Run `body` in a fill with or without deltas; the former follows a whole fill."""
    rank = Rank(RESHARDS["halves to every rank"](), job, sends_deltas=sends_deltas)
    if sends_deltas:
        assert [*map(rank.run_ahead, range(3)), rank.wrong()] == ["ok", "ok", "ok", []]
        rank.meet()
        rank.negate()
    rank.meet()
    rank.clear(whole=False)
    body(rank)
    rank.meet()


ON_THREADS: dict[str, Callable[[Job], None]] = {
    "each byte enters a host once": each_byte_enters_a_host_once,
    "each message is sent in its shorter form": each_message_is_sent_in_its_shorter_form,
    **{
        f"{body.__name__}{' with deltas' * sends_deltas}": partial(
            fail_in_a_fill, body, sends_deltas
        )
        for body in (
            a_reader_that_abandons_leaves_no_rank_waiting,
            a_failed_sender_reaches_readers_of_a_relay_rank,
            a_relay_rank_that_gives_up_ahead_leaves_no_rank_waiting,
        )
        for sends_deltas in (False, True)
    },
}


@pytest.mark.parametrize("late", range(4), ids="rank {} is late".format)
@pytest.mark.parametrize("name", ON_THREADS)
def test_ranks_as_threads(name: str, late: int) -> None:
    def run(world: World) -> None:
        job = Job.join(60, host=HOSTS[world.rank])
        ON_THREADS[name](job)
        job.close()

    RankThreads(4, late, early=late % 2 == 1).run(run)


@on_ranks(4, timeout=250)
@pytest.mark.parametrize("sends_deltas", [False, True])
def test_a_silent_relay_rank_is_an_error_within_the_timeout(sends_deltas: bool) -> None:
    """Run a bucket in which rank 3 sends no notifications, and wait for one again on rank 2."""
    join_process_group(60)
    job = Job.join(60, host=HOSTS[dist.get_rank()])
    reshard = RESHARDS["halves to every rank"]()
    rank = Rank(reshard, job, timeout=1, sends_deltas=sends_deltas)
    rank.clear(whole=not sends_deltas)
    rank.meet()
    transport = rank.router._transports[CollectiveTransport.name]
    with mock.patch.object(transport, "notify") if rank.rank == 3 else nullcontext():
        first = rank.run(0)
    if rank.rank == 2:
        silent = ("bucket 0", "phase relay arrived", "peer 3", "nothing for 1 seconds")
        check_error(first, "TransportError", *silent, within=9)
        second = outcome_of(lambda: transport.notify(1, "relay arrived", [], [3], ""))
        check_error(second, "TransportError", "earlier failure", within=5)
    rank.meet()
    job.close()

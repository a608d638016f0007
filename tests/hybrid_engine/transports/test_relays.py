"""Two hosts, played by four ranks: what several ranks of a host need crosses the network once, and failures reach all.

Ranks 0 and 1 are on one host, 2 and 3 on the other.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.planning.plan import Bucket, Link, ReshardPlan
from hybrid_engine.planning.planner import plan
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.transports import CollectiveTransport, RelayBuffers, TransportSet, Wiring, export_handles
from hybrid_engine.transports.registry import REGISTRY, RegisteredTransport
from tests.harness.launch import Ranks
from tests.hybrid_engine.planning.cases import NOT_WRITTEN, filled_buffers, network_lower_bound
from tests.hybrid_engine.switch.fakes import INFER, NBYTES, TRAIN, Rig
from tests.hybrid_engine.transports.cases import outcome_of

HOSTS = ("a", "a", "b", "b")
ROWS, COLUMNS = 24, 5


@dataclass(frozen=True)
class Job:
    """Layouts of all ranks; numbers below 2048, which are exact in float16."""

    source: Layout
    destination: Layout

    def plan(self, **settings: object) -> ReshardPlan:
        return plan(self.source, self.destination, HOSTS, **{"bucket_nbytes": 1, "relaying_hosts": HOSTS, **settings})


def rows_of(tensors: list[str], parts: list[tuple[int, int, int]], dtype: str, side: str) -> Layout:
    """Every rank's rows [start, stop) of every tensor, each part in a buffer of its own; a tensor is a group."""
    buffers, shards = {}, []
    for tensor in tensors:
        for number, (rank, start, stop) in enumerate(parts):
            buffer = BufferId(rank, f"{side} {tensor} {number}")
            buffers[buffer] = Buffer((stop - start) * COLUMNS, dtype, tensor)
            region = Region(tensor, (start, 0), (stop - start, COLUMNS))
            shards.append(Shard(region, Place(buffer, 0, (COLUMNS, 1))))
    return Layout(dict.fromkeys(tensors, (ROWS, COLUMNS)), buffers, tuple(shards))


def random_job(seed: int, src_dtype: str, dst_dtype: str) -> Job:
    """Sources cut anywhere, mostly on one host; every rank wants a window of its own, and some want two."""
    generator = random.Random(seed)
    tensors = [f"t{number}" for number in range(6)]
    cuts = sorted(generator.sample(range(1, ROWS), 2))
    held = [(generator.choice((0, 1, 1, 3)), *part) for part in zip((0, *cuts), (*cuts, ROWS), strict=True)]
    wanted = []
    for rank in (0, 1, 2, 2, 3, 3):
        wanted.append((rank, generator.randint(0, 10), generator.randint(14, ROWS)))
    return Job(rows_of(tensors, held, src_dtype, "src"), rows_of(tensors, wanted, dst_dtype, "dst"))


JOBS = {
    "halves to everybody": lambda: Job(
        rows_of(["t0", "t1", "t2"], [(0, 0, 12), (1, 12, 24)], "float32", "src"),
        rows_of(["t0", "t1", "t2"], [(rank, 0, ROWS) for rank in range(4)], "float32", "dst"),
    ),
    **{
        f"{src} to {dst}, {seed}": lambda seed=seed, src=src, dst=dst: random_job(seed, src, dst)
        for seed, (src, dst) in enumerate(
            [("float32", "float32"), ("float32", "float16"), ("float16", "float32"), ("int32", "int32")] * 2
        )
    },
}


class Rank:
    """One of the four, connected for a plan of its own part of a job."""

    def __init__(self, job: Job, timeout: float = 60, registry: Sequence[type[RegisteredTransport]] = REGISTRY) -> None:
        self.rank = dist.get_rank()
        self.plan = job.plan(rank=self.rank)
        self.expected = self._tensors(job.destination)
        self.source = {}
        for name, flat in self._tensors(job.source).items():
            self.source[name] = allocate_elastic(flat.numel(), flat.dtype, "cpu", "param").copy_(flat)
        relays = RelayBuffers(self.rank, self.plan.relays)
        gathered: list = [None] * len(HOSTS)
        dist.all_gather_object(gathered, export_handles(self.rank, self.source) | relays.handles())
        handles = {buffer: handle for part in gathered for buffer, handle in part.items()}
        self.group, self.tell_group = dist.new_group(), dist.new_group()
        wiring = Wiring(
            self.rank,
            job.source.buffers,
            handles,
            self.group,
            destination_buffers=job.destination.buffers,
            relays=relays,
            tell_group=self.tell_group,
            timeout=timeout,
        )
        self.router = TransportSet.connect(wiring, registry=registry)
        self.router.check(self.plan, exported=handles)
        self.clear()

    def _tensors(self, layout: Layout) -> dict[str, torch.Tensor]:
        return {
            buffer.name: torch.from_numpy(values).to(getattr(torch, layout.buffers[buffer].dtype))
            for buffer, values in filled_buffers(layout).items()
            if buffer.rank == self.rank
        }

    def clear(self) -> None:
        self.destination = {name: torch.full_like(flat, NOT_WRITTEN) for name, flat in self.expected.items()}

    def run(self, index: int, **changes: object) -> str:
        """Run a bucket; "ok", or the seconds it took with the error's type and message."""
        values = {"source": self.source, "destination": self.destination, **changes}
        return outcome_of(lambda: self.router.run(self.plan.buckets[index], **values))

    def following(self, index: int) -> Bucket | None:
        return next(iter(self.plan.buckets[index + 1 :]), None)

    def run_ahead(self, index: int) -> str:
        """The same, with the next bucket's messages sent meanwhile."""
        return self.run(index, following=self.following(index))

    def abandon_ahead(self, index: int, reason: str) -> str:
        return outcome_of(lambda: self.router.abandon(self.plan.buckets[index], reason, self.following(index)))

    def wrong(self, *indices: int) -> list[str]:
        """Buffers of these buckets' groups (default: all) that differ from what they should hold."""
        tensors = [tensor for index in indices for tensor in self.plan.buckets[index].tensors]
        return [
            name
            for name, flat in self.destination.items()
            if (not tensors or name.split()[1] in tensors) and not torch.equal(flat, self.expected[name])
        ]


# What goes right.


def run_job(make: Callable[[], Job]) -> dict[str, object]:
    """Two rounds over one set of transports, the second one bucket ahead; bytes that this rank received in it."""
    job = make()
    rank = Rank(job)
    wrong, received = [], dict.fromkeys(Link, 0)
    for is_ahead in (False, True):
        rank.clear()
        received = dict.fromkeys(Link, 0)
        dist.barrier()
        for bucket in rank.plan.buckets:
            following = rank.following(bucket.index) if is_ahead else None
            report = rank.router.run(bucket, rank.source, rank.destination, following)
            for link, nbytes in report.nbytes_by_link.items():
                received[link] += nbytes
        wrong += rank.wrong()
    dist.barrier()  # until then others may read this rank's buffers
    rank.router.close()
    count = rank.plan.bytes_by_rank[rank.rank]
    assert received == {Link.SELF: count.own, Link.HOST: count.host, Link.NETWORK: count.network}
    return {
        "wrong": wrong,
        "network": count.network,
        "least": network_lower_bound(job.source, job.destination, HOSTS),
        "relays": len(rank.plan.relays),
    }


def switch_with_manager() -> dict[str, object]:
    """The manager between fakes of both engines, its ranks on two hosts, then with host a without shared memory."""
    host, found = HOSTS[dist.get_rank()], {}
    for case in ("relayed", "host a cannot", "collective"):
        transport = "collective" if case == "collective" else "auto"
        device = "meta" if case == "host a cannot" and host == "a" else "cpu"  # it has no memory that others can read
        rig = Rig(elastic=True, host=host, device=device, transport=transport)
        for _ in range(2):
            rig.training.step()
            report = rig.manager.enter(INFER)
            rig.assert_is(INFER)
            rig.manager.enter(TRAIN)
        rig.close()
        found[case] = report.as_dict()
    return found


def test_relay_buffers_of_neighbouring_buckets_lie_apart():
    """And those of all others over the same bytes: together twice what the fullest bucket brings."""
    result = JOBS["halves to everybody"]().plan()
    relays = RelayBuffers(2, result.relays)
    spans: dict[int, list[tuple[int, int]]] = {}
    for buffer_id, buffer in result.relays.items():
        if buffer_id.rank == 2:
            flat = relays.tensors[buffer_id.name]
            assert (flat.numel(), str(flat.dtype)) == (buffer.numel, f"torch.{buffer.dtype}")
            spans.setdefault(int(buffer.group), []).append((flat.data_ptr(), flat.data_ptr() + flat.nbytes))
    assert spans.keys() == {0, 1, 2}
    for first, second in ((0, 1), (1, 2)):
        both = sorted(spans[first] + spans[second])
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(both))
    assert min(spans[0])[0] == min(spans[2])[0]
    assert relays.handles().keys() == {buffer_id for buffer_id in result.relays if buffer_id.rank == 2}


# What goes wrong: rank 0 or 1 sends, 2 and 3 bring half each and read the other's half.


def sender_fails(rank: Rank) -> list[object]:
    first = rank.run(0, source={} if rank.rank == 0 else rank.source)
    return [first, rank.run(1), rank.run(2), rank.wrong(1, 2)]


def reader_fails(rank: Rank) -> list[object]:
    first = rank.run(0, destination={} if rank.rank == 3 else rank.destination)
    return [first, rank.run(1), rank.run(2), rank.wrong(1, 2)]


def reader_abandons(rank: Rank) -> list[object]:
    if rank.rank == 3:
        first = outcome_of(lambda: rank.router.abandon(rank.plan.buckets[0], "no memory on rank 3"))
    else:
        first = rank.run(0)
    return [first, rank.run(1), rank.run(2), rank.wrong(1, 2)]


def sender_fails_ahead(rank: Rank) -> list[object]:
    """In the second bucket, whose messages are made while the first is under way."""
    if rank.rank == 0:
        del rank.source["src t1 0"]
    return [*map(rank.run_ahead, range(3)), rank.wrong(0, 2)]


def relay_rank_gives_up_ahead(rank: Rank) -> list[object]:
    """After the first bucket, when it has sent and begun to receive the second; then a round in which nothing fails."""
    found = [rank.run_ahead(0)]
    if rank.rank == 3:
        found += [rank.abandon_ahead(index, "no memory on rank 3") for index in (1, 2)]
    else:
        found.append(rank.run_ahead(1))
        found.append(rank.run_ahead(2) if found[1] == "ok" else rank.abandon_ahead(2, found[1]))
    rank.clear()
    return [*found, *map(rank.run_ahead, range(3)), rank.wrong()]


class Silent(CollectiveTransport):
    """Rank 3 says nothing any more once it has received."""

    last: Silent

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        Silent.last = self

    def tell(self, *args: Any) -> str:
        if self.rank != 3:
            return super().tell(*args)
        return ""


class Dying(CollectiveTransport):
    """The connections of rank 3 close once it has received."""

    def tell(self, *args: Any) -> str:
        if self.rank != 3:
            return super().tell(*args)
        groups = {self._group, self._tell_group} - {None}
        self._group = self._tell_group = None
        while groups:
            dist.destroy_process_group(groups.pop())
        return ""


def relay_rank_falls_silent(rank: Rank) -> list[object]:
    first = rank.run(0)
    if rank.rank != 2:
        return [first]
    return [first, outcome_of(lambda: Silent.last.tell(1, "relay arrived", [], [3]))]


def relay_rank_dies(rank: Rank) -> list[object]:
    rank.group = rank.tell_group = None  # the transport has the last references
    return [rank.run(0)]


SCENARIOS = [
    sender_fails,
    reader_fails,
    reader_abandons,
    sender_fails_ahead,
    relay_rank_gives_up_ahead,
    relay_rank_falls_silent,
    relay_rank_dies,
]


FAULTY = {relay_rank_falls_silent: (Silent, 1), relay_rank_dies: (Dying, 60)}
"""Scenario -> what takes the place of the collective transport, and its timeout."""


def run_all() -> dict[str, object]:
    dist.init_process_group("gloo")
    results: dict[str, object] = {name: run_job(make) for name, make in JOBS.items()}
    results["manager"] = switch_with_manager()
    for scenario in SCENARIOS:
        faulty, timeout = FAULTY.get(scenario, (CollectiveTransport, 60))
        rank = Rank(JOBS["halves to everybody"](), timeout, (*REGISTRY[:-1], faulty))
        results[scenario.__name__] = scenario(rank)
        dist.barrier()  # until then others may read this rank's buffers
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def four_ranks(ranks: Ranks) -> list[dict[str, object]]:
    return ranks.launch(run_all, 4, timeout=250)


@pytest.mark.parametrize("name", JOBS)
def test_each_byte_enters_a_host_once(four_ranks: list[dict[str, object]], name: str):
    found = [results[name] for results in four_ranks]
    assert [part["wrong"] for part in found] == [[]] * 4
    for host, least in found[0]["least"].items():
        assert sum(part["network"] for part, own in zip(found, HOSTS, strict=True) if own == host) == least


def test_the_jobs_have_relays(four_ranks: list[dict[str, object]]):
    with_relays = {name for name in JOBS if any(results[name]["relays"] for results in four_ranks)}
    assert len(with_relays) > len(JOBS) // 2


def test_the_manager_relays_where_all_ranks_of_a_host_can(four_ranks: list[dict[str, object]]):
    quarter = NBYTES // 4
    for rank, results in enumerate(four_ranks):
        found = results["manager"]
        for report in found.values():
            assert report["bytes_received"] == report["bytes_least"] == 3 * quarter
        relayed, apart, messages = (found[case] for case in ("relayed", "host a cannot", "collective"))
        assert relayed["staging_bytes"] > 0  # of every switch anew: nothing is kept in between
        assert messages["bytes_by_transport"] == {"collective": 3 * quarter}
        assert messages["pairs_by_transport"] == {"collective": 3}
        is_on_a = HOSTS[rank] == "a"
        straight = {"collective": 2 * quarter, "shared_memory": quarter}
        assert (apart["bytes_by_transport"] == straight) is is_on_a
        assert set(relayed["bytes_by_transport"]) == {"collective", "shared_memory"}
        assert sum(relayed["bytes_by_transport"].values()) == 3 * quarter
        assert relayed["bytes_by_transport"]["collective"] == relayed["bytes_across_hosts"]
    for first in (0, 2):
        entered = [four_ranks[rank]["manager"]["relayed"]["bytes_across_hosts"] for rank in (first, first + 1)]
        assert sum(entered) == 2 * quarter
        assert min(entered) > 0


def assert_says(outcome: object, *parts: str, within: float = 30) -> None:
    seconds, message = str(outcome).split(" ", 1)
    for part in parts:
        assert part in message, message
    assert float(seconds) < within


def test_a_sender_that_fails_reaches_those_who_read_from_a_carrier(four_ranks: list[dict[str, object]]):
    own, *others = (results["sender_fails"] for results in four_ranks)
    assert_says(own[0], "TransportError", "bucket 0", "there is no buffer 'src t0 0'")
    for outcome in others[1:]:
        assert_says(outcome[0], "PeerTransportError", "bucket 0", "there is no buffer 'src t0 0'")
    (told_by_relay_rank,) = (outcome[0] for outcome in others[1:] if "phase relay arrived" in outcome[0])
    assert re.search(r"phase relay arrived, peer [23]: the peer failed", told_by_relay_rank)
    assert [outcome[1:] for outcome in (own, *others)] == [["ok", "ok", []]] * 4


def test_a_reader_that_fails_reaches_its_relay_rank(four_ranks: list[dict[str, object]]):
    _, _, relay_rank, own = (results["reader_fails"] for results in four_ranks)
    assert_says(own[0], "TransportError", "bucket 0", "there is no buffer 'dst t0 3'")
    assert_says(
        relay_rank[0], "PeerTransportError", "bucket 0", "phase relay", "peer 3", "there is no buffer 'dst t0 3'"
    )
    assert [results["reader_fails"][1:] for results in four_ranks] == [["ok", "ok", []]] * 4


def test_a_reader_that_abandons_leaves_nobody_waiting(four_ranks: list[dict[str, object]]):
    *_, relay_rank, own = (results["reader_abandons"] for results in four_ranks)
    assert own[0] == "ok"
    assert_says(relay_rank[0], "PeerTransportError", "bucket 0", "phase relay arrived", "peer 3", "no memory on rank 3")
    assert [results["reader_abandons"][1:] for results in four_ranks] == [["ok", "ok", []]] * 4


def test_a_sender_that_fails_one_bucket_ahead_fails_in_that_bucket(four_ranks: list[dict[str, object]]):
    own, *others = (results["sender_fails_ahead"] for results in four_ranks)
    assert_says(own[1], "TransportError", "bucket 1", "there is no buffer 'src t1 0'")
    for outcome in others[1:]:
        assert_says(outcome[1], "PeerTransportError", "bucket 1", "there is no buffer 'src t1 0'")
    for first, _, last, wrong in (own, *others):
        assert (first, last, wrong) == ("ok", "ok", [])


def test_a_relay_rank_that_gives_up_one_bucket_ahead_leaves_nobody_waiting(four_ranks: list[dict[str, object]]):
    found = [results["relay_rank_gives_up_ahead"] for results in four_ranks]
    assert [outcome[0] for outcome in found] == ["ok"] * 4
    assert_says(found[2][1], "PeerTransportError", "bucket 1", "phase relay arrived", "peer 3", "no memory on rank 3")
    assert found[3][1:3] == ["ok", "ok"]
    assert [outcome[3:] for outcome in found] == [["ok", "ok", "ok", []]] * 4


def test_a_relay_rank_that_falls_silent_is_an_error_in_time(four_ranks: list[dict[str, object]]):
    first, second = four_ranks[2]["relay_rank_falls_silent"]
    assert_says(first, "TransportError", "bucket 0", "phase relay arrived", "peer 3", "nothing for 1 seconds", within=9)
    assert_says(second, "TransportError", "earlier failure", within=5)


def test_a_relay_rank_that_dies_is_an_error_at_once(four_ranks: list[dict[str, object]]):
    (outcome,) = four_ranks[2]["relay_rank_dies"]
    assert_says(outcome, "TransportError", "bucket 0", "phase relay arrived", "peer 3")

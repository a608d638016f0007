"""Relays on two simulated hosts: data crosses the network once, and failures reach all ranks.

Ranks are threads, each the late one in turn; what patches modules or ends by a timeout runs on real
ranks.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch.distributed as dist

from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.relays import staging_nbytes
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from hybrid_engine.switch import setup
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.context import RelayBuffers
from hybrid_engine.transports.router import export_handles
from tests.harness.launch import Ranks
from tests.harness.rank_threads import RankThreads
from tests.hybrid_engine.planning.cases import bytes_read, network_lower_bound
from tests.hybrid_engine.switch.fakes import INFER, NBYTES, TRAIN, Rig
from tests.hybrid_engine.transports.cases import check_error, outcome_of
from tests.hybrid_engine.transports.relay_ranks import HOSTS, RESHARDS, Rank, Reshard

HEADERS_AND_PADDING = 1 << 16
ByRank = list[dict[str, object]]
"""Results of each rank, by name."""


def run_reshard(make: Callable[[], Reshard], job: Job) -> dict[str, object]:
    """Fill twice over the same transports, the second time ahead; returns errors and bytes."""
    reshard = make()
    rank = Rank(reshard, job)
    wrong = []
    for is_ahead in (False, True):
        rank.clear()
        received: Counter[Link] = Counter()
        rank.meet()
        for bucket in rank.plan.buckets:
            following = rank.following(bucket.index) if is_ahead else None
            report = rank.router.run(bucket, rank.source, rank.destination, following)
            received.update(report.nbytes_by_link)
        wrong += rank.wrong()
    rank.meet()
    rank.router.close()
    count = bytes_read(rank.plan)[rank.rank]
    by_link = {Link.SELF: count.device, Link.HOST: count.host, Link.NETWORK: count.network}
    assert received == Counter(by_link)
    return {
        "wrong": wrong,
        "network": count.network,
        "least": network_lower_bound(reshard.source, reshard.destination, HOSTS),
        "relays": len(rank.plan.relays),
    }


def run_with_deltas(make: Callable[[], Reshard], job: Job) -> dict[str, object]:
    """Fill four times: whole, changed, unchanged, whole; in order or one bucket ahead."""
    rank = Rank(make(), job, sends_deltas=True)
    bytes_across = []
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
        bytes_across.append(sum(report.nbytes_by_link[Link.NETWORK] for report in reports))
        counts.append(sum((report.counts for report in reports), rank.router.trim().counts))
    rank.router.close()
    assert rank.router.trim().counts["bytes_of_copies"] == 0
    return {
        "network": bytes_read(rank.plan)[rank.rank].network,
        "across": bytes_across,
        "counts": counts,
    }


def switch_with_manager() -> dict[str, ReshardReport]:
    """Switch with relays, with relays on host b only, and with messages; returns reports."""
    host = HOSTS[dist.get_rank()]
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
        plan = rig.manager.plan
        planned = staging_nbytes(plan.buckets, plan.relays, rig.job.rank)
        # Allocated in every switch. Messages within a host are not planned.
        surplus = report.staging_bytes - planned
        assert planned > 0
        assert case == "collective" or 0 <= surplus < HEADERS_AND_PADDING
        rig.close()
        reports[case] = report
    return reports


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


# Failures: rank 0 or 1 sends, ranks 2 and 3 relay half each and read the other's half.


def reader_abandons(rank: Rank) -> list[object]:
    if rank.rank == 3:
        first = outcome_of(lambda: rank.router.abandon(rank.plan.buckets[0], "no memory on rank 3"))
    else:
        first = rank.run(0)
    return [first, rank.run(1), rank.run(2), rank.wrong(1, 2)]


def sender_fails_ahead(rank: Rank) -> list[object]:
    """Fail in the second bucket; its messages are made while the first is under way."""
    if rank.rank == 0:
        del rank.source["src t1 0"]  # read in the second bucket
    return [*map(rank.run_ahead, range(3)), rank.wrong(0, 2)]


def relay_rank_gives_up_ahead(rank: Rank) -> list[object]:
    """Give up after the first bucket, while the second is under way; then fill without failure."""
    outcomes = [rank.run_ahead(0)]
    if rank.rank == 3:
        outcomes += [rank.abandon_ahead(index, "no memory on rank 3") for index in (1, 2)]
    else:
        outcomes.append(rank.run_ahead(1))
        outcomes.append(
            rank.run_ahead(2) if outcomes[1] == "ok" else rank.abandon_ahead(2, outcomes[1])
        )
    rank.clear()
    return [*outcomes, *map(rank.run_ahead, range(3)), rank.wrong()]


def relay_rank_falls_silent(rank: Rank) -> list[object]:
    """Run a bucket in which rank 3 sends no notifications, and wait for one again on rank 2."""
    transport = rank.router._transports[CollectiveTransport.name]
    with mock.patch.object(transport, "notify") if rank.rank == 3 else nullcontext():
        first = rank.run(0)
    if rank.rank != 2:
        return [first]
    return [first, outcome_of(lambda: transport.notify(1, "relay arrived", [], [3], ""))]


SCENARIOS = [reader_abandons, sender_fails_ahead, relay_rank_gives_up_ahead]
DELTAS = ("", " with deltas")


def run_scenario(scenario: Callable[[Rank], list[object]], kind: str, job: Job) -> list[object]:
    """Run a scenario in a fill with or without deltas; the former follows a whole fill."""
    rank = Rank(RESHARDS["halves to every rank"](), job, sends_deltas=bool(kind))
    if kind:
        assert [*map(rank.run_ahead, range(3)), rank.wrong()] == ["ok", "ok", "ok", []]
        rank.meet()
        rank.negate()
    rank.meet()
    rank.clear(whole=False)
    outcome = scenario(rank)
    rank.meet()
    return outcome


def run_on_thread(world: World) -> dict[str, object]:
    job = Job.join(60, host=HOSTS[world.rank])
    results: dict[str, object] = {name: run_reshard(make, job) for name, make in RESHARDS.items()}
    results["changes"] = {name: run_with_deltas(make, job) for name, make in RESHARDS.items()}
    for scenario in SCENARIOS:
        for kind in DELTAS:
            results[f"{scenario.__name__}{kind}"] = run_scenario(scenario, kind, job)
    job.close()
    return results


@pytest.fixture(scope="module", params=range(4), ids="rank {} is late".format)
def four_ranks(request: pytest.FixtureRequest) -> ByRank:
    return RankThreads(4, request.param, early=request.param % 2 == 1).run(run_on_thread)


def run_on_process() -> dict[str, object]:
    dist.init_process_group("gloo")
    results: dict[str, object] = {"manager": switch_with_manager()}
    job = Job.join(60, host=HOSTS[dist.get_rank()])
    for kind in DELTAS:
        rank = Rank(RESHARDS["halves to every rank"](), job, timeout=1, sends_deltas=bool(kind))
        rank.clear(whole=not kind)
        rank.meet()
        results[f"silent{kind}"] = relay_rank_falls_silent(rank)
        rank.meet()
    job.close()
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def four_processes(ranks: Ranks) -> ByRank:
    return ranks.launch(run_on_process, 4, timeout=250)


@pytest.mark.parametrize("name", RESHARDS)
def test_each_byte_enters_a_host_once(four_ranks: ByRank, name: str):
    parts = [results[name] for results in four_ranks]
    assert [part["wrong"] for part in parts] == [[]] * 4
    for host, least in parts[0]["least"].items():
        assert (
            sum(
                part["network"]
                for part, part_host in zip(parts, HOSTS, strict=True)
                if part_host == host
            )
            == least
        )


def test_most_reshards_have_relays(four_ranks: ByRank):
    with_relays = {
        name for name in RESHARDS if any(results[name]["relays"] for results in four_ranks)
    }
    assert len(with_relays) > len(RESHARDS) // 2


def test_the_manager_relays_if_all_ranks_of_a_host_can(four_processes: ByRank):
    quarter = NBYTES // 4
    for rank, results in enumerate(four_processes):
        reports = results["manager"]
        for report in reports.values():
            assert report.bytes_received == report.bytes_least == 3 * quarter
        relayed, apart, messages = (
            reports[case] for case in ("relayed", "host a cannot", "collective")
        )
        assert messages.bytes_by_transport == {"collective": 3 * quarter}
        assert messages.pairs_by_transport == {"collective": 3}
        is_on_a = HOSTS[rank] == "a"
        straight = {"collective": 2 * quarter, "shared_memory": quarter}
        assert (apart.bytes_by_transport == straight) is is_on_a
        assert set(relayed.bytes_by_transport) == {"collective", "shared_memory"}
        assert sum(relayed.bytes_by_transport.values()) == 3 * quarter
        assert relayed.bytes_by_transport["collective"] == relayed.bytes_across_hosts
    for first in (0, 2):
        entered = [
            four_processes[rank]["manager"]["relayed"].bytes_across_hosts
            for rank in (first, first + 1)
        ]
        assert sum(entered) == 2 * quarter
        assert min(entered) > 0


def test_each_message_is_sent_in_its_shorter_form(four_ranks: ByRank):
    """A negated float32 changes one of two words; 16-bit values and int32 are sent whole."""
    for name in RESHARDS:
        across = sum(results["changes"][name]["across"][1] for results in four_ranks)
        planned = sum(results["changes"][name]["network"] for results in four_ranks)
        if name == "halves to every rank":
            assert 0.7 * planned < across < 0.9 * planned
        assert across < 2 * planned, "small messages are half padding"
        for results in four_ranks:
            changes = results["changes"][name]
            first, changed, unchanged, last = changes["counts"]
            planned = changes["network"]
            whole = first + last
            assert whole["messages_delta"] == whole["words_compared"] == 0
            assert changes["across"][0] == changes["across"][3] == planned
            assert (
                changes["across"][2],
                unchanged["messages_whole"],
                unchanged["words_changed"],
            ) == (0, 0, 0)
            num_messages = changed["messages_whole"] + changed["messages_delta"]
            assert first["messages_whole"] == num_messages == unchanged["messages_delta"]
            assert len({count["bytes_of_copies"] for count in changes["counts"]}) == 1
    assert any(
        results["changes"]["halves to every rank"]["counts"][1]["messages_delta"]
        for results in four_ranks
    )


with_or_without_deltas = pytest.mark.parametrize("kind", DELTAS)


@with_or_without_deltas
def test_a_failed_sender_reaches_readers_of_a_relay_rank(four_ranks: ByRank, kind: str):
    outcomes = [[*results[f"sender_fails_ahead{kind}"]] for results in four_ranks]
    failures = [outcome.pop(1) for outcome in outcomes]
    fault = "there is no buffer 'src t1 0'"
    check_error(failures[0], "TransportError", "bucket 1", fault)
    for failure in failures[2:]:
        check_error(failure, "PeerTransportError", "bucket 1", fault)
    (via_relay_rank,) = (failure for failure in failures[2:] if "phase relay arrived" in failure)
    assert re.search(r"phase relay arrived, peer [23]: the peer failed", via_relay_rank)
    assert outcomes == [["ok", "ok", []]] * 4


@with_or_without_deltas
def test_a_reader_that_abandons_leaves_no_rank_waiting(four_ranks: ByRank, kind: str):
    *_, relay_rank, reader = (results[f"reader_abandons{kind}"] for results in four_ranks)
    assert reader[0] == "ok"
    check_error(
        relay_rank[0],
        "PeerTransportError",
        "bucket 0",
        "phase relay arrived",
        "peer 3",
        "no memory on rank 3",
    )
    assert [results[f"reader_abandons{kind}"][1:] for results in four_ranks] == [
        ["ok", "ok", []]
    ] * 4


@with_or_without_deltas
def test_a_relay_rank_that_gives_up_ahead_leaves_no_rank_waiting(four_ranks: ByRank, kind: str):
    outcomes = [results[f"relay_rank_gives_up_ahead{kind}"] for results in four_ranks]
    assert [outcome[0] for outcome in outcomes] == ["ok"] * 4
    check_error(
        outcomes[2][1],
        "PeerTransportError",
        "bucket 1",
        "phase relay arrived",
        "peer 3",
        "no memory on rank 3",
    )
    assert outcomes[3][1:3] == ["ok", "ok"]
    assert [outcome[3:] for outcome in outcomes] == [["ok", "ok", "ok", []]] * 4


@with_or_without_deltas
def test_a_silent_relay_rank_is_an_error_within_the_timeout(four_processes: ByRank, kind: str):
    first, second = four_processes[2][f"silent{kind}"]
    check_error(
        first,
        "TransportError",
        "bucket 0",
        "phase relay arrived",
        "peer 3",
        "nothing for 1 seconds",
        within=9,
    )
    check_error(second, "TransportError", "earlier failure", within=5)

"""Who sends: holders of a box have equal shares, whoever asks; and what must be received in any case."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.routes import HostIngress, Hosts, RoundRobinOffset, Routes, missing_by_rank
from hybrid_engine.records.layout import Layout
from hybrid_engine.records.owners import BoxOwners, groups_of_columns
from tests.hybrid_engine.planning.cases import Case, cases, elements_of

INGRESS_LOADS = ("sent_network", "network", "sent_host", "host")


def owners_of(layout: Layout, tensor: str) -> list[BoxOwners]:
    by_box: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for shard in layout.shards_by_tensor()[tensor]:
        box = shard.region.offsets, shard.region.lengths
        by_box.setdefault(box, []).append(shard.place.buffer.rank)
    return [BoxOwners(*box, np.array(ranks)) for box, ranks in sorted(by_box.items())]


@given(cases(), st.integers(0, 50), st.integers(1, 9))
def test_holders_of_a_box_have_equal_shares(case: Case, start: int, num_laps: int) -> None:
    """Over any number of tensors with the same owners, whoever asks over the same link."""
    for tensor in case.destination.tensors:
        sources = owners_of(case.source, tensor)
        routes = Routes(sources, owners_of(case.destination, tensor), Hosts(case.hosts, case.relaying))
        asked: Counter[tuple[int, Link, str]] = Counter()
        sent: Counter[tuple[int, Link, str, int]] = Counter()
        for receivers in routes.receivers:
            assert receivers.missing == ()
            for piece in {piece.source: piece for piece in receivers.pieces}.values():
                for index in range(num_laps):
                    senders = routes.senders(receivers, piece, RoundRobinOffset(start, index))
                    for dst, src in zip(receivers.ranks.tolist(), senders.tolist(), strict=True):
                        host = case.hosts[dst] if piece.link is Link.HOST else ""
                        asked[piece.source, piece.link, host] += piece.link is not Link.SELF
                        sent[piece.source, piece.link, host, src] += 1
        of_hosts: dict[tuple[int, tuple[int, ...]], HostIngress] = {}  # boxes of one source share the turns of a host
        for ingress in routes.ingress:
            of_hosts.setdefault((ingress.source, tuple(ingress.turns.tolist())), ingress)
        for (number, _), ingress in of_hosts.items():
            for index in range(num_laps):
                for src in routes.ingress_senders(ingress, RoundRobinOffset(start, index)).tolist():
                    asked[number, Link.NETWORK, ""] += 1
                    sent[number, Link.NETWORK, "", src] += 1
        for (number, link, host), count in asked.items():
            holders = [rank for rank in set(sources[number].ranks.tolist()) if host in ("", case.hosts[rank])]
            shares = [sent[number, link, host, rank] for rank in holders] if link is not Link.SELF else []
            assert sum(shares) == count
            assert max(shares, default=0) - min(shares, default=0) <= 1


@given(cases(), st.integers(0, 50), st.sets(st.integers(0, 40), min_size=1, max_size=6))
def test_loads_are_counted_senders(case: Case, start: int, laps: set[int]) -> None:
    for tensor in case.destination.tensors:
        destinations = owners_of(case.destination, tensor)
        routes = Routes(owners_of(case.source, tensor), destinations, Hosts(case.hosts, case.relaying))
        for receivers in routes.receivers:
            copies = [int((destinations[receivers.want].ranks == rank).sum()) for rank in receivers.ranks]
            assert receivers.copies.tolist() == copies
            for piece in receivers.pieces:
                expected = np.zeros(len(case.hosts), int)
                if piece.link is not Link.SELF:
                    for index in laps:
                        np.add.at(expected, routes.senders(receivers, piece, RoundRobinOffset(start, index)), copies)
                found = routes.load(receivers, piece, start, np.array(sorted(laps)))
                np.testing.assert_array_equal(found, expected)


@given(cases(), st.integers(0, 50), st.sets(st.integers(0, 40), min_size=1, max_size=6))
def test_loads_of_arrivals_are_counted(case: Case, start: int, laps: set[int]) -> None:
    for tensor in case.destination.tensors:
        destinations = owners_of(case.destination, tensor)
        routes = Routes(owners_of(case.source, tensor), destinations, Hosts(case.hosts, case.relaying))
        for ingress in routes.ingress:
            expected: dict[str, Counter[int]] = {name: Counter() for name in INGRESS_LOADS}
            for index in laps:
                for (sender, relay_rank), readers in routes.ingress_of(ingress, RoundRobinOffset(start, index)):
                    assert relay_rank in readers and case.hosts[sender] != case.hosts[relay_rank]
                    assert {case.hosts[rank] for rank in readers} == {case.hosts[relay_rank]}
                    expected["sent_network"][sender] += 1
                    expected["network"][relay_rank] += 1
                    for rank, want, copies in zip(readers, ingress.destinations, ingress.copies, strict=True):
                        assert copies == int((destinations[want].ranks == rank).sum())
                        if rank != relay_rank:
                            expected["host"][rank] += copies
                            expected["sent_host"][relay_rank] += copies
            load = routes.ingress_load(ingress, start, np.array(sorted(laps)))
            for name, counts in expected.items():
                assert getattr(load, name).tolist() == [counts[rank] for rank in range(len(case.hosts))], name


@given(cases())
def test_what_must_be_received(case: Case) -> None:
    for tensor in case.destination.tensors:
        wanted: dict[int, set[object]] = {}
        held: dict[int, set[object]] = {}
        for layout, by_rank in ((case.destination, wanted), (case.source, held)):
            for shard in layout.shards_by_tensor()[tensor]:
                elements = {index for index, _ in elements_of(shard)}
                by_rank.setdefault(shard.place.buffer.rank, set()).update(elements)
        owners = owners_of(case.source, tensor), owners_of(case.destination, tensor)
        found = {rank: numel for ranks, numel in missing_by_rank(*owners, len(case.hosts)) for rank in ranks.tolist()}
        assert found == {rank: len(elements - held.get(rank, set())) for rank, elements in wanted.items()}


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), max_size=20))
def test_equal_columns_are_one_group(rows: list[list[bool]]) -> None:
    groups = groups_of_columns([np.array(row) for row in rows], 7)
    columns = {tuple(row[number] for row in rows) for number in range(7)}
    assert len(groups) == len(columns)
    assert sorted(index for group in groups for index in group.tolist()) == list(range(7))
    for group in groups:
        assert group.tolist() == sorted(group.tolist())
        assert len({tuple(row[number] for row in rows) for number in group}) == 1

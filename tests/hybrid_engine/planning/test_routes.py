"""Who sends: holders of a box have equal shares, whoever receives."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.planning.plan import Link
from hybrid_engine.planning.routes import HostIngress, Hosts, RoundRobinOffset, Routes
from hybrid_engine.records.holdings import BoxOwners, groups_of_columns
from hybrid_engine.records.layout import Layout
from tests.hybrid_engine.planning.cases import Case, cases


def owners_of(layout: Layout, tensor: str) -> list[BoxOwners]:
    by_box: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for shard in layout.shards_by_tensor()[tensor]:
        box = shard.region.offsets, shard.region.lengths
        by_box.setdefault(box, []).append(shard.place.buffer.rank)
    return [BoxOwners(*box, np.array(ranks)) for box, ranks in sorted(by_box.items())]


@given(cases(), st.integers(0, 50), st.integers(1, 9))
def test_holders_of_a_box_have_equal_shares(case: Case, first: int, num_tensors: int) -> None:
    """Over any number of tensors of a class, whoever receives over the same link."""
    for tensor in case.destination.tensors:
        sources = owners_of(case.source, tensor)
        routes = Routes(sources, owners_of(case.destination, tensor), Hosts(case.hosts, case.relaying))
        received: Counter[tuple[int, Link, str]] = Counter()
        sent: Counter[tuple[int, Link, str, int]] = Counter()
        for receivers in routes.receivers:
            for part in {part.source: part for part in receivers.parts}.values():
                for index in range(num_tensors):
                    senders = routes.senders(receivers, part, RoundRobinOffset(first, index))
                    for dst, src in zip(receivers.ranks.tolist(), senders.tolist(), strict=True):
                        host = case.hosts[dst] if part.link is Link.HOST else ""
                        received[part.source, part.link, host] += part.link is not Link.SELF
                        sent[part.source, part.link, host, src] += 1
        # boxes of one source have the same sender to a host
        of_hosts: dict[tuple[int, tuple[int, ...]], HostIngress] = {}
        for ingress in routes.ingress:
            of_hosts.setdefault((ingress.source, tuple(ingress.positions.tolist())), ingress)
        for (number, _), ingress in of_hosts.items():
            for index in range(num_tensors):
                for src in routes.ingress_senders(ingress, RoundRobinOffset(first, index)).tolist():
                    received[number, Link.NETWORK, ""] += 1
                    sent[number, Link.NETWORK, "", src] += 1
        for (number, link, host), count in received.items():
            holders = [rank for rank in set(sources[number].ranks.tolist()) if host in ("", case.hosts[rank])]
            shares = [sent[number, link, host, rank] for rank in holders] if link is not Link.SELF else []
            assert sum(shares) == count
            assert max(shares, default=0) - min(shares, default=0) <= 1


@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), max_size=20))
def test_equal_columns_are_one_group(rows: list[list[bool]]) -> None:
    groups = groups_of_columns([np.array(row) for row in rows], 7)
    columns = {tuple(row[number] for row in rows) for number in range(7)}
    assert len(groups) == len(columns)
    assert sorted(index for group in groups for index in group.tolist()) == list(range(7))
    for group in groups:
        assert group.tolist() == sorted(group.tolist())
        assert len({tuple(row[number] for row in rows) for number in group}) == 1

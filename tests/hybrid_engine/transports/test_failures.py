"""Failures between ranks become a TransportError with its location, on every rank and in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError
from hybrid_engine.planning.plan import Bucket, Costs, Link, ReshardPlan, Transfer
from hybrid_engine.records.layout import Buffer, BufferId, Place
from hybrid_engine.transports import deltas
from hybrid_engine.transports.context import TransportContext
from hybrid_engine.transports.router import (
    REGISTRY,
    TransportSet,
    choose_transport,
    pulled_buffers,
)
from tests.harness.errors import violated
from tests.harness.launch import on_ranks
from tests.hybrid_engine.transports.cases import check_error, group_of_all, outcome_of

NUMEL = 1000


def transfer_between(src_rank: int, dst_rank: int, link: Link = Link.NETWORK) -> Transfer:
    src = BufferId(src_rank, "src")
    dst = BufferId(dst_rank, f"dst{src_rank}")
    return Transfer("tensor", (NUMEL,), Place(src, 0, (1,)), Place(dst, 0, (1,)), NUMEL * 4, link)


ALL_PAIRS = tuple(
    transfer_between(src, dst, Link.SELF if src == dst else Link.NETWORK)
    for src in (0, 1)
    for dst in (0, 1)
)
BUCKETS = tuple(Bucket(index, (), ALL_PAIRS, ("group",), 8 * NUMEL) for index in range(4))
SOURCE_BUFFERS = {BufferId(rank, "src"): Buffer(NUMEL, "float32") for rank in (0, 1)}


class Peers:
    """A rank of two; each scenario has new connections."""

    def __init__(self, **settings: Any) -> None:
        self.group = group_of_all()
        self.rank = dist.get_rank()
        context = TransportContext(self.rank, SOURCE_BUFFERS, {}, self.group, **settings)
        self.router = TransportSet.connect(context)
        self.source = {"src": torch.full((NUMEL,), float(self.rank + 1))}
        self.destination = {f"dst{rank}": torch.zeros(NUMEL) for rank in (0, 1)}

    def run(self, index: int, **changes: object) -> str:
        values = {"source": self.source, "destination": self.destination, **changes}
        return outcome_of(lambda: self.router.run(BUCKETS[index], **values))

    def check_next(self) -> None:
        """Check that the next bucket arrives."""
        assert self.run(1) == "ok"
        assert all((self.destination[f"dst{rank}"] == rank + 1).all() for rank in (0, 1))


@contextmanager
def connected(**settings: Any) -> Iterator[Peers]:
    """Connect two ranks, and keep the connections until both have ended."""
    yield Peers(**settings)
    dist.barrier()


@on_ranks(2)
def test_a_missing_peer_is_an_error_within_the_timeout() -> None:
    with connected(timeout=0.5) as peers:
        if peers.rank == 0:
            missing = ("bucket 0", "phase transfer", "peer 1", "nothing for 0.5 seconds")
            check_error(peers.run(0), "TransportError", *missing, within=20)
            check_error(
                peers.run(1), "TransportError", "earlier failure", "bucket 0", "peer 1", within=5
            )
            abandoned = outcome_of(lambda: peers.router.abandon(BUCKETS[2], "out of time"))
            check_error(abandoned, "TransportError", "earlier failure", within=5)


@on_ranks(2)
def test_peers_meet_before_the_first_bucket() -> None:
    plan = ReshardPlan(BUCKETS, (), "")
    with connected(timeout=0.5) as peers:
        assert outcome_of(lambda: peers.router.meet(plan)) == "ok"
        # The first fill's costs have none of this.
        assert peers.router._transports["collective"].take_costs() == Costs()
        if peers.rank == 0:
            alone = outcome_of(lambda: peers.router.meet(plan))
            missing = ("phase first message", "peer 1", "nothing for 0.5 seconds")
            check_error(alone, "TransportError", *missing, within=20)


@on_ranks(2)
def test_an_abandoned_bucket_leaves_no_peer_waiting() -> None:
    with connected() as peers:
        if peers.rank == 0:
            peers.router.abandon(BUCKETS[0], "out of memory in allocate")
        else:
            check_error(peers.run(0), "PeerTransportError", "peer 0", "out of memory in allocate")
        peers.check_next()


@on_ranks(2)
def test_different_plans_are_detected() -> None:
    with connected() as peers:
        outcome = peers.run(peers.rank)
        check_error(
            outcome, "PeerTransportError", f"of bucket {1 - peers.rank}, expected", "plans differ"
        )


@on_ranks(2)
def test_a_lost_connection_is_an_error() -> None:
    with connected() as peers:
        if peers.rank == 1:
            peers.group.close()
        else:
            check_error(peers.run(0), "TransportError", "bucket 0", "phase transfer", "peer 1")


# name -> changed arguments of bucket 0 on rank 0, texts of rank 0's error, texts of rank 1's error
FAULTS: dict[str, tuple[Callable[[Peers], dict[str, object]], tuple[str, ...], tuple[str, ...]]] = {
    "missing source": (
        lambda _: {"source": {}},
        ("TransportError", "bucket 0", "there is no buffer 'src'"),
        ("PeerTransportError", "bucket 0", "phase transfer", "peer 0", "there is no buffer 'src'"),
    ),
    "missing destination": (
        lambda _: {"destination": {"dst0": torch.zeros(NUMEL)}},
        ("TransportError", "bucket 0", "phase write", "tensor tensor", "there is no buffer 'dst1'"),
        (),
    ),
    "an earlier transport": (
        lambda _: {"destination": {"dst1": torch.zeros(NUMEL)}},
        (
            "TransportError local transport",
            "bucket 0",
            "phase transfer",
            "there is no buffer 'dst0'",
        ),
        ("PeerTransportError", "peer 0", "local transport", "there is no buffer 'dst0'"),
    ),
    "another dtype": (
        lambda peers: {"source": {"src": peers.source["src"].to(torch.bfloat16)}},
        ("TransportError", "phase read", "torch.bfloat16", "torch.float32"),
        ("PeerTransportError", "peer 0", "torch.bfloat16"),
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_raised_on_both_and_the_next_bucket_works(name: str) -> None:
    change, *texts = FAULTS[name]
    with connected() as peers:
        outcome = peers.run(0, **(change(peers) if peers.rank == 0 else {}))
        if texts[peers.rank]:
            check_error(outcome, *texts[peers.rank])
        peers.check_next()


@on_ranks(2)
def test_no_memory_for_deltas_leaves_no_peer_waiting() -> None:
    """Rank 0 lacks memory for one bucket of deltas; the next bucket has deltas too."""
    no_memory = mock.patch.object(
        deltas.np, "flatnonzero", side_effect=MemoryError("not a byte left")
    )
    with connected(sends_deltas=True) as peers:
        for flat in peers.source.values():
            flat[::100] += 1  # undone before the second fill
        peers.router.begin(whole=True)
        assert [peers.run(0), peers.run(1)] == ["ok", "ok"]
        for flat in peers.source.values():
            flat[::100] -= 1
        dist.barrier()
        peers.router.begin(whole=False)
        with no_memory if peers.rank == 0 else nullcontext():
            outcome = peers.run(0)
        where = (
            ("TransportError", "phase read")
            if peers.rank == 0
            else ("PeerTransportError", "peer 0")
        )
        check_error(outcome, *where, "bucket 0", "not a byte left")
        peers.check_next()


@pytest.mark.parametrize(
    ("src_rank", "link", "is_exported", "preference", "expected"),
    [
        (1, Link.SELF, False, "auto", "local"),
        (1, Link.SELF, True, "collective", "local"),
        (0, Link.HOST, True, "auto", "shared_memory"),
        (0, Link.HOST, False, "auto", "collective"),
        (0, Link.NETWORK, True, "auto", "collective"),
        (0, Link.HOST, True, "collective", "collective"),
        (0, Link.HOST, False, "shared_memory", "shared_memory"),
    ],
)
def test_choice_of_transport(
    src_rank: int, link: Link, is_exported: bool, preference: str, expected: str
):
    exported = {BufferId(src_rank, "src")} if is_exported else set()
    transfer = transfer_between(src_rank, 1, link)
    assert choose_transport(transfer, exported, preference) == expected
    plan = mock.Mock(**{"transfers.return_value": [transfer]})
    if is_exported:
        assert pulled_buffers(src_rank, plan, preference) == (
            {"src"} if expected == "shared_memory" else set()
        )


def test_the_configuration_offers_every_registered_transport():
    _, *between_ranks = (transport.name for transport in REGISTRY)
    assert get_args(GenerateConfig.model_fields["transport"].annotation) == ("auto", *between_ranks)


def test_every_transfer_without_a_transport_is_reported():
    transfers = (
        transfer_between(0, 1),
        transfer_between(1, 0, Link.HOST),
        transfer_between(1, 1, Link.SELF),
    )
    plan = ReshardPlan((Bucket(0, (), transfers, (), 0),), (), "")
    key = "generate_config.transport"
    with violated(ConfigError, *[(key, "cannot-read")] * 2) as failure:
        TransportSet.connect(TransportContext(0, SOURCE_BUFFERS, {}), "shared_memory").check(
            plan, set()
        )
    across_hosts, not_exported = (violation.problem for violation in failure.value.findings)
    assert "rank=0" in across_hosts
    assert "rank=1" in not_exported
    with violated(ConfigError, *[(key, "no-transport")] * 2):
        TransportSet.connect(TransportContext(0, SOURCE_BUFFERS, {})).check(plan, set())

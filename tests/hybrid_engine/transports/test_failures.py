"""Failures between ranks become a TransportError with its location, on every rank and in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn, get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, TransportError
from hybrid_engine.planning.plan import Bucket, Link, ReshardPlan, Transfer
from hybrid_engine.records.layout import Buffer, BufferId, Place
from hybrid_engine.transports import deltas
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.context import TransportContext
from hybrid_engine.transports.router import (
    DELTA_REGISTRY,
    REGISTRY,
    RegisteredTransport,
    TransportSet,
    choose_transport,
    pulled_buffers,
)
from tests.harness.errors import has_violations
from tests.harness.launch import Ranks
from tests.hybrid_engine.transports.cases import check_error, outcome_of

NUMEL = 1000


def transfer_between(src_rank: int, dst_rank: int, link: Link = Link.NETWORK) -> Transfer:
    src = BufferId(src_rank, "src")
    dst = BufferId(dst_rank, f"dst{src_rank}")
    return Transfer("tensor", (NUMEL,), Place(src, 0, (1,)), Place(dst, 0, (1,)), NUMEL * 4, link)


ALL_PAIRS = tuple(
    transfer_between(src, dst, Link.SELF if src == dst else Link.NETWORK) for src in (0, 1) for dst in (0, 1)
)
BUCKETS = tuple(Bucket(index, (), ALL_PAIRS, ("group",), 8 * NUMEL) for index in range(4))
SOURCE_BUFFERS = {BufferId(rank, "src"): Buffer(NUMEL, "float32") for rank in (0, 1)}


class Peers:
    """A rank of two; each scenario has new connections."""

    def __init__(self, timeout: float = 60, registry: Sequence[type[RegisteredTransport]] = REGISTRY) -> None:
        self.rank = dist.get_rank()
        self.group = dist.new_group([0, 1])
        context = TransportContext(self.rank, SOURCE_BUFFERS, {}, self.group, timeout=timeout)
        self.router = TransportSet.connect(context, registry=registry)
        self.source = {"src": torch.full((NUMEL,), float(self.rank + 1))}
        self.destination = {f"dst{rank}": torch.zeros(NUMEL) for rank in (0, 1)}

    def run(self, index: int, **changes: object) -> str:
        values = {"source": self.source, "destination": self.destination, **changes}
        return outcome_of(lambda: self.router.run(BUCKETS[index], **values))

    def is_right(self) -> bool:
        return all(bool((self.destination[f"dst{rank}"] == rank + 1).all()) for rank in (0, 1))


def peer_never_comes() -> list[object]:
    peers = Peers(timeout=0.5)  # seconds
    if peers.rank == 1:
        return []  # keeps its connections until the barrier after the scenario
    return [peers.run(0), peers.run(1), outcome_of(lambda: peers.router.abandon(BUCKETS[2], "out of time"))]


def rank_abandons() -> list[object]:
    peers = Peers()
    if peers.rank == 0:
        peers.router.abandon(BUCKETS[0], "out of memory in allocate")
        return ["abandoned", peers.run(1), peers.is_right()]
    return [peers.run(0), peers.run(1), peers.is_right()]


def buckets_differ() -> list[object]:
    peers = Peers()
    return [peers.run(peers.rank)]


def connection_is_lost() -> list[object]:
    peers = Peers()
    if peers.rank == 1:
        dist.destroy_process_group(peers.group)  # closes its connections
        return []
    return [peers.run(0)]


def raise_memory_error(*_: object) -> NoReturn:
    raise MemoryError("not a byte left")


def no_room_for_deltas(
    transport: CollectiveTransport,
    side: str,
    sizes: Sequence[int],
    staged_parts: Any = CollectiveTransport._staged_parts,
) -> list[torch.Tensor]:
    if side == "deltas":
        raise TransportError("no memory for deltas")
    parts: list[torch.Tensor] = staged_parts(transport, side, sizes)
    return parts


WITHOUT_MEMORY = {
    "to compare": (deltas.np, "flatnonzero", raise_memory_error),
    "to receive": (CollectiveTransport, "_staged_parts", no_room_for_deltas),
}
"""Step of a fill with deltas that finds no memory -> attribute to replace, and its replacement."""


def run_without_memory(name: str) -> list[object]:
    """Lack memory on rank 0 for one bucket of deltas; the next bucket has deltas too."""
    peers = Peers(registry=DELTA_REGISTRY)
    for flat in peers.source.values():
        flat[::100] += 1  # undone before the second fill
    peers.router.begin(whole=True)
    outcomes: list[object] = [peers.run(0), peers.run(1)]
    for flat in peers.source.values():
        flat[::100] -= 1
    dist.barrier()
    peers.router.begin(whole=False)
    with mock.patch.object(*WITHOUT_MEMORY[name]) if peers.rank == 0 else nullcontext():
        outcomes.append(peers.run(0))
    return [*outcomes, peers.run(1), peers.is_right()]


SCENARIOS = [peer_never_comes, rank_abandons, buckets_differ, connection_is_lost]

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
        ("TransportError local transport", "bucket 0", "phase transfer", "there is no buffer 'dst0'"),
        ("PeerTransportError", "peer 0", "local transport", "there is no buffer 'dst0'"),
    ),
    "another dtype": (
        lambda peers: {"source": {"src": peers.source["src"].to(torch.bfloat16)}},
        ("TransportError", "phase read", "torch.bfloat16", "torch.float32"),
        ("PeerTransportError", "peer 0", "torch.bfloat16"),
    ),
}


def fail_on_rank_0(name: str) -> list[object]:
    peers = Peers()
    first = peers.run(0, **(FAULTS[name][0](peers) if peers.rank == 0 else {}))
    return [first, peers.run(1), peers.is_right()]


def run_scenarios() -> dict[str, list[object]]:
    dist.init_process_group("gloo")
    results = {}
    for scenario in SCENARIOS:
        results[scenario.__name__] = scenario()
        dist.barrier()
    for name in FAULTS:
        results[name] = fail_on_rank_0(name)
        dist.barrier()
    for name in WITHOUT_MEMORY:
        results[name] = run_without_memory(name)
        dist.barrier()
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def by_rank(ranks: Ranks) -> list[dict[str, list[object]]]:
    return ranks.launch(run_scenarios, 2, timeout=300)


def test_a_missing_peer_is_an_error_within_the_timeout(by_rank):
    first, second, abandoned = by_rank[0]["peer_never_comes"]
    check_error(first, "TransportError", "bucket 0", "phase transfer", "peer 1", "nothing for 0.5 seconds", within=20)
    check_error(second, "TransportError", "earlier failure", "bucket 0", "peer 1", within=5)
    check_error(abandoned, "TransportError", "earlier failure", within=5)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_raised_on_both_and_the_next_bucket_works(by_rank, name: str):
    _, local_texts, peer_texts = FAULTS[name]
    (local, *after), (peer, *peers_after) = (results[name] for results in by_rank)
    check_error(local, *local_texts)
    if peer_texts:
        check_error(peer, *peer_texts)
    assert after == peers_after == ["ok", True]


def test_no_memory_for_deltas_leaves_no_peer_waiting(by_rank):
    local, peer = (results["to compare"] for results in by_rank)
    assert local[:2] == peer[:2] == ["ok", "ok"]
    check_error(local[2], "TransportError", "bucket 0", "phase read", "not a byte left")
    check_error(peer[2], "PeerTransportError", "bucket 0", "peer 0", "not a byte left")
    assert local[3:] == peer[3:] == ["ok", True]
    local, peer = (results["to receive"] for results in by_rank)
    check_error(local[2], "TransportError", "no memory for deltas")
    assert local[3:] == ["ok", True]
    assert peer[2:] == ["ok", "ok", True]


def test_an_abandoned_bucket_leaves_no_peer_waiting(by_rank):
    local, (peer, *peer_after) = (results["rank_abandons"] for results in by_rank)
    assert local == ["abandoned", "ok", True]
    check_error(peer, "PeerTransportError", "peer 0", "out of memory in allocate")
    assert peer_after == ["ok", True]


def test_different_plans_are_detected(by_rank):
    for rank, results in enumerate(by_rank):
        check_error(
            results["buckets_differ"][0], "PeerTransportError", f"of bucket {1 - rank}, expected", "plans differ"
        )


def test_a_lost_connection_is_an_error(by_rank):
    check_error(by_rank[0]["connection_is_lost"][0], "TransportError", "bucket 0", "phase transfer", "peer 1")


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
def test_choice_of_transport(src_rank: int, link: Link, is_exported: bool, preference: str, expected: str):
    exported = {BufferId(src_rank, "src")} if is_exported else set()
    transfer = transfer_between(src_rank, 1, link)
    assert choose_transport(transfer, exported, preference) == expected
    plan = mock.Mock(**{"transfers.return_value": [transfer]})
    if is_exported:
        assert pulled_buffers(src_rank, plan, preference) == ({"src"} if expected == "shared_memory" else set())


def test_the_configuration_offers_every_registered_transport():
    _, *between_ranks = (transport.name for transport in REGISTRY)
    assert get_args(GenerateConfig.model_fields["transport"].annotation) == ("auto", *between_ranks)


def test_every_transfer_without_a_transport_is_reported():
    transfers = (transfer_between(0, 1), transfer_between(1, 0, Link.HOST), transfer_between(1, 1, Link.SELF))
    plan = ReshardPlan((Bucket(0, (), transfers, (), 0),), {}, (), "")
    key = "generate_config.transport"
    with pytest.raises(ConfigError, check=has_violations(*[(key, "cannot-read")] * 2)) as failure:
        TransportSet.connect(TransportContext(0, SOURCE_BUFFERS, {}), "shared_memory").check(plan, set())
    across_hosts, not_exported = (violation.problem for violation in failure.value.findings)
    assert "rank=0" in across_hosts
    assert "rank=1" in not_exported
    with pytest.raises(ConfigError, check=has_violations(*[(key, "no-transport")] * 2)):
        TransportSet.connect(TransportContext(0, SOURCE_BUFFERS, {})).check(plan, set())

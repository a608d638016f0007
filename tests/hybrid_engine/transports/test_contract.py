"""The contract of `Transport` for every transport: exactly the planned bytes move.

One process plays the ranks in turn: local, shared memory and the in-process twin, with cases from
hypothesis. 2 and 4 real ranks: shared memory, collective over gloo, and both behind `TransportSet`.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.transports import collective, copies
from hybrid_engine.transports.collective import CollectiveTransport
from hybrid_engine.transports.context import TransportContext
from hybrid_engine.transports.messages import HEADER_NBYTES, MessagePlanner
from hybrid_engine.transports.pull import LocalTransport, SharedMemoryTransport
from hybrid_engine.transports.router import REGISTRY, TransportSet, export_handles
from tests.harness.launch import of_all_ranks, on_ranks
from tests.hybrid_engine.planning.cases import Case as PlannedCase
from tests.hybrid_engine.planning.cases import cases, plan
from tests.hybrid_engine.transports.cases import Case, Shape, build_case, differing, group_of_all
from tests.hybrid_engine.transports.in_process import InProcessTransport

DTYPES = (
    *("float32", "bfloat16", "int64", "uint8"),
    *("float8_e4m3fn", "bool", "float16", "float64"),
)
CASES = {
    "strided_boxes": Shape(num_transfers=60),
    "several_dtypes": Shape(num_transfers=60, src_dtypes=DTYPES, dst_dtypes=DTYPES),
    "cast": Shape(src_dtypes=("float32", "bfloat16"), dst_dtypes=("bfloat16", "float32")),
    "many_small": Shape(
        num_transfers=600,
        num_buckets=2,
        small=True,
        src_dtypes=("float32",),
        dst_dtypes=("float32",),
    ),
    "both_directions_large": Shape(num_transfers=24, max_length=24, edges=((0, 1), (1, 0))),
    "one_direction": Shape(num_transfers=20, edges=((1, 0),)),
    "empty_shares": Shape(num_transfers=3, num_buckets=5),
    "nothing": Shape(num_transfers=0, num_buckets=2),
}
SEED = 20240607


def elastic_sources(case: Case, rank: int) -> TensorDict:
    sources = {}
    for name, flat in case.sources_of(rank).items():
        sources[name] = allocate_elastic(flat.numel(), flat.dtype, "cpu", "param")
        sources[name].copy_(flat)
    return sources


def num_memory_files() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:")


shapes = st.builds(
    Shape,
    num_transfers=st.integers(0, 30),
    num_buckets=st.integers(1, 3),
    src_dtypes=st.sampled_from(
        [("float32", "bfloat16"), ("int64", "bool"), ("float16", "float8_e5m2")]
    ),
    dst_dtypes=st.sampled_from([("bfloat16", "float32"), ("float32", "bfloat16")]),
    max_length=st.integers(1, 7),
)


@given(seed=st.integers(0, 2**32), num_ranks=st.integers(1, 4), shape=shapes)
@pytest.mark.parametrize("kind", ["local", "shared_memory", "in_process"])
def test_any_case_in_one_process(kind: str, seed: int, num_ranks: int, shape: Shape):
    num_ranks = 1 if kind == "local" else num_ranks
    case = build_case(seed, num_ranks, shape)
    by_rank = {rank: elastic_sources(case, rank) for rank in range(num_ranks)}
    handles = {
        key: handle
        for rank in by_rank
        for key, handle in export_handles(rank, by_rank[rank]).items()
    }
    num_mapped = num_memory_files()
    for rank in range(num_ranks):
        transport = {
            "local": lambda rank=rank: LocalTransport(rank),
            "shared_memory": lambda rank=rank: SharedMemoryTransport(rank, handles),
            "in_process": lambda rank=rank: InProcessTransport(rank, case.sources),
        }[kind]()
        destination = case.new_destinations(rank)
        for bucket in case.buckets:
            transport.run(
                bucket.index, transport.prepare(bucket.transfers), by_rank[rank], destination
            )
        transport.close()
        transport.close()  # idempotent
        assert num_memory_files() == num_mapped, "memory of the peers stays mapped"
        assert differing(destination, case.expected(rank)) == []


KINDS = [
    *(transport.name for transport in REGISTRY if transport is not LocalTransport),
    "mixed",
    "deltas",
]
"""Transports between ranks, several at once, and messages as deltas."""


ON_RANKS = {
    number: [f"{kind} {name} {number}" for kind, name in product(KINDS, CASES)] for number in (2, 4)
}


group = cache(group_of_all)


@on_ranks(ON_RANKS)
def test_case_on_real_ranks(case: str) -> None:
    """Run the case twice over one set of transports.

    The second run sends one bucket ahead and reuses maps and staging memory.
    """
    kind, name, _ = case.split()
    messages = group()
    rank = dist.get_rank()
    number = list(CASES).index(name)
    built = build_case(SEED + number, dist.get_world_size(), CASES[name])
    sources = elastic_sources(built, rank)
    gathered = of_all_ranks(export_handles(rank, sources))
    handles = {buffer_id: handle for part in gathered for buffer_id, handle in part.items()}
    preference = {"mixed": "auto", "deltas": CollectiveTransport.name}.get(kind, kind)
    if kind == "mixed":  # buffers of odd ranks are not exported
        handles = {
            buffer_id: handle for buffer_id, handle in handles.items() if buffer_id.rank % 2 == 0
        }
    buffers = built.source_buffers()
    context = TransportContext(
        rank, buffers, handles, messages, timeout=60, sends_deltas=kind == "deltas"
    )
    router = TransportSet.connect(context, preference)
    for is_ahead in (False, True):
        destination = built.new_destinations(rank)
        dist.barrier()
        router.begin(whole=not is_ahead)
        router.prepare()
        if kind == "deltas" and is_ahead:  # change some elements; each rank knows all sources
            for buffer_id, flat in built.sources.items():
                flat.view(torch.uint8)[:: 61 * flat.element_size()] ^= 1
                if buffer_id.rank == rank:
                    sources[buffer_id.name].copy_(flat)
            dist.barrier()
        for bucket, following in zip(built.buckets, (*built.buckets[1:], None), strict=True):
            with mock.patch.object(collective, "_begin", wraps=collective._begin) as begun:
                report = router.run(bucket, sources, destination, following if is_ahead else None)
            # One batch per bucket, possibly the next one's.
            assert begun.call_count <= (2 if is_ahead else 1)
            received = sum(
                transfer.nbytes for transfer in bucket.transfers if transfer.dst_rank == rank
            )
            if kind != "deltas" or not is_ahead:  # reports count deltas by their own size
                assert (
                    sum(sum(by_peer.values()) for by_peer in report.nbytes_by_peer.values())
                    == received
                )
        if is_ahead and preference == CollectiveTransport.name:  # peers read copies
            for flat in sources.values():
                flat.view(torch.uint8).fill_(0xA5)
        dist.barrier()
        assert differing(destination, built.expected(rank)) == []
    router.close()
    router.close()  # idempotent


@on_ranks({2: ["2"], 4: ["4"]})
def test_staging_memory_is_reused(case: str) -> None:
    messages = group()
    rank = dist.get_rank()
    built = build_case(SEED, dist.get_world_size(), CASES["both_directions_large"])
    transport = CollectiveTransport(
        TransportContext(rank, built.source_buffers(), {}, messages, timeout=60)
    )
    shares = [transport.prepare(bucket.transfers) for bucket in built.buckets]
    addresses = []
    for _ in range(3):
        for index, share in enumerate(shares):
            transport.run(index, share, built.sources_of(rank), built.new_destinations(rank))
        addresses.append(
            [(staging.data_ptr(), staging.numel()) for staging in transport._staging.values()]
        )
    transport.close()
    assert transport._staging == {}
    assert addresses[0] == addresses[2]


def test_ranks_read_different_peers_at_a_time() -> None:
    # Each begins with itself and its next peer.
    case = build_case(SEED, 4, Shape(num_transfers=200, num_buckets=1, small=True))
    owners = {flat.data_ptr(): buffer_id.rank for buffer_id, flat in case.sources.items()}
    for rank in range(4):
        with mock.patch.object(copies, "copy_each") as copy_each:
            transport = InProcessTransport(rank, case.sources)
            transport.run(
                0, transport.prepare(case.buckets[0].transfers), {}, case.new_destinations(rank)
            )
        for call in copy_each.call_args_list:
            read = [owners[view.untyped_storage().data_ptr()] for view in call.args[1]]
            assert read == sorted(read, key=lambda peer: (peer - rank) % 4)


def test_batches_are_small_and_none_waits_for_a_later_one() -> None:
    ranks = range(70)
    waiting = []
    for rank in ranks:  # all send to all
        operations = [(True, peer, (rank, peer)) for peer in ranks]
        operations += [(False, peer, (peer, rank)) for peer in ranks]
        with mock.patch.multiple(
            dist, P2POp=lambda *call: call[1], batch_isend_irecv=mock.DEFAULT
        ) as begun:
            collective._begin(operations, rank, None)
        waiting.append([call.args[0] for call in begun["batch_isend_irecv"].call_args_list])
        assert max(map(len, waiting[rank])) <= 64
    while waiting := [batches for batches in waiting if batches]:
        posted = Counter(message for batches in waiting for message in batches[0])
        ended = [
            batches for batches in waiting if all(posted[message] == 2 for message in batches[0])
        ]
        assert ended
        for batches in ended:
            batches.pop(0)


def test_polls_become_rarer() -> None:
    work = mock.Mock(**{"is_completed.side_effect": [False] * 99 + [True]})
    pauses: list[float] = []
    # The name of this module, because threads of other tests look up `time.sleep`, too.
    with mock.patch.object(
        collective, "time", SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    ):
        collective._finish(work, math.inf, of_nccl=True)
    work.wait.assert_called_once_with()  # orders the stream after the message
    assert max(pauses) == 0.0005
    assert all(pause < 0.00002 + 0.1 * sum(pauses[:number]) for number, pause in enumerate(pauses))


@given(cases())
def test_messages_have_the_bytes_that_the_plan_counts(case: PlannedCase) -> None:
    """Includes casts and relay buffers; senders and receivers expect the same."""
    planned = plan(
        case.source, case.destination, case.hosts, case.bucket_nbytes, relaying_hosts=case.relaying
    )
    for bucket in planned.buckets:
        sent = Counter()
        received = Counter()
        for rank in range(len(case.hosts)):
            messages = MessagePlanner(
                rank, case.source.buffers, case.destination.buffers, planned.relays
            )
            between = [
                moved
                for moved in bucket.of_rank(rank).transfers
                if moved.src_rank != moved.dst_rank
            ]
            outgoing, incoming = messages.messages(between)
            for ends, messages_of_rank in ((sent, outgoing), (received, incoming)):
                for message in messages_of_rank:
                    key = (rank, message.peer) if ends is sent else (message.peer, rank)
                    end = HEADER_NBYTES
                    for moved in message.transfers:
                        place = moved.dst if ends is sent else moved.src
                        itemsize = message.dtypes[place.buffer].itemsize
                        assert end <= place.offset * itemsize < end + itemsize  # without overlaps
                        end = (place.offset + moved.numel) * itemsize
                        ends[key] += moved.numel * itemsize
                    assert end <= message.nbytes
        expected = Counter()
        for transfer in bucket.transfers:
            if transfer.src_rank != transfer.dst_rank:
                expected[transfer.src_rank, transfer.dst_rank] += transfer.nbytes
        assert sent == received == expected

"""Messages that are derived from a plan."""

from __future__ import annotations

from collections import Counter

from hypothesis import given

from hybrid_engine.planning.planner import plan
from hybrid_engine.transports.messages import MessagePlanner
from tests.hybrid_engine.planning.cases import Case, cases


@given(cases())
def test_what_is_sent_are_the_bytes_that_the_plan_counts(case: Case) -> None:
    """Casts too, straight and into relay buffers; and both ends expect the same."""
    planned = plan(case.source, case.destination, case.hosts, case.bucket_nbytes, relaying_hosts=case.relaying)
    for bucket in planned.buckets:
        sent, received = Counter(), Counter()
        for rank in range(len(case.hosts)):
            messages = MessagePlanner(rank, case.source.buffers, case.destination.buffers, planned.relays)
            outgoing, incoming = messages.messages(bucket.of_rank(rank).transfers)
            for ends, found in ((sent, outgoing), (received, incoming)):
                for message in found:
                    key = (rank, message.peer) if ends is sent else (message.peer, rank)
                    ends[key] += sum(piece.nbytes for piece in message.pieces)
                    ends[key] += sum(image.nbytes for image in message.images)
        expected = Counter()
        for transfer in bucket.transfers:
            if transfer.src_rank != transfer.dst_rank:
                expected[transfer.src_rank, transfer.dst_rank] += transfer.nbytes
        assert sent == received == expected

"""Recorded plans change with a plan, and a difference is a fault of the cell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hybrid_engine.planning.plan import Bucket, Link, ReshardPlan, Transfer
from hybrid_engine.records.layout import Buffer, BufferId, Place
from tests.harness.values import Values
from tests.hybrid_engine.tools.verify import golden
from tests.hybrid_engine.tools.verify.test_verify import GOOD

SRC = BufferId(0, "flat")
DST = BufferId(1, "weight")
MOVED = Transfer("a", (2, 2), Place(SRC, 0, (4, 1)), Place(DST, 0, (2, 1)), 8, Link.HOST)
OTHER = replace(
    MOVED, tensor="b", src=replace(MOVED.src, offset=8), dst=replace(MOVED.dst, offset=4)
)
BUCKET = Bucket(0, ("a", "b"), (MOVED, OTHER), ("module",), 16)


def digest_of(*buckets: Bucket, dtype: str = "bfloat16", hosts: str = "hhh") -> str:
    """Return the digest of rank 1, with a weight of `dtype`."""
    sources = {BufferId(1, "flat"): Buffer(16, "bfloat16")}
    destinations = {DST: Buffer(8, dtype)}
    return golden.part_of(ReshardPlan(buckets, ()), 1, sources, destinations, hosts)["plan"]


def digest_with(*transfers: Transfer) -> str:
    return digest_of(replace(BUCKET, transfers=transfers))


def test_digests_depend_on_a_plan() -> None:
    cut = [
        replace(BUCKET, tensors=(transfer.tensor,), transfers=(transfer,))
        for transfer in BUCKET.transfers
    ]
    elsewhere = replace(MOVED.src, buffer=BufferId(2, "flat"))
    digests = [
        digest_of(BUCKET),
        digest_of(replace(BUCKET, tensors=("b", "a"))),
        digest_of(*cut),
        digest_of(*reversed(cut)),
        digest_of(BUCKET, dtype="float16"),
        digest_of(BUCKET, hosts="hoo"),
        digest_of(replace(BUCKET, transfers=(MOVED,), fan_out=(OTHER,))),
        digest_with(OTHER, MOVED),
        digest_with(replace(MOVED, src=elsewhere), replace(OTHER, src=elsewhere)),
        digest_with(MOVED, replace(OTHER, src=MOVED.src)),
        # A change of the second transfer, so that a changed buffer is not numbered first.
        digest_with(OTHER, replace(MOVED, src=replace(MOVED.src, strides=(5, 1)))),
    ]
    assert len(set(digests)) == len(digests)


RAN = replace(
    GOOD,
    seen=[
        {"plan": "d1", "buckets": 2, "transfers": 3},
        {"plan": "d2", "buckets": 2, "transfers": 4},
    ],
)


CHANGES: list[tuple[Values, list[str]]] = [
    ({}, []),
    (
        {"bytes_received": 9, "bytes_least": 9},
        ["bytes_received: 9, recorded 8", "bytes_least: 9, recorded 8"],
    ),
    ({"seen": RAN.seen[::-1]}, ["plan: "]),
    ({"seen": [{**part, "buckets": 3} for part in RAN.seen]}, ["buckets: 3, recorded 2"]),
    ({"name": "another"}, ["not in golden.json"]),
    ({"error": "boom", "seen": []}, ["boom"]),
]


def test_a_difference_is_a_fault_of_the_cell(tmp_path: Path) -> None:
    file = tmp_path / "golden.json"
    file.write_text("{}")
    golden.record(RAN, [RAN.name], file)
    for change, messages in CHANGES:
        faults = golden.faults(replace(RAN, **change), golden.read(file))
        assert [text in fault for text, fault in zip(messages, faults, strict=True)] == [
            True
        ] * len(messages)

"""Entries of golden.json change with everything that moves otherwise, and with nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.planning.plan import Bucket, Link, ReshardPlan, Transfer
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place
from tests.hybrid_engine.planning.cases import plan, whole
from tests.hybrid_engine.tools.verify import golden
from tests.hybrid_engine.tools.verify.test_verify import GOOD

HOSTS = ("one", "one", "other", "other")
NUM_BUCKETS = 2


def relayed(hosts: Sequence[str] = HOSTS, buffer: str = "flat", bucket_nbytes: int = 16) -> list[golden.Entry]:
    source = Layout.merge(whole(name, (2, 4), 0, f"{buffer} {name}") for name in ("a", "b"))
    destination = Layout.merge(whole(name, (2, 4), rank, name, name) for name in ("a", "b") for rank in range(4))

    def part(rank: int) -> golden.Entry:
        plan_of_rank = plan(source, destination, hosts, bucket_nbytes, rank=rank, relaying_hosts=hosts)
        return golden.part_of(plan_of_rank, rank, source.buffers, destination.buffers, hosts)

    return [part(rank) for rank in range(4)]


def test_entries_ignore_names_of_hosts_and_source_buffers() -> None:
    assert relayed() == relayed(hosts=("x", "x", "y", "y"), buffer="another")
    assert [part["buckets"] for part in relayed()] == [NUM_BUCKETS] * 4
    assert sum(part["transfers"] for part in relayed()) == NUM_BUCKETS * (2 + 1 + 2)  # same host, ingress, fan-out


def test_entries_ignore_hash_seeds() -> None:
    program = "from tests.hybrid_engine.tools.verify.test_golden import relayed; print(relayed())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in "12"
    }  # fmt: skip
    assert outputs == {f"{relayed()}\n"}


@pytest.mark.parametrize("change", [{"hosts": ("one",) * 4}, {"bucket_nbytes": 10**6}], ids=str)
def test_entries_depend_on_hosts_and_buckets(change: dict[str, Any]) -> None:
    assert relayed(**change) != relayed()


SRC = BufferId(0, "flat")
DST = BufferId(1, "weight")
RELAY = BufferId(1, "relay")
MOVED = Transfer("a", (2, 2), Place(SRC, 0, (4, 1)), Place(DST, 0, (2, 1)), 8, Link.HOST)
OTHER = replace(MOVED, tensor="b", src=replace(MOVED.src, offset=8), dst=replace(MOVED.dst, offset=4))
BUCKET = Bucket(0, ("a", "b"), (MOVED, OTHER), ("module",), 16)


def relay_first(relay: BufferId) -> Bucket:
    """Return the bucket with the first box sent through a relay buffer."""
    arriving = replace(MOVED, dst=Place(relay, 0, (2, 1)))
    return replace(BUCKET, transfers=(arriving, OTHER), fan_out=(replace(MOVED, src=arriving.dst),))


def digest_of(
    *buckets: Bucket, dtype: str = "bfloat16", relay: tuple[BufferId, str] | None = None, hosts: str = "hhh"
) -> str:
    """Return the digest of rank 1, with a weight of `dtype`."""
    plan = ReshardPlan(buckets, {}, (), relays={relay[0]: Buffer(4, relay[1])} if relay else {})
    sources = {BufferId(1, "flat"): Buffer(16, "bfloat16")}
    destinations = {DST: Buffer(8, dtype)}
    digest: str = golden.part_of(plan, 1, sources, destinations, hosts)["plan"]
    return digest


CHANGES: tuple[dict[str, Any], ...] = (
    {"tensor": "c"},
    {"lengths": (4,)},
    {"nbytes": 16},
    {"src": replace(MOVED.src, offset=1)},
    {"src": replace(MOVED.src, strides=(5, 1))},
    {"src": replace(MOVED.src, buffer=BufferId(1, "flat"))},
    {"src": replace(MOVED.src, buffer=BufferId(0, "second"))},
    {"dst": replace(MOVED.dst, offset=1)},
    {"dst": replace(MOVED.dst, strides=(1, 2))},
    {"dst": replace(MOVED.dst, buffer=BufferId(0, "weight"))},
    {"dst": replace(MOVED.dst, buffer=BufferId(0, "bias"))},
)


def test_digests_depend_on_every_field_of_a_plan() -> None:
    cut = [replace(BUCKET, tensors=(transfer.tensor,), transfers=(transfer,)) for transfer in BUCKET.transfers]
    elsewhere = replace(MOVED.src, buffer=BufferId(2, "flat"))
    digests = [
        digest_of(BUCKET),
        digest_of(replace(BUCKET, transfers=(OTHER, MOVED))),
        digest_of(replace(BUCKET, tensors=("b", "a"))),
        digest_of(*cut),
        digest_of(*reversed(cut)),
        digest_of(BUCKET, dtype="float16"),
        digest_of(BUCKET, hosts="hoo"),
        digest_of(replace(BUCKET, transfers=tuple(replace(transfer, src=elsewhere) for transfer in BUCKET.transfers))),
        digest_of(replace(BUCKET, transfers=tuple(replace(transfer, src=MOVED.src) for transfer in BUCKET.transfers))),
        digest_of(replace(BUCKET, transfers=(MOVED,), fan_out=(OTHER,))),
        # Changes of the second transfer, so that a changed buffer is not numbered first.
        *(digest_of(replace(BUCKET, transfers=(OTHER, replace(MOVED, **change)))) for change in CHANGES),
        digest_of(relay_first(RELAY), relay=(RELAY, "bfloat16")),
        digest_of(relay_first(RELAY), relay=(RELAY, "float16")),
    ]
    assert len(set(digests)) == len(digests)
    renamed = BufferId(1, "another")
    assert digest_of(relay_first(renamed), relay=(renamed, "float16")) == digests[-1]


RAN = replace(GOOD, seen=[{"plan": "d1", "buckets": 2, "transfers": 3}, {"plan": "d2", "buckets": 2, "transfers": 4}])


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"bytes_received": 9, "bytes_least": 9}, ["bytes_received: 9, recorded 8", "bytes_least: 9, recorded 8"]),
        ({"seen": RAN.seen[::-1]}, ["plan: "]),
        ({"seen": [{**part, "buckets": 3} for part in RAN.seen]}, ["buckets: 3, recorded 2"]),
        ({"seen": [{**part, "transfers": 3} for part in RAN.seen]}, ["transfers: 6, recorded 7"]),
        ({"name": "another"}, ["not in golden.json"]),
        ({"num_parameters": 0, "bytes_received": 8}, ["0 parameters compared"]),
        ({"error": "boom", "seen": []}, ["boom"]),
    ],
)
def test_a_difference_is_a_fault_of_the_cell(change: dict[str, Any], messages: list[str], tmp_path: Path) -> None:
    file = tmp_path / "golden.json"
    file.write_text("{}")
    golden.record(RAN, [RAN.name], file)
    assert golden.faults(RAN, golden.read(file)) == []
    faults = golden.faults(replace(RAN, **change), golden.read(file))
    assert [text in fault for text, fault in zip(messages, faults, strict=True)] == [True] * len(messages)


def test_only_successful_cells_are_recorded(tmp_path: Path) -> None:
    file = tmp_path / "golden.json"
    file.write_text('{"gone": {}, "case": {"plan": "old"}, "b": {"plan": "kept"}}')
    for verdict in (replace(RAN, name="a"), replace(RAN, error="boom")):
        golden.record(verdict, ["a", "b", RAN.name], file)
    lines = file.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("{", "}")
    assert [line.split(":")[0] for line in lines[1:-1]] == ['"a"', '"b"', '"case"']
    assert golden.read(file)["case"] == {"plan": "old"}

"""What an entry of golden.json depends on, and what it does not."""

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
        made = plan(source, destination, hosts, bucket_nbytes, rank=rank, relaying_hosts=hosts)
        return golden.part_of(made, rank, source.buffers, destination.buffers, hosts)

    return [part(rank) for rank in range(4)]


def test_an_entry_says_nothing_of_names_that_are_ours() -> None:
    assert relayed() == relayed(hosts=("x", "x", "y", "y"), buffer="another")
    assert [part["buckets"] for part in relayed()] == [NUM_BUCKETS] * 4
    assert sum(part["transfers"] for part in relayed()) == NUM_BUCKETS * (2 + 1 + 2)  # own host, ingress, fan-out


def test_hash_seeds_do_not_show() -> None:
    program = "from tests.hybrid_engine.tools.verify.test_golden import relayed; print(relayed())"
    said = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in "12"
    }  # fmt: skip
    assert said == {f"{relayed()}\n"}


@pytest.mark.parametrize("change", [{"hosts": ("one",) * 4}, {"bucket_nbytes": 10**6}], ids=str)
def test_hosts_and_buckets_show(change: dict[str, Any]) -> None:
    assert relayed(**change) != relayed()


SRC, DST, RELAY = BufferId(0, "flat"), BufferId(1, "weight"), BufferId(1, "relay")
MOVED = Transfer("a", (2, 2), Place(SRC, 0, (4, 1)), Place(DST, 0, (2, 1)), 8, Link.HOST)
OTHER = replace(MOVED, tensor="b", src=replace(MOVED.src, offset=8), dst=replace(MOVED.dst, offset=4))
BUCKET = Bucket(0, ("a", "b"), (MOVED, OTHER), ("module",), 16)


def over(relay: BufferId) -> Bucket:
    """The bucket with one of its boxes by way of a relay buffer."""
    arriving = replace(MOVED, dst=Place(relay, 0, (2, 1)))
    return replace(BUCKET, transfers=(arriving, OTHER), fan_out=(replace(MOVED, src=arriving.dst),))


def of(*buckets: Bucket, dtype: str = "bfloat16", relay: tuple[BufferId, str] | None = None, hosts: str = "hhh") -> str:
    """The digest of rank 1, whose weight is of `dtype`."""
    made = ReshardPlan(buckets, {}, (), relays={relay[0]: Buffer(4, relay[1])} if relay else {})
    sources, destinations = {BufferId(1, "flat"): Buffer(16, "bfloat16")}, {DST: Buffer(8, dtype)}
    digest: str = golden.part_of(made, 1, sources, destinations, hosts)["plan"]
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


def test_everything_of_transfers_orders_buckets_dtypes_ranks_hosts_and_relays_shows() -> None:
    cut = [replace(BUCKET, tensors=(one.tensor,), transfers=(one,)) for one in BUCKET.transfers]
    elsewhere = replace(MOVED.src, buffer=BufferId(2, "flat"))
    found = [
        of(BUCKET),
        of(replace(BUCKET, transfers=(OTHER, MOVED))),
        of(replace(BUCKET, tensors=("b", "a"))),
        of(*cut),
        of(*reversed(cut)),
        of(BUCKET, dtype="float16"),
        of(BUCKET, hosts="hoo"),
        of(replace(BUCKET, transfers=tuple(replace(one, src=elsewhere) for one in BUCKET.transfers))),
        of(replace(BUCKET, transfers=tuple(replace(one, src=MOVED.src) for one in BUCKET.transfers))),
        of(replace(BUCKET, transfers=(MOVED,), fan_out=(OTHER,))),
        # changes of the second of the bucket, so that a buffer of its own is not the first either
        *(of(replace(BUCKET, transfers=(OTHER, replace(MOVED, **change)))) for change in CHANGES),
        of(over(RELAY), relay=(RELAY, "bfloat16")),
        of(over(RELAY), relay=(RELAY, "float16")),
    ]
    assert len(set(found)) == len(found)
    renamed = BufferId(1, "another")
    assert of(over(renamed), relay=(renamed, "float16")) == found[-1]


RAN = replace(GOOD, seen=[{"plan": "d1", "buckets": 2, "transfers": 3}, {"plan": "d2", "buckets": 2, "transfers": 4}])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bytes_received": 9, "bytes_least": 9}, ["bytes_received: 9, recorded 8", "bytes_least: 9, recorded 8"]),
        ({"seen": RAN.seen[::-1]}, ["plan: "]),
        ({"seen": [{**each, "buckets": 3} for each in RAN.seen]}, ["buckets: 3, recorded 2"]),
        ({"seen": [{**each, "transfers": 3} for each in RAN.seen]}, ["transfers: 6, recorded 7"]),
        ({"name": "another"}, ["not in golden.json"]),
        ({"num_parameters": 0, "bytes_received": 8}, ["0 parameters compared"]),
        ({"error": "boom", "seen": []}, ["boom"]),
    ],
)
def test_what_differs_is_a_fault_of_the_cell(change: dict[str, Any], says: list[str], tmp_path: Path) -> None:
    file = tmp_path / "golden.json"
    file.write_text("{}")
    golden.record(RAN, [RAN.name], file)
    assert golden.faults(RAN, golden.read(file)) == []
    found = golden.faults(replace(RAN, **change), golden.read(file))
    assert [text in fault for text, fault in zip(says, found, strict=True)] == [True] * len(says)


def test_only_cells_that_ran_well_are_recorded(tmp_path: Path) -> None:
    file = tmp_path / "golden.json"
    file.write_text('{"gone": {}, "case": {"plan": "old"}, "b": {"plan": "kept"}}')
    for verdict in (replace(RAN, name="a"), replace(RAN, error="boom")):
        golden.record(verdict, ["a", "b", RAN.name], file)
    lines = file.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("{", "}")
    assert [line.split(":")[0] for line in lines[1:-1]] == ['"a"', '"b"', '"case"']
    assert golden.read(file)["case"] == {"plan": "old"}

"""Device memory that trainers and a server, as separate processes, hold while they switch.

Each holds its weights in a memory file, like elastic memory on a CPU. A fourth process reads every
two milliseconds the number of pages of each file, and the anonymous memory that each process has
allocated since the start. (Reading `Pss` would take longer than a bucket.)

Processes are read one after the other, so bytes that move between two of them could count twice.
Each is therefore read twice in turn and the smaller value counts: never more than was in use in
between.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import GenerateConfig
from hybrid_engine.memory.descriptors import fetch
from hybrid_engine.memory.elastic import allocate_elastic, exported_buffer_of
from hybrid_engine.memory.offload_items import Kind, Offloadable, OffloadItem, Part
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from hybrid_engine.records.layout import Buffer, BufferId, Layout, Place, Shard
from hybrid_engine.records.regions import Region
from hybrid_engine.serving.roles import NoInference, NoTraining
from hybrid_engine.switch import sharding_manager
from hybrid_engine.switch.release_fence import ReleaseFence
from hybrid_engine.switch.sharding_manager import ShardingManager
from tests.harness.launch import Ranks
from tests.hybrid_engine.switch.fakes import INFER, TRAIN

NUM_TRAINERS = 2
SERVER = 2
SAMPLER = 3
MIB = 2**20
BUCKET = 8 * MIB
TENSORS = {f"tensor{number:02}": (512, 1024) for number in range(32)}  # of 2 MiB each
SIZE = 512 * 1024
NBYTES = 4 * SIZE * len(TENSORS)
SLACK = 4 * MIB
"""Memory of three interpreters, and the error of the kernel's count of anonymous pages."""
NUM_WARM_UPS = 2
NUM_SWITCHES = 20
NUM_WITHOUT = 8
"""Switches without the second signal, which hold two buckets more."""
LONGEST_DELAY = 0.05
"""Seconds before a step of a bucket on the slow side; enough for two buckets on the other side."""


class Delays:
    """Seeded delays of one rank. Of four switches the trainers, the server, both or none are
    slow."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._draw = random.Random(rank)
        self._longest = 0.0

    def begin_switch(self, number: int) -> None:
        is_slow = number % 4 in ((1, 2) if self._rank == SERVER else (0, 2))
        self._longest = LONGEST_DELAY * is_slow

    def pause(self) -> None:
        time.sleep(self._draw.random() * self._longest)


class HalfOfRows(NoTraining):
    """A trainer with half of the rows of every tensor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.flat = allocate_elastic(NBYTES // 4 // NUM_TRAINERS, torch.float32, "cpu", "param")
        self.flat.fill_(rank + 1)

    def layout(self) -> Layout:
        buffer_id = BufferId(self.rank, "param")
        part = SIZE // NUM_TRAINERS
        shards = []
        for number, (name, (rows, columns)) in enumerate(TENSORS.items()):
            num_rows = rows // NUM_TRAINERS
            region = Region(name, (self.rank * num_rows, 0), (num_rows, columns))
            shards.append(Shard(region, Place(buffer_id, number * part, (columns, 1))))
        return Layout(TENSORS, {buffer_id: Buffer(self.flat.numel(), "float32")}, tuple(shards))

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {"param": self.flat}

    def offload_items(self) -> Iterable[OffloadItem]:
        return [OffloadItem("param", "param", self.flat)]


class SlowOffloader(Offloader):
    """Offloads parameters late, and notifies late that a bucket was read."""

    def __init__(self, owner: Offloadable, delays: Delays) -> None:
        super().__init__(owner)
        self._delays = delays

    def offload_parts(self, kind: Kind, parts: Iterable[Part]) -> int:
        self._delays.pause()
        return super().offload_parts(kind, parts)

    def save_parts(self, kind: Kind, parts: Iterable[Part]) -> None:
        super().save_parts(kind, parts)
        self._delays.pause()


class WholeTensors(NoInference):
    """Weights of a server, one group per tensor. They take memory in `allocate`, not in writes."""

    def __init__(self, rank: int, delays: Delays) -> None:
        self.rank = rank
        self._delays = delays
        self.flat = allocate_elastic(NBYTES // 4, torch.float32, "cpu", "param")
        self._parts = dict(zip(TENSORS, self.flat.split(SIZE), strict=True))
        self.live: set[str] = set()

    def layout(self) -> Layout:
        ids = {name: BufferId(self.rank, name) for name in TENSORS}
        shards = [
            Shard(Region(name, (0, 0), shape), Place(ids[name], 0, (shape[1], 1))) for name, shape in TENSORS.items()
        ]
        return Layout(TENSORS, {ids[name]: Buffer(SIZE, "float32", name) for name in TENSORS}, tuple(shards))

    def allocate(self, groups: Sequence[str]) -> Mapping[str, torch.Tensor]:
        self._delays.pause()
        self.live.update(groups)
        return {name: self._parts[name].zero_() for name in groups}

    def commit(self, groups: Sequence[str]) -> None:
        self._delays.pause()

    def release(self, keep: Collection[str] = ()) -> None:
        assert not keep
        exported_buffer_of(self.flat).release()
        self.live.clear()

    def committed(self) -> Collection[str]:
        return self.live

    def resident_nbytes(self) -> int:
        return exported_buffer_of(self.flat).resident_nbytes()

    def assert_filled(self) -> None:
        half = SIZE // NUM_TRAINERS
        for part in self._parts.values():
            assert all((part[half * rank : half * (rank + 1)] == rank + 1).all() for rank in range(NUM_TRAINERS))


def fence_of_one_signal(*args: Any, is_apart: bool, **kwargs: Any) -> ReleaseFence:
    """Build a fence that signals that a bucket was read, but not that the previous one was
    released.
    """
    assert is_apart
    return ReleaseFence(*args, **kwargs)


def switch_or_sample(has_second_signal: bool, num_switches: int) -> dict[str, int] | None:
    store, rank, _ = next(dist.rendezvous("env://"))
    if rank == SAMPLER:
        return sample(store)
    one_signal = mock.patch.object(sharding_manager, "ReleaseFence", fence_of_one_signal)
    with nullcontext() if has_second_signal else one_signal:
        switch_again_and_again(store, rank, num_switches)
    return None


def switch_again_and_again(store: dist.Store, rank: int, num_switches: int) -> None:
    delays = Delays(rank)
    training = NoTraining() if rank == SERVER else HalfOfRows(rank)
    inference = WholeTensors(rank, delays) if rank == SERVER else NoInference()
    flat = inference.flat if rank == SERVER else training.flat
    world = World(dist.PrefixStore("job", store), rank, SERVER + 1)
    with ExitStack() as ends:
        device = torch.device("cpu")
        job = ends.enter_context(closing(Job.join(60, world=world, host="a", device_name="one", device=device)))
        config = GenerateConfig(bucket_mb=BUCKET // MIB, timeout_seconds=60, check_compute="off")
        manager = ShardingManager(
            training,
            inference,
            caches=inference,
            offloader=SlowOffloader(training, delays),
            config=config,
            job=job,
        )
        ends.callback(manager.close)
        assert max(bucket.nbytes for bucket in manager.plan.buckets) == BUCKET
        for number in range(NUM_WARM_UPS + num_switches):
            if number == NUM_WARM_UPS:
                handle = exported_buffer_of(flat).export()
                store.set(f"ready{rank}", f"{os.getpid()} {handle.address} {handle.token}")
                store.wait(["sampling"])
            if number >= NUM_WARM_UPS:
                delays.begin_switch(number - NUM_WARM_UPS)
            manager.enter(INFER)
            if rank == SERVER and number == NUM_WARM_UPS:
                inference.assert_filled()
            manager.enter(TRAIN)
        store.set(f"done{rank}", "")
        store.wait(["sampled"])


class WatchedProcess:
    """Another process, with the memory file that stands for its device memory."""

    def __init__(self, handle: str) -> None:
        pid, address, token = handle.split()
        (self._file,) = fetch(address, [token])
        self._statm = Path(f"/proc/{pid}/statm")
        self._num_before = self._anonymous_nbytes()  # of imports and warm-up

    def _anonymous_nbytes(self) -> int:
        _, resident, of_files, *_ = map(int, self._statm.read_bytes().split())  # in pages
        return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")

    def nbytes(self) -> int:
        """Return bytes on the device and anonymous bytes allocated since the start."""
        return os.fstat(self._file).st_blocks * 512 + max(0, self._anonymous_nbytes() - self._num_before)


def sample(store: dist.Store) -> dict[str, int]:
    ranks = range(SERVER + 1)
    processes = [WatchedProcess(store.get(f"ready{rank}").decode()) for rank in ranks]
    at_rest = sum(process.nbytes() for process in processes)
    peak = 0
    num_samples = 0
    store.set("sampling", "")
    while not store.check([f"done{rank}" for rank in ranks]):
        for _ in range(20):
            first = [process.nbytes() for process in processes]
            second = [process.nbytes() for process in processes]
            peak = max(peak, sum(map(min, first, second)))
            num_samples += 1
            time.sleep(0.002)
    store.set("sampled", "")
    return {"at rest": at_rest, "peak": peak, "samples": num_samples}


@pytest.mark.parametrize(
    ("has_second_signal", "num_switches"),
    [(True, NUM_SWITCHES), (False, NUM_WITHOUT)],
    ids=["both signals", "without the second"],
)
def test_peak_memory_is_the_larger_side_and_two_buckets(
    ranks: Ranks, has_second_signal: bool, num_switches: int
) -> None:
    arguments = (has_second_signal, num_switches)
    *_, memory = ranks.launch(switch_or_sample, SAMPLER + 1, *arguments, timeout=300)
    assert memory["samples"] > 10 * num_switches
    assert abs(memory["at rest"] - NBYTES) < SLACK  # both sides are of one size
    assert memory["peak"] > NBYTES
    limit = NBYTES + 2 * BUCKET + SLACK
    num_buckets = (memory["peak"] - NBYTES) / BUCKET
    assert (memory["peak"] <= limit) is has_second_signal, f"{num_buckets:.2f} buckets"

"""Two processes on one GPU that read each other's weights: TP=2 in training, a whole copy each for inference."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import torch

from benchmarks.gpu_figures import Timing, plain_device_copy, raise_unless_written, seconds_of, synchronize, timing
from benchmarks.gpu_layouts import ModelShape, RankJob, rank_job
from hybrid_engine.memory.device_pages import CHUNK_NBYTES
from hybrid_engine.memory.elastic import Peer, allocate_elastic, export_tensor, open_peer
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.transports.copies import copy_straight
from hybrid_engine.transports.shared_memory import source_extents

HOLE = CHUNK_NBYTES // 4
"""Elements: a chunk of any dtype here has as many or more."""
TIMEOUT = 600.0
"""Seconds that the two processes wait for each other."""
WITH_MAPPING, COPIES = "pull, mapping bucket by bucket", "pull, copies alone"
FLOOR = "plain device copies, both at once"


@dataclass(frozen=True)
class PullTask:
    """What each of the two processes is told."""

    device: str
    shape: ModelShape
    bucket_nbytes: int
    repeat: int


@dataclass(frozen=True)
class PullResult:
    """One process's: bytes read from the other, median seconds by name, seconds of the floor."""

    nbytes: int
    seconds: Mapping[str, float]
    floor_seconds: float


def pull_figures(task: PullTask) -> Iterator[Timing]:
    """Start the two and take the slower one's figures. Raises RuntimeError when one of them fails."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2, timeout=TIMEOUT)
    ends = context.Pipe()
    results = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=pull, args=(rank, task, barrier, ends[rank], results[rank][1])) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for end in (*ends, results[0][1], results[1][1]):
        end.close()  # so that a process that dies is noticed
    try:
        found: list[PullResult] = [receiver.recv() for receiver, _ in results]
    except EOFError:
        raise RuntimeError("a process of the pull failed; its error is above") from None
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    for name in (WITH_MAPPING, COPIES):
        slower = max(found, key=lambda result: result.seconds[name])
        yield timing(name, slower.nbytes, slower.seconds[name], FLOOR, slower.floor_seconds)


def pull(rank: int, task: PullTask, barrier: Barrier, other: Connection, result: Connection) -> None:
    """One of the two processes."""
    try:
        result.send(_pull(rank, task, barrier, other))
    except BaseException:
        barrier.abort()  # the other one fails too instead of waiting
        raise


def _pull(rank: int, task: PullTask, barrier: Barrier, other: Connection) -> PullResult:
    torch.set_num_threads(1)
    device = torch.device(task.device)
    job = rank_job(task.shape, "tp=2,dp=1", "tp=1", rank, task.bucket_nbytes)
    source = job.new_source(lambda numel, dtype: allocate_elastic(numel, dtype, device, "param"))
    destinations = job.new_destinations(device)
    synchronize(device)
    other.send(export_tensor(source))
    peer = open_peer(other.recv(), device)
    copy_straight("local", 0, _read_from(job, rank), lambda _: source, destinations)
    parts = [_read_from(job, 1 - rank, bucket) for bucket in range(len(job.buckets))]
    transfers = [each for part in parts for each in part]
    seconds: dict[str, list[float]] = {WITH_MAPPING: [], COPIES: []}
    for _ in range(task.repeat + 1):
        barrier.wait()
        seconds[WITH_MAPPING].append(seconds_of(device, lambda: _pull_by_bucket(peer, parts, destinations)))
        barrier.wait()
        with peer.mapped() as flat:
            copies = partial(copy_straight, "pull", 0, transfers, lambda _, flat=flat: flat, destinations)
            seconds[COPIES].append(seconds_of(device, copies))
    raise_unless_written(destinations)
    nbytes = job.read_nbytes([1 - rank])
    floor = plain_device_copy(device, nbytes, task.repeat, barrier.wait)
    barrier.wait()  # both have read to the end before either's buffer goes
    return PullResult(nbytes, {name: statistics.median(found[1:]) for name, found in seconds.items()}, floor)


def _pull_by_bucket(peer: Peer, parts: Sequence[Sequence[Transfer]], destinations: Mapping[str, torch.Tensor]) -> None:
    """As a switch does: the peer's chunks are mapped for a bucket only."""
    for index, transfers in enumerate(parts):
        if transfers:
            extents = [extent for each in transfers for extent in source_extents(each, HOLE)]
            with peer.mapped(extents) as flat:
                copy_straight("pull", index, transfers, lambda _, flat=flat: flat, destinations)


def _read_from(job: RankJob, src_rank: int, bucket: int | None = None) -> list[Transfer]:
    buckets = job.buckets if bucket is None else [job.buckets[bucket]]
    return [each for one in buckets for each in one.transfers if each.src_rank == src_rank]

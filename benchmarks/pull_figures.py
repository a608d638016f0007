"""Two processes, on one GPU or two, that read each other's weights: TP=2 in training, a whole copy each for inference.

Each is a process of its own, with a driver of its own, as the ranks of a host are.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError

import torch

from benchmarks.flat_models import FLAT, ModelShape, RankJob, rank_job
from benchmarks.targets import Target, target_named
from benchmarks.timings import (
    Timing,
    plain_device_copy,
    raise_unless_written,
    seconds_of,
    synchronize,
    timing,
)
from hybrid_engine.errors import TransportError
from hybrid_engine.memory.elastic import allocate_elastic, export_tensor, open_peer
from hybrid_engine.planning.plan import Transfer
from hybrid_engine.records.layout import BufferId
from hybrid_engine.transports.copies import BatchedCopies, copy_straight
from hybrid_engine.transports.pull import SharedMemoryTransport

TIMEOUT = 120.0
"""Seconds that the two processes wait for each other."""
WITH_MAPPING, COPIES = "pull, mapping bucket by bucket", "pull, copies alone"


@dataclass(frozen=True)
class PullTask:
    """What each of the two processes is told. `targets`: of the two, by name."""

    targets: tuple[str, str]
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
    """Start the two and take the slower one's figures.

    Raises TransportError where they may not read each other's memory, and RuntimeError when one fails otherwise.
    """
    between = "in one GPU" if task.targets[0] == task.targets[1] else "from GPU to GPU"
    floor = f"plain copies {between}, both at once"
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2, timeout=TIMEOUT)
    ends = context.Pipe()
    results = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=pull, args=(rank, task, barrier, ends[rank], results[rank][1]))
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for end in (*ends, results[0][1], results[1][1]):
        end.close()  # so that a process that dies is noticed
    try:
        answers: list[PullResult | str] = [receiver.recv() for receiver, _ in results]
    except EOFError:
        raise RuntimeError("a process of the pull failed; its error is above") from None
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    found = [answer for answer in answers if isinstance(answer, PullResult)]
    if len(found) < len(answers):
        raise TransportError(
            "; ".join(sorted({answer for answer in answers if isinstance(answer, str)}))
        )
    for name in (WITH_MAPPING, COPIES):
        slower = max(found, key=lambda result: result.seconds[name])
        yield timing(name, slower.nbytes, slower.seconds[name], floor, slower.floor_seconds)


def pull(
    rank: int, task: PullTask, barrier: Barrier, other: Connection, result: Connection
) -> None:
    """One of the two processes."""
    try:
        with target_named(task.targets[rank]) as target:
            result.send(_pull(rank, task, target, barrier, other))
    except TransportError as error:
        barrier.abort()  # the other one fails too instead of waiting
        result.send(str(error))
    except BrokenBarrierError:
        result.send("the other process failed")
    except BaseException:
        barrier.abort()
        raise


def _pull(
    rank: int, task: PullTask, target: Target, barrier: Barrier, other: Connection
) -> PullResult:
    torch.set_num_threads(1)
    device = target.device
    job = rank_job(task.shape, 2, rank, task.bucket_nbytes)
    source = job.new_source(
        lambda numel, dtype: allocate_elastic(numel, dtype, target.elastic, "param")
    )
    destinations = job.new_destinations(device)
    synchronize(device)
    other.send(export_tensor(source))
    handle = other.recv()
    if handle is None:
        raise TransportError("no elastic buffers on this device; the log says why")
    peer = open_peer(handle, target.elastic)
    copy_straight("local", 0, _read_from(job, rank), lambda _: source, destinations)
    parts = [_read_from(job, 1 - rank, bucket) for bucket in range(len(job.buckets))]
    transport = SharedMemoryTransport(rank, {BufferId(1 - rank, FLAT): handle}, job.buckets)
    copies = BatchedCopies(each for part in parts for each in part)
    seconds: dict[str, list[float]] = {WITH_MAPPING: [], COPIES: []}
    for _ in range(task.repeat + 1):
        barrier.wait()
        seconds[WITH_MAPPING].append(
            seconds_of(device, partial(_pull_by_bucket, transport, parts, destinations))
        )
        barrier.wait()
        with peer.mapped() as flat:
            at_once = partial(copy_straight, "pull", 0, copies, _always(flat), destinations)
            seconds[COPIES].append(seconds_of(device, at_once))
    raise_unless_written(destinations)
    nbytes = job.read_nbytes([1 - rank])
    there = None if target.is_simulated else torch.device(task.targets[1 - rank])
    floor = plain_device_copy(device, nbytes, task.repeat, barrier.wait, there)
    transport.close()
    barrier.wait()  # both have read to the end before either's buffer goes
    return PullResult(
        nbytes, {name: statistics.median(found[1:]) for name, found in seconds.items()}, floor
    )


def _pull_by_bucket(
    transport: SharedMemoryTransport,
    parts: Sequence[Sequence[Transfer]],
    destinations: Mapping[str, torch.Tensor],
) -> None:
    """As a switch does: the peer's chunks are mapped from the first bucket that reads them to the last."""
    for index, transfers in enumerate(parts):
        if transfers:
            transport.run(index, transfers, {}, destinations)
    transport.trim()


def _always(flat: torch.Tensor) -> Callable[[Transfer], torch.Tensor]:
    return lambda _: flat


def _read_from(job: RankJob, src_rank: int, bucket: int | None = None) -> list[Transfer]:
    buckets = job.buckets if bucket is None else [job.buckets[bucket]]
    return [each for one in buckets for each in one.transfers if each.src_rank == src_rank]

"""Time two processes that read each other's weights, from TP=2 to a whole copy each.

Like the ranks of a host, each process has its own driver context. They use the same GPU or two
GPUs.
"""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError

import torch

from benchmarks.flat_models import FLAT, ModelShape, rank_job
from benchmarks.targets import Target, target_named
from benchmarks.timings import (
    Timing,
    plain_device_copy,
    raise_unless_written,
    seconds_of,
    synchronize,
)
from hybrid_engine.errors import TransportError
from hybrid_engine.memory.elastic import allocate_elastic, export_tensor, open_peer
from hybrid_engine.planning.plan import Bucket, Transfer
from hybrid_engine.records.layout import BufferId
from hybrid_engine.transports.copies import BatchedCopies
from hybrid_engine.transports.pull import LocalTransport, SharedMemoryTransport

TIMEOUT = 120.0
"""Seconds that the two processes wait for each other."""
WITH_MAPPING = "pull, mapping bucket by bucket"
COPIES = "pull, copies alone"


@dataclass(frozen=True)
class PullTask:
    """Arguments of both processes. `targets`: the name of the target of each."""

    targets: tuple[str, str]
    shape: ModelShape
    bucket_nbytes: int
    repeat: int


@dataclass(frozen=True)
class PullResult:
    """Bytes that a process read from its peer, median seconds by name, seconds of the floor."""

    nbytes: int
    seconds: Mapping[str, float]
    floor_seconds: float


def pull_figures(task: PullTask) -> Iterator[Timing]:
    """Start both processes and yield the figures of the slower one.

    Raises TransportError if they are not permitted to read each other's memory, and RuntimeError
    for other failures.
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
        end.close()  # otherwise recv would not fail when a process dies
    try:
        answers: list[PullResult | str] = [receiver.recv() for receiver, _ in results]
    except EOFError:
        raise RuntimeError("a process of the pull failed; see its error above") from None
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    errors = {answer for answer in answers if isinstance(answer, str)}
    if errors:
        raise TransportError("; ".join(sorted(errors)))
    measured = [answer for answer in answers if isinstance(answer, PullResult)]
    for name in (WITH_MAPPING, COPIES):
        slower = max(measured, key=lambda result: result.seconds[name])
        yield Timing(name, slower.nbytes, slower.seconds[name], floor, slower.floor_seconds)


def pull(
    rank: int, task: PullTask, barrier: Barrier, other: Connection, result: Connection
) -> None:
    """Run one of the two processes."""
    try:
        with target_named(task.targets[rank]) as target:
            result.send(_pull(rank, task, target, barrier, other))
    except TransportError as error:
        barrier.abort()  # lets the other process fail instead of waiting
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
    local = LocalTransport(rank)
    # the half that is already on this rank
    local.run(0, local.prepare(_read_from(rank, *job.buckets)), {FLAT: source}, destinations)
    transport = SharedMemoryTransport(rank, {BufferId(1 - rank, FLAT): handle})
    shares = [transport.prepare(_read_from(1 - rank, bucket)) for bucket in job.buckets]
    copies = local.prepare(_read_from(1 - rank, *job.buckets))
    seconds: dict[str, list[float]] = {WITH_MAPPING: [], COPIES: []}
    for _ in range(task.repeat + 1):
        barrier.wait()
        seconds[WITH_MAPPING].append(
            seconds_of(device, partial(_pull_by_bucket, transport, shares, destinations))
        )
        barrier.wait()
        with peer.mapped() as flat:
            copy_all = partial(local.run, 0, copies, {FLAT: flat}, destinations)
            seconds[COPIES].append(seconds_of(device, copy_all))
    raise_unless_written(destinations)
    nbytes = job.read_nbytes([1 - rank])
    peer_device = None if target.is_simulated else torch.device(task.targets[1 - rank])
    floor = plain_device_copy(device, nbytes, task.repeat, barrier.wait, peer_device)
    transport.close()
    barrier.wait()  # keeps the source buffer until the peer has read it
    medians = {name: statistics.median(runs[1:]) for name, runs in seconds.items()}
    return PullResult(nbytes, medians, floor)


def _pull_by_bucket(
    transport: SharedMemoryTransport,
    shares: Sequence[BatchedCopies],
    destinations: Mapping[str, torch.Tensor],
) -> None:
    """Pull as in a switch: chunks stay mapped from the first to the last bucket that reads them."""
    for index, share in enumerate(shares):
        transport.run(index, share, {}, destinations)
    transport.trim()


def _read_from(src_rank: int, *buckets: Bucket) -> list[Transfer]:
    """Return the transfers of the buckets from `src_rank`."""
    transfers = (transfer for bucket in buckets for transfer in bucket.transfers)
    return [transfer for transfer in transfers if transfer.src_rank == src_rank]

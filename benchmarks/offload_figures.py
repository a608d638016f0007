"""Time an offload, an onload and a reshard on one rank, and plain copies of the same bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

import torch

from benchmarks.flat_models import FLAT, RankJob
from benchmarks.targets import Target
from benchmarks.timings import (
    Memory,
    Timing,
    plain_device_copy,
    plain_host_copies,
    raise_unless_written,
    seconds_of,
)
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offload_items import Action, Items, Kind, OffloadItem
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.transports.pull import LocalTransport

TRAINING_NBYTES = 18
"""Bytes of a parameter with bfloat16 and Adam on the device."""
COPIED_NBYTES = 14
"""Bytes of them that an offload copies to the host."""

MOST = "training, most at once"
LEFT_COUNTED = "left after an offload, as the offloader counts"
LEFT_TAKEN = "left after an offload, as the driver counts"
OFFLOAD = "offload"
ONLOAD = "onload"
FIRST_OFFLOAD = "offload, the first"
FIRST_ONLOAD = "onload, the first"
RESHARD = "reshard"
BOTH_SIDES = "reshard with both sides there"

_NUMEL_TO_WARM_UP = 2**20
_STATE: tuple[tuple[str, Kind, torch.dtype, Action], ...] = (
    ("parameters", "param", torch.bfloat16, "copy"),
    ("gradients", "grad", torch.float32, "drop"),
    ("master weights", "optimizer", torch.float32, "copy"),
    ("first moments", "optimizer", torch.float32, "copy"),
    ("second moments", "optimizer", torch.float32, "copy"),
)


def copied_nbytes(items: Iterable[OffloadItem]) -> int:
    """Bytes that a full offload of `items` copies to the host; a shared storage counts once."""
    storages = (item.tensor.untyped_storage() for item in items if item.action == "copy")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class DeviceUse:
    """Device memory in use above that at construction, sampled by `observe`."""

    def __init__(self, target: Target) -> None:
        self._taken = target.taken_nbytes
        self._before = self._taken()
        self.peak = 0

    def observe(self) -> int:
        """Return the bytes in use now."""
        taken = self._taken() - self._before
        self.peak = max(self.peak, taken)
        return taken


def offload_figures(target: Target, numel: int, repeat: int) -> Iterator[Timing | Memory]:
    """Offload and onload training state. Raises AssertionError if its contents change."""
    device = target.device
    _move(target, _NUMEL_TO_WARM_UP)  # loads kernels, whose device memory must not count below
    use = DeviceUse(target)
    items = list(_training_state(target, numel))
    total = sum(item.tensor.untyped_storage().nbytes() for item in items)
    copied = copied_nbytes(items)
    use.observe()
    step = max(1, numel // 1000)  # compares a sample of about 1,000 elements per tensor
    before = [item.tensor[::step].clone() for item in items if item.action == "copy"]
    offloader = Offloader(Items(lambda: items), device)
    seconds: dict[str, list[float]] = {OFFLOAD: [], ONLOAD: []}
    left = 0
    residual = 0
    # the first offload also allocates page-locked memory, and counts separately
    for _ in range(repeat + 1):
        seconds[OFFLOAD].append(seconds_of(device, offloader.offload))
        left = use.observe()
        residual = sum(offloader.resident_nbytes().values())
        seconds[ONLOAD].append(seconds_of(device, offloader.onload))
        use.observe()
    after = [item.tensor[::step] for item in items if item.action == "copy"]
    if not all(map(torch.equal, before, after)):
        raise AssertionError("an offload and onload changed the contents")
    whole = "all training bytes"
    yield Memory(MOST, use.peak, whole, total)
    yield Memory(LEFT_COUNTED, residual, whole, total)
    yield Memory(LEFT_TAKEN, left, whole, total)
    floors = plain_host_copies(device, copied, repeat)
    floor = "plain copy, page-locked" if device.type == "cuda" else "plain copy"
    for name, name_of_first in ((OFFLOAD, FIRST_OFFLOAD), (ONLOAD, FIRST_ONLOAD)):
        first, *rest = seconds[name]
        yield Timing(name, copied, statistics.median(rest), floor, floors[name])
        yield Timing(name_of_first, copied, first, floor, floors[name])


def _move(target: Target, numel: int) -> None:
    """Offload and onload training state once."""
    items = list(_training_state(target, numel))
    offloader = Offloader(Items(lambda: items), target.device)
    offloader.offload()
    offloader.onload()


def _training_state(target: Target, numel: int) -> Iterator[OffloadItem]:
    """Yield parameters, gradients and each part of the state of Adam as an elastic buffer."""
    for owner, kind, dtype, action in _STATE:
        tensor = allocate_elastic(numel, dtype, target.elastic, kind).normal_()
        yield OffloadItem(owner, kind, tensor, action)


def reshard_figures(target: Target, job: RankJob, repeat: int) -> Iterator[Timing | Memory]:
    """Copy all buckets, with QKV de-interleaved, from a flat source on the same device."""
    device = target.device
    use = DeviceUse(target)
    source = job.new_source(
        lambda numel, dtype: allocate_elastic(numel, dtype, target.elastic, "param")
    )
    destinations = job.new_destinations(device)
    use.observe()
    nbytes = job.read_nbytes([job.rank])

    # built once, as in a switch
    transport = LocalTransport(job.rank)
    shares = [transport.prepare(bucket.transfers) for bucket in job.buckets]

    def reshard() -> None:
        for index, share in enumerate(shares):
            transport.run(index, share, {FLAT: source}, destinations)

    reshard()
    raise_unless_written(destinations)
    seconds = statistics.median(seconds_of(device, reshard) for _ in range(repeat))
    floor = plain_device_copy(device, nbytes, repeat)
    yield Timing(RESHARD, nbytes, seconds, "plain device copy", floor)
    # destinations are plain torch tensors, which the simulated driver does not count
    most = job.source_nbytes if target.is_simulated else job.source_nbytes + job.destination_nbytes
    yield Memory(BOTH_SIDES, use.peak, "the bytes of both", most)

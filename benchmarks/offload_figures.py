"""What an offload, an onload and a reshard on one rank cost, beside plain copies of as many bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

import torch

from benchmarks.flat_models import RankJob
from benchmarks.targets import Target
from benchmarks.timings import (
    Memory,
    Timing,
    memory,
    plain_device_copy,
    plain_host_copies,
    raise_unless_written,
    seconds_of,
    timing,
)
from hybrid_engine.memory.elastic import allocate_elastic
from hybrid_engine.memory.offload_items import Action, Items, Kind, OffloadItem
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.transports.copies import BatchedCopies, copy_straight

TRAINING_NBYTES, COPIED_NBYTES = 18, 14
"""Of each parameter with bfloat16 and Adam: on the device, and copied to the host by an offload."""

MOST, LEFT_COUNTED, LEFT_TAKEN = (
    "training, most at once",
    "left after an offload, as the offloader counts",
    "left after an offload, as the driver counts",
)
OFFLOAD, ONLOAD, FIRST_OFFLOAD, FIRST_ONLOAD = (
    "offload",
    "onload",
    "offload, the first",
    "onload, the first",
)
RESHARD, BOTH_SIDES = "reshard", "reshard with both sides there"

_NUMEL_TO_WARM_UP = 2**20
_STATE: tuple[tuple[str, Kind, torch.dtype, Action], ...] = (
    ("parameters", "param", torch.bfloat16, "copy"),
    ("gradients", "grad", torch.float32, "drop"),
    ("master weights", "optimizer", torch.float32, "copy"),
    ("first moments", "optimizer", torch.float32, "copy"),
    ("second moments", "optimizer", torch.float32, "copy"),
)


def copied_nbytes(items: Iterable[OffloadItem]) -> int:
    """Bytes that a whole offload of these copies to the host, each storage once."""
    storages = (item.tensor.untyped_storage() for item in items if item.action == "copy")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class DeviceUse:
    """Bytes taken on the device since this was made, at the moments when `observe` is called."""

    def __init__(self, target: Target) -> None:
        self._taken = target.taken_nbytes
        self._before = self._taken()
        self.peak = 0

    def observe(self) -> int:
        """Bytes taken now."""
        taken = self._taken() - self._before
        self.peak = max(self.peak, taken)
        return taken


def offload_figures(target: Target, numel: int, repeat: int) -> Iterator[Timing | Memory]:
    """Training state of `numel` parameters comes and goes. Raises AssertionError when its contents change."""
    device = target.device
    _move(
        target, _NUMEL_TO_WARM_UP
    )  # kernels that are loaded now take memory of the device for good
    use = DeviceUse(target)
    items = list(_training_state(target, numel))
    total = sum(item.tensor.untyped_storage().nbytes() for item in items)
    copied = copied_nbytes(items)
    use.observe()
    step = max(1, numel // 1000)
    before = [item.tensor[::step].clone() for item in items if item.action == "copy"]
    offloader = Offloader(Items(lambda: items), device)
    seconds: dict[str, list[float]] = {OFFLOAD: [], ONLOAD: []}
    left = residual = 0
    for _ in range(repeat + 1):
        seconds[OFFLOAD].append(seconds_of(device, offloader.offload))
        left = use.observe()
        residual = sum(sum(by_owner.values()) for by_owner in offloader.resident_nbytes().values())
        seconds[ONLOAD].append(seconds_of(device, offloader.onload))
        use.observe()
    after = [item.tensor[::step] for item in items if item.action == "copy"]
    if not all(map(torch.equal, before, after)):
        raise AssertionError("an offload and onload changed the contents")
    whole = "all training bytes"
    yield memory(MOST, use.peak, whole, total)
    yield memory(LEFT_COUNTED, residual, whole, total)
    yield memory(LEFT_TAKEN, left, whole, total)
    floors = plain_host_copies(device, copied, repeat)
    floor = "plain copy, page-locked" if device.type == "cuda" else "plain copy"
    for name, of_first in ((OFFLOAD, FIRST_OFFLOAD), (ONLOAD, FIRST_ONLOAD)):
        first, *rest = seconds[name]
        yield timing(name, copied, statistics.median(rest), floor, floors[name])
        yield timing(of_first, copied, first, floor, floors[name])


def _move(target: Target, numel: int) -> None:
    """One offload and onload of training state."""
    items = list(_training_state(target, numel))
    offloader = Offloader(Items(lambda: items), target.device)
    offloader.offload()
    offloader.onload()


def _training_state(target: Target, numel: int) -> Iterator[OffloadItem]:
    """Parameters and gradients in elastic buffers; Adam's state too, in a buffer each."""
    for owner, kind, dtype, action in _STATE:
        yield OffloadItem(
            owner, kind, allocate_elastic(numel, dtype, target.elastic, kind).normal_(), action
        )


def reshard_figures(target: Target, job: RankJob, repeat: int) -> Iterator[Timing | Memory]:
    """All buckets of the switch, QKV taken apart, from a flat source into destinations on the same device."""
    device, use = target.device, DeviceUse(target)
    source = job.new_source(
        lambda numel, dtype: allocate_elastic(numel, dtype, target.elastic, "param")
    )
    destinations = job.new_destinations(device)
    use.observe()
    nbytes = job.read_nbytes([job.rank])

    buckets = [
        (bucket.index, BatchedCopies(bucket.transfers)) for bucket in job.buckets
    ]  # kept, as by a switch

    def reshard() -> None:
        for index, copies in buckets:
            copy_straight("local", index, copies, lambda transfer: source, destinations)

    reshard()
    raise_unless_written(destinations)
    seconds = statistics.median(seconds_of(device, reshard) for _ in range(repeat))
    floor = plain_device_copy(device, nbytes, repeat)
    yield timing(RESHARD, nbytes, seconds, "plain device copy", floor)
    # destinations are torch's own tensors, which the tests' driver does not count
    most = job.source_nbytes if target.is_simulated else job.source_nbytes + job.destination_nbytes
    yield memory(BOTH_SIDES, use.peak, "the bytes of both", most)

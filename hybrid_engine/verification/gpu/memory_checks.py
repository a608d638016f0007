"""Stage 1, one GPU without vLLM: the driver's virtual memory, offloads, and two processes that read each other.

    python -m hybrid_engine.verification.gpu.memory_checks TARGET RESULTS

The limits are far from what is expected: they are to find what does not work, not what could be faster. None was tuned
on a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch

from hybrid_engine.errors import TransportError
from hybrid_engine.memory import device_pages
from hybrid_engine.memory.cuda_driver import INSTALL_HINT, CudaDriver
from hybrid_engine.memory.elastic import ElasticBuffer, allocate_elastic, exported_buffer_of, open_peer
from hybrid_engine.verification.gpu import offload_figures as offloads
from hybrid_engine.verification.gpu import pull_figures as pulls
from hybrid_engine.verification.gpu.checks import (
    CannotCheckError,
    Check,
    NothingToCheckError,
    Planned,
    judged,
    run_checks,
)
from hybrid_engine.verification.gpu.flat_models import TINY, ModelShape, RankJob, rank_job
from hybrid_engine.verification.gpu.gpus import GIB, memory_users, too_little
from hybrid_engine.verification.gpu.machine import available_host_nbytes, versions
from hybrid_engine.verification.gpu.targets import Target, target_named
from hybrid_engine.verification.gpu.timings import Memory, Timing, seconds_of, synchronize

MIB = 2**20
REPEAT = 3
BUCKET_NBYTES, _TINY_BUCKET_NBYTES = 256 * MIB, 2**15
_MOST_LAYERS = 2
_NUM_MAPPED = 16
_MOST_MAPPING_SECONDS = 5e-3  # of one chunk
_LEAST_REGISTERED = 0.2e9  # bytes of host memory in a second, in the first offload
LEAST_SHARES = {offloads.OFFLOAD: 0.4, offloads.ONLOAD: 0.4, offloads.RESHARD: 0.05, pulls.COPIES: 0.2}
"""Of the floor's rate. Mapping bucket by bucket has a limit of its own."""
LEAST_SHARE_WITH_MAPPING = 0.05
_OVERHEAD = 1.1
"""Most memory beside what it is for: chunks are larger than what is in the last of each buffer."""


class MemoryChecks:
    """The checks of one target."""

    def __init__(self, name: str, target: Target) -> None:
        self._name, self._target = name, target

    def planned(self) -> list[Planned]:
        """In order; what could end the process, or its CUDA context, last."""
        return [
            Planned("driver", self._driver),
            Planned("granularity", self._granularity, ("driver",)),
            Planned("mapping", self._mapping, ("driver",)),
            Planned("buffer", self._buffer, ("driver",)),
            Planned("second mapping", self._second_mapping, ("buffer",)),
            Planned("offloading", self._offloading, ("buffer",)),
            Planned("resharding", self._resharding, ("buffer",)),
            Planned("pulling", self._pulling, ("second mapping",)),
            Planned("forked child", self._forked_child, ("buffer",)),
            Planned("release behind a kernel", self._release_behind_a_kernel, ("buffer",)),
        ]

    def _driver(self) -> Iterator[Check]:
        if self._target.driver is None:
            if "cuda-bindings" not in versions():
                raise CannotCheckError(f"cuda-bindings is missing: {INSTALL_HINT}")
            raise CannotCheckError(
                "the driver has no virtual memory with file descriptors here: training buffers will be ordinary "
                "tensors, which leave only whole, and ranks of a host send messages"
            )
        yield judged("driver: virtual memory, with file descriptors", True, "is there")

    def _granularity(self) -> Iterator[Check]:
        granule = self._require_driver().granularity()
        chunk = device_pages.CHUNK_NBYTES
        is_good = granule > 0 and chunk % granule == 0
        note = f"chunks of {chunk} bytes are not a multiple of it"
        yield judged("granularity", is_good, _size(granule), note=note, nbytes=granule)

    def _mapping(self) -> Iterator[Check]:
        """What a chunk costs to have and to give back, which a switch does for each, and a reader for each it reads."""
        driver, chunk = self._require_driver(), device_pages.CHUNK_NBYTES
        address = driver.reserve(_NUM_MAPPED * chunk)
        taken: list[tuple[int, object]] = []

        def take() -> None:
            for index in range(_NUM_MAPPED):
                handle = driver.create(chunk)
                driver.map(address + index * chunk, chunk, handle)
                taken.append((address + index * chunk, handle))

        def give_back() -> None:
            while taken:
                at, handle = taken.pop()
                driver.unmap(at, chunk)
                driver.release(handle)

        try:
            for name, action in (("taking memory", take), ("giving memory back", give_back)):
                seconds = seconds_of(self._target.device, action) / _NUM_MAPPED
                figure = f"{seconds * 1e6:.0f} µs for a chunk of {_size(chunk)}"
                yield self._timed(name, seconds <= _MOST_MAPPING_SECONDS, figure, "at most 5 ms", seconds=seconds)
        finally:
            give_back()
            driver.unreserve(address, _NUM_MAPPED * chunk)

    def _buffer(self) -> Iterator[Check]:
        """An elastic buffer's whole life: address and contents stay, memory goes and comes back."""
        target, driver = self._target, self._require_driver()
        values = torch.arange(3 * device_pages.CHUNK_NBYTES // 4 + 5, dtype=torch.float32, device=target.device)
        flat = allocate_elastic(values.numel(), torch.float32, target.elastic, "param")
        buffer = exported_buffer_of(flat)
        assert buffer is not None, "there is a driver"
        faults = []
        with closing(buffer):
            if flat.any():
                faults.append("it was not zero")
            flat.copy_(values)
            address, kept = flat.data_ptr(), slice(0, buffer.granularity // 4)
            before, resident = target.taken_nbytes(), buffer.resident_nbytes()
            buffer.release(buffer.granularity)
            freed = before - target.taken_nbytes()
            if abs(freed - (resident - buffer.granularity)) > driver.granularity():
                faults.append(f"{freed} bytes were freed, not {resident - buffer.granularity}")
            if buffer.resident_nbytes() != buffer.granularity:
                faults.append(f"{buffer.resident_nbytes()} bytes are counted as there, not {buffer.granularity}")
            buffer.restore()
            if flat.data_ptr() != address or not torch.equal(flat[kept], values[kept]):
                faults.append("address or contents of what was kept changed")
            flat.fill_(2)
            if flat.sum(dtype=torch.float64).item() != 2 * values.numel():
                faults.append("memory that came back has wrong values")
        figure = f"{_size(freed)} freed and back at one address"
        yield judged("buffer: release and restore", not faults, figure, note="; ".join(faults), nbytes=freed)

    def _second_mapping(self) -> Iterator[Check]:
        """The same memory through a mapping of its own, as another process has it."""
        target, chunk = self._target, device_pages.CHUNK_NBYTES
        values = torch.arange(2 * chunk // 4, dtype=torch.float32, device=target.device)
        with closing(_new_buffer(target, 2 * chunk)) as buffer:
            buffer.tensor.view(torch.float32).copy_(values)
            synchronize(target.device)
            try:
                with closing(open_peer(buffer.export(), target.elastic)) as peer, peer.mapped() as there:
                    is_same = torch.equal(there.view(torch.float32), values)
            except TransportError as error:
                raise CannotCheckError(str(error)) from error
        yield judged("buffer: mapped as by a peer", is_same, "the same contents", note="it reads other values")

    def _offloading(self) -> Iterator[Check]:
        figures = {each.name: each for each in offloads.offload_figures(self._target, self._job().source.numel, REPEAT)}
        for name in (offloads.OFFLOAD, offloads.ONLOAD):
            yield self._beside_floor(figures[name])
        if not self._target.is_simulated:
            yield _page_locking(figures[offloads.FIRST_OFFLOAD], figures[offloads.OFFLOAD])
        yield _at_most(figures[offloads.MOST], _OVERHEAD)
        yield _at_most(figures[offloads.LEFT_COUNTED], 0.0)
        yield _at_most(figures[offloads.LEFT_TAKEN], 0.01)

    def _resharding(self) -> Iterator[Check]:
        for figure in offloads.reshard_figures(self._target, self._job(), REPEAT):
            if isinstance(figure, Timing):
                yield self._beside_floor(figure)

    def _pulling(self) -> Iterator[Check]:
        job = pulls.PullTask((self._name, self._name), self._shape(), self._bucket_nbytes(), REPEAT)
        yield from pull_checks(job, is_judged=not self._target.is_simulated)

    def _forked_child(self) -> Iterator[Check]:
        """A DataLoader's worker inherits the descriptors of exported memory, and must not keep it."""
        if self._target.is_simulated:
            raise NothingToCheckError("the model of the driver counts what its own process keeps")
        with closing(_new_buffer(self._target, 4 * device_pages.CHUNK_NBYTES)) as buffer:
            buffer.export()
            before = self._target.taken_nbytes()
            with _forked_child():
                buffer.release()
                freed = before - self._target.taken_nbytes()
            figure = f"{_size(freed)} of {_size(buffer.nbytes)} freed while a forked child lives"
            note = "the child holds the rest: do not fork after the engine is built (DataLoader: spawn)"
            yield judged("forked child", freed >= 0.9 * buffer.nbytes, figure, note=note, nbytes=freed)

    def _release_behind_a_kernel(self) -> Iterator[Check]:
        """Memory must not go before what was queued on it is done; what others queue goes on."""
        device, chunk = self._target.device, device_pages.CHUNK_NBYTES
        with closing(_new_buffer(self._target, 3 * chunk)) as buffer:
            flat, matrix = (
                buffer.tensor.view(torch.int32),
                torch.eye(2048 if device.type == "cuda" else 8, device=device),
            )
            other = torch.cuda.Stream(device) if device.type == "cuda" else None
            synchronize(device)
            with torch.cuda.stream(other):
                for _ in range(200):
                    matrix = matrix @ matrix
            for value in range(50):
                flat.fill_(value).add_(1)
            seconds = seconds_of(device, lambda: buffer.release(chunk))
            synchronize(device)
            kept = bool((flat[: chunk // 4] == 50).all()) and bool((matrix.diagonal() == 1).all())
            buffer.restore()
            restored = int(flat.fill_(2).sum(dtype=torch.int64)) == 2 * flat.numel()
            note = "what was kept has wrong values" if not kept else "memory that came back has wrong values"
            yield judged("release behind a kernel", kept and restored, f"after {seconds * 1e3:.1f} ms", note=note)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _require_driver(self) -> CudaDriver:
        assert self._target.driver is not None
        return self._target.driver

    def _shape(self) -> ModelShape:
        """As many layers of an 8B model as leave room on device and host; without a GPU a tiny model."""
        if self._target.is_simulated:
            return TINY
        free = torch.cuda.mem_get_info(self._target.device)[0]
        for num_layers in range(_MOST_LAYERS, 0, -1):
            shape = ModelShape(num_layers)
            numel = rank_job(shape, "tp=1,dp=1", "tp=1", 0, BUCKET_NBYTES).source.numel
            # on the host the arenas, and as much again for the floor's copy, rounded up to a power of two
            on_host = 3 * offloads.COPIED_NBYTES * numel
            if 2 * offloads.TRAINING_NBYTES * numel < free and on_host < 0.7 * available_host_nbytes():
                return shape
        if free <= (needed := 2 * offloads.TRAINING_NBYTES * numel):
            users = memory_users().get(f"GPU-{torch.cuda.get_device_properties(self._target.device).uuid}", ())
            raise CannotCheckError(too_little(self._name, free, needed, users))
        raise CannotCheckError(
            f"{available_host_nbytes() / GIB:.0f} GiB of host memory are available, and {on_host / 0.7 / GIB:.0f} are "
            "needed: raise the container's limit, or end what else runs"
        )

    def _bucket_nbytes(self) -> int:
        return _TINY_BUCKET_NBYTES if self._target.is_simulated else BUCKET_NBYTES

    def _job(self) -> RankJob:
        return rank_job(self._shape(), "tp=1,dp=1", "tp=1", 0, self._bucket_nbytes())

    def _beside_floor(self, figure: Timing | Memory) -> Check:
        assert isinstance(figure, Timing)
        return beside_floor(figure, LEAST_SHARES[figure.name], is_judged=not self._target.is_simulated)

    def _timed(self, name: str, is_good: bool, figure: str, limit: str, **values: float) -> Check:
        """Times mean nothing without a GPU."""
        simulated = self._target.is_simulated
        return judged(name, is_good or simulated, figure, "not judged" if simulated else limit, note="", **values)


def pull_checks(task: pulls.PullTask, *, is_judged: bool) -> Iterator[Check]:
    """Two processes that read each other's memory. Raises CannotCheckError where they may not."""
    try:
        figures = {each.name: each for each in pulls.pull_figures(task)}
    except TransportError as error:
        raise CannotCheckError(f"{error}. Without it the ranks of a host send messages") from error
    yield beside_floor(figures[pulls.COPIES], LEAST_SHARES[pulls.COPIES], is_judged=is_judged)
    yield beside_floor(figures[pulls.WITH_MAPPING], LEAST_SHARE_WITH_MAPPING, is_judged=is_judged)


def beside_floor(figure: Timing, least: float, *, is_judged: bool) -> Check:
    """A time and that of its floor; red below `least` of the floor's rate."""
    floor_rate = figure.nbytes / figure.floor_seconds / 1e9
    limit = f"at least {least:.0%}" if is_judged else "not judged"
    return judged(
        figure.name,
        figure.of_floor >= least or not is_judged,
        f"{figure.gb_per_second:.1f} GB/s",
        f"{figure.of_floor:.0%} of {floor_rate:.1f} GB/s ({figure.floor}); {limit}",
        nbytes=figure.nbytes,
        seconds=figure.seconds,
        floor_seconds=figure.floor_seconds,
    )


def _page_locking(first: Timing | Memory, later: Timing | Memory) -> Check:
    """The first offload takes the host memory that later ones have."""
    assert isinstance(first, Timing)
    assert isinstance(later, Timing)
    rate = first.nbytes / max(first.seconds - later.seconds, 1e-9)
    figure, limit = f"{rate / 1e9:.1f} GB/s, in the first offload", f"at least {_LEAST_REGISTERED / 1e9:g} GB/s"
    return judged("page-locking host memory", rate >= _LEAST_REGISTERED, figure, limit, bytes_per_second=rate)


def _at_most(figure: Timing | Memory, ratio: float) -> Check:
    assert isinstance(figure, Memory)
    floor = f"{figure.ratio:.2f} of {_size(figure.beside_nbytes)} ({figure.beside}); at most {ratio:g}"
    values = {"nbytes": figure.nbytes, "beside_nbytes": figure.beside_nbytes}
    return judged(figure.name, figure.ratio <= ratio, _size(figure.nbytes), floor, note="", **values)


def _new_buffer(target: Target, nbytes: int) -> ElasticBuffer:
    return ElasticBuffer(nbytes, torch.uint8, device=target.elastic)


class _forked_child:
    """A forked process that does nothing until the block ends; it has closed by then what a child closes."""

    def __enter__(self) -> None:
        reader, self._writer = os.pipe()
        told, tells = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:  # what is registered to run after a fork has run
            os.close(self._writer)
            os.write(tells, b".")
            os.read(reader, 1)
            os._exit(0)
        os.close(reader)
        os.close(tells)
        os.read(told, 1)
        os.close(told)

    def __exit__(self, *_: object) -> None:
        os.close(self._writer)
        os.waitpid(self._pid, 0)


def _size(nbytes: float) -> str:
    if nbytes < MIB:
        return f"{nbytes / 1024:.0f} KiB"
    return f"{nbytes / MIB:.0f} MiB" if nbytes < GIB else f"{nbytes / GIB:.2f} GiB"


def main(target_name: str, results: str) -> None:
    """Run the stage in this process."""
    with target_named(target_name) as target:
        run_checks(MemoryChecks(target_name, target).planned(), Path(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Stage 1, one GPU without vLLM: virtual memory, offloads, reads of another process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from benchmarks import offload_figures as offloads
from benchmarks import pull_figures as pulls
from benchmarks.flat_models import ModelShape, RankJob, rank_job
from benchmarks.targets import SIMULATED, Target, target_named
from benchmarks.timings import Memory, Timing, seconds_of, synchronize
from hybrid_engine.errors import TransportError
from hybrid_engine.memory import device_pages
from hybrid_engine.memory.cuda_driver import INSTALL_HINT, CudaDriver
from hybrid_engine.memory.elastic import (
    ElasticBuffer,
    allocate_elastic,
    exported_buffer_of,
    reading,
)
from hybrid_engine.tools.verify.machine import GIB, available_host_nbytes, memory_users, versions
from tests.gpu.conftest import Note
from tests.gpu.needs import too_little
from tests.gpu.sizes import MIB, Sizes, sizes_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

REPEAT = 3
MAX_LAYERS = 2
NUM_MAPPED = 16
MAX_MAPPING_SECONDS = 5e-3  # Per chunk.
MIN_REGISTERED = 0.2e9  # Bytes of host memory per second in the first offload.
MIN_SHARES = {
    offloads.OFFLOAD: 0.4,
    offloads.ONLOAD: 0.4,
    offloads.RESHARD: 0.05,
    pulls.COPIES: 0.2,
    pulls.WITH_MAPPING: 0.05,
}
"""Minimum shares of the rate of plain copies."""
MAX_BYTES = {offloads.MOST: 1.1, offloads.LEFT_COUNTED: 0.0, offloads.LEFT_TAKEN: 0.01}
"""Maximum shares of all training bytes; the last chunk of a buffer is not full."""
SEGMENT_NBYTES = 2 * MIB
"""Device memory that torch's allocator keeps for a small tensor."""


@pytest.fixture(scope="module")
def target(device: str) -> Iterator[Target]:
    with target_named(SIMULATED if device == "cpu" else "cuda:0") as target:
        yield target


@pytest.fixture(scope="module")
def driver(target: Target) -> CudaDriver:
    if target.driver is None and "cuda-bindings" not in versions():
        pytest.skip(f"cuda-bindings is missing: {INSTALL_HINT}")
    if target.driver is None:
        pytest.skip(
            "the driver has no virtual memory with file descriptors here: training "
            "buffers will be ordinary tensors, "
            "which leave only whole, and ranks of a host send messages"
        )
    return target.driver


class TestMemory:
    """Checks that could kill the process or its CUDA context come last."""

    def test_granularity(self, driver: CudaDriver, note: Note) -> None:
        granule = driver.granularity()
        chunk = device_pages.CHUNK_NBYTES
        note(size(granule), nbytes=granule)
        assert granule > 0
        assert chunk % granule == 0, f"chunks of {chunk} bytes are not a multiple of it"

    def test_taking_and_giving_memory(self, driver: CudaDriver, target: Target, note: Note) -> None:
        """Measure the cost of a chunk, which switches and readers pay for each."""
        chunk = device_pages.CHUNK_NBYTES
        address = driver.reserve(NUM_MAPPED * chunk)
        taken = []

        def take() -> None:
            for index in range(NUM_MAPPED):
                handle = driver.create(chunk)
                driver.map(address + index * chunk, chunk, handle)
                taken.append((address + index * chunk, handle))

        def give_back() -> None:
            while taken:
                start, handle = taken.pop()
                driver.unmap(start, chunk)
                driver.release(handle)

        try:
            taking, giving = (
                seconds_of(target.device, action) / NUM_MAPPED for action in (take, give_back)
            )
        finally:
            give_back()
            driver.unreserve(address, NUM_MAPPED * chunk)
        figure = f"{taking * 1e6:.0f} and {giving * 1e6:.0f} µs for a chunk of {size(chunk)}"
        note(figure, "at most 5 ms", taking=taking, giving=giving)
        assert not sizes_on(target).are_times_judged or max(taking, giving) <= MAX_MAPPING_SECONDS

    def test_buffer_release_and_restore(
        self, driver: CudaDriver, target: Target, note: Note
    ) -> None:
        """A release and a restore of an elastic buffer keep its address and contents."""
        values = torch.arange(
            3 * device_pages.CHUNK_NBYTES // 4 + 5, dtype=torch.float32, device=target.device
        )
        flat = allocate_elastic(values.numel(), torch.float32, target.elastic, "param")
        buffer = exported_buffer_of(flat)
        assert buffer is not None, "no elastic memory in spite of a driver"
        assert not flat.any(), "it was not zero"
        flat.copy_(values)
        address = flat.data_ptr()
        kept = slice(0, buffer.granularity // 4)
        before = target.taken_nbytes()
        resident = buffer.resident_nbytes()
        buffer.release(buffer.granularity)
        freed = before - target.taken_nbytes()
        note(f"{size(freed)} freed", nbytes=freed)
        assert freed == pytest.approx(resident - buffer.granularity, abs=driver.granularity()), (
            "bytes freed"
        )
        assert buffer.resident_nbytes() == buffer.granularity
        buffer.restore()
        assert flat.data_ptr() == address
        assert torch.equal(flat[kept], values[kept]), "what was kept changed"
        flat.fill_(2)
        assert flat.sum(dtype=torch.float64).item() == 2 * values.numel(), (
            "memory that came back has wrong values"
        )

    def test_buffer_mapped_as_by_a_peer(self, driver: CudaDriver, target: Target) -> None:
        """Map the same memory a second time, as another process does."""
        chunk = device_pages.CHUNK_NBYTES
        values = torch.arange(2 * chunk // 4, dtype=torch.float32, device=target.device)
        buffer = new_buffer(target, 2 * chunk)
        buffer.tensor.view(torch.float32).copy_(values)
        synchronize(target.device)
        try:
            with reading(buffer.export(), target.elastic) as mapped:
                assert torch.equal(mapped.view(torch.float32), values), (
                    "the mapping has other values"
                )
        except TransportError as error:
            pytest.skip(str(error))

    @pytest.mark.gpu
    def test_forked_child(self, driver: CudaDriver, target: Target, note: Note) -> None:
        """A DataLoader's worker inherits descriptors, which must not keep the memory."""
        buffer = new_buffer(target, 4 * device_pages.CHUNK_NBYTES)
        buffer.export()
        before = target.taken_nbytes()
        with forked_child():
            buffer.release()
            freed = before - target.taken_nbytes()
        note(
            f"{size(freed)} of {size(buffer.nbytes)} freed while a forked child lives", nbytes=freed
        )
        remedy = (
            "the child holds the rest: do not fork after the engine is built (DataLoader: spawn)"
        )
        assert freed >= 0.9 * buffer.nbytes, remedy

    def test_release_behind_a_kernel(self, driver: CudaDriver, target: Target, note: Note) -> None:
        """A release must wait for queued work on the memory; work of other streams continues."""
        device = target.device
        chunk = device_pages.CHUNK_NBYTES
        buffer = new_buffer(target, 3 * chunk)
        flat = buffer.tensor.view(torch.int32)
        matrix = torch.eye(sizes_on(target).matrix_size, device=device)
        other = torch.cuda.Stream(device) if device.type == "cuda" else None
        synchronize(device)
        with torch.cuda.stream(other):
            for _ in range(200):
                matrix = matrix @ matrix
        for value in range(50):
            flat.fill_(value).add_(1)
        seconds = seconds_of(device, lambda: buffer.release(chunk))
        note(f"after {seconds * 1e3:.1f} ms", seconds=seconds)
        synchronize(device)
        assert bool((flat[: chunk // 4] == 50).all()), "what was kept has wrong values"
        assert bool((matrix.diagonal() == 1).all()), "the other stream's matrix has wrong values"
        buffer.restore()
        restored = int(flat.fill_(2).sum(dtype=torch.int64))
        assert restored == 2 * flat.numel(), "memory that came back has wrong values"


class TestOffload:
    @pytest.fixture(scope="class")
    def figures(self, driver: CudaDriver, target: Target) -> dict[str, Timing | Memory]:
        """Offload and onload training state; raises AssertionError if that changes its contents."""
        figures = offloads.offload_figures(target, job_on(target).source.numel, REPEAT)
        return {figure.name: figure for figure in figures}

    @pytest.mark.parametrize("name", [offloads.OFFLOAD, offloads.ONLOAD])
    def test_rate(self, name: str, figures: dict[str, Timing], target: Target, note: Note) -> None:
        judge(figures[name], target, note)

    @pytest.mark.gpu
    def test_page_locking(self, figures: dict[str, Timing], target: Target, note: Note) -> None:
        """Only the first offload allocates and page-locks host memory."""
        first = figures[offloads.FIRST_OFFLOAD]
        later = figures[offloads.OFFLOAD]
        rate = first.nbytes / max(first.seconds - later.seconds, 1e-9)
        note(
            f"{rate / 1e9:.1f} GB/s",
            f"at least {MIN_REGISTERED / 1e9:g} GB/s",
            bytes_per_second=rate,
        )
        assert not sizes_on(target).are_times_judged or rate >= MIN_REGISTERED

    @pytest.mark.parametrize("name", MAX_BYTES)
    def test_bytes(self, name: str, figures: dict[str, Memory], note: Note) -> None:
        figure = figures[name]
        share = MAX_BYTES[name]
        limit = (
            f"{figure.ratio:.2f} of {size(figure.whole_nbytes)} ({figure.whole}); at most {share:g}"
        )
        note(size(figure.nbytes), limit, nbytes=figure.nbytes, beside_nbytes=figure.whole_nbytes)
        segment = SEGMENT_NBYTES if name == offloads.LEFT_TAKEN else 0
        assert figure.nbytes <= share * figure.whole_nbytes + segment


class TestReshard:
    def test_rate(self, driver: CudaDriver, target: Target, note: Note) -> None:
        figures = offloads.reshard_figures(target, job_on(target), REPEAT)
        (timing,) = (figure for figure in figures if isinstance(figure, Timing))
        judge(timing, target, note)


class TestPull:
    @pytest.fixture(scope="class")
    def figures(self, driver: CudaDriver, target: Target) -> dict[str, Timing]:
        where = SIMULATED if target.is_simulated else "cuda:0"
        return pulled(
            pulls.PullTask((where, where), shape_on(target), bucket_nbytes(target), REPEAT)
        )

    @pytest.mark.parametrize("name", [pulls.COPIES, pulls.WITH_MAPPING])
    def test_rate(self, name: str, figures: dict[str, Timing], target: Target, note: Note) -> None:
        judge(figures[name], target, note)


def pulled(task: pulls.PullTask) -> dict[str, Timing]:
    """Return figures of two processes that read each other; skip if that is not permitted."""
    try:
        return {figure.name: figure for figure in pulls.pull_figures(task)}
    except TransportError as error:
        pytest.skip(f"{error}. Without it the ranks of a host send messages")


def judge(figure: Timing, target: Target, note: Note) -> None:
    """Compare a rate with plain copies, if times are judged."""
    is_judged = sizes_on(target).are_times_judged
    share = MIN_SHARES[figure.name]
    floor = (
        f"{figure.of_floor:.0%} of {figure.nbytes / figure.floor_seconds / 1e9:.1f} "
        f"GB/s ({figure.floor})"
    )
    limit = f"at least {share:.0%}" if is_judged else "not judged"
    seconds = {"seconds": figure.seconds, "floor_seconds": figure.floor_seconds}
    note(f"{figure.gb_per_second:.1f} GB/s", f"{floor}; {limit}", nbytes=figure.nbytes, **seconds)
    assert not is_judged or figure.of_floor >= share


def shape_on(target: Target) -> ModelShape:
    """Return as many layers of an 8B model as fit, or skip; without a GPU, a tiny model."""
    sizes = sizes_on(target)
    if sizes.shape is not None:
        return sizes.shape
    free = torch.cuda.mem_get_info(target.device)[0]
    available = available_host_nbytes()
    for num_layers in range(MAX_LAYERS, 0, -1):
        shape = ModelShape(num_layers)
        numel = rank_job(shape, 1, 0, sizes.flat_bucket_nbytes).source.numel
        on_device = 2 * offloads.TRAINING_NBYTES * numel
        # Arenas, and a copy for the floor of the same size, rounded up to a power of two.
        on_host = 3 * offloads.COPIED_NBYTES * numel / 0.7
        if on_device < free and on_host < available:
            return shape
    if free <= on_device:
        users = memory_users().get(
            f"GPU-{torch.cuda.get_device_properties(target.device).uuid}", ()
        )
        pytest.skip(too_little(str(target.device), free, on_device, users))
    pytest.skip(
        f"{available / GIB:.0f} GiB of host memory are available, and "
        f"{on_host / GIB:.0f} are needed: raise the "
        "container's limit, or end what else runs"
    )


def sizes_on(target: Target) -> Sizes:
    return sizes_of("cpu" if target.is_simulated else "cuda")


def bucket_nbytes(target: Target) -> int:
    return sizes_on(target).flat_bucket_nbytes


def job_on(target: Target) -> RankJob:
    return rank_job(shape_on(target), 1, 0, bucket_nbytes(target))


def new_buffer(target: Target, nbytes: int) -> ElasticBuffer:
    buffer = ElasticBuffer(nbytes, torch.uint8, device=target.elastic)
    buffer.restore()
    return buffer


@contextmanager
def forked_child() -> Iterator[None]:
    """Fork a process that sleeps until the block ends, after its handlers of forks have run."""
    end_reader, end_writer = os.pipe()
    ready_reader, ready_writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # Handlers registered for after a fork have run.
        os.close(end_writer)
        os.write(ready_writer, b".")
        os.read(end_reader, 1)
        os._exit(0)
    os.close(end_reader)
    os.close(ready_writer)
    os.read(ready_reader, 1)
    os.close(ready_reader)
    try:
        yield
    finally:
        os.close(end_writer)
        os.waitpid(pid, 0)


def size(nbytes: float) -> str:
    if nbytes < MIB:
        return f"{nbytes / 1024:.0f} KiB"
    return f"{nbytes / MIB:.0f} MiB" if nbytes < GIB else f"{nbytes / GIB:.2f} GiB"

"""Stage 1, one GPU without vLLM: the driver's virtual memory, offloads, and two processes that read each other's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

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
from hybrid_engine.memory.elastic import ElasticBuffer, allocate_elastic, exported_buffer_of, reading
from hybrid_engine.tools.verify.machine import GIB, available_host_nbytes, memory_users, versions
from tests.gpu.conftest import Noted
from tests.gpu.needs import too_little
from tests.gpu.sizes import MIB, Sizes, sizes_of

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

REPEAT = 3
MOST_LAYERS = 2
NUM_MAPPED = 16
MOST_MAPPING_SECONDS = 5e-3  # of one chunk
LEAST_REGISTERED = 0.2e9  # bytes of host memory in a second, in the first offload
LEAST_SHARES = {
    offloads.OFFLOAD: 0.4,
    offloads.ONLOAD: 0.4,
    offloads.RESHARD: 0.05,
    pulls.COPIES: 0.2,
    pulls.WITH_MAPPING: 0.05,
}
"""Of the rate of plain copies."""
MOST_BYTES = {offloads.MOST: 1.1, offloads.LEFT_COUNTED: 0.0, offloads.LEFT_TAKEN: 0.01}
"""Beside all training bytes; the first has room for chunks, which are larger than what is in the last of a buffer."""
SEGMENT_NBYTES = 2 * MIB
"""What torch's allocator keeps of the device for one small tensor."""


@pytest.fixture(scope="module")
def target(device: str) -> Iterator[Target]:
    with target_named(SIMULATED if device == "cpu" else "cuda:0") as found:
        yield found


@pytest.fixture(scope="module")
def driver(target: Target) -> CudaDriver:
    if target.driver is None and "cuda-bindings" not in versions():
        pytest.skip(f"cuda-bindings is missing: {INSTALL_HINT}")
    if target.driver is None:
        pytest.skip(
            "the driver has no virtual memory with file descriptors here: training buffers will be ordinary tensors, "
            "which leave only whole, and ranks of a host send messages"
        )
    return target.driver


class TestMemory:
    """What could end the process, or its CUDA context, comes last."""

    def test_granularity(self, driver: CudaDriver, noted: Noted) -> None:
        granule, chunk = driver.granularity(), device_pages.CHUNK_NBYTES
        noted(size(granule), nbytes=granule)
        assert granule > 0
        assert chunk % granule == 0, f"chunks of {chunk} bytes are not a multiple of it"

    def test_taking_and_giving_memory(self, driver: CudaDriver, target: Target, noted: Noted) -> None:
        """What a chunk costs, which a switch pays for each, and a reader for each it reads."""
        chunk = device_pages.CHUNK_NBYTES
        address = driver.reserve(NUM_MAPPED * chunk)
        taken: list[tuple[int, object]] = []

        def take() -> None:
            for index in range(NUM_MAPPED):
                handle = driver.create(chunk)
                driver.map(address + index * chunk, chunk, handle)
                taken.append((address + index * chunk, handle))

        def give_back() -> None:
            while taken:
                at, handle = taken.pop()
                driver.unmap(at, chunk)
                driver.release(handle)

        try:
            taking, giving = (seconds_of(target.device, action) / NUM_MAPPED for action in (take, give_back))
        finally:
            give_back()
            driver.unreserve(address, NUM_MAPPED * chunk)
        figure = f"{taking * 1e6:.0f} and {giving * 1e6:.0f} µs for a chunk of {size(chunk)}"
        noted(figure, "at most 5 ms", taking=taking, giving=giving)
        assert not sizes_on(target).are_times_judged or max(taking, giving) <= MOST_MAPPING_SECONDS

    def test_buffer_release_and_restore(self, driver: CudaDriver, target: Target, noted: Noted) -> None:
        """An elastic buffer's whole life: address and contents stay, memory goes and comes back."""
        values = torch.arange(3 * device_pages.CHUNK_NBYTES // 4 + 5, dtype=torch.float32, device=target.device)
        flat = allocate_elastic(values.numel(), torch.float32, target.elastic, "param")
        buffer = exported_buffer_of(flat)
        assert buffer is not None, "there is a driver"
        with closing(buffer):
            assert not flat.any(), "it was not zero"
            flat.copy_(values)
            address, kept = flat.data_ptr(), slice(0, buffer.granularity // 4)
            before, resident = target.taken_nbytes(), buffer.resident_nbytes()
            buffer.release(buffer.granularity)
            freed = before - target.taken_nbytes()
            noted(f"{size(freed)} freed", nbytes=freed)
            assert freed == pytest.approx(resident - buffer.granularity, abs=driver.granularity()), "bytes freed"
            assert buffer.resident_nbytes() == buffer.granularity
            buffer.restore()
            assert flat.data_ptr() == address
            assert torch.equal(flat[kept], values[kept]), "what was kept changed"
            flat.fill_(2)
            assert flat.sum(dtype=torch.float64).item() == 2 * values.numel(), "memory that came back has wrong values"

    def test_buffer_mapped_as_by_a_peer(self, driver: CudaDriver, target: Target) -> None:
        """The same memory through a mapping of its own, as another process has it."""
        chunk = device_pages.CHUNK_NBYTES
        values = torch.arange(2 * chunk // 4, dtype=torch.float32, device=target.device)
        with closing(new_buffer(target, 2 * chunk)) as buffer:
            buffer.tensor.view(torch.float32).copy_(values)
            synchronize(target.device)
            try:
                with reading(buffer.export(), target.elastic) as there:
                    assert torch.equal(there.view(torch.float32), values), "it reads other values"
            except TransportError as error:
                pytest.skip(str(error))

    @pytest.mark.gpu
    def test_forked_child(self, driver: CudaDriver, target: Target, noted: Noted) -> None:
        """A DataLoader's worker inherits the descriptors of exported memory, and must not keep it."""
        with closing(new_buffer(target, 4 * device_pages.CHUNK_NBYTES)) as buffer:
            buffer.export()
            before = target.taken_nbytes()
            with forked_child():
                buffer.release()
                freed = before - target.taken_nbytes()
            noted(f"{size(freed)} of {size(buffer.nbytes)} freed while a forked child lives", nbytes=freed)
            remedy = "the child holds the rest: do not fork after the engine is built (DataLoader: spawn)"
            assert freed >= 0.9 * buffer.nbytes, remedy

    def test_release_behind_a_kernel(self, driver: CudaDriver, target: Target, noted: Noted) -> None:
        """Memory must not go before what was queued on it is done; what others queue goes on."""
        device, chunk = target.device, device_pages.CHUNK_NBYTES
        with closing(new_buffer(target, 3 * chunk)) as buffer:
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
            noted(f"after {seconds * 1e3:.1f} ms", seconds=seconds)
            synchronize(device)
            assert bool((flat[: chunk // 4] == 50).all()), "what was kept has wrong values"
            assert bool((matrix.diagonal() == 1).all()), "the other stream's matrix has wrong values"
            buffer.restore()
            restored = int(flat.fill_(2).sum(dtype=torch.int64))
            assert restored == 2 * flat.numel(), "memory that came back has wrong values"


class TestOffload:
    @pytest.fixture(scope="class")
    def figures(self, driver: CudaDriver, target: Target) -> dict[str, Timing | Memory]:
        """Training state comes and goes; raises AssertionError where that changes its contents."""
        found = offloads.offload_figures(target, job_on(target).source.numel, REPEAT)
        return {each.name: each for each in found}

    @pytest.mark.parametrize("name", [offloads.OFFLOAD, offloads.ONLOAD])
    def test_rate(self, name: str, figures: dict[str, Timing], target: Target, noted: Noted) -> None:
        judge(figures[name], target, noted)

    @pytest.mark.gpu
    def test_page_locking(self, figures: dict[str, Timing], target: Target, noted: Noted) -> None:
        """The first offload takes the host memory that later ones have."""
        first, later = figures[offloads.FIRST_OFFLOAD], figures[offloads.OFFLOAD]
        rate = first.nbytes / max(first.seconds - later.seconds, 1e-9)
        noted(f"{rate / 1e9:.1f} GB/s", f"at least {LEAST_REGISTERED / 1e9:g} GB/s", bytes_per_second=rate)
        assert not sizes_on(target).are_times_judged or rate >= LEAST_REGISTERED

    @pytest.mark.parametrize("name", MOST_BYTES)
    def test_bytes(self, name: str, figures: dict[str, Memory], noted: Noted) -> None:
        figure, most = figures[name], MOST_BYTES[name]
        limit = f"{figure.ratio:.2f} of {size(figure.beside_nbytes)} ({figure.beside}); at most {most:g}"
        noted(size(figure.nbytes), limit, nbytes=figure.nbytes, beside_nbytes=figure.beside_nbytes)
        segment = SEGMENT_NBYTES if name == offloads.LEFT_TAKEN else 0
        assert figure.nbytes <= most * figure.beside_nbytes + segment


class TestReshard:
    def test_rate(self, driver: CudaDriver, target: Target, noted: Noted) -> None:
        (figure,) = (
            each for each in offloads.reshard_figures(target, job_on(target), REPEAT) if isinstance(each, Timing)
        )
        judge(figure, target, noted)


class TestPull:
    @pytest.fixture(scope="class")
    def figures(self, driver: CudaDriver, target: Target) -> dict[str, Timing]:
        where = SIMULATED if target.is_simulated else "cuda:0"
        return pulled(pulls.PullTask((where, where), shape_on(target), bucket_nbytes(target), REPEAT))

    @pytest.mark.parametrize("name", [pulls.COPIES, pulls.WITH_MAPPING])
    def test_rate(self, name: str, figures: dict[str, Timing], target: Target, noted: Noted) -> None:
        judge(figures[name], target, noted)


def pulled(task: pulls.PullTask) -> dict[str, Timing]:
    """Figures of two processes that read each other's memory; skips where they may not."""
    try:
        return {each.name: each for each in pulls.pull_figures(task)}
    except TransportError as error:
        pytest.skip(f"{error}. Without it the ranks of a host send messages")


def judge(figure: Timing, target: Target, noted: Noted) -> None:
    """Compare a rate with that of plain copies, where times mean something."""
    is_judged = sizes_on(target).are_times_judged
    least = LEAST_SHARES[figure.name]
    floor = f"{figure.of_floor:.0%} of {figure.nbytes / figure.floor_seconds / 1e9:.1f} GB/s ({figure.floor})"
    limit = f"at least {least:.0%}" if is_judged else "not judged"
    seconds = {"seconds": figure.seconds, "floor_seconds": figure.floor_seconds}
    noted(f"{figure.gb_per_second:.1f} GB/s", f"{floor}; {limit}", nbytes=figure.nbytes, **seconds)
    assert not is_judged or figure.of_floor >= least


def shape_on(target: Target) -> ModelShape:
    """As many layers of an 8B model as leave room on device and host, or skip; elsewhere a tiny model."""
    sizes = sizes_on(target)
    if sizes.shape is not None:
        return sizes.shape
    free, available = torch.cuda.mem_get_info(target.device)[0], available_host_nbytes()
    for num_layers in range(MOST_LAYERS, 0, -1):
        shape = ModelShape(num_layers)
        numel = rank_job(shape, 1, 0, sizes.flat_bucket_nbytes).source.numel
        on_device = 2 * offloads.TRAINING_NBYTES * numel
        # on the host the arenas, and as much again for the floor's copy, rounded up to a power of two
        on_host = 3 * offloads.COPIED_NBYTES * numel / 0.7
        if on_device < free and on_host < available:
            return shape
    if free <= on_device:
        users = memory_users().get(f"GPU-{torch.cuda.get_device_properties(target.device).uuid}", ())
        pytest.skip(too_little(str(target.device), free, on_device, users))
    pytest.skip(
        f"{available / GIB:.0f} GiB of host memory are available, and {on_host / GIB:.0f} are needed: raise the "
        "container's limit, or end what else runs"
    )


def sizes_on(target: Target) -> Sizes:
    return sizes_of("cpu" if target.is_simulated else "cuda")


def bucket_nbytes(target: Target) -> int:
    return sizes_on(target).flat_bucket_nbytes


def job_on(target: Target) -> RankJob:
    return rank_job(shape_on(target), 1, 0, bucket_nbytes(target))


def new_buffer(target: Target, nbytes: int) -> ElasticBuffer:
    return ElasticBuffer(nbytes, torch.uint8, device=target.elastic)


@contextmanager
def forked_child() -> Iterator[None]:
    """A forked process that does nothing until the block ends; it has closed by then what a child closes."""
    reader, writer = os.pipe()
    told, tells = os.pipe()
    pid = os.fork()
    if pid == 0:  # what is registered to run after a fork has run
        os.close(writer)
        os.write(tells, b".")
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    os.close(tells)
    os.read(told, 1)
    os.close(told)
    try:
        yield
    finally:
        os.close(writer)
        os.waitpid(pid, 0)


def size(nbytes: float) -> str:
    if nbytes < MIB:
        return f"{nbytes / 1024:.0f} KiB"
    return f"{nbytes / MIB:.0f} MiB" if nbytes < GIB else f"{nbytes / GIB:.2f} GiB"

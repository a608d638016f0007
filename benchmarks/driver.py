"""What a GPU's copies, its driver's virtual memory and page-locked memory cost: the floors under offloads and switches.

    python -m benchmarks.driver [--json FILE] [--gib N]

    copies            within the device, to and from the host, page-locked and ordinary, both directions at once; GB/s,
                      each byte counted once
    page-locked       populating and registering host memory, in ordinary and huge pages; GB/s
    virtual memory    microseconds of a call for chunks of some sizes, idle and beside matrix products
    small copies      microseconds of one of many, one call each and in one call

Needs a GPU and cuda-bindings. Copies are medians of three; nothing else should run on the GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.launching import parser_of, write_figures
from benchmarks.resharding.measuring import Clock
from benchmarks.timings import plain_device_copy, plain_host_copies, seconds_of
from hybrid_engine.memory.cuda_driver import CudaDriver, driver_of

GIB, MIB = 2**30, 2**20
DEVICE = torch.device("cuda", 0)
CHUNKS = (2 * MIB, 32 * MIB, 128 * MIB, 512 * MIB)
NUM_CHUNKS = 8
REPEAT = 3
NUM_THREADS = 8
NUM_SMALL, SMALL_NBYTES = 400, 512 * 1024

Figures = dict[str, float]


def median(action: Callable[[], object]) -> float:
    """Median seconds of some runs."""
    return statistics.median(seconds_of(DEVICE, action) for _ in range(REPEAT))


def copies(nbytes: int) -> Figures:
    """GB/s of one large copy, by its ends."""
    one, other = (torch.ones(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    locked, also_locked = (
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
    )
    ordinary = torch.ones(nbytes, dtype=torch.uint8)  # touched before
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def both_ways() -> None:
        with torch.cuda.stream(streams[0]):
            locked.copy_(one, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            other.copy_(also_locked, non_blocking=True)

    page_locked = plain_host_copies(DEVICE, nbytes, REPEAT)
    seconds = {
        "within the device": plain_device_copy(DEVICE, nbytes, REPEAT),
        "to page-locked memory": page_locked["offload"],
        "from page-locked memory": page_locked["onload"],
        "to ordinary memory": median(lambda: ordinary.copy_(one)),
        "from ordinary memory": median(lambda: one.copy_(ordinary)),
    }
    rates = {name: nbytes / each / 1e9 for name, each in seconds.items()}
    return rates | {
        "to and from page-locked memory at once, together": 2 * nbytes / median(both_ways) / 1e9
    }


def page_locking(nbytes: int) -> Figures:
    """GB/s of populating host memory and of registering it."""
    figures: Figures = {}
    for name, advice, num_threads in (
        ("ordinary pages", mmap.MADV_NOHUGEPAGE, 1),
        ("huge pages", mmap.MADV_HUGEPAGE, 1),
        (f"huge pages, {NUM_THREADS} threads", mmap.MADV_HUGEPAGE, NUM_THREADS),
    ):
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(advice)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        part = nbytes // num_threads

        def populate(number: int, address: int = address, part: int = part) -> None:
            ctypes.memset(address + number * part, 1, part)

        started = time.perf_counter()
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(populate, range(num_threads)))
        figures[f"populate, {name}"] = nbytes / (time.perf_counter() - started) / 1e9
        started = time.perf_counter()
        if error := int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)):
            raise RuntimeError(f"cudaHostRegister failed with error {error}")
        figures[f"register, {name}"] = nbytes / (time.perf_counter() - started) / 1e9
        torch.cuda.cudart().cudaHostUnregister(address)
    return figures


def virtual_memory(driver: CudaDriver, chunk: int) -> Figures:
    """Microseconds of each call, for one chunk of some that are taken and given back."""
    clock, address = Clock(), driver.reserve(NUM_CHUNKS * chunk)
    addresses = range(address, address + NUM_CHUNKS * chunk, chunk)
    with clock.phase("create"):
        handles = [driver.create(chunk) for _ in addresses]
    with clock.phase("map, with access"):
        for at, handle in zip(addresses, handles, strict=True):
            driver.map(at, chunk, handle)
    with clock.phase("export"):
        descriptors = [driver.export_descriptor(handle) for handle in handles]
    with clock.phase("import"):
        imported = [driver.import_descriptor(descriptor) for descriptor in descriptors]
    for descriptor, handle in zip(descriptors, imported, strict=True):
        driver.release(handle)
        os.close(descriptor)
    with clock.phase("unmap"):
        for at in addresses:
            driver.unmap(at, chunk)
    with clock.phase("release"):
        for handle in handles:
            driver.release(handle)
    driver.unreserve(address, NUM_CHUNKS * chunk)
    return {name: seconds / NUM_CHUNKS * 1e6 for name, seconds in clock.seconds.items()}


@contextmanager
def products() -> Iterator[None]:
    """Matrix products all the while, in another thread."""
    has_begun, is_over = threading.Event(), threading.Event()

    def multiply() -> None:
        try:
            matrix = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
            while not is_over.is_set():
                for _ in range(20):
                    matrix @ matrix
                torch.cuda.current_stream(DEVICE).synchronize()
                has_begun.set()
        finally:
            has_begun.set()

    with ThreadPoolExecutor(1) as thread:
        multiplying = thread.submit(multiply)
        has_begun.wait()
        try:
            yield
        finally:
            is_over.set()
            multiplying.result()


def small_copies() -> Figures:
    """Microseconds of one of many copies."""
    sources = [torch.ones(SMALL_NBYTES, dtype=torch.uint8, device=DEVICE) for _ in range(NUM_SMALL)]
    destinations = [torch.empty_like(source) for source in sources]

    def one_by_one() -> None:
        for destination, source in zip(destinations, sources, strict=True):
            destination.copy_(source)

    seconds = {
        "a call each": median(one_by_one),
        "one call": median(lambda: torch._foreach_copy_(destinations, sources)),
    }
    return {name: each / NUM_SMALL * 1e6 for name, each in seconds.items()}


def main() -> None:
    """Measure, print tables, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--gib",
        type=float,
        default=4.0,
        help="size of a large copy, and of host memory that is registered",
    )
    arguments = parser.parse_args()
    driver = driver_of(0) if torch.cuda.is_available() else None
    if driver is None:
        parser.error("needs a GPU whose driver has virtual memory, and cuda-bindings")
    figures: dict[str, Figures] = {
        "copies, GB/s": copies(int(arguments.gib * GIB)),
        "page-locked memory, GB/s": page_locking(int(arguments.gib * GIB)),
    }
    torch.cuda.empty_cache()
    for chunk in CHUNKS:
        figures[f"virtual memory, {chunk // MIB} MiB, µs"] = virtual_memory(driver, chunk)
    with products():
        figures["virtual memory, 32 MiB, beside matrix products, µs"] = virtual_memory(
            driver, 32 * MIB
        )
    figures[f"small copies, {SMALL_NBYTES // 1024} KiB, µs"] = small_copies()
    _print(figures)
    write_figures(arguments.json, {"device": torch.cuda.get_device_name(DEVICE), **figures})


def _print(figures: dict[str, Figures]) -> None:
    console = Console()
    for name, row in figures.items():
        table = Table(*row, title=name)
        table.add_row(*(f"{value:.3g}" for value in row.values()))
        console.print(table)


if __name__ == "__main__":
    main()

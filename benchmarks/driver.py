"""Cost of GPU copies, virtual memory and page-locked memory: the floors of offloads and switches.

    python -m benchmarks.driver [--json FILE] [--gib N]

    copies            within the device, to and from page-locked and ordinary host memory, both
                      directions at once; GB/s, each byte counted once
    page-locked       populating and registering host memory, in ordinary and huge pages; GB/s
    virtual memory    microseconds per call by chunk size
    small copies      microseconds per copy, in separate calls and in one call

Needs a GPU and cuda-bindings. Copies are medians of three; nothing else should run on the GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.launching import parser_of, write_figures
from benchmarks.resharding.measuring import Clock
from benchmarks.timings import plain_device_copy, plain_host_copies, seconds_of
from hybrid_engine.memory.cuda_driver import CudaDriver, driver_of

GIB = 2**30
MIB = 2**20
DEVICE = torch.device("cuda", 0)
CHUNKS = (2 * MIB, 32 * MIB, 128 * MIB, 512 * MIB)
NUM_CHUNKS = 8
REPEAT = 3
NUM_THREADS = 8
NUM_SMALL = 400
SMALL_NBYTES = 512 * 1024

Figures = dict[str, float]


def median(action: Callable[[], object]) -> float:
    """Return the median seconds of REPEAT runs."""
    return statistics.median(seconds_of(DEVICE, action) for _ in range(REPEAT))


def copies(nbytes: int) -> Figures:
    """Return GB/s of a large copy by its source and destination."""
    to_send, to_receive = (torch.ones(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    locked_to_receive, locked_to_send = (
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
    )
    ordinary = torch.ones(nbytes, dtype=torch.uint8)  # written, so that its pages exist
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def both_ways() -> None:
        with torch.cuda.stream(streams[0]):
            locked_to_receive.copy_(to_send, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            to_receive.copy_(locked_to_send, non_blocking=True)

    page_locked = plain_host_copies(DEVICE, nbytes, REPEAT)
    seconds = {
        "within the device": plain_device_copy(DEVICE, nbytes, REPEAT),
        "to page-locked memory": page_locked["offload"],
        "from page-locked memory": page_locked["onload"],
        "to ordinary memory": median(lambda: ordinary.copy_(to_send)),
        "from ordinary memory": median(lambda: to_send.copy_(ordinary)),
    }
    rates = {name: nbytes / duration / 1e9 for name, duration in seconds.items()}
    total = 2 * nbytes / median(both_ways) / 1e9
    return {**rates, "to and from page-locked memory at once, together": total}


def page_locking(nbytes: int) -> Figures:
    """Return GB/s of populating and of registering host memory."""
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

        # defaults, because a closure would see later values of the loop variables
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
    """Return microseconds per chunk of each call of the driver."""
    clock = Clock()
    address = driver.reserve(NUM_CHUNKS * chunk)
    addresses = range(address, address + NUM_CHUNKS * chunk, chunk)
    with clock.phase("create"):
        handles = [driver.create(chunk) for _ in addresses]
    with clock.phase("map, with access"):
        for start, handle in zip(addresses, handles, strict=True):
            driver.map(start, chunk, handle)
    with clock.phase("export"):
        descriptors = [driver.export(start) for start in addresses]
    with clock.phase("import"):
        imported = [driver.import_descriptor(descriptor) for descriptor in descriptors]
    for descriptor, handle in zip(descriptors, imported, strict=True):
        driver.release(handle)
        os.close(descriptor)
    with clock.phase("unmap"):
        for start in addresses:
            driver.unmap(start, chunk)
    with clock.phase("release"):
        for handle in handles:
            driver.release(handle)
    driver.unreserve(address, NUM_CHUNKS * chunk)
    return {name: seconds / NUM_CHUNKS * 1e6 for name, seconds in clock.seconds.items()}


def small_copies() -> Figures:
    """Return microseconds per copy."""
    sources = [torch.ones(SMALL_NBYTES, dtype=torch.uint8, device=DEVICE) for _ in range(NUM_SMALL)]
    destinations = [torch.empty_like(source) for source in sources]

    def one_by_one() -> None:
        for destination, source in zip(destinations, sources, strict=True):
            destination.copy_(source)

    seconds = {
        "a call each": median(one_by_one),
        "one call": median(lambda: torch._foreach_copy_(destinations, sources)),
    }
    return {name: duration / NUM_SMALL * 1e6 for name, duration in seconds.items()}


def main() -> None:
    """Measure, print tables, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--gib",
        type=float,
        default=4.0,
        help="size of a large copy and of the registered host memory",
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

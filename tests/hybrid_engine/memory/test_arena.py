"""Pages of the arena: contents survive growth, forks have none, pinned pages are populated."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_engine.errors import OffloadError
from hybrid_engine.memory import arena
from hybrid_engine.memory.arena import Arena, Copier
from tests.harness.errors import refused

MIB = 2**20


class Cudart:
    """Records registered memory and its resident bytes; refuses more than `limit` bytes.

    Like CUDA, it keeps the error of a failed call, and torch raises it after the next kernel.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.registered: dict[int, int] = {}
        self.resident: list[int] = []
        self.error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.resident.append(int(fields_of(address)["Rss"].split()[0]) * 1024)
        if address in self.registered or (self.limit is not None and nbytes > self.limit):
            self.error = 2
            return self.error
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if self.registered.pop(address, None) is None:
            self.error = 713
            return self.error
        return 0

    def launch(self, *args: object, **kwargs: object) -> None:
        error = self.error
        self.error = 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudart]:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    monkeypatch.setattr(arena, "_SLICE_NBYTES", MIB)
    yield runtime
    gc.collect()  # frees pages while the stand-in is installed


def fields_of(address: int) -> dict[str, str]:
    """Return the kernel's fields of the mapping at an address; it may join neighbours."""
    fields: dict[str, str] = {}
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_inside:
            name, _, value = line.partition(":")
            fields[name] = value.strip()
    return fields


def is_mapped(address: int) -> bool:
    return bool(fields_of(address))


@pytest.mark.parametrize("pinned", [False, True])
def test_contents_survive_growth(cudart: Cudart, pinned: bool) -> None:
    pages = Arena(Copier(), pinned=pinned)
    pages.reserve(3 * MIB)
    pages.memory.copy_(torch.arange(3 * MIB) % 251)
    pages.reserve(40 * MIB)
    assert torch.equal(pages.memory[: 3 * MIB], (torch.arange(3 * MIB) % 251).to(torch.uint8))
    pages.memory[3 * MIB :].fill_(1)
    assert cudart.registered == ({pages.memory.data_ptr(): 40 * MIB} if pinned else {})


def test_a_fork_does_not_inherit_the_pages() -> None:
    pages = Arena(Copier(), pinned=False)
    pages.reserve(MIB)
    assert "dc" in fields_of(pages.memory.data_ptr())["VmFlags"].split()
    address = pages.memory.data_ptr()
    if (child := os.fork()) == 0:
        os._exit(int(is_mapped(address)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pages.reserve(8 * MIB)
    assert "dc" in fields_of(pages.memory.data_ptr())["VmFlags"].split()


def test_pinned_memory_is_resident_before_it_is_registered(cudart: Cudart) -> None:
    pages = Arena(Copier(), pinned=True)
    pages.reserve(5 * MIB)
    assert cudart.resident[0] >= 6 * MIB  # rounded up to huge pages of 2 MiB
    assert "hg" in fields_of(pages.memory.data_ptr())["VmFlags"].split()  # huge pages are advised


def test_without_pinning_no_page_is_touched() -> None:
    pages = Arena(Copier(), pinned=False)
    pages.reserve(16 * MIB)
    assert fields_of(pages.memory.data_ptr())["Rss"] == "0 kB"


def assert_unchanged_and_usable(pages: Arena, cudart: Cudart) -> None:
    """The arena is one usable page of 2 MiB and can grow."""
    flat = pages.memory
    assert bool((flat == 7).all())
    assert pages.nbytes == flat.numel() == MIB
    assert cudart.registered == {flat.data_ptr(): 2 * MIB}
    cudart.launch()  # raises if CUDA kept an error
    pages.reserve(5 * MIB)
    assert cudart.resident[-1] >= 6 * MIB, "populated before it is registered"
    assert bool((pages.memory[:MIB] == 7).all())
    del flat
    gc.collect()
    assert cudart.registered == {pages.memory.data_ptr(): 6 * MIB}


def pinned_page() -> Arena:
    pages = Arena(Copier(), pinned=True)
    pages.reserve(MIB)
    pages.memory.fill_(7)
    return pages


def test_a_failed_pin_changes_nothing(cudart: Cudart) -> None:
    pages = pinned_page()
    cudart.limit = 2 * MIB
    with refused(OffloadError, "no-host-memory", "6291456", "CUDA error 2", "ulimit -l"):
        pages.reserve(5 * MIB)
    cudart.limit = None
    assert_unchanged_and_usable(pages, cudart)


@pytest.mark.parametrize(
    ("kind", "expected"), [(MemoryError, MemoryError), (OSError, OffloadError)]
)
def test_a_failed_population_changes_nothing(
    cudart: Cudart, kind: type[Exception], expected: type[Exception]
) -> None:
    pages = pinned_page()
    populate = arena._populate_slice
    num_populated = iter(range(2))  # slices before the failure

    def fail_after_two_slices(address: int, nbytes: int) -> None:
        if next(num_populated, None) is None:
            raise kind("no page left")
        populate(address, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "_populate_slice", fail_after_two_slices)
        with pytest.raises(expected, match="no page left"):
            pages.reserve(5 * MIB)
    assert_unchanged_and_usable(pages, cudart)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_works_after_a_failed_call() -> None:
    pages = Arena(Copier(), pinned=True)
    pages.reserve(MIB)
    address = pages.memory.data_ptr()
    assert arena._call_cuda("cudaHostRegister", address, 2 * MIB, 0), (
        "the page is registered already"
    )
    assert torch.ones(3, device="cuda").sum() == 3


def test_pages_are_freed_with_the_last_tensor(cudart: Cudart) -> None:
    pages = Arena(Copier(), pinned=True)
    pages.reserve(MIB)
    flat = pages.memory
    address = flat.data_ptr()
    del pages
    gc.collect()
    assert is_mapped(address)
    assert cudart.registered
    del flat
    gc.collect()
    assert not is_mapped(address)
    assert not cudart.registered

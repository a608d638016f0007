"""The arena's pages: they keep what is in them, forks have none of them, and they are populated before pinning."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
import torch

from hybrid_engine.errors import OffloadError
from hybrid_engine.memory import growing_pages
from hybrid_engine.memory.growing_pages import GrowingPages

MIB = 2**20


class Cudart:
    """Notes what is registered, and how much of it was resident."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}
        self.resident: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.resident.append(int(fields_of(address)["Rss"].split()[0]) * 1024)
        if not self.code:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    """In the place of CUDA's runtime."""
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(growing_pages, "_SLICE_NBYTES", MIB)
    return runtime


def fields_of(address: int) -> dict[str, str]:
    """What the kernel says of the mapping at an address."""
    found: dict[str, str] = {}
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_inside:
            name, _, value = line.partition(":")
            found[name] = value.strip()
    return found


def is_mapped(address: int) -> bool:
    return bool(fields_of(address))


@pytest.mark.parametrize("pinned", [False, True])
def test_contents_stay_when_it_grows(cudart: Cudart, pinned: bool) -> None:
    pages = GrowingPages()
    pages.grow(3 * MIB, pinned=pinned)
    pages.tensor().copy_(torch.arange(3 * MIB) % 251)
    blocker = torch.empty(64 * MIB)  # so that it may have to move
    pages.grow(40 * MIB, pinned=pinned)
    assert torch.equal(pages.tensor()[: 3 * MIB], (torch.arange(3 * MIB) % 251).to(torch.uint8))
    pages.tensor()[3 * MIB :].fill_(1)
    assert cudart.registered == ({pages.tensor().data_ptr(): 40 * MIB} if pinned else {})
    del blocker


def test_a_fork_has_none_of_it() -> None:
    pages = GrowingPages()
    pages.grow(MIB, pinned=False)
    assert "dc" in fields_of(pages.tensor().data_ptr())["VmFlags"].split()
    address = pages.tensor().data_ptr()
    if (child := os.fork()) == 0:
        os._exit(int(is_mapped(address)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pages.grow(8 * MIB, pinned=False)
    assert "dc" in fields_of(pages.tensor().data_ptr())["VmFlags"].split()


def test_pinned_memory_is_resident_before_it_is_registered(cudart: Cudart) -> None:
    pages = GrowingPages()
    pages.grow(5 * MIB, pinned=True)
    assert cudart.resident == [6 * MIB]
    assert "hg" in fields_of(pages.tensor().data_ptr())["VmFlags"].split()
    pages.grow(7 * MIB, pinned=True)
    assert cudart.resident[1:] == [8 * MIB]


def test_without_pinning_no_page_is_touched() -> None:
    pages = GrowingPages()
    pages.grow(16 * MIB, pinned=False)
    assert fields_of(pages.tensor().data_ptr())["Rss"] == "0 kB"


def test_memory_that_cannot_be_pinned_is_as_before(cudart: Cudart) -> None:
    pages = GrowingPages()
    pages.grow(MIB, pinned=True)
    pages.tensor().fill_(7)
    cudart.code = 2
    with pytest.raises(OffloadError, match=r"page-locking 4194304 bytes .* CUDA error 2.*ulimit -l"):
        pages.grow(3 * MIB, pinned=True)
    assert pages.nbytes == MIB
    assert bool((pages.tensor() == 7).all())
    cudart.code = 0
    pages.grow(3 * MIB, pinned=True)
    assert cudart.registered == {pages.tensor().data_ptr(): 4 * MIB}


def test_more_than_there_can_be_is_refused() -> None:
    pages = GrowingPages()
    with pytest.raises(OffloadError, match="bytes of host memory cannot be had"):
        pages.grow(2**60, pinned=False)
    assert pages.tensor().numel() == 0


def test_it_ends_with_the_last_tensor(cudart: Cudart) -> None:
    pages = GrowingPages()
    pages.grow(MIB, pinned=True)
    flat = pages.tensor()
    address = flat.data_ptr()
    del pages
    gc.collect()
    assert is_mapped(address)
    assert cudart.registered
    del flat
    gc.collect()
    assert not is_mapped(address)
    assert not cudart.registered

"""Offload of parts, and onloads that promise not to write."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_engine.errors import OffloadError
from hybrid_engine.memory import offload_items
from hybrid_engine.memory.arena import Copier
from hybrid_engine.memory.elastic import allocate_elastic, exported_buffer_of
from hybrid_engine.memory.offload_items import Items, OffloadItem, Part, Storage
from hybrid_engine.memory.offloader import Offloader
from tests.harness.errors import refused
from tests.hybrid_engine.memory.test_offloader import CopiesToHost, fail

PAGE = os.sysconf("SC_PAGE_SIZE")


def filled(numel: int, dtype: torch.dtype = torch.int32, seed: int = 0) -> torch.Tensor:
    flat = allocate_elastic(numel, dtype, "cpu", "param")
    refill(flat, seed)
    return flat


def refill(flat: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    flat.view(torch.uint8).random_(0, 256, generator=generator)


def whole(flat: torch.Tensor) -> Part:
    return Part(flat, 0, flat.numel())


def on_device(flat: torch.Tensor) -> int:
    return exported_buffer_of(flat).resident_nbytes()


def offloader_of(
    flats: list[torch.Tensor], *, action: str = "copy", kind: str = "param"
) -> Offloader:
    """Return the offloader of the tensors that are in `flats` at the time of a call."""
    return Offloader(
        Items(
            lambda: [OffloadItem(f"flat {n}", kind, flat, action) for n, flat in enumerate(flats)]
        )
    )


# Sizes in elements of 2 to 4 bytes: below a page, whole pages, and pages with a remainder.
SIZES = (100, 4 * PAGE, 5 * PAGE + 7)
DTYPES = (torch.int32, torch.int16, torch.int32)
FRACTION = st.integers(0, 12)
STEP = st.one_of(
    st.tuples(
        st.sampled_from(["parts", "save"]),
        st.lists(st.tuples(st.integers(0, 2), FRACTION, FRACTION), min_size=1, max_size=3),
    ),
    st.tuples(st.sampled_from(["offload", "onload", "onload read-only", "write", "grow"])),
)


class Rig:
    """An offloader of three elastic tensors and of later ones, with their expected values."""

    def __init__(self) -> None:
        self.flats = [
            filled(numel, dtype, seed)
            for seed, (numel, dtype) in enumerate(zip(SIZES, DTYPES, strict=True))
        ]
        self.expected = [flat.clone() for flat in self.flats]
        self.offloader = offloader_of(self.flats)
        self.offloader._saves_ahead = True  # as on CUDA
        self.copies = CopiesToHost(self.offloader)
        self.gone: list[set[int]] = [set() for _ in self.flats]  # bytes offloaded as parts
        self.promised = False
        self.is_in_arena = False  # all contents are, and nothing was written since
        self.is_leaving = False
        self.num_writes = 0

    def step(self, name: str, *arguments: list[tuple[int, int, int]]) -> None:
        if name == "parts":
            self.take_parts(*arguments)
        elif name == "save":
            self.save_parts(*arguments)
        elif name == "offload":
            copied = self.copies.nbytes
            self.offloader.offload({"param"})
            assert not any(map(on_device, self.flats))
            assert self.copies.nbytes == copied or not self.is_in_arena
            self.promised = self.is_in_arena = False
        elif name.startswith("onload"):
            was_away = self.offloader.is_offloaded("param")
            self.offloader.onload({"param"}, read_only=name.endswith("read-only"))
            self.promised = name.endswith("read-only") and (was_away or self.promised)
            # Not if parts had left.
            self.is_in_arena = self.promised and (
                was_away or (self.is_in_arena and not self.is_leaving)
            )
            self.gone = [set() for _ in self.flats]
            self.is_leaving = False
            self.check_contents()
        elif self.offloader.is_offloaded("param"):
            return
        elif name == "grow":
            self.flats.append(filled(PAGE, seed=len(self.flats)))
            self.expected.append(self.flats[-1].clone())
            self.gone.append(set())
            self.is_in_arena = False
        elif not self.is_leaving:
            self.write()

    def write(self) -> None:
        """Write to every tensor, or to one element of each after a promise not to."""
        self.num_writes += 1
        for number, flat in enumerate(self.flats):
            if self.promised:
                flat.data[self.num_writes] += 1
            else:
                refill(flat, 100 * self.num_writes + number)
        self.expected = [flat.clone() for flat in self.flats]
        self.is_in_arena = False

    def parts_of(self, chosen: list[tuple[int, int, int]]) -> list[Part]:
        parts = []
        for number, first, second in chosen:
            flat = self.flats[number]
            start, stop = sorted((flat.numel() * first // 12, flat.numel() * second // 12))
            parts.append(Part(flat, start, stop))
        return parts

    def save_parts(self, chosen: list[tuple[int, int, int]]) -> None:
        before = [on_device(flat) for flat in self.flats]
        self.offloader.save_parts("param", self.parts_of(chosen))
        assert [on_device(flat) for flat in self.flats] == before
        self.is_leaving = True

    def take_parts(self, chosen: list[tuple[int, int, int]]) -> None:
        parts = self.parts_of(chosen)
        before = [on_device(flat) for flat in self.flats]
        away = self.offloader.is_offloaded("param")
        released = self.offloader.offload_parts("param", parts)
        if away:
            assert released == 0
            return
        self.is_leaving = True
        for (number, _, _), part in zip(chosen, parts, strict=True):
            size = part.flat.element_size()
            self.gone[number].update(range(part.start * size, part.stop * size))
        after = [on_device(flat) for flat in self.flats]
        for flat, gone, left in zip(self.flats, self.gone, after, strict=True):
            assert left == PAGE * sum(not gone.issuperset(page) for page in pages_of(flat))
        # A partial last page counts only with the bytes of the tensor.
        assert released <= sum(before) - sum(after) < released + PAGE * len(self.flats)

    def check_contents(self) -> None:
        assert all(map(torch.equal, self.flats, self.expected))


def pages_of(flat: torch.Tensor) -> list[range]:
    return [range(start, min(start + PAGE, flat.nbytes)) for start in range(0, flat.nbytes, PAGE)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(STEP, max_size=12),
    st.lists(STEP, max_size=3),
    st.sampled_from([PAGE - 3, 2 * PAGE + 10, 256 * 2**20]),
)
def test_any_sequence_restores_all_bytes_and_releases_whole_pages(
    steps: list[tuple], while_promised: list[tuple], piece: int
) -> None:
    """Onloads that promise not to write copy nothing back, unless something was written."""
    rig = Rig()
    promise = [("offload",), ("onload read-only",)]
    with mock.patch.object(offload_items, "_PIECE_NBYTES", piece):
        for step in (*steps, *promise, *while_promised, ("offload",), ("onload",)):
            rig.step(*step)


def test_saved_parts_are_not_copied_again():
    flat = filled(4 * PAGE)
    offloader = offloader_of([flat])
    offloader._saves_ahead = True
    copies = CopiesToHost(offloader)
    offloader.save_parts("param", [Part(flat, 0, PAGE)])
    assert copies.nbytes == 4 * PAGE
    assert offloader.offload_parts("param", [Part(flat, 0, 2 * PAGE)]) == 8 * PAGE
    assert copies.nbytes == 8 * PAGE
    offloader.save_parts("param", [Part(flat, 2 * PAGE, 3 * PAGE)])
    assert copies.nbytes == 12 * PAGE
    assert offloader.offload() == 8 * PAGE
    assert copies.nbytes == flat.nbytes


def test_dropped_storages_leave_whole_and_come_back_zero():
    flat = filled(2 * PAGE)
    offloader = offloader_of([flat], action="drop", kind="grad")
    assert offloader.offload_parts("grad", [whole(flat)]) == 0
    assert offloader.offload() == flat.nbytes
    assert offloader._arenas["grad"].nbytes == 0
    flat.fill_(1)  # after the release
    offloader.onload({"grad"})
    assert not flat.any()


def test_parts_of_other_storages_stay_until_the_offload():
    plain = torch.arange(PAGE)
    elastic = filled(PAGE)
    unknown = filled(PAGE)
    offloader = offloader_of([plain, elastic])
    assert offloader.offload_parts("param", [whole(plain), whole(unknown)]) == 0
    assert plain.untyped_storage().nbytes() == 8 * PAGE
    assert on_device(unknown) == 4 * PAGE
    offloader.offload()
    offloader.onload()
    assert torch.equal(plain, torch.arange(PAGE))


def test_a_writable_onload_or_another_inventory_is_copied_back():
    flats = [filled(PAGE)]
    offloader = offloader_of(flats)
    offloader.offload()
    offloader.onload({"param"}, read_only=True)
    offloader.onload({"param"})  # already resident, but may now be written
    flats[0][3] = 77
    copies = CopiesToHost(offloader)
    offloader.offload()
    assert copies.nbytes == 4 * PAGE
    offloader.onload({"param"}, read_only=True)
    assert flats[0][3] == 77
    flats.insert(0, filled(2 * PAGE, seed=5))
    expected = [flat.clone() for flat in flats]
    offloader.offload()
    assert copies.nbytes == 12 * PAGE
    offloader.onload()
    assert all(map(torch.equal, flats, expected))


def test_places_of_storages_that_are_gone_are_reused():
    flats = [filled(PAGE)]
    offloader = offloader_of(flats)
    for seed in range(3):
        flats[0] = filled(PAGE, seed=seed)
        offloader.offload()
        offloader.onload({"param"}, read_only=True)
    assert torch.equal(flats[0], filled(PAGE, seed=seed))
    assert offloader._arenas["param"].nbytes == flats[0].nbytes


@pytest.mark.parametrize(
    ("owner", "method", "after"),
    [
        (Copier, "copy", 0),
        (Copier, "copy", 1),
        (Storage, "release_inside", 0),
        (Storage, "release_inside", 1),
    ],
)
@pytest.mark.parametrize("then", ["onload", "parts", "offload"])
def test_a_failure_of_parts_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, after: int, then: str
):
    flats = [filled(PAGE, seed=1), filled(2 * PAGE, seed=2)]
    expected = [flat.clone() for flat in flats]
    offloader = offloader_of(flats)
    fail(monkeypatch, owner, method, after)
    with refused(OffloadError, "offload-failed", "param", "out of memory"):
        offloader.offload_parts("param", map(whole, flats))
    if then == "parts":
        offloader.offload_parts("param", map(whole, flats))
    if then in ("parts", "offload"):
        offloader.offload()
        assert list(map(on_device, flats)) == [0, 0]
    offloader.onload()
    assert all(map(torch.equal, flats, expected))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Part(torch.zeros(4), 1, 5), r"\[1, 5\).* 4 "),
        (lambda: Part(torch.zeros(4), 3, 2), r"\[3, 2\).* 4 "),
        (lambda: Part(torch.zeros(2, 2), 0, 1), r"shape \(2, 2\)"),
        (lambda: OffloadItem("x", "weights", torch.zeros(1)), "x: kind 'weights', action 'copy'"),
        (
            lambda: OffloadItem("cache", "param", torch.zeros(1), "rebuild"),
            "cache: action 'rebuild'",
        ),
        (
            lambda: OffloadItem("weight", "param", torch.zeros(1), "copy", forget=list),
            "weight: action 'copy'",
        ),
    ],
)
def test_invalid_records_are_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()

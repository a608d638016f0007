"""Memory that training and inference share, over the driver of tests/software_gpu."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.errors import DeviceMemoryError, StateError, TransportError
from hybrid_engine.memory.elastic import ElasticBuffer, open_peer
from hybrid_engine.memory.host_pages import tensor_over
from hybrid_engine.memory.pool import AddressRange, Pool, share_out
from tests.harness.errors import refused
from tests.hybrid_engine.memory.device_rig import CHUNK, Rig
from tests.software_gpu.device import GRANULE, failing, mapped, virtual_memory

SIZES = st.lists(st.integers(1, 12), max_size=6)
USES = {"weights": (False, False), "first blocks": (True, False), "last blocks": (True, True)}
RANGES = st.lists(
    st.tuples(st.integers(1, 20), st.sampled_from([*USES]), st.integers(0, 2)), max_size=6
)


@given(SIZES, SIZES, RANGES)
def test_cuts_cover_rooms_and_segments(
    rooms: list[int], chunks: list[int], sizes: list[tuple[int, str, int]]
):
    ranges = [AddressRange(0, nbytes, segment, *USES[use]) for nbytes, use, segment in sizes]
    cuts = share_out(rooms, chunks, ranges)
    of_rooms: Counter[int | None] = Counter()
    of_ranges: Counter[int | None] = Counter()
    shared: Counter[int | None] = Counter()
    sharing = {ranges[cut.range].segment for cut in cuts if cut.range is not None}
    for nbytes, room, chunk, number in cuts:
        of_rooms[room] += nbytes
        of_ranges[number] += nbytes
        if chunk is not None:
            assert chunks[chunk] == nbytes
            assert number is None or ranges[number].is_late, (
                "it has contents while weights are filled"
            )
        if room is None and chunk is None:
            assert not any(cut.range is None for cut in cuts), "there was room"
        elif number is not None:
            assert of_ranges[number] - shared[number] == nbytes, "its own memory comes last"
            shared[number] += nbytes
    assert [of_rooms[number] for number in range(len(rooms))] == rooms
    taken = [cut.chunk for cut in cuts if cut.chunk is not None]
    assert len(taken) == len(set(taken))
    for number, of in enumerate(ranges):
        assert of_ranges[number] == (of.nbytes if of.segment in sharing else 0)
        if not of_ranges[number]:
            assert not any(cut.range is None for cut in cuts), "there was room"
        suitable = [nbytes for index, nbytes in enumerate(chunks) if index not in taken]
        unshared = of.nbytes - shared[number]
        assert not of.is_late or not any(nbytes <= unshared for nbytes in suitable)


def test_what_is_saved_lies_in_the_last_ranges():
    first, last = (AddressRange(0, 6, 0, *USES[use]) for use in ("first blocks", "last blocks"))
    weights = AddressRange(0, 2, 1)
    cuts = share_out([5, 4], [3, 4], [first, weights, last])
    assert {(cut.room, cut.chunk): cut.nbytes for cut in cuts if cut.range == 2} == {
        (None, 0): 3,
        (1, None): 3,
    }
    assert {(cut.room, cut.chunk): cut.nbytes for cut in cuts if cut.range == 0} == {
        (0, None): 3,
        (1, None): 1,
        (None, None): 2,
    }


class Sides:
    """Gradients of three granules, parameters of two chunks; weights of two granules, a cache of
    seven.
    """

    def __init__(self, rig: Rig) -> None:
        self.driver = rig.driver
        self.grads = ElasticBuffer(3 * GRANULE, torch.uint8, device="cuda:0")
        self.params = rig.buffer(2 * CHUNK)
        self.params.tensor.fill_(1)
        self.segments = []
        for size in (2, 7):
            address = rig.driver.reserve(size * GRANULE)
            self.segments.append(AddressRange(address, size * GRANULE, address, size > 2))
        self.weights, self.cache = (
            tensor_over(segment.address, segment.nbytes, torch.device("cpu"), None)
            for segment in self.segments
        )

    def share(self) -> Pool:
        return Pool(self.driver, [self.grads.memory], [self.params.memory], self.segments)

    def end(self) -> None:
        for segment in self.segments:
            self.driver.unreserve(segment.address, segment.nbytes)
        vars(self).clear()


@pytest.fixture
def sides(rig: Rig) -> Iterator[Sides]:
    sides = Sides(rig)
    yield sides
    sides.end()


@contextmanager
def no_calls(sides: Sides, *allowed: str) -> Iterator[None]:
    sides.driver.calls.clear()
    yield
    assert set(sides.driver.calls) <= {"finish_stream", *allowed}


def touchable(sides: Sides) -> list[bool]:
    """Return whether gradients and parameters may be touched."""
    ranges = mapped()
    return [
        any(start == buffer.address for start, _ in ranges)
        for buffer in (sides.grads, sides.params)
    ]


def test_both_sides_use_the_memory_in_turn(sides: Sides):
    pool = sides.share()
    weights, cache = (pool.segments[segment.address] for segment in sides.segments)
    # The cache: one granule in the room, four of the parameters, two of its own.
    assert virtual_memory().nbytes == (3 + 4) * GRANULE
    for value in (2, 3):
        with no_calls(sides):
            weights.wake()
        sides.weights.fill_(value)
        assert bool((sides.params.tensor == value - 1).all()), "parameters stay until they are read"
        with refused(StateError, "memory-in-use", "inference"):
            sides.grads.restore()
        cache.wake()
        assert sorted(cache.pending)[0][0] == sides.segments[1].address + GRANULE
        assert cache.pending.nbytes == 4 * GRANULE
        with refused(StateError, "memory-in-use", "training"):
            pool.take_rest()
        cache.sleep()
        assert touchable(sides) == [False, True]
        with no_calls(sides, "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemRelease"):
            sides.params.release(0, CHUNK)
            assert touchable(sides) == [False, True], "a part has contents"
            sides.params.release()
            cache.wake()
            cache.wake()
            pool.take_rest()
        assert not pool.pending().nbytes
        assert virtual_memory().nbytes == (3 + 4 + 2) * GRANULE
        sides.cache.fill_(7)
        assert bool((sides.weights == value).all())
        assert sides.params.resident_nbytes() == sides.grads.resident_nbytes() == 0
        assert touchable(sides) == [False, False], "they would show the contents of inference"
        with no_calls(sides, "cuMemUnmap", "cuMemSetAccess"):
            weights.sleep()
            cache.sleep()
            sides.params.restore()
            sides.grads.restore()
        assert sides.driver.calls.count("cuMemSetAccess") == 2
        assert touchable(sides) == [True, True]
        sides.grads.tensor.zero_()
        sides.params.tensor.fill_(value)
        assert sides.params.resident_nbytes() == 4 * GRANULE
        sides.grads.release()
    sides.params.release()
    pool.give_back()
    assert virtual_memory().nbytes == 0
    sides.params.restore()
    sides.share().give_back()
    assert sides.params.resident_nbytes() == virtual_memory().nbytes, "what has contents stays"


def test_peers_keep_shared_memory_mapped(sides: Sides):
    peer = open_peer(sides.params.export())
    pool = sides.share()
    cache = pool.segments[sides.segments[1].address]
    with peer.mapped():
        pass
    for value in (5, 6):
        sides.params.release()
        with refused(TransportError, "chunks-are-released"), peer.mapped():
            pass
        cache.wake()
        cache.sleep()
        sides.params.restore()
        sides.params.tensor.fill_(value)
        with no_calls(sides), peer.mapped() as flat:
            assert bool((flat == value).all())
    sides.params.release()
    peer.trim()
    held = virtual_memory().nbytes
    pool.give_back()
    assert virtual_memory().nbytes == 4 * GRANULE < held, (
        "the peer's mappings keep the parameters' memory"
    )
    peer.trim()
    assert virtual_memory().nbytes == 0
    sides.params.restore()
    sides.params.tensor.fill_(8)
    sides.share().give_back()
    own_mappings = mapped()
    with peer.mapped() as flat:
        assert bool((flat == 8).all())
    assert mapped() == own_mappings, "it has left the pool with its contents"
    peer.close()
    del flat


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("after", range(2))
def test_a_failure_changes_nothing(sides: Sides, call: str, after: int):
    before = mapped()
    with failing(call, first=after + 1, num=2), pytest.raises(DeviceMemoryError):
        sides.share()
    assert mapped() == before
    sides.grads.restore()
    sides.params.release()
    assert virtual_memory().nbytes == 3 * GRANULE


def test_a_wake_up_without_memory_takes_none(sides: Sides):
    pool = sides.share()
    cache = pool.segments[sides.segments[1].address]
    sides.params.release()
    with failing("cuMemCreate", num=2), pytest.raises(DeviceMemoryError):
        cache.wake()
    sides.params.restore()
    sides.params.release()
    pool.give_back()


def test_training_may_end_with_contents(sides: Sides):
    pool = sides.share()
    sides.grads.restore()
    sides.driver.calls.clear()
    del sides.grads
    assert sides.driver.calls.count("cuMemUnmap") == 1, "the whole range at once"
    del sides.params
    pool.give_back()
    assert virtual_memory().nbytes == 0


def test_memory_lives_on_when_one_side_ends(sides: Sides):
    pool = sides.share()
    weights = pool.segments[sides.segments[0].address]
    weights.wake()
    sides.weights.fill_(3)
    del sides.grads, sides.params
    assert bool((sides.weights == 3).all())
    weights.sleep()
    pool.give_back()

"""NCCL's calls of two ranks in one process: reports of mismatches, and order in groups."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.software_gpu.device import Reports

INT32 = 2
FLOAT32 = 7
SUM = 0
MAXIMUM = 2
COUNT = 1000
SECONDS = 20
INVALID_USAGE = 5


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


nccl = ctypes.CDLL("libnccl.so.2")


@contextmanager
def group() -> Iterator[None]:
    assert nccl.ncclGroupStart() == 0
    yield
    assert nccl.ncclGroupEnd() == 0


class Rank:
    """A rank of two: its device, memory there, and a communicator."""

    def __init__(self, rank: int) -> None:
        self.device = torch.device("cuda", rank)
        self._rank = rank
        self.source = torch.full((2 * COUNT,), rank + 1.0, device=self.device)
        self.target = torch.zeros(2 * COUNT, device=self.device)
        torch.cuda.synchronize(self.device)
        self.stream = torch.cuda.Stream(self.device)
        self.communicator = ctypes.c_void_p()

    def join(self, unique_id: UniqueId) -> ctypes.c_void_p:
        """Return a communicator, which is created at the end of the group."""
        communicator = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            assert nccl.ncclCommInitRank(ctypes.byref(communicator), 2, unique_id, self._rank) == 0
        return communicator

    def call(self, name: str, *arguments: int, communicator: ctypes.c_void_p | None = None) -> None:
        """Call a function with two buffers, or one for send and receive, on this rank's stream."""
        source, target = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (self.source, self.target))
        buffers = {"ncclSend": (source,), "ncclRecv": (target,)}.get(name, (source, target))
        count, *rest = arguments
        stream = ctypes.c_void_p(self.stream.cuda_stream)
        used = communicator or self.communicator
        assert getattr(nccl, name)(*buffers, ctypes.c_size_t(count), *rest, used, stream) == 0

    def is_over(self) -> bool:
        deadline = time.monotonic() + SECONDS
        while not (is_over := self.stream.query()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return is_over


def new_id() -> UniqueId:
    unique_id = UniqueId()
    assert nccl.ncclGetUniqueId(ctypes.byref(unique_id)) == 0
    return unique_id


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank]]:
    pair = (Rank(0), Rank(1))
    unique_id = new_id()
    with group():
        for rank in pair:
            rank.communicator = rank.join(unique_id)
    yield pair
    for rank in pair:
        nccl.ncclCommAbort(rank.communicator)
        torch.cuda.synchronize(rank.device)


@pytest.mark.parametrize(
    ("name", "arguments", "others", "texts"),
    [
        ("ncclAllReduce", (COUNT, FLOAT32, SUM), (COUNT, INT32, SUM), ("1000 float32", "1000 int32")),
        ("ncclAllReduce", (COUNT, FLOAT32, SUM), (COUNT - 1, FLOAT32, SUM), ("1000 float32", "999 float32")),
        ("ncclAllReduce", (1, FLOAT32, SUM), (2, FLOAT32, SUM), ("1 float32", "2 float32")),
        ("ncclAllReduce", (COUNT, FLOAT32, SUM), (COUNT, FLOAT32, MAXIMUM), ("sum", "maximum")),
        ("ncclBroadcast", (COUNT, FLOAT32, 0), (COUNT, FLOAT32, 1), ("root 0", "root 1")),
        ("ncclReduce", (COUNT, FLOAT32, SUM, 0), (COUNT, FLOAT32, SUM, 1), ("root 0", "root 1")),
    ],
)
def test_a_mismatch_of_ranks_is_reported(
    ranks: tuple[Rank, Rank],
    name: str,
    arguments: tuple[int, ...],
    others: tuple[int, ...],
    texts: tuple[str, str],
    reports: Reports,
) -> None:
    for rank, rank_arguments in zip(ranks, (arguments, others), strict=True):
        rank.call(name, *rank_arguments)
    assert all(rank.is_over() for rank in ranks), "a hang"
    require_mismatch(ranks, texts, reports)


def test_a_mismatch_of_send_and_receive_is_reported(ranks: tuple[Rank, Rank], reports: Reports) -> None:
    ranks[0].call("ncclSend", COUNT, FLOAT32, 1)
    ranks[1].call("ncclRecv", COUNT, INT32, 0)
    assert all(rank.is_over() for rank in ranks), "a hang"
    require_mismatch(ranks, ("float32", "int32"), reports)


def require_mismatch(ranks: tuple[Rank, Rank], texts: tuple[str, str], reports: Reports) -> None:
    """Check that a report describes both calls, and that each rank has an error."""
    text = reports.new()
    assert all(f"rank {number} calls" in text for number in (0, 1))
    assert all(part in text for part in texts)
    error = ctypes.c_int()
    for rank in ranks:
        assert nccl.ncclCommGetAsyncError(rank.communicator, ctypes.byref(error)) == 0
        assert error.value == INVALID_USAGE


def gather(ranks: tuple[Rank, Rank]) -> None:
    for rank in ranks:
        rank.call("ncclAllGather", COUNT, FLOAT32)


def reduce(ranks: tuple[Rank, Rank]) -> None:
    for rank in ranks:
        rank.call("ncclAllReduce", 2 * COUNT, FLOAT32, SUM)


def reduce_and_scatter(ranks: tuple[Rank, Rank]) -> None:
    for rank in ranks:
        rank.call("ncclReduceScatter", COUNT, FLOAT32, SUM)


def broadcast(ranks: tuple[Rank, Rank]) -> None:
    for rank in ranks:
        rank.call("ncclBroadcast", COUNT, FLOAT32, 1)


def exchange(ranks: tuple[Rank, Rank]) -> None:
    for number, rank in enumerate(ranks):
        with group():
            rank.call("ncclSend", COUNT, FLOAT32, 1 - number)
            rank.call("ncclRecv", COUNT, FLOAT32, 1 - number)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (gather, ((1, 2), (1, 2))),
        (reduce, ((3, 3), (3, 3))),
        (reduce_and_scatter, ((3, 0), (3, 0))),
        (broadcast, ((2, 0), (2, 0))),
        (exchange, ((2, 0), (1, 0))),
    ],
)
def test_matching_calls_have_the_right_results(
    ranks: tuple[Rank, Rank], call: Callable[[tuple[Rank, Rank]], None], expected: tuple[tuple[int, int], ...]
) -> None:
    call(ranks)
    assert all(rank.is_over() for rank in ranks)
    for rank, halves in zip(ranks, expected, strict=True):
        rank.stream.synchronize()
        assert rank.target.view(2, COUNT).mean(dim=1).tolist() == list(halves)


def test_communicators_of_a_group_start_in_the_order_of_calls() -> None:
    """Even if they were created in another order: on one stream the second waits for the first."""
    ranks = (Rank(0), Rank(1))
    ids = (new_id(), new_id())
    with group():
        first = [ranks[0].join(ids[0])]
        second = [ranks[0].join(ids[1]), ranks[1].join(ids[1])]
        first.append(ranks[1].join(ids[0]))
    for number, rank in enumerate(ranks):
        with group():
            for communicator in (first[number], second[number]):
                rank.call("ncclSend", COUNT, FLOAT32, 1 - number, communicator=communicator)
                rank.call("ncclRecv", COUNT, FLOAT32, 1 - number, communicator=communicator)
    are_over = [rank.is_over() for rank in ranks]
    for rank, communicators in zip(ranks, zip(first, second, strict=True), strict=True):
        for communicator in communicators:
            nccl.ncclCommAbort(communicator)
        torch.cuda.synchronize(rank.device)
    assert all(are_over), "the ranks wait for each other"

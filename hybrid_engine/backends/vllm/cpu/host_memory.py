"""Memory of weights on a CPU: pages of vLLM's storages come and go, and loader layout uses a pool.

Live weights keep their storages and their addresses. Once gradients exist, weights use the pages of
their memory files, mapped at the weights' addresses as well. So no switch touches a new page, which
takes several times as long as a copy. The system takes back the pages of what finds no room there.

The storages need not be resizable: anything that makes an array of a weight, as vLLM's checksums
do, makes its storage non-resizable.

A switch fills modules in loader layout and drops them as soon as vLLM has packed them. New pages
for each would cost several times as much as the copy; here the pages of one bucket are reused for
the next.

    pool.lend([(numel, dtype), …]) -> tensors --last of them gone--> pages are free --lend--> …
                                          lent before a trim ─┐                └──trim──> system
                                                              └────────────────────────> system
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from hybrid_engine.backends.vllm.weights.tracing import WeightStorage
from hybrid_engine.backends.vllm.weights.weight_memory import Live, WeightMemory
from hybrid_engine.memory.host_pages import (
    HostMemory,
    PoolPiece,
    libc,
    map_memory,
    raise_errno,
    round_up,
    tensor_over,
)
from hybrid_engine.memory.pool import Memories

_HUGE_PAGE = 2 * 1024**2
_ALIGNMENT = 64  # bytes, of every tensor


class CpuWeightMemory(WeightMemory):
    """Memory of weights on a CPU.

    Pages are returned to the system and touched again; loader layout passes through the same pages,
    group after group. The partial pages at both ends of a storage, less than 8 KiB in total, stay
    and are not counted.
    """

    def __init__(self) -> None:
        self._pool = StagingPool()
        self._given_back: set[int] = set()  # addresses of storages
        self._loans: dict[int, _Loan] = {}  # by address of the storage
        # Weakly: the trainer may end before vLLM.
        self._lenders: weakref.WeakSet[HostMemory] = weakref.WeakSet()
        # A storage must not be freed over pages of training, so the loans keep it until then.
        weakref.finalize(self, _end_loans, self._loans, self._lenders, self._pool).atexit = False

    def new(
        self,
        storages: Sequence[WeightStorage],
        stay: Collection[str] = (),
    ) -> list[torch.Tensor]:
        # A storage that stays unexpectedly is safe as well: the pool lends no page with a live
        # tensor.
        passing = [storage for storage in storages if storage.name not in stay]
        staying = [storage for storage in storages if storage.name in stay]
        lent = iter(self._pool.lend([(storage.numel, storage.dtype) for storage in passing]))
        allocated = iter(super().new(staying))
        return [next(allocated if storage.name in stay else lent) for storage in storages]

    def trim(self) -> None:
        self._pool.trim()
        # The C library may keep free heap pages (glibc blocks up to 32 MiB): without this, which
        # takes milliseconds, a released CPU model occupies about as much memory as before.
        malloc_trim = getattr(libc(), "malloc_trim", None)
        if malloc_trim is not None:
            malloc_trim(0)

    def free(self, live: Live) -> None:
        for address, storage in _storages(live.values()).items():
            if address in self._loans:
                self._loans[address].piece.leave(address)
            elif not _advise(storage, mmap.MADV_DONTNEED, mmap.PAGESIZE):
                raise_errno("the system does not take pages of weights back")
            self._given_back.add(address)

    def share(self, live: Live, memories: Memories, leave: Callable[[], object]) -> bool:
        self.give_back()
        waiting = {
            address: storage
            for address, storage in _storages(live.values()).items()
            if address in self._given_back
        }
        for memory in memories.get("grad", ()):
            assert isinstance(memory, HostMemory)
            piece = PoolPiece(is_late=False)
            fd = memory.lend(piece)
            self._lenders.add(memory)
            taken = 0
            for address, storage in list(waiting.items()):
                start, nbytes = _pages(storage, mmap.PAGESIZE)
                if 0 < nbytes <= memory.reserved_nbytes - taken:
                    map_memory(nbytes, fd, at=start, offset=taken)
                    self._loans[address] = _Loan(storage, piece)
                    taken += nbytes
                    del waiting[address]
            memory.lent_nbytes = taken
            if memory.reserved_nbytes - taken > self._pool.room:
                self._pool.offer(memory, fd, piece)
        return True

    def give_back(self) -> None:
        _end_loans(self._loans, self._lenders, self._pool)

    def close(self) -> None:
        self.give_back()

    def restore(self, tensors: Iterable[torch.Tensor]) -> None:
        for address, storage in _storages(tensors).items():
            if address in self._loans:
                self._loans[address].piece.take("inference", address)
                self._given_back.discard(address)
            elif address in self._given_back:
                # With huge pages the first write costs little more than any other; with 4 KiB
                # pages it takes several times as long.
                _advise(storage, mmap.MADV_HUGEPAGE, _HUGE_PAGE)
                self._given_back.discard(address)

    def nbytes(self, live: Live) -> int:
        taken = {
            name: tensor
            for name, tensor in live.items()
            if tensor.untyped_storage().data_ptr() not in self._given_back
        }
        return super().nbytes(taken) + self._pool.free_nbytes


@dataclass(frozen=True)
class _Loan:
    """A storage with pages of training's, and their piece of what both sides share."""

    storage: torch.UntypedStorage
    piece: PoolPiece


def _end_loans(
    loans: dict[int, _Loan],
    lenders: weakref.WeakSet[HostMemory],
    pool: StagingPool,
) -> None:
    """Give these storages and tensors of the pool pages of their own, with the same contents."""
    for address, loan in [*loans.items()]:
        _renew(*_pages(loan.storage, mmap.PAGESIZE), loan.piece)
        # Before it leaves: an interrupt must not renew pages again without their contents.
        del loans[address]
        loan.piece.leave(address)
    pool.end_loan()
    for memory in lenders:
        memory.end_loan()
    lenders.clear()


def _renew(start: int, nbytes: int, piece: PoolPiece) -> None:
    """Replace pages by new ones with the same contents, unless inference has none in the piece."""
    pages = tensor_over(start, nbytes, HostMemory.device, None)
    contents = pages.clone() if piece.has_contents_of("inference") else pages[:0]
    map_memory(nbytes, at=start)
    pages[: len(contents)] = contents


class StagingPool:
    """A block of pages, lent as a whole and returned when the last tensor over it is gone.

    Memory: the largest loan so far. A loan while the pages are still lent (a tensor was kept) is
    new memory; the larger of the two blocks is kept.

    Pages that it borrows itself stay; in between training has contents in them.

    Attributes:
        room: bytes of another memory that were offered to it.
    """

    room = 0

    def __init__(self) -> None:
        self._free: _Pages | None = None
        self._borrowed: _Pages | None = None
        self._num_trims = 0
        self._largest_nbytes = 0  # of all loans
        self._offer: tuple[weakref.ref[HostMemory], int, PoolPiece] | None = None

    @property
    def free_nbytes(self) -> int:
        """Bytes of its own pages that are not lent."""
        return 0 if self._free is None or self._free is self._borrowed else self._free.nbytes

    def offer(self, memory: HostMemory, fd: int, piece: PoolPiece) -> None:
        """Let it borrow pages behind those that are lent already, once it knows how many."""
        self.room = memory.reserved_nbytes - memory.lent_nbytes
        self._offer = weakref.ref(memory), fd, piece

    def _borrow(self) -> None:
        memory = None if self._offer is None else self._offer[0]()
        nbytes = self._largest_nbytes
        if self._offer is None or memory is None or not 0 < nbytes <= self.room:
            return
        _, fd, piece = self._offer
        self._borrowed = self._free = _Pages(nbytes, piece)
        map_memory(nbytes, fd, at=self._free.address, offset=memory.lent_nbytes)
        memory.lent_nbytes += nbytes
        self._offer = None

    def end_loan(self) -> None:
        """Use borrowed pages no more. Tensors over them keep their contents."""
        self._offer = None
        self.room = 0
        pages = self._borrowed
        self._borrowed = None
        if pages is not None and pages is not self._free:
            _renew(pages.address, pages.nbytes, pages.piece)
            pages.piece.leave(pages.address)
        elif pages is not None:
            self._free = None

    def lend(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """Return flat CPU tensors of these sizes, uninitialised, each with a separate storage."""
        starts = []
        end = 0  # bytes
        for numel, dtype in sizes:
            starts.append(end)
            end += round_up(numel * dtype.itemsize, _ALIGNMENT)
        if not end:
            return [torch.empty(numel, dtype=dtype) for numel, dtype in sizes]
        pages = self._free
        self._free = None
        if pages is None or pages.nbytes < end:
            del pages  # free the old block before the new one is allocated
            pages = _Pages(end)
        self._largest_nbytes = max(self._largest_nbytes, pages.nbytes)
        pages.piece.take("inference", pages.address)
        loan = (ctypes.c_ubyte * pages.nbytes).from_buffer(pages.memory)
        # torch keeps `loan` alive as long as a storage over it lives.
        finalizer = weakref.finalize(loan, _take_back, weakref.ref(self), pages, self._num_trims)
        finalizer.atexit = False
        return [
            torch.frombuffer(loan, dtype=dtype, count=numel, offset=start)
            if numel
            else torch.empty(0, dtype=dtype)
            for start, (numel, dtype) in zip(starts, sizes, strict=True)
        ]

    def take_back(self, pages: _Pages, num_trims: int) -> None:
        """Keep pages that were lent after `num_trims` trims.

        They are dropped if the pool was trimmed since, or holds larger pages.
        """
        is_larger = self._num_trims == num_trims and self.free_nbytes < pages.nbytes
        has_borrowed = self._free is not None and self._free is self._borrowed
        if pages is self._borrowed or (is_larger and not has_borrowed):
            self._free = pages

    def trim(self) -> None:
        """Free the pages; lent pages are freed when the last tensor over them is gone."""
        self._num_trims += 1
        if self._free is not self._borrowed:
            self._free = None
        if self._free is None and self._borrowed is not None:
            # Training needs the pages next, and a tensor over them was kept.
            self.end_loan()
        self._borrow()


class _Pages:
    """An anonymous mapping, in huge pages if it is large enough; unmapped when it is collected."""

    def __init__(self, nbytes: int, piece: PoolPiece | None = None) -> None:
        """`piece`: of the memory that another owner's pages will replace."""
        self.nbytes = round_up(nbytes, mmap.PAGESIZE)
        self.memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.memory))
        self.piece = piece or PoolPiece(is_late=False)


def _take_back(pool: weakref.ref[StagingPool], pages: _Pages, num_trims: int) -> None:
    pages.piece.leave(pages.address)
    owner = pool()
    if owner is not None:
        owner.take_back(pages, num_trims)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the non-empty storages of these tensors by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _advise(storage: torch.UntypedStorage, advice: int, page: int) -> bool:
    """Call madvise for the pages of `page` bytes inside a storage; return whether it succeeded."""
    start, nbytes = _pages(storage, page)
    return nbytes <= 0 or libc().madvise(start, nbytes, advice) == 0


def _pages(storage: torch.UntypedStorage, page: int) -> tuple[int, int]:
    """Return address and bytes of the pages of `page` bytes inside a storage."""
    start = round_up(storage.data_ptr(), page)
    return start, (storage.data_ptr() + storage.nbytes()) // page * page - start

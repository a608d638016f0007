"""Hosts, and process groups: which processes share memory, groups of some ranks, and the end of groups.

What all ranks must know goes by way of few (ranks/rank_tree.py); everything else among some of them over gloo has a
group of these (`RankGroup`). torch keeps every group of its own until it is told to end it (`end_groups`), or until the
job ends.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybrid_engine.messages import LIMIT, require_size
from hybrid_engine.ranks.process import own_groups
from hybrid_engine.ranks.torch_internals import is_alive
from hybrid_engine.ranks.world import World

logger = logging.getLogger("hybrid_engine")


MEETING_DIRECTORY = "/tmp"
"""Where processes of a host have the sockets by which they pass descriptors (memory/descriptors.py). Not TMPDIR, which
differs between processes that see the same files, and may be too long for a socket's address."""


def host_id() -> str:
    """Equal for two processes exactly when one kernel runs both and they see one MEETING_DIRECTORY: containers may.

    Where /proc does not say, the host's name.
    """
    try:
        place = os.stat(MEETING_DIRECTORY)
        return f"{_boot_id()}/{place.st_dev}:{place.st_ino}"
    except OSError:
        return socket.gethostname()


def process_space() -> str | None:
    """Equal for two processes exactly when they see each other's ids; None where that cannot be known."""
    try:
        return f"{_boot_id()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def state_of(pid: int) -> str | None:
    """Say what keeps a process of this host from going on: it has ended or is stopped. None: nothing seen."""
    if has_ended(pid):
        return f"has ended (process {pid})"
    return f"is stopped (process {pid})" if _letter(pid) in _STOPPED else None


def has_ended(pid: int) -> bool:
    """Whether a process of this host is gone, or only waits for its parent to take note."""
    return _letter(pid) in _ENDED


_ENDED, _STOPPED = ("Z", "X"), ("T", "t")  # states of proc(5)


def _letter(pid: int) -> str:
    """The state of /proc/<pid>/stat: X where there is no such process, "" where that cannot be read."""
    try:
        # the name before it is in brackets and may hold spaces and brackets
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except (OSError, IndexError):  # no descriptor left, for instance: that says nothing about the other process
        return ""


_SECONDS_TO_FINISH = 10.0
"""For what is queued on the device when its groups end: a collective whose peer was lost never finishes."""
_SECONDS_BETWEEN_LOOKS = 0.5
_SOURCE = re.compile(r"^\[[^\]]*\]\s*")
_ADVICE = re.compile(r"\s*This is typically caused by .*", re.DOTALL)


def is_lost_connection(error: BaseException) -> bool:
    """Whether torch says of a group that a member ended or did not come; gloo raises plain RuntimeErrors for that."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and "third_party/gloo/" in str(error)


def plain_text(error: BaseException) -> str:
    """Text of gloo's error for a broken connection, without its source file and its advice to look for other errors."""
    return _ADVICE.sub("", _SOURCE.sub("", str(error)))


def end_groups(*groups: dist.ProcessGroup | None) -> None:
    """End groups; None is no group, and those of a job that has ended are gone already. On all ranks of a group.

    Their connections and threads, of which gloo has three for each, go once nothing refers to them. Never run on NCCL.
    """
    alive = [group for group in groups if is_alive(group)]
    if any("nccl" in dist.get_backend_config(group) for group in alive):
        let_device_finish()
    for group in alive:
        if is_alive(group):  # a group is given twice where two parallel sizes have the same ranks
            dist.destroy_process_group(group)


def let_device_finish() -> None:
    """Wait a while for what this thread has queued on the current stream: NCCL aborts what is under way in a group that
    ends. A device that has failed is not waited for."""
    if not torch.cuda.is_initialized():
        return
    deadline = time.monotonic() + _SECONDS_TO_FINISH
    try:
        queued = torch.cuda.Event()
        queued.record()
        while not queued.query() and time.monotonic() < deadline:
            time.sleep(0.001)
    except RuntimeError as error:  # groups must end all the same, and why the device failed is told elsewhere
        logger.warning("the device cannot be asked whether it has finished: %s", error)


class RankGroup:
    """Some ranks over gloo, each connected with each other: for one purpose only, after a timeout it is dead.

    Not one of torch's own groups: every rank of the job has to call for each of those, hundreds where there are
    hundreds of hosts. A rank that is not in one returns at once, unless the default group is bound to a device: then
    each call splits NCCL's communicator, on all ranks.

    Attributes:
        ranks: of the group; the first tells the others.
        timeout_seconds: longest wait for another one.
    """

    def __init__(self, world: World, name: str, ranks: Sequence[int], timeout_seconds: float) -> None:
        """`name`: among all groups of the job. Collective, for its ranks."""
        self.ranks, self.timeout_seconds = ranks, timeout_seconds
        self._gloo: dist.ProcessGroupGloo | None = _connected(world, name, ranks, timeout_seconds)
        self._maxima: dict[int, dist.Work] = {}
        self._is_left = False  # something under way that nobody waits for any more
        self._numbers = itertools.count()

    # what is waited for is in no variable: an error's traceback would keep its connections open

    def begin_maximum(self, values: torch.Tensor) -> int:
        """Let every element be the largest of all ranks', in place, once this one has ended, by its number."""
        number = next(self._numbers)
        self._maxima[number] = self._open().allreduce([values], dist.ReduceOp.MAX)  # type: ignore[attr-defined]
        return number

    def end_maximum(self, number: int, ended: Callable[[], str] = lambda: "") -> None:
        """Wait for it, not longer than all ranks live: gloo tells of one that has ended only to its neighbours.

        `ended`: which are known to have, in words. Raises RuntimeError as torch does, and DistError where one has, or
        does not come.
        """
        deadline = time.monotonic() + self.timeout_seconds
        try:
            while True:
                left = deadline - time.monotonic()
                try:
                    self._maxima[number].wait(timedelta(seconds=min(max(left, 0.001), _SECONDS_BETWEEN_LOOKS)))
                    return
                except RuntimeError:
                    if self._maxima[number].is_completed():
                        self._maxima[number].wait()  # its own error, or none: it may have ended since the look
                        return
                if said := ended() or (f"not within {self.timeout_seconds:g} s" if left <= 0 else ""):
                    self._is_left = True
                    raise dist.DistError(said)
        finally:
            self._maxima.pop(number, None)

    def gather(self, message: bytes, limit: int = LIMIT) -> dict[int, bytes]:
        """By rank of the group, its message. Raises MessageError, on all of them, where they are longer than `limit`
        together, each taken for as long as the longest."""
        sizes = torch.empty(len(self.ranks), 1, dtype=torch.int64)
        self._all_gather(sizes, torch.tensor([len(message)]))
        width = int(sizes.max())
        require_size(width * len(self.ranks), limit)
        rows = torch.empty(len(self.ranks), max(width, 1), dtype=torch.uint8)
        padded = bytearray(message.ljust(rows.shape[1], b"\0"))
        self._all_gather(rows, torch.frombuffer(padded, dtype=torch.uint8))
        told = zip(self.ranks, rows, sizes.flatten().tolist(), strict=True)
        return {rank: row.numpy().tobytes()[:size] for rank, row, size in told}

    def tell(self, values: torch.Tensor) -> None:
        """Let all have the first rank's, in place."""
        self._open().broadcast(values, 0).wait()  # type: ignore[attr-defined]  # none of these is in torch's stubs

    def begin_send(self, values: torch.Tensor, rank: int) -> dist.Work:
        """Give them to another rank, which receives as often; done once what is returned has been waited for."""
        return self._open().send([values], self.ranks.index(rank), 0)  # type: ignore[attr-defined]

    def begin_receive(self, values: torch.Tensor, rank: int) -> dist.Work:
        """Take what another rank sends, in place, once what is returned has been waited for."""
        return self._open().recv([values], self.ranks.index(rank), 0)  # type: ignore[attr-defined]

    def _all_gather(self, rows: torch.Tensor, row: torch.Tensor) -> None:
        self._open().allgather([list(rows)], [row]).wait()  # type: ignore[attr-defined]

    def _open(self) -> dist.ProcessGroupGloo:
        assert self._gloo is not None, "the group is closed"
        return self._gloo

    def close(self) -> None:
        """End the connections; idempotent. Waits for what is under way, unless a wait for it was given up."""
        held, self._gloo = [self._gloo], None
        self._maxima.clear()
        if self._is_left:  # its destructor waits for gloo, at most the timeout
            threading.Thread(target=held.clear, name="end of a group", daemon=True).start()


def ranks_by_host(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, given the hosts by rank."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    return list(by_host.values())


def connected_parts(meets: Sequence[int]) -> list[list[int]]:
    """All ranks, in parts that have nothing to do with each other.

    `meets`: by rank, whom it meets, as bits by rank; of two that meet, both say so.
    """
    parts, left = [], (1 << len(meets)) - 1
    while left:
        found, part = left & -left, []
        while new := found & left:
            rank = new.bit_length() - 1
            left &= ~(1 << rank)
            found |= meets[rank]
            part.append(rank)
        parts.append(sorted(part))
    return parts


def told_by(source: int, message: bytes, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> bytes:
    """The `message` of one rank of a group, which all of them get; `source` is its global rank. Collective."""
    size = torch.tensor([len(message)], device=device)
    dist.broadcast(size, src=source, group=group)
    require_size(int(size))
    told = torch.frombuffer(bytearray(message.ljust(int(size), b"\0")[: int(size)]), dtype=torch.uint8).to(device)
    dist.broadcast(told, src=source, group=group)
    return told.cpu().numpy().tobytes()


def _connected(world: World, name: str, ranks: Sequence[int], timeout_seconds: float) -> dist.ProcessGroupGloo:
    gloo = dist.ProcessGroupGloo
    store, options = world.part(f"groups/{name}"), gloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_seconds)
    options._devices = [_listening(world)]
    group = gloo(store, ranks.index(world.rank), len(ranks), options)
    own_groups.add(group)
    return group


_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable that names the interface on which gloo listens, or several; torch reads it in its own groups
alone."""


def _listening(world: World) -> object:
    """Where this process listens: at the world's address, on the interface that the user names, or where torch does, at
    the address of the host's name."""
    gloo = dist.ProcessGroupGloo
    if world.address:
        return gloo.create_device(hostname=world.address)
    if interface := os.environ.get(_INTERFACE, "").partition(",")[0]:
        return gloo.create_device(interface=interface)
    return gloo.create_default_device()

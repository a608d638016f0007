"""Hosts and processes, gloo groups of some ranks, and the end of process groups.

Messages for all ranks go through a tree of small groups (ranks/rank_tree.py). Any other gloo
traffic between some of the ranks uses a `RankGroup`. torch keeps each process group of its own
until it is destroyed (`end_groups`) or the job ends.
"""

from __future__ import annotations

import itertools
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
from hybrid_engine.ranks.signals_and_forks import own_groups
from hybrid_engine.ranks.torch_internals import is_alive
from hybrid_engine.ranks.world import World

MEETING_DIRECTORY = "/tmp"
"""Directory of the sockets by which processes of a host pass descriptors (memory/descriptors.py).
Not TMPDIR, which differs between processes that see the same files, and may be too long for the
address of a socket."""

_POLL_INTERVAL = 0.5
_MAX = dist.ReduceOp.MAX

_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the interface, or several, on which gloo listens. torch reads it only
for its own groups."""

# States of a process, proc(5): zombie, dead; stopped, stopped by a tracer.
_ENDED = ("Z", "X")
_STOPPED = ("T", "t")

_SOURCE = re.compile(r"^\[[^\]]*\]\s*")
_ADVICE = re.compile(r"\s*This is typically caused by .*", re.DOTALL)


def host_id() -> str:
    """Return an id that is equal for processes under one kernel that see one MEETING_DIRECTORY.

    Processes in different containers may qualify. Without a readable /proc it is the host's name.
    """
    try:
        status = os.stat(MEETING_DIRECTORY)
        return f"{_boot_id()}/{status.st_dev}:{status.st_ino}"
    except OSError:
        return socket.gethostname()


def process_space() -> str | None:
    """Return an id that is equal for processes that see each other's pids; None if unknown."""
    try:
        return f"{_boot_id()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def state_of(pid: int) -> str | None:
    """Return "has ended ..." or "is stopped ..." for a process of this host, else None."""
    if has_ended(pid):
        return f"has ended (process {pid})"
    if _state_letter(pid) in _STOPPED:
        return f"is stopped (process {pid})"
    return None


def has_ended(pid: int) -> bool:
    """Return True if a process of this host is gone, or a zombie that its parent has not reaped."""
    return _state_letter(pid) in _ENDED


def _state_letter(pid: int) -> str:
    """Return the state in /proc/<pid>/stat: X if the process does not exist, "" if unreadable."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        # The state follows the name, which is in brackets and may contain spaces and brackets.
        return text.rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except (OSError, IndexError):
        # For example, this process has too many open files. The other one may be alive.
        return ""


def is_lost_connection(error: BaseException) -> bool:
    """Return True if torch reports that a member of a group ended or did not come.

    gloo raises plain RuntimeErrors for that.
    """
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and "third_party/gloo/" in str(error)


def plain_text(error: BaseException) -> str:
    """Return gloo's message of a broken connection, without its source file and its advice."""
    text = _SOURCE.sub("", str(error))
    return _ADVICE.sub("", text)


def end_groups(*groups: dist.ProcessGroup | None) -> None:
    """Destroy process groups on all their ranks; None and destroyed groups are skipped.

    Connections and threads of gloo, which has three per group, end with the last reference to the
    group. For NCCL, torch first waits for operations that have begun.
    """
    for group in groups:
        # A group comes twice if two parallel sizes have the same ranks.
        if is_alive(group):
            dist.destroy_process_group(group)


class RankGroup:
    """gloo group of some ranks, all connected with each other. Unusable after a timeout.

    It is not registered with torch. Creating one of torch's own groups requires every rank of the
    job, for hundreds of groups if there are hundreds of hosts. A rank outside a group returns at
    once there, unless the default group is bound to a device: then each creation splits NCCL's
    communicator on all ranks.

    Args:
        world: the ranks of the job.
        name: unique among all groups of the job. Creation is collective over `ranks`.
        ranks: the group's ranks; the first one is the source of `broadcast`.
        timeout_seconds: longest wait for another rank.

    Attributes:
        ranks: as above.
        timeout_seconds: as above.
    """

    def __init__(
        self,
        world: World,
        name: str,
        ranks: Sequence[int],
        timeout_seconds: float,
    ) -> None:
        self.ranks = ranks
        self.timeout_seconds = timeout_seconds
        self._gloo: dist.ProcessGroupGloo | None = _connected(world, name, ranks, timeout_seconds)
        self._maxima: dict[int, dist.Work] = {}
        self._is_abandoned = False  # a wait was given up, and its operation is still under way
        self._numbers = itertools.count()

    # Methods of gloo's groups are missing in torch's stubs.
    # Works in progress are not kept in local variables, because the traceback of an error would
    # keep the connections open.

    def begin_maximum(self, values: torch.Tensor) -> int:
        """Start an elementwise maximum over all ranks, in place; return its number."""
        number = next(self._numbers)
        self._maxima[number] = self._open().allreduce([values], _MAX)  # type: ignore[attr-defined]
        return number

    def end_maximum(self, number: int, ended: Callable[[], str] = lambda: "") -> None:
        """Wait for a maximum, but only while all ranks live.

        gloo reports the end of a rank only to its neighbours, so `ended` is called repeatedly. It
        returns the ranks that are known to have ended, as text.

        Raises RuntimeError of torch; DistError if a rank has ended or does not come.
        """
        deadline = time.monotonic() + self.timeout_seconds
        try:
            while True:
                left = deadline - time.monotonic()
                seconds = min(max(left, 0.001), _POLL_INTERVAL)
                try:
                    self._maxima[number].wait(timedelta(seconds=seconds))
                    return
                except RuntimeError:
                    # It failed, or it has succeeded since the wait ended: the second wait decides.
                    if self._maxima[number].is_completed():
                        self._maxima[number].wait()
                        return
                problem = ended()
                if not problem and left <= 0:
                    problem = f"not within {self.timeout_seconds:g} s"
                if problem:
                    self._is_abandoned = True
                    raise dist.DistError(problem)
        finally:
            self._maxima.pop(number, None)

    def gather(self, message: bytes, limit: int = LIMIT) -> dict[int, bytes]:
        """Return the message of each rank of the group, by rank. Collective.

        Raises MessageError on all ranks if the messages, padded to the longest, exceed `limit`
        bytes.
        """
        num_ranks = len(self.ranks)
        sizes = torch.empty(num_ranks, 1, dtype=torch.int64)
        self._all_gather(sizes, torch.tensor([len(message)]))
        width = int(sizes.max())
        require_size(width * num_ranks, limit)
        # gloo's gather needs rows of equal length, and at least one byte.
        rows = torch.empty(num_ranks, max(width, 1), dtype=torch.uint8)
        padded = bytearray(message.ljust(rows.shape[1], b"\0"))
        self._all_gather(rows, torch.frombuffer(padded, dtype=torch.uint8))
        messages = {}
        for rank, row, size in zip(self.ranks, rows, sizes.flatten().tolist(), strict=True):
            messages[rank] = row.numpy().tobytes()[:size]
        return messages

    def broadcast(self, values: torch.Tensor) -> None:
        """Replace `values` on all ranks by the values of the group's first rank. Collective."""
        self._open().broadcast(values, 0).wait()  # type: ignore[attr-defined]

    def begin_send(self, values: torch.Tensor, rank: int) -> dist.Work:
        """Start to send `values` to another rank, which must receive them; return torch's work."""
        return self._open().send([values], self.ranks.index(rank), 0)  # type: ignore[attr-defined]

    def begin_receive(self, values: torch.Tensor, rank: int) -> dist.Work:
        """Start to receive into `values` from another rank; return torch's work."""
        return self._open().recv([values], self.ranks.index(rank), 0)  # type: ignore[attr-defined]

    def _all_gather(self, rows: torch.Tensor, row: torch.Tensor) -> None:
        self._open().allgather([list(rows)], [row]).wait()  # type: ignore[attr-defined]

    def _open(self) -> dist.ProcessGroupGloo:
        assert self._gloo is not None, "the group is closed"
        return self._gloo

    def close(self) -> None:
        """Close the connections; idempotent.

        Waits for operations under way, but not for abandoned ones.
        """
        references = [self._gloo]
        self._gloo = None
        self._maxima.clear()
        if self._is_abandoned:
            # gloo's destructor waits for the operation, for up to the timeout.
            end = threading.Thread(target=references.clear, name="end of a group", daemon=True)
            end.start()


def ranks_by_host(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, given the host of each rank."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    return list(by_host.values())


def connected_parts(meets: Sequence[int]) -> list[list[int]]:
    """Return all ranks in parts that do not communicate with each other.

    `meets`: by rank, the ranks that it communicates with, as bits; symmetric.
    """
    parts = []
    left = (1 << len(meets)) - 1
    while left:
        # 0b1100 & -0b1100 = 0b0100.
        reached = left & -left  # the lowest rank that is in no part yet
        part = []
        # `reached` grows by the peers of each rank that is taken, until no rank in it is left.
        while new := reached & left:
            rank = new.bit_length() - 1
            left &= ~(1 << rank)
            reached |= meets[rank]
            part.append(rank)
        parts.append(sorted(part))
    return parts


def broadcast_bytes(
    source: int,
    message: bytes,
    group: dist.ProcessGroup,
    device: torch.device | str = "cpu",
) -> bytes:
    """Return the `message` of global rank `source` on all ranks of `group`. Collective.

    Messages of the other ranks are ignored. `device` is one that the group's backend supports.
    """
    length = torch.tensor([len(message)], device=device)
    dist.broadcast(length, src=source, group=group)
    size = int(length)
    require_size(size)
    padded = bytearray(message.ljust(size, b"\0")[:size])
    values = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    dist.broadcast(values, src=source, group=group)
    return values.cpu().numpy().tobytes()


def _connected(
    world: World,
    name: str,
    ranks: Sequence[int],
    timeout_seconds: float,
) -> dist.ProcessGroupGloo:
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_seconds)
    # Without an address or interface of the user's: the address of the host's name.
    interface = os.environ.get(_INTERFACE, "").partition(",")[0]
    if world.address or interface:
        device = gloo.create_device(world.address or "", interface)
    else:
        device = gloo.create_default_device()
    options._devices = [device]
    group = gloo(world.part(f"groups/{name}"), ranks.index(world.rank), len(ranks), options)
    own_groups.add(group)
    return group

"""`World`: the processes of a job, and the store through which they find each other.

    torchrun, or a process group of the script    World.of_default_group()    a job of all its ranks
    processes with different default groups,      World(store, rank, size)    a job over all of them
    or without any                                                            for switches only

Connections are named by the world's own counter. All ranks of a job connect in the same order, so
they get equal names, even if their processes differed before. vLLM, FSDP2 and NCCL create groups of
torch, so engines can be built only in the first kind of world.
"""

from __future__ import annotations

import itertools
import socket
from contextlib import suppress

import torch.distributed as dist

from hybrid_engine.ranks.torch_internals import job_store


class World:
    """Place of one process among the processes of a job.

    Args:
        store: empty store that all ranks can reach: a FileStore or TCPStore, or better a
            PrefixStore on one with a different name for each job.
        rank: number of this process, from 0.
        size: number of processes.
        may_end: end this process as a last resort, if it waits for a failed rank in a library and
            no timeout ends the wait. Must be False in a process that serves others, which then has
            to limit its waits itself.
        is_default: the processes are the ranks of torch's default process group.
        address: address of the interface on which gloo listens; None: torch's choice.

    Attributes:
        rank: as above; so are `size`, `may_end`, `is_default` and `address`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        may_end: bool = True,
        is_default: bool = False,
        address: str | None = None,
    ) -> None:
        self._store = _connected(store)
        self._numbers = itertools.count()
        self._num_meetings = 0
        self.rank = rank
        self.size = size
        self.may_end = may_end
        self.is_default = is_default
        self.address = address

    @classmethod
    def of_default_group(cls) -> World:
        """Return a new world of the ranks of torch's default process group. All of them call it."""
        store = job_store()
        rank = dist.get_rank()
        # Number of this job in the group. A counter in the process would include other groups.
        # `add` returns the new value: 1 for the first job of the group.
        number = store.add(f"hybrid_engine/joined/{rank}", 1)
        prefixed = dist.PrefixStore(f"hybrid_engine/{number}", store)
        return cls(prefixed, rank, dist.get_world_size(), is_default=True)

    @property
    def meeting(self) -> str:
        """Name of the next rendezvous of all ranks; the first one is the start of the job."""
        return f"meeting/{self._num_meetings}"

    def begin_meeting(self) -> str:
        """Start the next rendezvous and return its name."""
        name = self.meeting
        self._num_meetings += 1
        return name

    def refuse(self, why: str, meeting: str) -> None:
        """Report to the ranks that wait in a rendezvous that this one does not come."""
        with suppress(RuntimeError):  # the store may be gone, with the job
            self._store.set(f"{meeting}/refused", why)

    def refusal(self, meeting: str) -> str:
        """Return why a rank does not come to a rendezvous; "" if none has refused."""
        key = f"{meeting}/refused"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def next_number(self) -> int:
        """Return a number that makes names unique; the same on all ranks."""
        return next(self._numbers)

    def part(self, name: str) -> dist.Store:
        """Return a part of the store, for use in turn: all parts share one connection."""
        return dist.PrefixStore(name, self._store)

    def own_connection(self, name: str) -> dist.Store:
        """Return a part of the store with a new connection, which waits on others do not block."""
        return dist.PrefixStore(name, _connected(self._store))


def _connected(store: dist.Store) -> dist.Store:
    """Return a new connection to `store`, with the same timeout."""
    connection: dist.Store = store.clone()  # type: ignore[attr-defined]  # not in the stubs
    connection.set_timeout(store.timeout)  # type: ignore[attr-defined]
    return connection


def store_at(address: str, family: socket.AddressFamily = socket.AF_INET) -> dist.TCPStore:
    """Return a new store at a free port of `address`, reachable by this address only.

    By default a TCPStore listens on all interfaces, for any host name, and does not
    authenticate its clients.
    """
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )

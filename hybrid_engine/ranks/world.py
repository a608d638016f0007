"""`World`: the processes of a job, and the store by which they find each other.

    torchrun, or a script's own process group      World.of_default_group()           one job of all its ranks
    processes with default groups of their own,    World(store, rank, size)           one job over all of them, for a
    or with none                                                                      switch: agreements, plan, fills

What ranks connect is named by the world's own numbers: all ranks of a job connect in the same order, whatever else
their processes have done before. vLLM, FSDP2 and NCCL make groups of torch's, so engines are built in the first kind
alone.
"""

from __future__ import annotations

import itertools
import socket

import torch.distributed as dist

from hybrid_engine.ranks.torch_internals import job_store


class World:
    """One process's place among those of a job.

    Attributes:
        rank, size: its number, from 0, and how many there are.
        is_default: they are the ranks of torch's default process group.
        may_end: a rank that waits in a library, where no timeout ends it, for one that failed is ended at last. Not to
            be of a process that serves others, which must then bound its waits itself.
        address: of the interface on which gloo listens; None: whichever torch takes.
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
        """`store`: one that all ranks reach, with nothing in it yet: a FileStore, a TCPStore, or better a PrefixStore
        over one, of a name for each job."""
        self._store, self._numbers, self._num_meetings = _connected(store), itertools.count(), 0
        self.rank, self.size, self.may_end, self.is_default = rank, size, may_end, is_default
        self.address = address

    @classmethod
    def of_default_group(cls) -> World:
        """The ranks of torch's default process group, for a job of its own. All of them call alike."""
        store, rank = job_store(), dist.get_rank()
        number = store.add(f"hybrid_engine/joined/{rank}", 1)  # of the group's jobs, whatever the process did before
        return cls(dist.PrefixStore(f"hybrid_engine/{number}", store), rank, dist.get_world_size(), is_default=True)

    @property
    def meeting(self) -> str:
        """The name of the next meeting of all ranks; the first is that where they join."""
        return f"meeting/{self._num_meetings}"

    def begin_meeting(self) -> str:
        """Its name; the one after it is the next."""
        name, self._num_meetings = self.meeting, self._num_meetings + 1
        return name

    def refuse(self, why: str, meeting: str) -> None:
        """Tell those who wait in a meeting for all to come that one of them does not."""
        self._store.set(f"{meeting}/refused", why)

    def refusal(self, meeting: str) -> str:
        """Why one of them does not come; "" where nobody says so."""
        key = f"{meeting}/refused"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def next_number(self) -> int:
        """One that makes names differ, the same on all ranks."""
        return next(self._numbers)

    def part(self, name: str) -> dist.Store:
        """A part of the store, by one connection for all parts: for what is connected in turn."""
        return dist.PrefixStore(name, self._store)

    def own_connection(self, name: str) -> dist.Store:
        """The same by a connection of its own: waits over others do not hold it up."""
        return dist.PrefixStore(name, _connected(self._store))


def _connected(store: dist.Store) -> dist.Store:
    """Another connection to a store, with its timeout."""
    other: dist.Store = store.clone()  # type: ignore[attr-defined]  # not in the stubs
    other.set_timeout(store.timeout)  # type: ignore[attr-defined]
    return other


def store_at(address: str, family: socket.AddressFamily = socket.AF_INET) -> dist.TCPStore:
    """A store that this address alone reaches, at a port of its own.

    By itself, a TCPStore listens on all interfaces, whatever host name it is given, and authenticates nobody.
    """
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

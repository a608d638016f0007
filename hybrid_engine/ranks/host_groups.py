"""Groups of a job's ranks by host: the ranks of each, and the first of each.

gloo's all-reduce goes around a ring, twice the number of ranks messages one after the other: 0.1 s among 2,048
(estimated), for a single number. So what all ranks must know goes by way of the hosts' first ranks (`HostLeaders`), and
what only the ranks of a host need stays there (`HostGroup`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hybrid_engine.ranks.forks import own_groups
from hybrid_engine.ranks.torch_internals import job_store


class HostGroup:
    """The ranks of this one's host, over gloo.

    Not one of torch's own groups: every rank of the job has to call for each of those, hundreds where there are
    hundreds of hosts. A rank that is not in one returns at once, unless the default group is bound to a device: then
    each call splits NCCL's communicator, on all ranks.
    """

    def __init__(self, rank: int, hosts: Sequence[str], timeout_seconds: float) -> None:
        """`hosts`: of all ranks, by rank. Collective: all ranks make their groups in the same order."""
        mates = [mate for mate, host in enumerate(hosts) if host == hosts[rank]]
        self._gloo: dist.ProcessGroupGloo | None = _connected(
            f"{next(_numbers)}/{mates[0]}", mates, rank, timeout_seconds
        )

    def begin_maximum(self, values: torch.Tensor) -> dist.Work:
        """Let every element be the largest of all ranks', in place, once what is returned has been waited for."""
        assert self._gloo is not None, "the group is closed"
        return _begin_maximum(self._gloo, values)

    def close(self) -> None:
        """End the connections; idempotent."""
        self._gloo = None


class HostLeaders:
    """A maximum over all ranks: over each host's, over the hosts' first, and over each host's again."""

    def __init__(self, rank: int, hosts: Sequence[str], timeout_seconds: float) -> None:
        """As of `HostGroup`."""
        first = {host: number for number, host in reversed(list(enumerate(hosts)))}
        leaders = sorted(first.values())
        number = next(_numbers)  # first: where a connection fails on one host alone, all ranks still count the same
        self._host = HostGroup(rank, hosts, timeout_seconds)
        self._leaders = _connected(f"{number}/leaders", leaders, rank, timeout_seconds) if rank in leaders else None

    def maximum(self, values: torch.Tensor) -> None:
        """Let every element be the largest of all ranks', in place. Raises RuntimeError as torch.distributed does."""
        # what is waited for is in no variable: an error's traceback would keep its connections open
        self._host.begin_maximum(values).wait()
        if self._leaders is not None:
            _begin_maximum(self._leaders, values).wait()
        self._host.begin_maximum(values).wait()

    def close(self) -> None:
        """End the connections; idempotent."""
        self._host.close()
        self._leaders = None


def _connected(name: str, ranks: Sequence[int], rank: int, timeout_seconds: float) -> dist.ProcessGroupGloo:
    store = dist.PrefixStore(f"hybrid_engine/hosts/{name}", job_store())
    group = dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), timedelta(seconds=timeout_seconds))
    own_groups.add(group)
    return group


def _begin_maximum(gloo: dist.ProcessGroupGloo, values: torch.Tensor) -> dist.Work:
    work: dist.Work = gloo.allreduce([values], dist.ReduceOp.MAX)  # type: ignore[attr-defined]  # not in torch's stubs
    return work


_numbers = itertools.count()

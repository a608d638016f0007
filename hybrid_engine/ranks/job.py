"""`Job`: what one rank knows of the job it belongs to, handed down to all that asks who is who.

    job = Job.join(timeout)      1. torchrun's process group, unless there is one          (ranks/start_up.py)
                                 2. an agreement of all ranks                              (ranks/agreement.py)
                                 3. the ranks tell each other their hosts, once       (ranks/host_groups.py)
    InferenceEngine(..., job), HybridEngine(...), save_checkpoint(..., job) ...
    job.close()                  ends the agreement, and the process group if it was made here

Nothing below the entry points asks torch.distributed for a rank or looks for its host: tests say what the hosts are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.ranks.agreement import Agreement
from hybrid_engine.ranks.forks import Ends
from hybrid_engine.ranks.host_groups import HostGroup
from hybrid_engine.ranks.hosts import host_id
from hybrid_engine.ranks.process_groups import end_groups, let_device_finish
from hybrid_engine.ranks.start_up import join_process_group, own_device


@dataclass(frozen=True, eq=False)
class Job:
    """One rank's place among all ranks of a job.

    Attributes:
        rank: global rank of this process.
        hosts: of all ranks, by rank; equal for two of them exactly when they can read each other's memory.
        device: of this rank's training weights.
        timeout_seconds: longest wait for another rank, in the agreement and in groups; the configuration's.
        agreement: of all ranks.
    """

    rank: int
    hosts: tuple[str, ...]
    device: torch.device
    timeout_seconds: float
    agreement: Agreement
    _ends: Ends = field(repr=False)

    @classmethod
    def join(cls, timeout_seconds: float, *, host: str | None = None, device: torch.device | None = None) -> Job:
        """Take part in the job; in the process group that is there, else under torchrun. Collective.

        Args:
            timeout_seconds: longest wait for another rank; for the start, at least `agreement.SECONDS_TO_BUILD`.
            host: where this rank is; default: what /proc says.
            device: of the training weights; default: the current GPU, without one the CPU.

        Raises ConfigError where there is neither a process group nor torchrun, LostRankError when a rank is missing.
        """
        device = device or own_device()  # before NCCL, which takes the current one
        with Ends() as undo:
            if join_process_group(timeout_seconds):
                undo.callback(_end_process_group)
            rank = dist.get_rank()
            agreement = Agreement(rank, dist.get_world_size(), timeout_seconds)
            undo.callback(agreement.close)
            hosts = agreement.gather(host or host_id(), "exchange of hosts")
            agreement.use_hosts(hosts)
            return cls(rank, tuple(hosts), device, timeout_seconds, agreement, undo.pop_all())

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    def new_group(
        self, backend: str, owner: ExitStack, parts: Sequence[Sequence[int]] | None = None
    ) -> dist.ProcessGroup:
        """A group for one purpose only: after a timeout it is dead. It ends with `owner`. Collective.

        Of all ranks, or of those in this rank's part; each rank is in one of the `parts`.
        """
        with self.agreement.phase(f"connecting a {backend} group"):
            # NCCL's watchdog ends the process at a group's timeout: whoever waits for a peer is to say so before
            seconds = self.timeout_seconds * (2 if backend == "nccl" else 1)
            groups = [
                (ranks, dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=seconds)))
                for ranks in parts or [range(self.world_size)]
            ]
            (group,) = [each for ranks, each in groups if self.rank in ranks]
            owner.callback(end_groups, group)
            # A group's connections are made at first use, NCCL's by all ranks together: they would wait for one that
            # has nothing to send in the first bucket.
            dist.all_reduce(torch.zeros(1, device=self.device if backend == "nccl" else "cpu"), group=group)
        return group

    def new_host_group(self, owner: ExitStack) -> HostGroup:
        """A group of this host's ranks, for one purpose only. It ends with `owner`. Collective, over all hosts."""
        with self.agreement.phase("connecting the ranks of a host"):
            group = HostGroup(self.rank, self.hosts, self.timeout_seconds)
            owner.callback(group.close)
        return group

    @property
    def is_inherited(self) -> bool:
        """Whether this is the copy of a child that the rank has forked, which has no part in the job."""
        return self._ends.is_inherited

    def require_timeout(self, seconds: float) -> None:
        """Raise ConfigError unless `seconds`, by which vLLM and Megatron wait, are those by which all others do."""
        if seconds != self.timeout_seconds:
            problem = f"{seconds:g}, but the job was joined with {self.timeout_seconds:g}"
            raise ConfigError([Violation("generate_config.timeout_seconds", problem, "Pass Job.join this value")])

    def close(self) -> None:
        """End what `join` made, the last first; idempotent. Close what uses the job before.

        In a child that was forked from this rank it does nothing, as do all that end what uses the job.
        """
        self._ends.close()


def _end_process_group() -> None:
    if dist.is_initialized():  # the caller may have ended it
        let_device_finish()
        dist.destroy_process_group()

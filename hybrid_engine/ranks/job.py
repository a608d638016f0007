"""`Job`: what one rank knows of the job it belongs to, handed down to all that asks who is who.

    job = Job.join(timeout)      1. torchrun's ranks meet in one process group, unless there is one
                                 2. they tell each other their hosts, once, by way of its store
                                 3. an agreement of all ranks                              (ranks/agreement.py)
    InferenceEngine(..., job), HybridEngine(...), save_checkpoint(..., job) ...
    job.close()                  ends the agreement, and the process group if it was made here

Nothing below the entry points asks torch.distributed for a rank or looks for its host: tests say what the hosts are.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from hybrid_engine.errors import ConfigError, LostRankError, Violation
from hybrid_engine.ranks.agreement import SECONDS_TO_BUILD, Agreement
from hybrid_engine.ranks.groups import RankGroup, connected_parts, end_groups, host_id, let_device_finish, ranks_by_host
from hybrid_engine.ranks.process import Ends
from hybrid_engine.ranks.world import World


def join_process_group(timeout_seconds: float) -> bool:
    """Join torchrun's process group unless there is one; True when it was created here.

    Raises ConfigError outside of torchrun, and LostRankError when not all ranks start.
    """
    if dist.is_initialized():
        return False
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError([Violation("environment", f"{', '.join(missing)} not set", "Start the script with torchrun")])
    start_up = max(timeout_seconds, SECONDS_TO_BUILD)
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=start_up)))
        # torchrun's store outlives a group: under its own keys a second one would find the first one's addresses
        own_store = dist.PrefixStore(f"hybrid_engine/{next(_numbers)}", store)
        _meet(own_store, rank, world_size, start_up)
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostRankError(
            f"the ranks did not meet at {where} within {start_up:g} s ({error}): see the logs of those that are "
            "missing, or raise generate_config.timeout_seconds"
        ) from error
    timeout = datetime.timedelta(seconds=timeout_seconds)
    dist.init_process_group(default_backend(), store=own_store, rank=rank, world_size=world_size, timeout=timeout)
    return True


def own_device() -> torch.device:
    """The GPU of this process, made the current one, which Megatron and vLLM take; the CPU where there is none.

    Ranks of a host take the GPUs in order of LOCAL_RANK, and a process that sees one GPU takes that. A current device
    that the caller chose stays; device 0 is current where nobody chose, so it counts as not chosen.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = torch.cuda.current_device() or int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def default_backend() -> str:
    """Backend of the job's process group. On GPUs NCCL alone, as Megatron's own scripts have it.

    Megatron's groups, dozens on each rank, take the backends of this one, and gloo connects every rank with every other
    of each group. What needs the CPU has groups of its own.
    """
    return "nccl" if torch.cuda.is_available() else "gloo"


def _meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    seconds: float,
    said: str = "",
    refusal: Callable[[], str] = lambda: "",
) -> list[str]:
    """Wait until every rank is there, and hear what it says: they import for a minute on a busy host, and not at one
    speed. Afterwards a wait for a peer takes no longer than the timeout.

    `refusal`: asked meanwhile for why one of them does not come at all.

    Raises LostRankError naming the missing ranks, or with the refusal.
    """
    names = [f"started/{each}" for each in range(world_size)]
    store.set(names[rank], said)
    try:
        if rank == 0:  # for all, who would each ask the store for as many answers
            _wait(store, names, seconds, refusal)
            store.set("all", json.dumps([store.get(name).decode() for name in names]))
        _wait(store, ["all"], seconds, refusal)
    except RuntimeError as error:  # a FileStore raises no DistError
        missing = ["0"]  # which has the store, and ends the wait for all
        with suppress(RuntimeError):
            missing = [str(each) for each, name in enumerate(names) if not store.check([name])] or missing
        raise LostRankError(
            f"rank {', '.join(missing)} of {world_size} did not start within {seconds:g} s: see its log, or raise "
            "generate_config.timeout_seconds"
        ) from error
    told: list[str] = json.loads(store.get("all"))
    return told


def _wait(store: dist.Store, names: list[str], seconds: float, refusal: Callable[[], str]) -> None:
    """Wait until the store has all names. Raises LostRankError for a refusal, RuntimeError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (why := refusal()):
        left = deadline - time.monotonic()
        try:
            store.wait(names, datetime.timedelta(seconds=max(min(left, 1.0), 0.001)))
        except RuntimeError:
            if left < 1.0:
                raise
        else:
            return
    raise LostRankError(why)


_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Job:
    """One rank's place among all ranks of a job.

    Attributes:
        world: the ranks.
        hosts: of all ranks, by rank; equal for two of them exactly when they can read each other's memory.
        devices: of all ranks, by rank; equal for two of them exactly when they are processes on one GPU.
        device: of this rank's training weights.
        timeout_seconds: longest wait for another rank, in the agreement and in groups; the configuration's.
        agreement: of all ranks.
    """

    world: World
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    device: torch.device
    timeout_seconds: float
    agreement: Agreement
    _ends: Ends = field(repr=False)

    @classmethod
    def join(
        cls,
        timeout_seconds: float,
        *,
        host: str | None = None,
        device: torch.device | None = None,
        device_name: str | None = None,
        world: World | None = None,
    ) -> Job:
        """Take part in the job; in the process group that is there, else under torchrun. Collective.

        Args:
            timeout_seconds: longest wait for another rank; for the start of the ranks of the process group, at least
                `agreement.SECONDS_TO_BUILD`. Those of a `world` have started.
            host: where this rank is; default: `groups.host_id()`.
            device: of the training weights; default: the current GPU, without one the CPU.
            device_name: by which others tell whether they are on it too; default: a GPU's UUID, on a CPU this rank's.
            world: of the job, where that is not the process group's.

        Raises ConfigError where there is neither a process group nor torchrun, LostRankError when a rank is missing.
        """
        device = device or own_device()  # before NCCL, which takes the current one
        with Ends() as undo:
            seconds = timeout_seconds
            if world is None:
                if join_process_group(timeout_seconds):
                    undo.callback(_end_process_group)
                world, seconds = World.of_default_group(), max(timeout_seconds, SECONDS_TO_BUILD)
            meeting = world.begin_meeting()
            store, refusal = world.part(meeting), functools.partial(world.refusal, meeting)
            said = json.dumps([host or host_id(), device_name or _name_of(device, world.rank)])
            told = map(json.loads, _meet(store, world.rank, world.size, seconds, said, refusal))
            hosts, devices = map(tuple, zip(*told, strict=True))
            agreement = Agreement(world, hosts, timeout_seconds)
            undo.callback(agreement.close)
            return cls(world, hosts, devices, device, timeout_seconds, agreement, undo.pop_all())

    def meet(self) -> None:
        """Wait until all ranks come here, while none is in a collective: a rank that says that it does not come
        (`World.refuse`), or has ended, is known within a second. Collective.

        Raises LostRankError where one does not come.
        """
        world, meeting = self.world, self.world.begin_meeting()
        store, seconds = world.part(meeting), self.timeout_seconds
        with self.agreement.by_the_store("meeting") as ended:
            try:
                _meet(store, world.rank, world.size, seconds, refusal=lambda: world.refusal(meeting) or ended())
            except BaseException as error:  # what one knows, or that it was interrupted, all are to hear
                with suppress(RuntimeError):  # a store that is gone
                    world.refuse(str(error) or type(error).__name__, meeting)
                raise

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.size

    def new_group(self, owner: ExitStack, parts: Sequence[Sequence[int]] | None = None) -> RankGroup:
        """A group over gloo, for one purpose only. It ends with `owner`. Collective, of all ranks.

        Of all ranks, or of those in this rank's part; each rank is in one of the `parts`.
        """
        return self._connect(owner, self._own_part(parts))

    def new_nccl_group(self, owner: ExitStack, parts: Sequence[Sequence[int]] | None = None) -> dist.ProcessGroup:
        """The same over NCCL, which connects a rank with those that it sends something. Never run.

        Raises ConfigError where these are not the ranks of torch's default process group.
        """
        with self.agreement.phase("connecting GPUs"):
            if not self.world.is_default:
                problem = "these ranks are not torch's default process group, in which alone GPUs can send messages yet"
                raise ConfigError([Violation("generate_config.transport", problem, "Run them on one host")])
            # NCCL's watchdog ends the process at a group's timeout: whoever waits for a peer is to say so before
            timeout = timedelta(seconds=2 * self.timeout_seconds)
            # All ranks call for all parts: with use_local_synchronization torch would name a group by how many groups
            # a rank has, which differs where Megatron's stages do.
            own = self._own_part(parts)
            for ranks in parts or [own]:
                made = dist.new_group(ranks, timeout, "nccl")
                if ranks is own:
                    group = made
                    owner.callback(end_groups, group)
            if len(own) > 1:  # the first operation is everybody's: they would wait for one that has nothing to send
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return group

    def parts_that_meet(self, peers: Iterable[int]) -> list[list[int]] | None:
        """All ranks in parts that have nothing to say to each other; None where no rank has. Collective.

        `peers`: whom this rank sends something, or from whom it receives; itself, too, where it does so by a group.
        """
        own = sum(1 << peer for peer in {*peers})  # as bits: what 2,048 ranks say is half a MB
        message = own.to_bytes(-(-self.world_size // 8), "little")
        told = [int.from_bytes(each, "little") for each in self.agreement.gather(message, bytes, "who meets whom")]
        return connected_parts(told) if any(told) else None

    def _own_part(self, parts: Sequence[Sequence[int]] | None) -> Sequence[int]:
        (own,) = [ranks for ranks in parts or [range(self.world_size)] if self.rank in ranks]
        return own

    def new_host_group(self, owner: ExitStack) -> RankGroup:
        """A group of this host's ranks, for one purpose only. It ends with `owner`. Collective, over all hosts."""
        return self._connect(owner, self._own_part(ranks_by_host(self.hosts)))

    def _connect(self, owner: ExitStack, ranks: Sequence[int]) -> RankGroup:
        with self.agreement.phase("connecting ranks"):
            group = RankGroup(self.world, f"{self.world.next_number()}/{ranks[0]}", ranks, self.timeout_seconds)
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


def _name_of(device: torch.device, rank: int) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"rank {rank}"
    return str(torch.cuda.get_device_properties(device).uuid)


def _end_process_group() -> None:
    if dist.is_initialized():  # the caller may have ended it
        let_device_finish()
        dist.destroy_process_group()

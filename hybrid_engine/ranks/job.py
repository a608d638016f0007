"""`Job`: place of one rank in the job, passed down to all code that needs ranks or hosts.

    job = Job.join(timeout)      1. torchrun's ranks join a process group, unless one exists
                                 2. they exchange their hosts once, through the job's store
                                 3. an agreement of all ranks                  (ranks/agreement.py)
    InferenceEngine(..., job), HybridEngine(...), save_checkpoint(..., job) ...
    job.close()                  ends the agreement, and the process group if `join` created it

Code below the entry points never reads its rank from torch.distributed nor its host from the
system, so tests can set the hosts.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from hybrid_engine.errors import ConfigError, LostRankError
from hybrid_engine.ranks.agreement import BUILD_TIMEOUT, Agreement
from hybrid_engine.ranks.groups import (
    RankGroup,
    connected_parts,
    end_groups,
    host_id,
    ranks_by_host,
)
from hybrid_engine.ranks.signals_and_forks import Ends
from hybrid_engine.ranks.torch_internals import abort_group, without_watchdog
from hybrid_engine.ranks.uncaught import ignore_known_warnings
from hybrid_engine.ranks.world import World

logger = logging.getLogger("hybrid_engine")

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_FIRST_PAUSE = 0.001
"""Between two looks at the store; each pause is twice as long as the one before."""
_LONGEST_PAUSE = 0.5
"""2,048 ranks that wait a minute for one make 4,000 requests a second of the store."""

_numbers = itertools.count()


def join_process_group(timeout_seconds: float) -> bool:
    """Join torchrun's process group unless there is one; return True if it was created here.

    Raises ConfigError outside of torchrun, LostRankError if not all ranks start.
    """
    if dist.is_initialized():
        return False
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        problem = f"{', '.join(missing)} not set"
        remedy = "Start the script with hybrid-engine run"
        raise ConfigError.of("environment", problem, remedy, code="missing-variables")
    seconds = max(timeout_seconds, BUILD_TIMEOUT)
    try:
        rendezvous = dist.rendezvous("env://", timeout=timedelta(seconds=seconds))
        store, rank, world_size = next(rendezvous)
        # torchrun's store outlives the group. Without a prefix, a second group would read the
        # addresses of the first.
        own_store = dist.PrefixStore(f"hybrid_engine/{next(_numbers)}", store)
        _meet(own_store, rank, world_size, seconds)
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostRankError(
            f"the ranks did not meet at {address} within {seconds:g} s ({error}): see the logs of "
            "the missing ranks, or raise generate_config.timeout_seconds",
            code="no-rendezvous",
        ) from error
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        default_backend(),
        store=own_store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return True


def own_device() -> torch.device:
    """Return the GPU of this process after making it current; without GPUs, the CPU.

    Megatron and vLLM use the current device. Ranks of a host take its GPUs in order of LOCAL_RANK,
    and a process that sees a single GPU takes that one. A current device other than 0 was chosen by
    the caller and stays; 0 is the default, so it counts as not chosen.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = torch.cuda.current_device()
    if index == 0:
        index = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def default_backend() -> str:
    """Return the backend of the job's process group: on GPUs only NCCL, as in Megatron's scripts.

    Megatron's groups, dozens on each rank, take the backends of this one, and gloo would connect
    every rank with every other of each group. Traffic on the CPU has separate groups.
    """
    return "nccl" if torch.cuda.is_available() else "gloo"


def _meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    seconds: float,
    message: str = "",
    refusal: Callable[[], str] = lambda: "",
) -> list[str]:
    """Wait until every rank has come, and return the `message` of each, by rank.

    Ranks import for up to a minute on a busy host, and not equally fast; after this rendezvous the
    timeout of a wait for a peer need not include that. `refusal` is called while waiting, and
    returns why some rank will not come, "" if all may.

    Raises LostRankError naming the missing ranks, or with the refusal.
    """
    names = [f"started/{other}" for other in range(world_size)]
    store.set(names[rank], message)
    try:
        # Rank 0 collects the messages, so that not every rank reads every other's key.
        if rank == 0:
            _wait(store, names, seconds, refusal)
            collected = [store.get(name).decode() for name in names]
            store.set("all", json.dumps(collected))
        _wait(store, ["all"], seconds, refusal)
    except RuntimeError as error:  # a FileStore raises no DistError
        missing: list[str] = []
        with suppress(RuntimeError):
            missing = [str(other) for other, name in enumerate(names) if not store.check([name])]
        # If none is missing, or the store is lost, it was rank 0, which ends the wait of all.
        missing_ranks = ", ".join(missing or ["0"])
        raise LostRankError(
            f"rank {missing_ranks} of {world_size} did not start within {seconds:g} s: see its "
            "log, or raise generate_config.timeout_seconds",
            code="ranks-not-started",
        ) from error
    messages: list[str] = json.loads(store.get("all"))
    return messages


def _wait(store: dist.Store, names: list[str], seconds: float, refusal: Callable[[], str]) -> None:
    """Wait until the store has all `names`.

    Raises LostRankError for a refusal, RuntimeError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    while True:
        # In this order: a rank may leave the job as soon as all have come.
        why = refusal()
        # Not `store.wait`, which prints two lines whenever its timeout ends.
        if store.check(names):
            return
        if why:
            raise LostRankError(why, code="rank-lost")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all came within {seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


@dataclass(frozen=True, eq=False)
class Job:
    """Place of one rank among all ranks of a job.

    Attributes:
        world: the ranks.
        hosts: host of each rank, by rank; equal exactly for ranks that can read each other's
            memory.
        devices: device of each rank, by rank; equal exactly for processes on one GPU.
        device: device of this rank's training weights.
        timeout_seconds: longest wait for another rank in the agreement and in groups.
        agreement: agreement of all ranks.
    """

    world: World
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    device: torch.device
    timeout_seconds: float
    agreement: Agreement
    _ends: Ends = field(repr=False)
    _built_at: list[float] = field(default_factory=lambda: [time.monotonic()], repr=False)

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
        """Join the job of the existing process group, or of torchrun. Collective.

        Args:
            timeout_seconds: longest wait for another rank. The ranks of a process group may take at
                least `agreement.BUILD_TIMEOUT` to start; those of a `world` have started.
            host: id of this rank's host; default: `groups.host_id()`.
            device: device of the training weights; default: the current GPU, without GPUs the CPU.
            device_name: id that ranks on one device share; default: a GPU's UUID, on a CPU the
                rank.
            world: ranks of the job, if they are not those of the process group.

        Raises ConfigError without a process group and torchrun, LostRankError if a rank is missing.
        """
        ignore_known_warnings()
        # Chosen before NCCL starts, because NCCL uses the current device.
        device = device or own_device()
        with Ends() as undo:
            seconds = timeout_seconds
            if world is None:
                if join_process_group(timeout_seconds):
                    undo.callback(_end_process_group)
                world = World.of_default_group()
                seconds = max(timeout_seconds, BUILD_TIMEOUT)
            meeting = world.begin_meeting()
            store = world.part(meeting)
            refusal = functools.partial(world.refusal, meeting)
            host = host or host_id()
            message = json.dumps([host, device_name or _name_of(device, world.rank)])
            messages = _meet(store, world.rank, world.size, seconds, message, refusal)
            pairs = map(json.loads, messages)
            hosts, devices = map(tuple, zip(*pairs, strict=True))
            agreement = Agreement(world, hosts, timeout_seconds)
            undo.callback(agreement.close)
            return cls(world, hosts, devices, device, timeout_seconds, agreement, undo.pop_all())

    def meet(self) -> None:
        """Wait until all ranks have come, none of them in a collective. Collective.

        Raises LostRankError, within a second, if a rank refuses (`World.refuse`) or has ended.
        """
        world = self.world
        meeting = world.begin_meeting()
        store = world.part(meeting)
        with self.agreement.without_collective("meeting") as ended:

            def refusal() -> str:
                return world.refusal(meeting) or ended()

            try:
                _meet(store, world.rank, world.size, self.timeout_seconds, refusal=refusal)
            except BaseException as error:
                # The other ranks must learn the reason, or that this one was interrupted.
                world.refuse(str(error) or type(error).__name__, meeting)
                raise

    @contextmanager
    def building(self, what: str = "the engines") -> Iterator[None]:
        """Run a set-up, like `Agreement.building`, after a line about it. Collective."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        with self.agreement.building():
            self.say(f"building {what} on {ranks} ...")
            self._built_at.append(time.monotonic())
            yield

    def built(self, part: str) -> None:
        """Say that a part of the set-up is complete, and its seconds, since the part before."""
        self._built_at.append(time.monotonic())
        self.say(f"{part} in {self._built_at[-1] - self._built_at[-2]:.0f} s")

    def say(self, text: str) -> None:
        """Print a line on rank 0, unless the logger `hybrid_engine` leaves out warnings."""
        if self.rank == 0 and logger.isEnabledFor(logging.WARNING):
            # Nobody may read it any more, which must not end a set-up.
            with suppress(OSError, ValueError):
                print(text, flush=True)

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.size

    def new_group(
        self,
        owner: ExitStack,
        parts: Sequence[Sequence[int]] | None = None,
    ) -> RankGroup:
        """Return a new gloo group, for one purpose only, which ends with `owner`. Collective.

        It consists of all ranks or, with `parts` that partition them, of those in this rank's part.
        """
        ranks = self._own_part(parts)
        with self.agreement.phase("connecting ranks"):
            name = f"{self.world.next_number()}/{ranks[0]}"
            group = RankGroup(self.world, name, ranks, self.timeout_seconds)
            owner.callback(group.close)
        return group

    def new_nccl_group(
        self,
        owner: ExitStack,
        parts: Sequence[Sequence[int]] | None = None,
    ) -> dist.ProcessGroup:
        """Return a new NCCL group like `new_group`; it connects ranks when they exchange messages.

        Raises ConfigError if the ranks are not those of torch's default process group.
        """
        with ExitStack() as undo:
            with self.agreement.phase("connecting GPUs"):
                if not self.world.is_default:
                    raise ConfigError.of(
                        "generate_config.transport",
                        "GPUs exchange messages only between the ranks of torch's default process "
                        "group, which these are not",
                        "Run the ranks on one host",
                        code="not-default-group",
                    )
                timeout = timedelta(seconds=2 * self.timeout_seconds)
                # All ranks create the groups of all parts. With use_local_synchronization torch
                # would name a group by the number of groups of the rank, which differs between
                # Megatron's stages.
                own_part = self._own_part(parts)
                for part in parts or [own_part]:
                    with without_watchdog():
                        created = dist.new_group(part, timeout, "nccl")
                    if part is own_part:
                        group = created
                        owner.callback(end_groups, group)
                        # If this rank fails, the others must not wait for it in the group forever.
                        undo.callback(abort_group, group)
                # All ranks take part in the first operation of a group, which is why it is done
                # here: later some ranks may have nothing to send.
                if len(own_part) > 1:
                    dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            undo.pop_all()
        return group

    def parts_that_meet(self, peers: Iterable[int]) -> list[list[int]] | None:
        """Return all ranks in parts that exchange nothing with each other. Collective.

        `peers`: ranks with which this rank exchanges messages in a group, possibly including
        itself. Returns None if no rank has peers.
        """
        # As bits, because 2,048 ranks then send half a MB in total.
        bits = sum(1 << peer for peer in set(peers))
        nbytes = -(-self.world_size // 8)
        message = bits.to_bytes(nbytes, "little")
        messages = self.agreement.gather(message, bytes, "who meets whom")
        meets = [int.from_bytes(peers_of_rank, "little") for peers_of_rank in messages]
        return connected_parts(meets) if any(meets) else None

    def _own_part(self, parts: Sequence[Sequence[int]] | None) -> Sequence[int]:
        if not parts:
            return range(self.world_size)
        (own_part,) = [part for part in parts if self.rank in part]
        return own_part

    def new_host_group(self, owner: ExitStack) -> RankGroup:
        """Return a new group of this host's ranks, as `new_group`. Collective over all hosts."""
        return self.new_group(owner, ranks_by_host(self.hosts))

    @property
    def is_inherited(self) -> bool:
        """True in a child that the rank has forked, which does not belong to the job."""
        return self._ends.is_inherited

    def require_timeout(self, seconds: float) -> None:
        """Raise ConfigError unless vLLM's and Megatron's timeout, `seconds`, is that of the job."""
        if seconds != self.timeout_seconds:
            raise ConfigError.of(
                "generate_config.timeout_seconds",
                f"{seconds:g}, but the job was joined with {self.timeout_seconds:g}",
                "Pass Job.join this value",
                code="different-timeouts",
            )

    def close(self) -> None:
        """Undo `join` in reverse order; idempotent. Users of the job must be closed before.

        Does nothing in a forked child of this rank, as for everything that uses the job.
        """
        self._ends.close()


def _name_of(device: torch.device, rank: int) -> str:
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"rank {rank}"
    return str(torch.cuda.get_device_properties(device).uuid)


def _end_process_group() -> None:
    # The caller may have destroyed it.
    if dist.is_initialized():
        dist.destroy_process_group()

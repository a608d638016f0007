"""Ranks as threads of one process, of which one runs at a time, in an order that the test chooses.

    RankThreads(4, late=2, early=True).run(lambda world: ...)       # the result of each rank

Only gloo and the waits for the job's store are replaced: groups, agreement, transports and fences
are the real ones. A rank hands over whenever it posts an operation or waits for one. The late rank
runs only when no other can go on, so the others are as far ahead of it as they ever get. Messages
move as soon as both ends have posted them (`early`), or when an end waits for them: memory that is
written too soon, or read too late, has other contents in one of the two. If every rank waits, all
of them raise `Stuck` at once, where real ranks would wait for a timeout.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from hybrid_engine.ranks import agreement, failure_watch, groups, job
from hybrid_engine.ranks.world import World

T = TypeVar("T")


class Stuck(BaseException):
    """Every rank waits; not an Exception, so that no rank handles it as a failure."""


class RankThreads:
    """Scheduler of the ranks, and the exchange between them.

    Args:
        num_ranks: number of ranks.
        late: rank that runs only when no other can go on; None: no such rank.
        early: messages move as soon as both ends have posted them.
    """

    def __init__(self, num_ranks: int, late: int | None = None, *, early: bool = False) -> None:
        self.early = early
        self.posted: defaultdict[object, dict[object, Any]] = defaultdict(
            dict
        )  # by operation, then by end
        self._num_ranks = num_ranks
        self._late = late
        self._store = dist.HashStore()
        self._place = threading.local()
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[Callable[[], bool], str, bool]] = {}
        self._num_ended = 0
        self._turn: int | None = None
        self._stuck = ""

    def run(self, body: Callable[[World], T]) -> list[T]:
        """Run `body` on every rank; return the results by rank, or raise the first error.

        The world is that of a job of its own; `Job.join` inside the block joins another one.
        """
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def run_rank(rank: int) -> None:
            self._place.rank = rank
            try:
                self.wait(lambda: True, "the start")
                results[rank] = body(self._new_world())
            except BaseException as error:
                errors.append(error)
            with self._changed:
                self._num_ended += 1
                self._choose()

        clock = SimpleNamespace(monotonic=time.monotonic, sleep=self._sleep)
        with ExitStack() as patches:
            for owner, name, replacement in (
                (groups, "_connected", self._connect),
                (
                    job,
                    "_wait",
                    lambda store, names, *_: self.wait(
                        lambda: store.check(names), f"store: {names}"
                    ),
                ),
                (agreement, "time", clock),
                (failure_watch, "time", clock),
                (job, "join_process_group", lambda _: False),
                (World, "of_default_group", self._new_world),
            ):
                patches.enter_context(mock.patch.object(owner, name, replacement))
            threads = [
                threading.Thread(target=run_rank, args=(rank,)) for rank in range(self._num_ranks)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        errors.sort(key=lambda error: isinstance(error, Stuck))
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self._num_ranks)]

    def _sleep(self, seconds: float) -> None:
        if hasattr(self._place, "rank"):
            self.wait(lambda: True, "a time", is_idle=True)
        time.sleep(min(seconds, 0.01) if hasattr(self._place, "rank") else seconds)

    def wait(self, ready: Callable[[], bool], what: str, *, is_idle: bool = False) -> None:
        """Let other ranks run until it is this one's turn again, with `ready` true.

        An idle rank, which only looks again, comes after all others.
        """
        rank = self._place.rank
        with self._changed:
            self._waiting[rank] = ready, what, is_idle
            self._choose()
            self._changed.wait_for(lambda: self._stuck or self._turn == rank)
            del self._waiting[rank]
        if self._stuck:
            raise Stuck(self._stuck)

    def _choose(self) -> None:
        if len(self._waiting) + self._num_ended < self._num_ranks or not self._waiting:
            return
        able = [(is_idle, rank) for rank, (ready, _, is_idle) in self._waiting.items() if ready()]
        # The one that runs goes on for as long as it can.
        before = self._turn
        order = sorted(
            (is_idle, rank == self._late, rank != before, rank) for is_idle, rank in able
        )
        self._turn = order[0][-1] if order else None
        if self._turn is None:
            self._stuck = "; ".join(
                f"rank {rank} waits for {what}"
                for rank, (_, what, _) in sorted(self._waiting.items())
            )
        self._changed.notify_all()

    def _new_world(self) -> World:
        rank = self._place.rank
        # Only gloo would use the address: it tells the groups of different jobs apart.
        name = f"job {self._store.add(f'jobs/{rank}', 1)}"
        return World(dist.PrefixStore(name, self._store), rank, self._num_ranks, address=name)

    def _connect(
        self, world: World, name: str, ranks: Sequence[int], timeout_seconds: float
    ) -> _Gloo:
        return _Gloo(self, f"{name} of {world.address}", ranks.index(world.rank), len(ranks))


@dataclass(frozen=True)
class _Work:
    """An operation of a rank; `finish` reads and writes tensors once it is `ready`."""

    ranks: RankThreads
    what: str
    ready: Callable[[], bool]
    finish: Callable[[], object]

    def wait(self, timeout: timedelta | None = None) -> None:
        self.ranks.wait(self.ready, self.what)
        self.finish()

    def is_completed(self) -> bool:
        return self.ready()


class _Gloo:
    """Takes the place of gloo's group on the rank at `position`."""

    def __init__(self, ranks: RankThreads, name: str, position: int, size: int) -> None:
        self._ranks = ranks
        self._name = name
        self._position = position
        self._size = size
        self._numbers: defaultdict[object, itertools.count[int]] = defaultdict(itertools.count)

    def allreduce(self, tensors: list[torch.Tensor], operation: object) -> _Work:
        assert operation is dist.ReduceOp.MAX
        (values,) = tensors
        return self._meet(
            "a maximum", values, lambda parts: values.copy_(torch.stack(parts).amax(0))
        )

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> _Work:
        def finish(parts: Sequence[torch.Tensor]) -> None:
            for row, part in zip(outputs[0], parts, strict=True):
                row.copy_(part)

        return self._meet("a gather", inputs[0], finish)

    def broadcast(self, values: torch.Tensor, source: int) -> _Work:
        return self._meet("a broadcast", values, lambda parts: values.copy_(parts[source]))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._exchange("sent", tensors[0], (self._position, peer))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._exchange("received", tensors[0], (peer, self._position))

    def _meet(
        self, what: str, values: torch.Tensor, finish: Callable[[Sequence[torch.Tensor]], object]
    ) -> _Work:
        number = next(self._numbers[None])
        parts = self._ranks.posted[self._name, number]
        parts[self._position] = values.clone()
        what = f"{what}, operation {number} of group {self._name}"
        return self._begin(
            what,
            lambda: len(parts) == self._size,
            lambda: finish([*map(parts.get, range(self._size))]),
        )

    def _exchange(self, end: str, values: torch.Tensor, edge: tuple[int, int]) -> _Work:
        number = next(self._numbers[end, edge])
        message = self._ranks.posted[self._name, edge, number]
        message[end] = values

        def move() -> None:
            if "is moved" not in message:
                # As gloo, this takes a shorter message than was awaited.
                message["received"][: len(message["sent"])] = message["sent"]
                message["is moved"] = True

        what = f"message {number} {end} {edge} of group {self._name}"
        work = self._begin(what, lambda: {"sent", "received"} <= message.keys(), move)
        if self._ranks.early and work.ready():
            move()
        return work

    def _begin(self, what: str, ready: Callable[[], bool], finish: Callable[[], object]) -> _Work:
        self._ranks.wait(lambda: True, what)
        return _Work(self._ranks, what, ready, finish)

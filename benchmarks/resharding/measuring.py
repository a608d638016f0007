"""How a contender is timed: all ranks start together, the slowest one counts, the median of several runs is kept.

A slow contender is given fewer runs, so that it does not hold up the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybrid_engine.ranks.digests import box_digest

COMMIT = "commit"
"""The phase that is reported apart: vLLM's own repacking, the same for every contender."""

ALLOCATE = "allocate"
"""The phase in which fresh memory for vLLM's weights is taken; part of every contender's time who writes there."""

Digests = Mapping[str, str]
"""Parameter name -> digest of its bytes, as vLLM's loader lays it out."""


class Contender(Protocol):
    """One way to bring the weights to where they are needed. All methods are collective."""

    def prepare(self) -> None:
        """Before every run, not timed: undo the run before."""

    def run(self, clock: Clock) -> None:
        """Timed. `clock.phase` splits the time; what is in phase `COMMIT` is reported apart."""

    def digesting(self) -> AbstractContextManager[Digests]:
        """Around a run: gives what it wrote on this rank, complete at the end of the block."""

    def close(self) -> None:
        """Give back all memory."""


@dataclass
class Clock:
    """Seconds by phase of one run on one rank."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to phase `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add to a phase what was timed elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


@dataclass(frozen=True)
class Timing:
    """The median run of a contender, on its slowest rank.

    Attributes:
        seconds: without the commit. commit_seconds: the commit, of the same rank and run.
        allocate_seconds: part of `seconds`.
        by_phase: phases of that rank and run.
        fastest, slowest: of all runs, without the commit.
        num_runs: how many.
    """

    seconds: float
    commit_seconds: float
    allocate_seconds: float
    by_phase: Mapping[str, float]
    fastest: float
    slowest: float
    num_runs: int


def measure(contender: Contender, num_runs: int, budget: float) -> tuple[Timing, Digests]:
    """Time up to `num_runs` runs after one that warms up, whose result is digested. Raises what the contender raises.

    Args:
        budget: seconds for all runs together; one that would exceed them is not begun. Where none fits, the run that
            warms up is the only one.
    """
    with contender.digesting() as digests:
        warm_up = last = _slowest(*_one_run(contender))
    spent, runs = last[0], []
    while len(runs) < num_runs and spent + last[0] <= budget:
        last = _slowest(*_one_run(contender))
        spent += last[0]
        runs.append(last)
    runs = sorted(runs or [warm_up], key=_net)
    middle = runs[(len(runs) - 1) // 2]
    phases = middle[1]
    commit, allocate = (phases.get(name, 0.0) for name in (COMMIT, ALLOCATE))
    return Timing(
        _net(middle), commit, allocate, phases, _net(runs[0]), _net(runs[-1]), len(runs)
    ), digests


def _one_run(contender: Contender) -> tuple[float, Clock]:
    contender.prepare()
    clock = Clock()
    _synchronize()
    dist.barrier()
    started = time.perf_counter()
    contender.run(clock)
    _synchronize()
    return time.perf_counter() - started, clock


def _synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _slowest(whole: float, clock: Clock) -> tuple[float, dict[str, float]]:
    """Seconds and phases of the rank that took longest without the commit; the same answer on every rank."""
    return max(gather((whole, clock.seconds)), key=_net)


def _net(run: tuple[float, Mapping[str, float]]) -> float:
    whole, phases = run
    return whole - phases.get(COMMIT, 0.0)


def gather(value: Any) -> list[Any]:
    """`value` of every rank, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def digest(tensor: torch.Tensor) -> str:
    """Of shape, dtype and bytes."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {box_digest(tensor.detach())}"


@contextmanager
def digesting_vllm(adaptor: Any) -> Iterator[Digests]:
    """Digest every parameter of vLLM in loader layout, filled, before it is repacked."""
    digests: dict[str, str] = {}
    with adaptor.observed(lambda name, tensor: digests.update({name: digest(tensor)})):
        yield digests


def agreed(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of `action` and None, or None and the reasons when it failed on any rank."""
    try:
        result, own = action(), None
    except Exception as error:
        result, own = None, f"{type(error).__name__}: {error}"
    reasons = gather(own)
    if not any(reasons):
        return result, None
    return None, "; ".join(dict.fromkeys(reason for reason in reasons if reason))

"""Timing of a contender: the seconds of the slowest rank in the median of several runs.

A slow contender gets fewer runs. `profiled` counts what a run does on the device, apart from the
timed runs, which it would slow down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.counting import profiled
from hybrid_engine.ranks.digests import box_digest

COMMIT = "commit"
"""Phase of vLLM's repacking, which is equal for every contender and reported separately."""

ALLOCATE = "allocate"
"""Phase that allocates memory for vLLM's weights."""

_net = attrgetter("net")

Digests = Mapping[str, str]
"""Parameter name -> digest of its bytes in loader layout."""


class Contender(Protocol):
    """A way to bring training weights to inference. All methods are collective."""

    def prepare(self) -> None:
        """Undo the previous run. Called before every run, not timed."""

    def run(self, clock: Clock) -> None:
        """Write the weights. Timed; `clock.phase` splits the time."""

    def digesting(self) -> AbstractContextManager[Digests]:
        """Yield digests of the weights that the block writes on this rank; complete at its end."""

    def close(self) -> None:
        """Release all memory."""


@dataclass
class Clock:
    """Seconds by phase of a run on one rank."""

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
        """Add seconds to a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


@dataclass(frozen=True)
class Timing:
    """The median run of a contender, on its slowest rank.

    Attributes:
        seconds: seconds without the commit.
        commit_seconds: seconds of the commit.
        allocate_seconds: seconds of the allocation, part of `seconds`.
        by_phase: seconds by phase.
        device_seconds: seconds between two events on the stream, with the commit; None on a CPU.
        fastest, slowest: seconds of the fastest and of the slowest run, without the commit.
        num_runs: number of timed runs.
    """

    seconds: float
    commit_seconds: float
    allocate_seconds: float
    by_phase: Mapping[str, float]
    device_seconds: float | None
    fastest: float
    slowest: float
    num_runs: int


@dataclass(frozen=True)
class _Run:
    """A run on one rank; its attributes are those of `Timing`, but `seconds` has the commit."""

    seconds: float
    by_phase: Mapping[str, float]
    device_seconds: float | None

    @property
    def net(self) -> float:
        """Seconds without the commit."""
        return self.seconds - self.by_phase.get(COMMIT, 0.0)


def measure(contender: Contender, num_runs: int, budget: float) -> tuple[Timing, Digests]:
    """Time up to `num_runs` runs after a warm-up, whose result is digested.

    Args:
        budget: seconds for all runs together. A run that would exceed it is not started; if there
            is no time for any, the warm-up counts.
    """
    with contender.digesting() as digests:
        warm_up = last = _slowest(_one_run(contender))
    spent = last.seconds
    runs = []
    while len(runs) < num_runs and spent + last.seconds <= budget:
        last = _slowest(_one_run(contender))
        spent += last.seconds
        runs.append(last)
    runs = sorted(runs or [warm_up], key=_net)
    middle = runs[(len(runs) - 1) // 2]  # a real run, not an average, so that its phases add up
    timing = Timing(
        seconds=middle.net,
        commit_seconds=middle.by_phase.get(COMMIT, 0.0),
        allocate_seconds=middle.by_phase.get(ALLOCATE, 0.0),
        by_phase=middle.by_phase,
        device_seconds=middle.device_seconds,
        fastest=runs[0].net,
        slowest=runs[-1].net,
        num_runs=len(runs),
    )
    return timing, digests


def _one_run(contender: Contender) -> _Run:
    contender.prepare()
    clock = Clock()
    events = (
        [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        if torch.cuda.is_available()
        else None
    )
    _synchronize()
    dist.barrier()
    started = time.perf_counter()
    if events is not None:
        events[0].record()
    contender.run(clock)
    if events is not None:
        events[1].record()
    _synchronize()
    seconds = time.perf_counter() - started
    on_device = None if events is None else events[0].elapsed_time(events[1]) / 1e3
    return _Run(seconds, clock.seconds, on_device)


def profile_run(contender: Contender, trace: Path) -> dict[str, Any] | None:
    """Run once more; on rank 0 write the trace and return its `Profile`. Collective."""
    contender.prepare()
    _synchronize()
    dist.barrier()
    if dist.get_rank():
        contender.run(Clock())
        return None
    with profiled(trace) as profile:
        contender.run(Clock())
    return asdict(profile)


def _synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _slowest(run: _Run) -> _Run:
    """Return the run of the slowest rank, without the commit. Equal on every rank."""
    return max(gather(run), key=_net)


def gather(value: Any) -> list[Any]:
    """Return `value` of every rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of shape, dtype and bytes."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {box_digest(tensor.detach())}"


@contextmanager
def digesting_vllm(adaptor: Any) -> Iterator[Digests]:
    """Yield digests of vLLM's filled parameters in loader layout, before repacking."""
    digests: dict[str, str] = {}
    with adaptor.observed(lambda name, tensor: digests.update({name: digest(tensor)})):
        yield digests


def agreed(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return (result, None), or (None, errors) if `action` failed on any rank. Collective."""
    result: Any = None
    failure = None
    try:
        result = action()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    failures = dict.fromkeys(filter(None, gather(failure)))
    return (None, "; ".join(failures)) if failures else (result, None)

"""Figures and the choice of the median run, without engines."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.distributed as dist

from benchmarks.resharding import measuring
from benchmarks.resharding.measuring import Clock, Digests, digest, measure


class Scripted:
    """Contender with runs of given durations, by a simulated clock."""

    def __init__(self, runs: list[tuple[float, float]]) -> None:
        self.runs = iter(runs)
        self.now = 0.0
        self.num_prepared = 0

    def prepare(self) -> None:
        self.num_prepared += 1

    def run(self, clock: Clock) -> None:
        work, commit = next(self.runs)
        self.now += work
        with clock.phase("commit"):
            self.now += commit

    def digesting(self) -> AbstractContextManager[Digests]:
        return nullcontext({"weight": "digest"})

    def close(self) -> None: ...


def test_timing_is_the_median_of_the_slowest_rank_without_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = (9.0, 9.0)
    runs = [(3.0, 1.0), (1.0, 50.0), (2.0, 5.0)]
    contender = Scripted([warm_up, *runs])
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: contender.now)
    monkeypatch.setattr(dist, "barrier", lambda: None)

    def gather(run: tuple[float, dict[str, float]]) -> list[tuple[float, dict[str, float]]]:
        # The other rank always takes 0.5 s longer and commits in no time.
        seconds, phases = run
        return [run, (seconds - phases["commit"] + 0.5, {"transfer": 1.0})]

    monkeypatch.setattr(measuring, "gather", gather)
    timing, digests = measure(contender, 3, budget=100.0)
    assert (timing.seconds, timing.fastest, timing.slowest) == (2.5, 1.5, 3.5)
    assert timing.commit_seconds == 0.0
    assert timing.by_phase == {"transfer": 1.0}
    assert digests == {"weight": "digest"}
    assert contender.num_prepared == 4
    assert timing.num_runs == 3


def test_digests_depend_on_bits_shapes_and_dtypes_and_keep_the_storage_resizable() -> None:
    zero = torch.zeros(2, 3)
    others = (-zero, zero.view(3, 2), zero.to(torch.int32), torch.ones(2, 3))
    assert len({digest(tensor) for tensor in (zero, *others)}) == 5
    assert digest(torch.ones(3, 2).t()) == digest(torch.ones(2, 3))
    zero.untyped_storage().resize_(0)  # Impossible after a conversion to numpy.

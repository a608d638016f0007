"""Rank of `verify` that knows no written name tables, so that every table is derived.

It describes its plan, as `planned` does for a job that does not run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybrid_engine.models import TABLES
from hybrid_engine.planning.plan import ReshardPlan
from hybrid_engine.tools.verify.cases import Case

if TYPE_CHECKING:
    from hybrid_engine.trainer.worker import ActorHybridWorker


def elements_of(plan: ReshardPlan) -> dict[str, int]:
    """Return the elements that a rank moves, by sender and receiver.

    Live parameters of FSDP2 are neighbours in memory, so their transfers are joined.
    """
    elements: Counter[str] = Counter()
    for transfer in plan.transfers():
        elements[f"{transfer.src_rank} to {transfer.dst_rank}"] += transfer.numel
    return dict(elements)


def look(worker: ActorHybridWorker) -> dict[str, int]:
    return elements_of(worker.sharding.plan)


def planned(cases: Sequence[Case], num_ranks: int) -> list[list[dict[str, int]]]:
    """Return the elements of each case's plan by rank, without the ranks."""
    from hybrid_engine.tools.plan.cluster_plan import plan_job

    jobs = [plan_job(case.config(num_ranks), num_ranks) for case in cases]
    return [[elements_of(job.plan_of(rank)) for rank in range(num_ranks)] for job in jobs]


if __name__ == "__main__":
    from hybrid_engine.tools.verify import verify

    TABLES.clear()
    verify.main(*sys.argv[1:], look=look)

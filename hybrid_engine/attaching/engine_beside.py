"""vLLM and the plan, beside a live Megatron model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from hybrid_engine.assembly import put_beside
from hybrid_engine.config import HybridConfig
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Trainer
from hybrid_engine.ranks.job import Job

TrainerT = TypeVar("TrainerT", bound=Trainer)


def engine_beside(
    find_model: Callable[[], TrainerT], config: HybridConfig, table: ModelTable, job: Job, owner: ExitStack
) -> HybridEngine[TrainerT]:
    """An engine around a live model, in state TRAIN. Collective, within `job.agreement.building()`.

    Args:
        find_model: looks at Megatron's objects; may fail on one rank.
        config: both sides.
        table: the model's name table.
        job: of all ranks.
        owner: ends what is built here.

    If anything fails, on any rank, training state is back on the device.
    """
    with job.agreement.phase("looking at Megatron's model"):
        live = find_model()
    engine = HybridEngine.of(put_beside(live, config, table, job, owner))
    owner.callback(engine.sharding.close)
    return engine

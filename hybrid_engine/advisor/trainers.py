"""Whoever trains in a planned job: what its ranks hold, how much memory that takes, and whom to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybrid_engine.advisor.other_systems import PeerBytes, full_tensors, megatron_peers
from hybrid_engine.layouts.memory_peaks import TrainingMemory, megatron_memory, sharded_memory
from hybrid_engine.layouts.parallelism import InferenceParallelism, ShardedParallelism, TrainParallelism
from hybrid_engine.layouts.sharded import PackedModel, sharded_side
from hybrid_engine.layouts.training import training_side
from hybrid_engine.models.table import ModelTable
from hybrid_engine.records.holdings import Holdings, SideLayout


class PlannedTrainer(Protocol):
    """One of those below."""

    @property
    def sizes(self) -> TrainParallelism | ShardedParallelism:
        """Parallel sizes."""
        ...

    @property
    def grad_dtype(self) -> str | None:
        """Of gradients; None: that of the parameters."""
        ...

    def side(self, table: ModelTable, dtype: str) -> SideLayout:
        """What every rank holds; `dtype` of the parameters. Raises ConfigError with every violation."""
        ...

    def memory(self, source: SideLayout, dtype: str) -> TrainingMemory:
        """Of its state, which lies as `source` says."""
        ...

    def peers(self, source: Holdings, destination: Holdings, infer: InferenceParallelism) -> Sequence[PeerBytes]:
        """What systems with such a trainer move."""
        ...


@dataclass(frozen=True)
class Megatron:
    """megatron-core with its distributed optimizer."""

    sizes: TrainParallelism
    grad_dtype = "float32"

    def side(self, table: ModelTable, dtype: str) -> SideLayout:
        return training_side(table, self.sizes, dtype)

    def memory(self, source: SideLayout, dtype: str) -> TrainingMemory:
        return megatron_memory(source, self.sizes, dtype)

    def peers(self, source: Holdings, destination: Holdings, infer: InferenceParallelism) -> Sequence[PeerBytes]:
        return megatron_peers(source, destination, self.sizes, infer)


@dataclass(frozen=True)
class Fsdp:
    """FSDP2 with torch's AdamW; `model`: as transformers would build it."""

    sizes: ShardedParallelism
    model: PackedModel
    grad_dtype = None

    def side(self, table: ModelTable, dtype: str) -> SideLayout:
        return sharded_side(table, self.model, self.sizes, dtype)

    def memory(self, source: SideLayout, dtype: str) -> TrainingMemory:
        return sharded_memory(source, self.model, self.sizes, dtype)

    def peers(self, source: Holdings, destination: Holdings, infer: InferenceParallelism) -> Sequence[PeerBytes]:
        return [full_tensors(source)]

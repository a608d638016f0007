"""Calls of trainers with several completions in a row (`pack` of the settings)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from hybrid_engine.errors import Violation, Violations
from hybrid_engine.ports import Batch, Figures
from hybrid_engine.rl.config import LoopConfig
from hybrid_engine.trainer.batches.batch_checks import BatchLimits
from hybrid_engine.trainer.batches.row_packing import pack_rows


def packing_violations(config: LoopConfig, no_packing: str) -> Violations:
    """Yield a violation if rows are to be packed for a model that cannot compute them.

    `no_packing`: `BatchLimits.no_packing` of the model.
    """
    if config.pack and no_packing:
        yield Violation(config.key("pack"), no_packing, "Leave it out", code="packing-unsupported")


@dataclass(frozen=True)
class PackedCalls:
    """Passes batches [B, S] of one sequence a row to a model, packed if the settings ask for it.

    Attributes:
        limits: of the model's batches.
        packs: pack the rows; otherwise they are passed unchanged.
    """

    limits: BatchLimits
    packs: bool

    def score(self, call: Callable[..., Any], batch: Batch, **settings: Any) -> Any:
        """Return the results of `call(batch, **settings)`: [B, S, ...], or such by name.

        Padding has 0.
        """
        if not self.packs:
            return call(batch, **settings)
        packed = pack_rows(batch, multiple_of=self._multiple)
        results = call(packed.batch, **settings)
        if isinstance(results, torch.Tensor):
            return packed.restore(results)
        return {name: packed.restore(values) for name, values in results.items()}

    def update(
        self,
        call: Callable[..., Figures],
        batch: Batch,
        loss_function: Callable[..., Any],
        **settings: Any,
    ) -> Figures:
        """Return the report of `call(batch, loss_function, **settings)`."""
        if self.packs:
            batch = pack_rows(batch, multiple_of=self._multiple).batch
        return call(batch, loss_function, **settings)

    def learn(
        self,
        call: Callable[..., Figures],
        cut: Callable[[], Iterable[Batch]],
        epochs: int,
        loss_function: Callable[..., Any],
        **settings: Any,
    ) -> Figures:
        """Return the means of the reports of `update` over the minibatches that `cut` returns.

        It is called in each of the epochs.
        """
        reports = [
            self.update(call, part, loss_function, **settings)
            for _ in range(epochs)
            for part in cut()
        ]
        return {name: fmean(report[name] for report in reports) for name in reports[0]}

    @property
    def _multiple(self) -> int:
        return self.limits.dp_size * self.limits.rows_of_rank

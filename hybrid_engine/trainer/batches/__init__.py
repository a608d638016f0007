"""Batches of token sequences: what is in them, how rows are computed, what losses get and give. Pure torch.

    making.py          rows from prompts and completions, one or several in a row
    batch_checks.py    what is refused at the boundary, before any collective; ranks that pass what differs
    arrangement.py     which tokens are one sequence; micro batches, and the rows that a model computes
    token_outputs.py   entropy and most likely tokens, of logits whose vocabulary is split over ranks
    loss_results.py    what a loss function may return

docs/batches.md is the user's page.
"""

from __future__ import annotations

from hybrid_engine.ports import Batch, LossFunction, Report
from hybrid_engine.trainer.batches.making import PackedRows, build_batch, mean_weights, pack

__all__ = ["Batch", "LossFunction", "PackedRows", "Report", "build_batch", "mean_weights", "pack"]

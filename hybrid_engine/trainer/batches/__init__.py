"""Batches of token sequences: what is in them, how rows are computed, what losses get and give. Pure torch.

    making.py          rows from prompts and completions
    tensor_shapes.py   tensors that must have the shape of another
    row_packing.py     several sequences in a row
    batch_checks.py    what is refused at the boundary, before any collective
    same_batches.py    ranks that compute a batch together pass the same
    sequences.py       which tokens are one sequence: attention_mask, position_ids, sequence_ids
    arrangement.py     micro batches, and the rows that a model computes in place of the user's
    token_outputs.py   entropy and most likely tokens, of logits whose vocabulary is split over ranks
    loss_results.py    what a loss function may return

docs/batches.md is the user's page.
"""

from __future__ import annotations

from hybrid_engine.ports import Batch, LossFunction, Report
from hybrid_engine.trainer.batches.making import build_batch, mean_weights
from hybrid_engine.trainer.batches.row_packing import PackedRows, pack

__all__ = ["Batch", "LossFunction", "PackedRows", "Report", "build_batch", "mean_weights", "pack"]

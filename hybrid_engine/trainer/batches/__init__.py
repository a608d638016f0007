"""Batches of token sequences: contents, computed rows, inputs and results of losses. Pure torch.

    batch_building.py  rows from prompts and completions, one sequence a row
    row_packing.py     several sequences in a row
    image_rows.py      images of rows, as a vision tower takes them: tensors of the image
                       processor's `model_input_names` (`image_prompt` of backends/vllm/images.py)
                       that `forward` takes (`image_inputs` of backends/fsdp/sharded_model.py)
    batch_checks.py    checks before any collective, and comparison of the ranks' arguments
    arrangement.py     sequences of a row; micro batches, and the rows that a model computes
    chunked_scores.py  scores in chunks of tokens, because logits of whole rows are large
    token_outputs.py   entropy and most likely tokens, from logits split over ranks by vocabulary
    loss_results.py    checks of the return value of a loss function

docs/worker.md is the user's page.
"""

from __future__ import annotations

from hybrid_engine.ports import Batch, LossFunction, Report
from hybrid_engine.trainer.batches.batch_building import build_batch, mean_weights
from hybrid_engine.trainer.batches.row_packing import PackedRows, pack, pack_rows

__all__ = [
    "Batch",
    "LossFunction",
    "PackedRows",
    "Report",
    "build_batch",
    "mean_weights",
    "pack",
    "pack_rows",
]

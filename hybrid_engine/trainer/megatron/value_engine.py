"""Trains and reads a Megatron value model: one number for each token."""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from hybrid_engine.backends.megatron.forward_probe import from_last_stage
from hybrid_engine.ports import Batch, Report
from hybrid_engine.trainer.batches.arrangement import Rows
from hybrid_engine.trainer.megatron.pipeline_engine import PipelineEngine


class ValueEngine(PipelineEngine):
    """A `PipelineEngine` of a model whose table is a value model's (models/value_table.py).

    A batch has `tokens` [B, S], keys that say which of them are a sequence (`batches.Batch`), and whatever the loss
    function reads, which gets the values [b, S] in float32, 0 for padding.
    """

    @torch.no_grad()
    def values(self, batch: Batch) -> torch.Tensor:
        """Value [B, S] fp32 at every token, on every pipeline stage."""

        def keep(micro_batch: Batch, values: torch.Tensor) -> tuple[torch.Tensor, Report]:
            return values.sum(), {"values": values}

        reports = self._run(batch, keep, forward_only=True)
        values = from_last_stage([report["values"] for report in reports], batch["tokens"].shape)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            # each rank has computed them; they go into a batch, in which ranks must pass the same bits
            source = parallel_state.get_tensor_model_parallel_src_rank()
            torch.distributed.broadcast(values, source, parallel_state.get_tensor_model_parallel_group())
        return values

    def _forward(self, model: torch.nn.Module, rows: Rows) -> torch.Tensor:
        output: torch.Tensor = model(**self._inputs.arguments(rows))
        return output

    def _result(self, rows: Rows, output: torch.Tensor) -> torch.Tensor:
        return rows.restore(output.view(rows.tokens.shape).float())

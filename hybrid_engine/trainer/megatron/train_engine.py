"""Training and scoring of a Megatron language model, and of a value model.

Entropy and most likely tokens are read by forward hooks of the output layer, whose logits are split
over the ranks that share a vocabulary. Later they are not available: Megatron's cross entropy, the
next step, overwrites the memory of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.forward_probe import from_last_stage, hide_padding
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Batch, LossFunction, Report
from hybrid_engine.trainer.batches.arrangement import MicroBatch, Rows
from hybrid_engine.trainer.batches.token_outputs import NO_OUTPUTS, Outputs, token_outputs
from hybrid_engine.trainer.megatron.build import Actor
from hybrid_engine.trainer.megatron.model_variants import WithBias
from hybrid_engine.trainer.megatron.pipeline_engine import PipelineEngine


class OutputReader:
    """Hook of the output layer that divides logits by the temperature and reads outputs from them.

    It does nothing outside of its contexts.
    """

    def __init__(self) -> None:
        self._outputs = NO_OUTPUTS
        self._results: dict[str, torch.Tensor] = {}
        self._temperature: torch.Tensor | None = None

    def __call__(self, _layer: torch.nn.Module, _inputs: Any, outputs: WithBias) -> WithBias:
        """Process the logits of a call of the output layer.

        MTP layers call it before the decoder does, so the last results are the decoder's.
        """
        logits, bias = outputs
        if self._temperature is not None:
            # in place, because Megatron's cross entropy is in place as well
            logits = logits.float().div_(self._temperature)
        if self._outputs:
            group = parallel_state.get_tensor_model_parallel_group()
            self._results = token_outputs(logits, self._outputs, group)
        return logits, bias

    @contextmanager
    def dividing_by(self, temperature: torch.Tensor | None) -> Iterator[None]:
        """Divide logits [L, b, ...] of forward passes in the block by `temperature` [b, L]."""
        if temperature is not None:
            self._temperature = temperature.transpose(0, 1).unsqueeze(-1)
        try:
            yield
        finally:
            self._temperature = None

    @contextmanager
    def reading(self, outputs: Outputs) -> Iterator[None]:
        """Read `outputs` in every forward pass of the block."""
        self._outputs = outputs
        try:
            yield
        finally:
            self._outputs = NO_OUTPUTS
            self._results = {}

    def take(self) -> dict[str, torch.Tensor]:
        """Return and forget the results [b, L, ...] of the last forward pass, by name."""
        # forgotten, because the next micro batch may read none
        results = self._results
        self._results = {}
        return {name: value.transpose(0, 1) for name, value in results.items()}


class TrainEngine(PipelineEngine):
    """A `PipelineEngine` of a language model, e.g. an actor or a reference; same arguments.

    A loss function gets the log-probabilities [b, S] of the labels.

    Every step trains the MTP layers of a model, if it has any: Megatron adds their loss to the
    gradients, over the labels where `mask` [B, S] of the batch is 1. Without a mask all labels
    count, except padding and labels after the end of a packed sequence. A micro batch in which no
    label counts has no effect on MTP layers.

    Padding of the vocabulary has probability 0, as in the inference engine, because the constructor
    sets its logits to -inf.
    """

    def __init__(
        self,
        actor: Actor,
        table: ModelTable,
        micro_batch_size: int,
        separate_lora: bool = False,
        seq_length: int | None = None,
    ) -> None:
        super().__init__(actor, table, micro_batch_size, separate_lora, seq_length)
        self._reader = OutputReader()
        hide_padding(actor.chunks, self.vocab_size)
        for model in unwrap_model(actor.chunks):
            if model.post_process:
                model.output_layer.register_forward_hook(self._reader)

    def train_step(
        self, batch: Batch, loss_function: LossFunction, outputs: Outputs = NO_OUTPUTS
    ) -> dict[str, float]:
        """Take an optimizer step; `outputs` are added to the loss function's micro batch.

        Otherwise as `PipelineEngine.train_step`.
        """
        with self._reader.reading(outputs):
            return super().train_step(batch, loss_function)

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Return the log-probability [B, S] fp32 of every label, on every pipeline stage."""
        return self.scores(batch)["log_probs"]

    @torch.no_grad()
    def scores(self, batch: Batch, outputs: Outputs = NO_OUTPUTS) -> dict[str, torch.Tensor]:
        """Return `log_probs` [B, S] fp32 of every label, and `outputs`, on every pipeline stage."""

        def keep(micro_batch: Batch, log_probs: torch.Tensor) -> tuple[torch.Tensor, Report]:
            # schedules require a loss from every micro batch, even without a backward pass
            further = {name: micro_batch[name] for name in outputs.names}
            return log_probs.sum(), {"log_probs": log_probs.float(), **further}

        with self._reader.reading(outputs):
            reports = self._run(batch, keep, forward_only=True)
        shape = tuple(batch["tokens"].shape)
        results = {}
        for name, further_dims, dtype in outputs.shapes:
            parts = [report[name] for report in reports]
            results[name] = from_last_stage(parts, (*shape, *further_dims), dtype)
        return results

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, vocab_size] fp32 of `tokens` [B, S] on every rank; for checks."""

        def keep(micro_batch: Batch, output: torch.Tensor) -> tuple[torch.Tensor, Report]:
            # [b, S, padded vocabulary]
            padded_logits = gather_from_tensor_model_parallel_region(output)
            logits = padded_logits[..., : self.vocab_size]
            return logits.sum(), {"logits": logits.float()}

        reports = self._run({"tokens": tokens}, keep, forward_only=True)
        parts = [report["logits"] for report in reports]
        return from_last_stage(parts, (*tokens.shape, self.vocab_size))

    def _forward(self, model: torch.nn.Module, rows: Rows) -> torch.Tensor:
        """Return losses [b, S] of the last chunk, or logits if there are no labels."""
        temperature = self._inputs.in_shape(rows, rows.temperature)
        with self._mtp_loss_of(rows), self._reader.dividing_by(temperature):
            output: torch.Tensor = model(
                **self._inputs.arguments(rows), labels=self._inputs.in_shape(rows, rows.labels)
            )
        return output

    @contextmanager
    def _mtp_loss_of(self, rows: Rows) -> Iterator[None]:
        """Disable the loss of MTP layers in the block if the deepest one has no label in `rows`.

        Each MTP layer predicts one token further than the previous one. megatron-core before 0.17
        divides by the mask's sum, so `ModelInputs` keeps that above 0; a mask of tiny values would
        mean the average over all tokens, including padding.
        """
        config = self.transformer_config
        factor = config.mtp_loss_scaling_factor
        if rows.mask is not None and config.mtp_num_layers and factor:
            # the product stays a tensor: converting it would synchronize with the GPU
            has_labels = rows.mask[:, config.mtp_num_layers :].any()
            config.mtp_loss_scaling_factor = factor * has_labels
        try:
            yield
        finally:
            config.mtp_loss_scaling_factor = factor

    def _result(self, rows: Rows, output: torch.Tensor) -> torch.Tensor:
        if rows.labels is None:
            return output
        return rows.restore_log_probs(-output.view(rows.tokens.shape))

    def _visible_batch(self, micro_batch: MicroBatch) -> Batch:
        """Return the user's micro batch, with the outputs that were read from the logits."""
        rows = micro_batch.rows
        further = {}
        for name, value in self._reader.take().items():
            values_of_rows = value.reshape(*rows.tokens.shape, *value.shape[2:])
            further[name] = rows.restore(values_of_rows)
        return {**micro_batch.batch, **further} if further else micro_batch.batch


class ValueEngine(PipelineEngine):
    """A `PipelineEngine` of a value model, with a table of models/value_table.py.

    A batch has `tokens` [B, S], keys that define the sequences (`batches.Batch`), and the keys that
    the loss function reads. A loss function gets the values [b, S] in float32, 0 for padding.
    """

    @torch.no_grad()
    def values(self, batch: Batch) -> torch.Tensor:
        """Return the value [B, S] fp32 at every token, on every pipeline stage."""

        def keep(micro_batch: Batch, values: torch.Tensor) -> tuple[torch.Tensor, Report]:
            return values.sum(), {"values": values}

        reports = self._run(batch, keep, forward_only=True)
        values = from_last_stage([report["values"] for report in reports], batch["tokens"].shape)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            # Each rank has computed them with other rounding, but users put them into a batch, in
            # which ranks must pass the same bits.
            source = parallel_state.get_tensor_model_parallel_src_rank()
            group = parallel_state.get_tensor_model_parallel_group()
            torch.distributed.broadcast(values, source, group)
        return values

    def _forward(self, model: torch.nn.Module, rows: Rows) -> torch.Tensor:
        output: torch.Tensor = model(**self._inputs.arguments(rows))
        return output

    def _result(self, rows: Rows, output: torch.Tensor) -> torch.Tensor:
        return rows.restore(output.view(rows.tokens.shape).float())

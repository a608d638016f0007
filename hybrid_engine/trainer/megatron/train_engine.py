"""Trains and scores with a Megatron language model, or a value model, through Megatron's own pipeline schedules.

Outputs are read by forward hooks of the output layer, whose logits are split over the ranks that share a vocabulary:
Megatron's cross entropy, which comes next, writes into the logits' memory.
"""

from __future__ import annotations

import contextlib
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
    """A hook that divides logits by the temperature, and reads entropy and most likely tokens off them, while it is
    asked to."""

    def __init__(self) -> None:
        self._wanted = NO_OUTPUTS
        self._found: dict[str, torch.Tensor] = {}
        self._temperature: torch.Tensor | None = None

    def __call__(self, _layer: torch.nn.Module, _inputs: Any, outputs: WithBias) -> WithBias:
        """Read; MTP layers use the output layer before the decoder does, whose logits are the last."""
        logits, bias = outputs
        if self._temperature is not None:
            logits = logits.float().div_(self._temperature)  # in place, as Megatron's cross entropy, which comes next
        if self._wanted:
            self._found = token_outputs(logits, self._wanted, parallel_state.get_tensor_model_parallel_group())
        return logits, bias

    @contextmanager
    def dividing_by(self, temperature: torch.Tensor | None) -> Iterator[None]:
        """Divide logits [L, b, ...] of the forward pass in the block by `temperature` [b, L], if there is one."""
        self._temperature = None if temperature is None else temperature.transpose(0, 1).unsqueeze(-1)
        try:
            yield
        finally:
            self._temperature = None

    @contextmanager
    def reading(self, outputs: Outputs) -> Iterator[None]:
        """Read `outputs` in every forward pass of the block."""
        self._wanted = outputs
        try:
            yield
        finally:
            self._wanted, self._found = NO_OUTPUTS, {}

    def take(self) -> dict[str, torch.Tensor]:
        """By name, [b, L, ...] of the last forward pass."""
        found, self._found = self._found, {}
        return {name: value.transpose(0, 1) for name, value in found.items()}


class TrainEngine(PipelineEngine):
    """A `PipelineEngine` of a language model, or of a reference that is only read; args as there.

    MTP layers, where a model has them, are trained by every step: Megatron adds their loss to the gradients, over the
    labels where `mask` [B, S] of the batch is 1 (over all without a mask, but for padding and what follows the end of a
    packed sequence). A micro batch in which that leaves nothing teaches them nothing.

    Padding of the vocabulary gets probability 0, as in the inference engine: its logits are set to -inf from here on.

    A loss function gets the log-probabilities [b, S] of the labels.
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

    def train_step(self, batch: Batch, loss_function: LossFunction, outputs: Outputs = NO_OUTPUTS) -> dict[str, float]:
        """As `PipelineEngine.train_step`; a loss function finds `outputs` in its micro batch."""
        with self._reader.reading(outputs):
            return super().train_step(batch, loss_function)

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probability [B, S] fp32 of every label, on every pipeline stage."""
        return self.scores(batch)["log_probs"]

    @torch.no_grad()
    def scores(self, batch: Batch, outputs: Outputs = NO_OUTPUTS) -> dict[str, torch.Tensor]:
        """`log_probs` [B, S] fp32 of every label and what `outputs` asks for, on every pipeline stage."""

        def keep(micro_batch: Batch, log_probs: torch.Tensor) -> tuple[torch.Tensor, Report]:
            further = {name: micro_batch[name] for name in outputs.names}
            return log_probs.sum(), {"log_probs": log_probs.float(), **further}

        with self._reader.reading(outputs):
            reports = self._run(batch, keep, forward_only=True)
        shape = tuple(batch["tokens"].shape)
        return {
            name: from_last_stage([report[name] for report in reports], (*shape, *further), dtype)
            for name, further, dtype in outputs.shapes
        }

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, vocab_size] fp32 of `tokens` [B, S], on every rank; for checks."""

        def keep(micro_batch: Batch, output: torch.Tensor) -> tuple[torch.Tensor, Report]:
            whole = gather_from_tensor_model_parallel_region(output)[..., : self.vocab_size]
            return whole.sum(), {"logits": whole.float()}

        reports = self._run({"tokens": tokens}, keep, forward_only=True)
        return from_last_stage([report["logits"] for report in reports], (*tokens.shape, self.vocab_size))

    def _forward(self, model: torch.nn.Module, rows: Rows) -> torch.Tensor:
        """Losses [b, S] of the last chunk, or logits without labels."""
        temperature = self._inputs.in_shape(rows, rows.temperature)
        with self._predicting_in(rows), self._reader.dividing_by(temperature):
            output: torch.Tensor = model(
                **self._inputs.arguments(rows), labels=self._inputs.in_shape(rows, rows.labels)
            )
        return output

    @contextlib.contextmanager
    def _predicting_in(self, rows: Rows) -> Iterator[None]:
        """Let MTP layers learn from rows, unless the deepest of them has no label there: each is one token further.

        megatron-core before 0.17 divides by the mask's sum, so that a mask of 0 everywhere must not be, and one that is
        nearly 0 everywhere means the mean over all tokens, padding too.
        """
        config = self.transformer_config
        factor = config.mtp_loss_scaling_factor
        if rows.mask is not None and config.mtp_num_layers and factor:
            # a tensor, for to look at it would wait for the GPU
            config.mtp_loss_scaling_factor = factor * rows.mask[:, config.mtp_num_layers :].any()
        try:
            yield
        finally:
            config.mtp_loss_scaling_factor = factor

    def _result(self, rows: Rows, output: torch.Tensor) -> torch.Tensor:
        return output if rows.labels is None else rows.restore_log_probs(-output.view(rows.tokens.shape))

    def _seen_by_losses(self, micro_batch: MicroBatch) -> Batch:
        """What the user gave, and what was read off the logits."""
        rows = micro_batch.rows
        further = {
            name: rows.restore(value.reshape(*rows.tokens.shape, *value.shape[2:]))
            for name, value in self._reader.take().items()
        }
        return {**micro_batch.given, **further} if further else micro_batch.given


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

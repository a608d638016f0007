"""Training and scoring of a Megatron language model, and of a value model.

Megatron's models call their output layer, and then a function that computes losses from its logits,
for the decoder and for each MTP layer. Here the layer passes on its input, and the function calls
the layer for a chunk of tokens at a time, so that no rank has the logits of a whole row. Logits are
split over the ranks that share a vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig, multi_token_prediction
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.forward_probe import from_last_stage, hide_padding
from hybrid_engine.backends.megatron.live_model import LiveModel
from hybrid_engine.backends.training_side import Modules
from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Batch, Figures, LossFunction
from hybrid_engine.trainer.batches.arrangement import MicroBatch, Rows
from hybrid_engine.trainer.batches.chunked_scores import (
    chunk_length,
    chunk_product,
    score_in_chunks,
)
from hybrid_engine.trainer.batches.loss_results import Loss
from hybrid_engine.trainer.batches.token_outputs import NO_OUTPUTS, Outputs, Scores, token_outputs
from hybrid_engine.trainer.learning_rate import ScheduledOptimizer
from hybrid_engine.trainer.megatron.build import Actor
from hybrid_engine.trainer.megatron.model_inputs import ModelInputs
from hybrid_engine.trainer.megatron.pipeline import (
    Conclude,
    ModelOutput,
    Pipeline,
    conclude_without_job,
)


class LogProbs(ModelOutput):
    """Output of a language model: log-probabilities [b, S] of the labels.

    Padding of the vocabulary has probability 0, as in the inference engine, because the constructor
    sets its logits to -inf.

    Args:
        chunks: of the model.
        config: of the model.
        vocab_size: without padding.
    """

    def __init__(
        self,
        chunks: Modules,
        config: TransformerConfig,
        vocab_size: int,
    ) -> None:
        self._config = config
        hide_padding(chunks, vocab_size)

    def forward(self, model: torch.nn.Module, rows: Rows, inputs: ModelInputs) -> torch.Tensor:
        """Return losses [b, S] of the last chunk, or logits if there are no labels."""
        labels = inputs.in_shape(rows, rows.labels)
        inner = unwrap_model(model)
        replaced: Any = {}
        self._further: Any = []
        if inner.post_process and labels is not None:
            replaced = self._replaced(inner, inputs.in_shape(rows, rows.temperature))
        zero = rows.tokens.new_zeros(())
        with (
            self._mtp_loss_of(rows),
            attributes_set([inner], **replaced),
            # from megatron-core 0.19 on it reads logits, for a log
            attributes_set(
                [multi_token_prediction],
                _compute_mtp_acceptance_counts=lambda *_, **__: (zero, zero),
            ),
        ):
            output: torch.Tensor = model(**inputs.arguments(rows), labels=labels)
        return output

    def _replaced(self, model: Any, temperature: Any) -> Any:
        """Return attributes with which the model computes losses in chunks, and `outputs`."""
        layer = model.output_layer
        outputs = self.outputs
        whole_losses = model.compute_language_model_loss
        deferred: Any = torch.nn.Module()
        # models read it for a shared embedding
        deferred.weight = layer.weight
        deferred.forward = lambda hidden, weight=None, **_: (
            (hidden, layer.weight if weight is None else weight),
            None,
        )

        def losses(labels: Any, call: Any) -> Any:
            hidden, weight = call
            # [S, b], as hidden states [S, b, H] have their tokens: chunks are cut along S.
            inputs = [values.t() for values in (labels, temperature) if values is not None]
            num_rows = labels.shape[1]
            # The weight's rows are this rank's part of the vocabulary.
            length = chunk_length(num_rows, labels.numel() * len(weight))
            replaced: Any = {}  # of the layer, if there are several chunks
            if length < num_rows:
                if hasattr(weight, "grad_added_to_main_grad"):
                    # A shorter row of this step may have set it: here autograd adds the gradient.
                    weight.grad_added_to_main_grad = False
                # once for all chunks
                hidden = (
                    gather_from_sequence_parallel_region(hidden)
                    if layer.sequence_parallel
                    else copy_to_tensor_model_parallel_region(hidden)
                )
                product = chunk_product(num_rows, length)
                replaced["forward"] = lambda hidden, **_: (product(hidden, weight), None)

            def score(hidden: Any, labels: Any, *temperature: Any) -> Any:
                # the call runs the hooks of the layer
                with attributes_set([layer], **replaced):
                    logits, _ = layer(hidden, weight=weight)
                if temperature:
                    # in place, because Megatron's cross entropy is in place as well
                    logits = logits.float().div_(temperature[0].unsqueeze(-1))
                # before the cross entropy, which overwrites the logits
                further = token_outputs(
                    logits, outputs, parallel_state.get_tensor_model_parallel_group()
                )
                return whole_losses(labels.t(), logits).t(), *further.values()

            # MTP layers come before the decoder, so the last results are the decoder's
            # From [S, b, ...] to [b * S, ...].
            loss, *self._further = (
                value.transpose(0, 1).flatten(0, 1)
                for value in score_in_chunks(score, [hidden, *inputs], length)
            )
            return loss.view_as(labels)

        return {"output_layer": deferred, "compute_language_model_loss": losses}

    @contextmanager
    def _mtp_loss_of(self, rows: Rows) -> Iterator[None]:
        """Disable the loss of MTP layers in the block if the deepest one has no label in `rows`.

        Each MTP layer predicts one token further than the previous one. megatron-core before 0.17
        divides by the mask's sum, so `ModelInputs` keeps that above 0; a mask of tiny values would
        mean the average over all tokens, including padding.
        """
        config = self._config
        factor = config.mtp_loss_scaling_factor
        if rows.mask is not None and config.mtp_num_layers and factor:
            # the product stays a tensor: converting it would synchronize with the GPU
            has_labels = rows.mask[:, config.mtp_num_layers :].any()
            config.mtp_loss_scaling_factor = factor * has_labels
        try:
            yield
        finally:
            config.mtp_loss_scaling_factor = factor

    def result(self, rows: Rows, output: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [b, S], or logits if there are no labels."""
        if rows.labels is None:
            return output
        return rows.restore_log_probs(-output.view(rows.tokens.shape))

    def visible_batch(self, micro_batch: MicroBatch) -> Batch:
        """Return the user's micro batch, with the outputs that were read from the logits."""
        rows = micro_batch.rows
        further = {}
        for name in self.outputs.names:
            # forgotten, because it refers to the graph of autograd
            value = self._further.pop(0)
            further[name] = rows.restore(value.view(*rows.tokens.shape, *value.shape[1:]))
        return {**micro_batch.batch, **further} if further else micro_batch.batch


class Values(ModelOutput):
    """Output of a value model: a value [b, S] fp32 at every token."""

    def result(self, rows: Rows, output: torch.Tensor) -> torch.Tensor:
        """Return the values [b, S], 0 for padding."""
        return rows.restore(output.view(rows.tokens.shape).float())


class TrainEngine:
    """Training loop of this rank's share of a model: an actor, a reference or a critic.

    A batch is this data parallel rank's share; see `batches.Batch`. A loss function gets the
    log-probabilities [b, S] of the labels. A model with an optimizer takes `routed_experts` of a
    batch (router_inputs.py); a reference ignores them. Training and scoring raise StateError while
    memory that they need is offloaded by a `HybridEngine`.

    A value model, whose table has the head "value", needs no labels: a loss function gets the
    values [b, S] in float32, 0 for padding.

    Every step trains the MTP layers of a model, if it has any: Megatron adds their loss to the
    gradients, over the labels where `mask` [B, S] of the batch is 1. Without a mask all labels
    count, except padding and labels after the end of a packed sequence. A micro batch in which no
    label counts has no effect on MTP layers.

    Args:
        actor: the Megatron objects; without an optimizer the model cannot be trained.
        table: the model's name table.
        micro_batch_size: rows per micro batch.
        separate_lora: reshard LoRA weights separately instead of merged into the weights.
        seq_length: largest number of tokens in a row; None: no limit.
        conclude: see `Conclude`; by default an error of another rank becomes a RemoteError.

    Attributes:
        model: weights, and the state that can leave the device (port `Trainer`).
        optimizer: of the model, with its learning rate.
        limits: of the batches that it can compute.
        data_parallel: the ranks that share a batch.
    """

    def __init__(
        self,
        actor: Actor,
        table: ModelTable,
        micro_batch_size: int,
        separate_lora: bool = False,
        seq_length: int | None = None,
        conclude: Conclude = conclude_without_job,
    ) -> None:
        self.model = LiveModel(
            actor.chunks, actor.optimizer, table, actor.noop_layers, separate_lora
        )
        self.optimizer = ScheduledOptimizer(actor.optimizer, actor.scheduler)
        config = actor.transformer_config
        self._vocab_size = table.dims.vocab_size
        has_values = table.head == "value"
        self._output = Values() if has_values else LogProbs(actor.chunks, config, self._vocab_size)
        self._pipeline = Pipeline(
            self.model,
            self._output,
            self.optimizer,
            config,
            micro_batch_size,
            seq_length,
            conclude,
            # a reference is another policy, which routes tokens itself, and so does a critic
            replays=actor.optimizer is not None and not has_values,
        )
        self.limits = self._pipeline.limits
        self.data_parallel = self._pipeline.data_parallel

    def train_step(
        self,
        batch: Batch,
        loss_function: LossFunction,
        outputs: Outputs = NO_OUTPUTS,
    ) -> Figures:
        """Take an optimizer step; `outputs` are added to the loss function's micro batch.

        Otherwise as `Pipeline.step`.
        """
        with attributes_set([self._output], outputs=outputs):
            return self._pipeline.step(batch, loss_function)

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Return the log-probability [B, S] fp32 of every label, on every pipeline stage."""
        return self.scores(batch)["log_probs"]

    @torch.no_grad()
    def scores(self, batch: Batch, outputs: Outputs = NO_OUTPUTS) -> Scores:
        """Return `log_probs` [B, S] fp32 of every label, and `outputs`, on every pipeline stage."""

        def keep(micro_batch: Batch, log_probs: torch.Tensor) -> Loss:
            # schedules require a loss from every micro batch, even without a backward pass
            further = {name: micro_batch[name] for name in outputs.names}
            return log_probs.sum(), {"log_probs": log_probs.float(), **further}

        with attributes_set([self._output], outputs=outputs):
            reports = self._pipeline.run(batch, keep, forward_only=True)
        shape = tuple(batch["tokens"].shape)
        results = {}
        for name, further_dims, dtype in outputs.shapes:
            parts = [report[name] for report in reports]
            results[name] = from_last_stage(parts, (*shape, *further_dims), dtype)
        return results

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, vocab_size] fp32 of `tokens` [B, S] on every rank; for checks."""

        def keep(micro_batch: Batch, output: torch.Tensor) -> Loss:
            # [b, S, padded vocabulary]
            padded_logits = gather_from_tensor_model_parallel_region(output)
            logits = padded_logits[..., : self._vocab_size]
            return logits.sum(), {"logits": logits.float()}

        reports = self._pipeline.run({"tokens": tokens}, keep, forward_only=True)
        parts = [report["logits"] for report in reports]
        return from_last_stage(parts, (*tokens.shape, self._vocab_size))

    @torch.no_grad()
    def values(self, batch: Batch) -> torch.Tensor:
        """Return the value [B, S] fp32 at every token, on every pipeline stage."""

        def keep(micro_batch: Batch, values: torch.Tensor) -> Loss:
            return values.sum(), {"values": values}

        reports = self._pipeline.run(batch, keep, forward_only=True)
        values = from_last_stage([report["values"] for report in reports], batch["tokens"].shape)
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            # Each rank has computed them with other rounding, but users put them into a batch, in
            # which ranks must pass the same bits.
            source = parallel_state.get_tensor_model_parallel_src_rank()
            group = parallel_state.get_tensor_model_parallel_group()
            torch.distributed.broadcast(values, source, group)
        return values


def copy_weights(source: LiveModel, target: LiveModel, but_for: str | None = None) -> None:
    """Copy the weights of a model of the same layout, with LoRA merged. Collective.

    Args:
        source: for example the actor of a reference.
        target: is written.
        but_for: prefix of the names to leave unchanged, for a critic. Then the optimizer's main
            parameters are not required on the device, because the caller updates them later.
    """
    target.guard(KINDS if but_for is None else ["param"])
    source.guard(["param"])
    merged = source.weights.merged
    merged.prepare()
    sources = dict(merged.shown_weights())
    with torch.no_grad():
        for name, tensor in target.weights.model.named_weights():
            # heads of an actor and of a critic have different shapes
            if but_for is None or not name.startswith(but_for):
                tensor.copy_(sources[name])

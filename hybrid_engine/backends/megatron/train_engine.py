"""Trains and scores with a Megatron language model through Megatron's own pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.build import Actor
from hybrid_engine.backends.megatron.model_variants import WithBias
from hybrid_engine.backends.megatron.pipeline_engine import PipelineEngine, causal_inputs
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Batch, Report


class TrainEngine(PipelineEngine):
    """One rank's share of a model that is trained here (or of a reference model that is only read), and its loop.

    Args:
        actor: the Megatron objects.
        table: the model's name table.
        micro_batch_size: sequences per micro batch.
        separate_lora: reshard LoRA beside the weights instead of added to them.
        allow_unreviewed: as in `LiveModel`.

    A batch is a dict of tensors whose dim 0 is this data parallel rank's sequences: `tokens` and `labels` [B, S]
    int64 (`labels[i, t]` is the token after `tokens[i, t]`), and whatever the loss function reads.

    MTP layers, where a model has them, are trained by every step: Megatron adds their loss to the gradients, over the
    labels where `mask` [B, S] of the batch is 1 (over all without a mask; megatron-core before 0.17 also takes all in a
    micro batch where it is 0 everywhere).

    Padding of the vocabulary gets probability 0, as in the inference engine: its logits are set to -inf from here on.

    A loss function gets the log-probabilities [b, S] of the labels. Training and scoring raise StateError while a
    `HybridEngine` has the memory that they need off the device.
    """

    def __init__(
        self,
        actor: Actor,
        table: ModelTable,
        micro_batch_size: int,
        separate_lora: bool = False,
        allow_unreviewed: Collection[str] = (),
    ) -> None:
        super().__init__(actor, table, micro_batch_size, separate_lora, allow_unreviewed)
        self.vocab_size = table.dims.vocab_size
        for model in unwrap_model(actor.chunks):
            if model.post_process:
                model.output_layer.register_forward_hook(_hide_padding(self.vocab_size))

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probability [B, S] fp32 of every label, on every pipeline stage."""

        def keep(micro_batch: Batch, log_probs: torch.Tensor) -> tuple[torch.Tensor, Report]:
            return log_probs.sum(), {"log_probs": log_probs.float()}

        reports = self._run(batch, keep, forward_only=True)
        return self._from_last_stage([report["log_probs"] for report in reports], batch["tokens"].shape)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, vocab_size] fp32 of `tokens` [B, S], on every rank; for checks."""

        def keep(micro_batch: Batch, output: torch.Tensor) -> tuple[torch.Tensor, Report]:
            whole = gather_from_tensor_model_parallel_region(output)[..., : self.vocab_size]
            return whole.sum(), {"logits": whole.float()}

        reports = self._run({"tokens": tokens}, keep, forward_only=True)
        return self._from_last_stage([report["logits"] for report in reports], (*tokens.shape, self.vocab_size))

    def _forward(self, model: torch.nn.Module, micro_batch: Batch) -> torch.Tensor:
        """Losses [b, S] of the last chunk, or logits without labels."""
        tokens = micro_batch["tokens"]
        position_ids, future = causal_inputs(tokens)
        mask = micro_batch.get("mask")
        # Megatron divides by the mask's sum, which must not be 0
        mask = None if mask is None else mask.float().clamp_min(1e-8)
        output: torch.Tensor = model(tokens, position_ids, future, labels=micro_batch.get("labels"), loss_mask=mask)
        return output

    def _result(self, micro_batch: Batch, output: torch.Tensor) -> torch.Tensor:
        return output if micro_batch.get("labels") is None else -output


def _hide_padding(vocab_size: int) -> Callable[..., WithBias]:
    """A forward hook of Megatron's output layer: -inf for the rows that pad the vocabulary."""

    def hook(_layer: torch.nn.Module, _inputs: Any, outputs: WithBias) -> WithBias:
        logits, bias = outputs
        local_size = logits.shape[-1]
        num_real = max(0, vocab_size - parallel_state.get_tensor_model_parallel_rank() * local_size)
        if num_real < local_size:
            logits[..., num_real:] = float("-inf")
        return logits, bias

    return hook

"""Training steps and log-probabilities of a sharded transformers model.

The counterpart of trainer/megatron/train_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hybrid_engine.backends.fsdp.adaptor import LoraDelivery
from hybrid_engine.backends.fsdp.names import transformers_model
from hybrid_engine.backends.fsdp.sharded_model import ShardedModel
from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.models.derived import PLACEHOLDER_BIAS
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Batch, Figures, LossFunction, Report
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.trainer.batches.arrangement import Rows, micro_batches
from hybrid_engine.trainer.batches.batch_checks import BatchLimits
from hybrid_engine.trainer.batches.chunked_scores import (
    chunk_length,
    chunk_product,
    score_in_chunks,
)
from hybrid_engine.trainer.batches.loss_results import CheckedLoss
from hybrid_engine.trainer.batches.token_outputs import NO_OUTPUTS, Outputs, Scores, token_outputs
from hybrid_engine.trainer.data_parallel import DataParallelRanks, is_true_anywhere
from hybrid_engine.trainer.learning_rate import ScheduledOptimizer

_NO_IMAGES = "the model has no token for images in its config.json"


class FsdpTrainEngine:
    """Training loop of this rank's share of a model. Every rank is a data parallel rank.

    A value model has values, 0 for padding, in the place of log-probabilities, and needs no labels.

    Gradients of a micro batch are reduced at once, so that no rank holds unsharded ones; replicas
    (HSDP) add up theirs after the last micro batch.

    Args:
        module: sharded; see `ShardedModel`.
        optimizer: of its parameters; None for a model without training.
        table: the model's name table.
        job: of all ranks.
        micro_batch_size: rows per micro batch.
        clip_grad: largest norm of the gradients; 0 does not clip.
        schedule: megatron-core's, of learning rate and weight decay; None if both are constant.
        seq_length: largest number of tokens in a row; None: no limit.
        lora_delivery: see `ShardedModel`.

    Attributes:
        model: weights, and the state that can leave the device (port `Trainer`).
        optimizer: of the model, with its learning rate.
        data_parallel: the ranks that share a batch, which are all.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        table: ModelTable,
        job: Job,
        micro_batch_size: int,
        clip_grad: float = 1.0,
        schedule: Any = None,
        seq_length: int | None = None,
        lora_delivery: LoraDelivery = "merge",
    ) -> None:
        optimizers = [] if optimizer is None else [optimizer]
        self.model = ShardedModel(module, table, job.rank, optimizers, lora_delivery)
        self.optimizer = ScheduledOptimizer(optimizer, schedule)
        self.data_parallel = DataParallelRanks(job.rank, job.world_size, job.device)
        self._device = job.device
        self._micro_batch_size = micro_batch_size
        self._clip_grad = clip_grad
        self._seq_length = seq_length
        self._conclude = job.agreement.conclude
        self._is_adapted = True

    def without_adapters(self) -> FsdpTrainEngine:
        """Return an engine that scores with this model, but without its adapters."""
        engine = copy(self)
        engine._is_adapted = False
        return engine

    @property
    def limits(self) -> BatchLimits:
        """Limits of the batches that it can compute, and this data parallel rank."""
        return BatchLimits(
            self.model.table.dims.vocab_size,
            self._micro_batch_size,
            self.data_parallel.rank,
            self.data_parallel.size,
            self._seq_length,
            no_packing=self._no_packing,
            no_replay="models that FSDP2 shards select experts themselves",
            no_images="" if "image" in self.model.table.placeholders else _NO_IMAGES,
        )

    def train_step(
        self,
        batch: Batch,
        loss_function: LossFunction,
        outputs: Outputs = NO_OUTPUTS,
    ) -> Figures:
        """Take one optimizer step on this rank's share of a batch. Collective.

        Args:
            batch: B is a multiple of the micro batch size.
            loss_function: see `batches.LossFunction`.
            outputs: tensors that are added to the loss function's micro batch.

        Returns, on every rank, the reported scalars averaged over micro batches and ranks, with
        `grad_norm`, the `learning_rate` of this step, and `skipped`: 1 if a gradient of any rank is
        not finite, so that no weight changed.

        Raises, before any weight changes, LossError if the loss function fails or returns no loss,
        and RemoteError with its message on the other ranks.
        """
        optimizer = self.optimizer.inner
        # of this step, before a schedule changes it
        learning_rate = self.optimizer.learning_rate
        # not the optimizer's state, which may arrive during the passes
        self.model.guard(["param", "grad"])
        self.model.before_step()
        parts = micro_batches(batch, self._micro_batch_size, self._device)
        optimizer.zero_grad()
        loss = CheckedLoss(loss_function)
        reports = []
        model = self.model.model
        root = model if isinstance(model, FSDPModule) else transformers_model(model)
        assert isinstance(root, FSDPModule)
        for index, part in enumerate(parts):
            is_last = index == len(parts) - 1
            root.set_requires_all_reduce(is_last)
            log_probs, further = self._score(part.rows, outputs)
            # a loss function without `outputs` gets the micro batch itself
            visible = {**part.batch, **further} if further else part.batch
            value, report = loss(visible, log_probs)
            # The mean over micro batches; FSDP2 takes that over ranks.
            (value / len(parts)).backward()
            reports.append({name: scalar.float() for name, scalar in report.items()})
        loss.finish(self._device)
        self._conclude("training step", loss.fault or self.model.training_fault())
        grad_norm = self._clip_gradients()
        successful = not is_true_anywhere(~grad_norm.isfinite())
        if successful:
            optimizer.step()
        # frees the gradients, which then need no offload
        optimizer.zero_grad()
        self.optimizer.conclude_step(successful)
        return self._average(reports) | {
            "skipped": float(not successful),
            "learning_rate": learning_rate,
            "grad_norm": grad_norm.item(),
        }

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Return the log-probability [B, S] fp32 of every label. Collective."""
        return self.scores(batch)["log_probs"]

    def values(self, batch: Batch) -> torch.Tensor:
        """Return the value [B, S] fp32 at every token, of a value model. Collective."""
        return self.log_probs(batch)

    @torch.no_grad()
    def scores(self, batch: Batch, outputs: Outputs = NO_OUTPUTS) -> Scores:
        """Return `log_probs` [B, S] fp32 of every label, and `outputs`. Collective."""
        parts = micro_batches(batch, self._micro_batch_size, self._device)
        scored = [self._score(part.rows, outputs) for part in parts]
        results = {"log_probs": torch.cat([log_probs for log_probs, _ in scored])}
        for name in outputs.names:
            results[name] = torch.cat([further[name] for _, further in scored])
        return results

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, vocab_size] fp32 of `tokens` [B, S]; for checks. Collective."""
        parts = micro_batches({"tokens": tokens}, self._micro_batch_size, self._device)
        return torch.cat([self._forward(part.rows).logits.float() for part in parts])

    @property
    def _no_packing(self) -> str:
        """Reason why rows of several sequences are unsupported; "" if they are supported."""
        config = getattr(self.model.model, "config", None)
        attention = getattr(config, "_attn_implementation", None) or ""
        # for other attention transformers makes masks from position ids; for flash attention it
        # derives sequences from them only if there is one row
        if self._micro_batch_size > 1 and "flash" in attention:
            return "flash attention honours positions only in single rows"
        return ""

    def _forward(self, rows: Rows) -> Any:
        inputs: TensorDict = {}
        if rows.images is not None:
            inputs = self.model.image_inputs(rows.tokens, rows.images.joined(self._device))
        if rows.sequence_ids is not None:
            # transformers recognizes a new sequence in a row by a position that restarts at 0
            inputs["position_ids"] = rows.position_ids
        bare = () if self._is_adapted else self.model.model.modules()
        with attributes_set(bare, _disable_adapters=True):
            return self.model.model(rows.tokens, use_cache=False, **inputs)

    def _score(self, rows: Rows, outputs: Outputs) -> tuple[torch.Tensor, Scores]:
        """Return log-probabilities [b, S] of the labels, and `outputs` by name.

        Of a value model, the values [b, S] of the tokens.
        """
        if self.model.table.head == "value":
            return rows.restore(self._forward(rows).float()), {}
        placeholders = list(self.model.table.placeholders.values())

        def score(logits: Any, labels: Any, *temperature: Any) -> Any:
            logits = logits.float()
            if placeholders:
                # as in vLLM, which never draws them; of a copy, because this may run again
                logits = logits.clone()
                logits[..., placeholders] += PLACEHOLDER_BIAS
            if temperature:
                logits = logits / temperature[0].unsqueeze(-1)
            losses = cross_entropy(logits, labels, reduction="none")
            return -losses, *token_outputs(logits, outputs).values()

        inputs = [value.flatten() for value in (rows.labels, rows.temperature) if value is not None]
        model: Any = transformers_model(self.model.model)
        num_rows = rows.tokens.numel()
        length = chunk_length(num_rows, num_rows * self.model.table.dims.vocab_size)
        if length < num_rows and model.base_model is not model:
            with attributes_set([model], forward=forward_in_chunks(model, score, inputs, length)):
                results = self._forward(rows)
        else:
            logits = self._forward(rows).logits.flatten(0, 1)
            results = score_in_chunks(score, [logits, *inputs], length)
        log_probs, *further = (
            value.view(*rows.tokens.shape, *value.shape[1:]) for value in results
        )
        restored = map(rows.restore, further)
        return rows.restore_log_probs(log_probs), dict(zip(outputs.names, restored, strict=True))

    def _clip_gradients(self) -> torch.Tensor:
        """Scale the gradients down if their norm is too large; return the norm before that."""
        parameters = list(self.model.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self._clip_grad:
            clip_grads_with_norm_(parameters, self._clip_grad, norm)
        return norm

    def _average(self, reports: Sequence[Report]) -> Figures:
        """Return the means over micro batches and ranks, all of which report the same names."""
        names = sorted(reports[0])
        if not names:
            return {}
        means = [torch.stack([report[name] for report in reports]).mean() for name in names]
        values = torch.stack(means).to(self._device)
        dist.all_reduce(values)
        return dict(zip(names, (values / self.data_parallel.size).tolist(), strict=True))


class _HeadReached(Exception):
    """Ends a forward pass at the model's head, where it is raised."""


def forward_in_chunks(
    model: Any,
    score: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    length: int,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a `forward` of a transformers model that returns scores in place of logits.

    The model's own pass runs up to its head, and then again for each chunk of tokens, in which the
    last hidden states of the chunk take the place of the layers. So whatever the model does with
    its logits is done, and they never exist for a whole row.

    Args:
        model: with layers in a `base_model`, which it calls once.
        score: of logits [n, V] and `inputs` [n]; see `score_in_chunks`.
        inputs: one value a token, [b * S].
        length: tokens of a chunk.
    """
    whole = model.forward
    head = model.get_output_embeddings()
    # OPT calls a part of its base model.
    layers = getattr(model.base_model, "decoder", model.base_model)

    def end(*_arguments: Any, **_named: Any) -> Any:
        raise _HeadReached

    def forward(*arguments: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        outputs: Any = []
        with (
            # Before their own hooks, which run for each chunk, and may change the output in place.
            layers.register_forward_hook(
                lambda _module, _inputs, output: outputs.append(copy(output)), prepend=True
            ),
            # Before the head's own hooks, which expect it to return.
            head.register_forward_pre_hook(end, prepend=True),
            suppress(_HeadReached),
        ):
            whole(*arguments, **named)
        (output,) = outputs
        hidden = output.last_hidden_state.flatten(0, 1)
        replaced: Any = {}
        is_plain = getattr(head.forward, "__func__", None) is torch.nn.Linear.forward
        if is_plain and head.bias is None:
            product = chunk_product(len(hidden), length)
            replaced["forward"] = lambda part: product(part, head.weight)

        def score_part(part: torch.Tensor, *values: torch.Tensor) -> Any:
            of_part = copy(output)
            of_part["last_hidden_state"] = part.unsqueeze(0)
            with (
                attributes_set([layers], forward=lambda *_, **__: of_part),
                attributes_set([head], **replaced),
            ):
                logits = whole(*arguments, **named).logits
            return score(logits.flatten(0, 1), *values)

        return score_in_chunks(score_part, [hidden, *inputs], length)

    return forward


@torch.no_grad()
def copy_weights(source: ShardedModel, target: ShardedModel, but_for: str = "") -> None:
    """Copy the weights of a model with the same sharding, adapters merged. Collective.

    `but_for`: name of a weight to leave unchanged, a critic's head.
    """
    target.guard(["param"])
    source.guard(["param"])
    merged = source.weights.merged
    merged.prepare()
    weights = merged.computing_tensors()
    for name, tensor in target.weights.computing_tensors().items():
        if name != but_for:
            tensor.copy_(weights[name])

"""Trains and reads a Megatron model through Megatron's own pipeline schedules, whatever its output is.

What the model gets for rows:

    attention                        rows of one sequence      rows of several
    megatron-core's own              causal mask [1,1,L,L]     mask [b,1,L,L]: each sequence sees its own tokens
    Transformer Engine's             none: it is causal        one row of b * L tokens (`thd`) and where sequences begin

With megatron-core's own attention rotary positions count along the row: scores depend on differences alone, so that a
sequence's log-probabilities are those of its own row up to rounding. What Transformer Engine gets has **never run on a
GPU yet**.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.forward_probe import (
    causal_mask,
    core_attentions,
    is_of_transformer_engine,
    masks_by_itself,
    model_device,
    without_multi_token_prediction,
)
from hybrid_engine.backends.megatron.internals import softmax_of
from hybrid_engine.backends.megatron.live_model import LiveModel
from hybrid_engine.errors import BatchError, RemoteError, Violation
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.messages import decode, encode
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Batch, LossFunction, Report
from hybrid_engine.ranks.groups import told_by
from hybrid_engine.trainer.batches.arrangement import MicroBatch, Rows, begins_of, micro_batches
from hybrid_engine.trainer.batches.batch_checks import BatchLimits
from hybrid_engine.trainer.batches.loss_results import CheckedLoss
from hybrid_engine.trainer.megatron.build import Actor
from hybrid_engine.trainer.trained_model import TrainedModel
from megatron_patches.optimizers import set_weight_version


class ModelInputs:
    """Makes the arguments of a model's forward pass.

    Args:
        chunks: the model's.

    Attributes:
        no_packing: why rows of several sequences cannot be computed; empty where they can.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        found = core_attentions(chunks)
        self._with_te = masks_by_itself(chunks)
        self.no_packing = next(filter(None, _packing_faults(chunks, found, with_te=self._with_te)), "")

    def shape_of(self, rows: Rows) -> tuple[int, int]:
        """How many rows the model computes for a micro batch, and their length. Raises BatchError where it cannot."""
        if rows.sequence_ids is not None and self.no_packing:
            problem = f"rows have several sequences, but {self.no_packing}"
            raise BatchError([Violation("sequence_ids", problem, "Give each a row of its own")])
        num_rows, length = rows.tokens.shape
        return (1, num_rows * length) if self._are_joined(rows) else (num_rows, length)

    def _are_joined(self, rows: Rows) -> bool:
        return self._with_te and rows.sequence_ids is not None

    def arguments(self, rows: Rows) -> dict[str, Any]:
        """Of GPTModel.forward but for labels, on any pipeline stage."""
        # Megatron divides by the mask's sum, which must not be 0
        mask = None if rows.mask is None else rows.mask.float().clamp_min(1e-8)
        tensors = {"input_ids": rows.tokens, "position_ids": rows.position_ids, "loss_mask": mask}
        arguments = {name: self.in_shape(rows, value) for name, value in tensors.items()}
        if self._are_joined(rows):
            return {**arguments, "attention_mask": None, "packed_seq_params": _packed_params(rows)}
        return {**arguments, "attention_mask": None if self._with_te else _hidden_tokens(rows)}

    def in_shape(self, rows: Rows, values: torch.Tensor | None) -> torch.Tensor | None:
        """Values [b, L] of the rows' tokens as `shape_of` says."""
        return values.reshape(1, -1) if values is not None and self._are_joined(rows) else values


def _hidden_tokens(rows: Rows) -> torch.Tensor:
    """[1 or b, 1, L, L], True where a token (dim 2) may not look (dim 3)."""
    length = rows.tokens.shape[1]
    future = causal_mask(length, rows.tokens.device)
    ids = rows.sequence_ids
    return future if ids is None else future | (ids[:, None, :, None] != ids[:, None, None, :])


def _packed_params(rows: Rows) -> PackedSeqParams:
    """Where sequences begin in the rows, one after another. Stretches of padding count as sequences."""
    assert rows.sequence_ids is not None
    begins = begins_of(rows.sequence_ids).flatten().nonzero().flatten()
    offsets = torch.cat([begins, begins.new_tensor([rows.tokens.numel()])]).int()
    longest = int(offsets.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _packing_faults(
    chunks: Sequence[torch.nn.Module], attentions: Sequence[torch.nn.Module], *, with_te: bool
) -> Iterator[str]:
    """Why a model cannot compute rows of several sequences."""
    for chunk in chunks:
        for module in chunk.modules():
            mixer = getattr(module, "self_attention", None) if isinstance(module, TransformerLayer) else None
            if mixer is not None and not isinstance(mixer, (Attention, IdentityOp)):
                yield f"{type(mixer).__name__} mixes tokens of different sequences"
            if type(module).__module__.startswith("megatron.core.ssm") and type(module).__name__.endswith("Layer"):
                yield f"{type(module).__name__} mixes tokens of different sequences"
        depth = getattr(getattr(chunk, "config", None), "mtp_num_layers", None) or 0
        if depth > 1:
            yield f"{depth} MTP layers would learn across their borders"
    for core in attentions:
        if with_te and is_of_transformer_engine(core):
            continue
        if with_te or not isinstance(core, DotProductAttention):
            yield f"{type(core).__name__} is not known to take a mask"
            continue
        softmax = softmax_of(core)
        if softmax.window_size is not None:
            yield "megatron-core's own attention ignores masks where a layer has a sliding window"
        if softmax.scaled_masked_softmax_fusion:
            yield "Megatron's fused softmax ignores masks (masked_softmax_fusion)"


_Loss = Callable[[Batch, torch.Tensor], tuple[torch.Tensor, Report]]
"""Returns (loss, report), which share no memory: Megatron divides the loss in place."""


class PipelineEngine(TrainedModel, LiveModel, ABC):
    """One rank's share of a model that is trained here (or of one that is only read), and its loop.

    Args:
        actor: the Megatron objects.
        table: the model's name table.
        micro_batch_size: sequences per micro batch.
        separate_lora: reshard LoRA beside the weights instead of added to them.
        seq_length: the most tokens of a row; None: not known here.

    Attributes:
        conclude: ends a phase of all ranks (its name, this rank's error or None), and raises on all where one has an
            error. Those of a job set their own.

    A batch is this data parallel rank's share; see `batches.Batch`. Training and reading raise StateError while a
    `HybridEngine` has the memory that they need off the device.
    """

    def __init__(
        self,
        actor: Actor,
        table: ModelTable,
        micro_batch_size: int,
        separate_lora: bool = False,
        seq_length: int | None = None,
    ) -> None:
        super().__init__(actor.chunks, actor.optimizer, table, actor.noop_layers, separate_lora)
        self.transformer_config, self.scheduler = actor.transformer_config, actor.scheduler
        self.micro_batch_size = micro_batch_size
        self.vocab_size = table.dims.vocab_size
        self.conclude: Callable[[str, Exception | None], None] = _conclude
        self._seq_length = seq_length
        self._device, self._data_parallel = model_device(), parallel_state.get_data_parallel_group()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self._inputs = ModelInputs(unwrap_model(actor.chunks))

    @abstractmethod
    def _forward(self, model: torch.nn.Module, rows: Rows) -> torch.Tensor:
        """The output of a chunk; of the last one, what `_result` reads."""

    @abstractmethod
    def _result(self, rows: Rows, output: torch.Tensor) -> torch.Tensor:
        """What a loss function is given of the last chunk's output, in the user's places."""

    def _seen_by_losses(self, micro_batch: MicroBatch) -> Batch:
        """The micro batch that a loss function is given."""
        return micro_batch.given

    @property
    def limits(self) -> BatchLimits:
        """What of a batch can be computed."""
        return BatchLimits(
            self.vocab_size,
            self.micro_batch_size,
            self.dp_rank,
            self.dp_size,
            self._seq_length,
            self._row_multiple,
            self._inputs.no_packing,
        )

    @property
    def _row_multiple(self) -> int:
        """Sequence parallel ranks have as many tokens of a row each."""
        config = self.transformer_config
        return config.tensor_model_parallel_size if config.sequence_parallel else 1

    def train_step(self, batch: Batch, loss_function: LossFunction) -> dict[str, float]:
        """One optimizer step on this rank's share of the batch.

        Args:
            batch: B is a multiple of `micro_batch_size`.
            loss_function: see `batches.LossFunction`; what it gets is that of `_result`.

        Returns and raises as `ActorTrainer.train_step`; where float16 gradients overflowed, `skipped` is 1, Megatron
        has lowered its loss scale, and a schedule stays where it is.
        """
        optimizer, learning_rate = self.trained_by, self.learning_rate
        self.guard(KINDS)
        self.before_step()
        for chunk in self.weights.model.ddp_chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss = CheckedLoss(loss_function)
        reports = self._run(batch, loss, forward_only=False)
        if reports:  # on the last pipeline stage
            loss.finish(model_device(), parallel_state.get_data_parallel_group())
        self.conclude("loss function", loss.fault)
        version = self.version
        successful, grad_norm, _ = optimizer.step()
        if successful:  # also where a whole stage is frozen, and nothing there takes a step
            set_weight_version(optimizer, version + 1)
        report = self._average(reports)
        if successful and self.scheduler is not None:
            self.scheduler.step(1)
        report["skipped"] = float(not successful)
        report["learning_rate"] = learning_rate
        report["grad_norm"] = float(grad_norm) if grad_norm is not None else float("nan")
        return report

    def copy_weights_from(self, other: PipelineEngine, but_for: str | None = None) -> None:
        """Copy another engine's weights (same layout), LoRA added, e.g. to freeze a reference. Collective.

        `but_for`: beginning of the names that are left as they are, in a critic, whose main parameters follow later.
        """
        self.guard(KINDS if but_for is None else ["param"])
        other.guard(["param"])
        merged = other.weights.merged
        merged.prepare()
        sources = dict(merged.shown_weights())
        with torch.no_grad():
            for name, tensor in self.weights.model.named_weights():
                if but_for is None or not name.startswith(but_for):
                    tensor.copy_(sources[name])

    def _run(self, batch: Batch, loss_function: _Loss, forward_only: bool) -> list[Report]:
        """All micro batches through Megatron's schedule; the reports, on the last pipeline stage only."""
        self.guard(["param"])
        if forward_only:
            self.weights.base.prepare()  # overlapped gathers are otherwise finished by the next training step only
        is_pipelined = parallel_state.get_pipeline_model_parallel_world_size() > 1
        parts = micro_batches(
            batch, self.micro_batch_size, model_device(), self._row_multiple, same_length=is_pipelined
        )
        num_rows, seq_length = self._inputs.shape_of(parts[0].rows)
        forward_backward = get_forward_backward_func()
        for chunk in self.chunks:
            chunk.train(not forward_only)
        iterators = [iter(parts) for _ in self.chunks]
        alone = without_multi_token_prediction(unwrap_model(self.chunks))
        with alone if forward_only else contextlib.nullcontext():
            return forward_backward(
                forward_step_func=self._forward_step(loss_function),
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(parts),
                seq_length=seq_length,
                micro_batch_size=num_rows,
                forward_only=forward_only,
            )

    def _forward_step(self, loss_function: _Loss) -> Callable[[Iterator[MicroBatch], torch.nn.Module], Any]:
        """The function that Megatron's schedules call for each micro batch."""

        def forward_step(
            iterator: Iterator[MicroBatch], model: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, Report]]]:
            micro_batch = next(iterator)

            def loss(output: torch.Tensor) -> tuple[torch.Tensor, Report]:
                return loss_function(self._seen_by_losses(micro_batch), self._result(micro_batch.rows, output))

            return self._forward(model, micro_batch.rows), loss

        return forward_step

    def _average(self, reports: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """Mean over micro batches and data parallel ranks, sent from the last pipeline stage to all."""
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        own = encode(sorted(reports[0]) if reports else [])
        names = decode(told_by(last, own, group, model_device()), list[str])
        values = torch.zeros(len(names), dtype=torch.float32, device=model_device())
        if reports:
            for index, name in enumerate(names):
                values[index] = torch.stack([report[name].float() for report in reports]).mean()
            torch.distributed.all_reduce(values, group=parallel_state.get_data_parallel_group())
            values /= self.dp_size
        torch.distributed.broadcast(values, src=last, group=group)
        return dict(zip(names, values.tolist(), strict=True))


def _conclude(phase: str, error: Exception | None) -> None:
    """Without a job: raise this rank's error, or RemoteError where another has one. Collective."""
    has_failed = torch.tensor([error is not None], dtype=torch.int64, device=model_device())
    torch.distributed.all_reduce(has_failed, op=torch.distributed.ReduceOp.MAX)
    if error is not None:
        raise error
    if has_failed:
        raise RemoteError(f"{phase}: failed on another rank, whose log has more")

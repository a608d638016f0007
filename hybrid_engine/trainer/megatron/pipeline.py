"""Training and evaluation of a Megatron model of any output, by Megatron's pipeline schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model
from torch.nn.utils import get_total_norm

from hybrid_engine.backends.megatron.forward_probe import (
    model_device,
    without_multi_token_prediction,
)
from hybrid_engine.backends.megatron.live_model import LiveModel
from hybrid_engine.errors import RemoteError
from hybrid_engine.messages import decode, encode
from hybrid_engine.ports import Batch, LossFunction, Report
from hybrid_engine.ranks.groups import broadcast_bytes
from hybrid_engine.trainer.batches.arrangement import MicroBatch, Rows, micro_batches
from hybrid_engine.trainer.batches.batch_checks import BatchLimits
from hybrid_engine.trainer.batches.loss_results import CheckedLoss, Loss
from hybrid_engine.trainer.batches.token_outputs import NO_OUTPUTS
from hybrid_engine.trainer.data_parallel import DataParallelRanks, is_true_anywhere
from hybrid_engine.trainer.learning_rate import MAX_SKIPPED, ScheduledOptimizer
from hybrid_engine.trainer.megatron.model_inputs import ModelInputs
from hybrid_engine.trainer.megatron.router_inputs import RouterInputs
from megatron_patches.buffers import iter_buffers
from megatron_patches.optimizers import set_weight_version

MicroLoss = Callable[[Batch, torch.Tensor], Loss]
"""Returns (loss, report), which share no memory: Megatron divides the loss in place."""

Conclude = Callable[[str, Exception | None], object]
"""Called at the end of a phase, on all ranks, with the name of the phase and this rank's error or
None; raises on all ranks if one has an error."""


class ModelOutput:
    """Base class of outputs of a model: log-probabilities of labels, or values.

    Attributes:
        outputs: what to compute beside them, for the visible micro batch.
    """

    outputs = NO_OUTPUTS

    def forward(self, model: torch.nn.Module, rows: Rows, inputs: ModelInputs) -> torch.Tensor:
        """Return the output of a chunk; `result` receives that of the last chunk."""
        output: torch.Tensor = model(**inputs.arguments(rows))
        return output

    def result(self, rows: Rows, output: torch.Tensor) -> torch.Tensor:
        """Return a loss function's second argument, from the output of the last chunk.

        Its columns are the user's.
        """
        raise NotImplementedError

    def visible_batch(self, micro_batch: MicroBatch) -> Batch:
        """Return a loss function's first argument, by default the user's micro batch."""
        return micro_batch.batch


class Pipeline:
    """Runs batches through one rank's share of a model, by Megatron's pipeline schedules.

    A batch is this data parallel rank's share; see `batches.Batch`. All methods raise StateError
    while memory that they need is offloaded by a `HybridEngine`.

    Args:
        model: weights and state.
        output: what the model computes.
        optimizer: of the model.
        transformer_config: of the model's chunks.
        micro_batch_size: rows per micro batch.
        seq_length: largest number of tokens in a row; None: no limit.
        conclude: see `Conclude`.
        replays: see `RouterInputs`.

    Attributes:
        data_parallel: the ranks that share a batch.
        limits: of the batches that it can compute.
    """

    def __init__(
        self,
        model: LiveModel,
        output: ModelOutput,
        optimizer: ScheduledOptimizer,
        transformer_config: TransformerConfig,
        micro_batch_size: int,
        seq_length: int | None,
        conclude: Conclude,
        *,
        replays: bool = False,
    ) -> None:
        self.data_parallel = DataParallelRanks(
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            model_device(),
            parallel_state.get_data_parallel_group(),
        )
        self._model = model
        self._output = output
        self._optimizer = optimizer
        self._micro_batch_size = micro_batch_size
        self._conclude = conclude
        self._has_loss_scale = transformer_config.fp16
        self._row_multiple = 1
        if transformer_config.sequence_parallel:
            self._row_multiple = transformer_config.tensor_model_parallel_size
        self._inputs = ModelInputs(unwrap_model(model.chunks), self._row_multiple)
        self._routers = RouterInputs(model.weights.model, transformer_config, replays=replays)
        self.limits = BatchLimits(
            model.weights.model.table.dims.vocab_size,
            micro_batch_size,
            self.data_parallel.rank,
            self.data_parallel.size,
            seq_length,
            self._row_multiple,
            self._inputs.no_packing,
            self._routers.routing,
            self._routers.refusal,
            # Virtual stages take micro batches in groups.
            micro_batch_multiple=transformer_config.microbatch_group_size_per_vp_stage
            if len(model.chunks) > 1
            else 1,
        )

    def step(self, batch: Batch, loss_function: LossFunction) -> dict[str, float]:
        """Take one optimizer step on this rank's share of the batch.

        Args:
            batch: B is a multiple of the micro batch size.
            loss_function: see `batches.LossFunction`; its arguments are those of the
                `ModelOutput`.

        Returns, on every rank, the reported scalars averaged over micro batches and ranks, with
        `grad_norm`, the `learning_rate` of this step, and `skipped`: 1 if a gradient of any rank is
        not finite, so that no weight changed; in float16 Megatron has then
        lowered its loss scale.

        Raises, before any weight changes, LossError if the loss function fails or returns no loss,
        and RemoteError with its message on the other ranks.
        """
        optimizer = self._optimizer.inner
        # of this step, before a schedule changes it
        learning_rate = self._optimizer.learning_rate
        # not the optimizer's state, which may arrive during the passes
        self._model.guard(["param", "grad"])
        # raises if servers would fall too far behind
        self._model.before_step()
        chunks = self._model.weights.model.ddp_chunks
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        loss = CheckedLoss(loss_function)
        with contextlib.ExitStack() as undo:
            # the backward pass moves routers' biases before it is known whether a step follows
            for buffer in chain(*(model.buffers() for model in unwrap_model(chunks))):
                undo.callback(buffer.copy_, buffer.clone())
            reports = self.run(batch, loss, forward_only=False)
            if reports:
                # this is the last pipeline stage
                loss.finish(self.data_parallel.device, self.data_parallel.group)
            # no rank takes a step if another one has a fault
            self._conclude("training step", loss.fault or self._model.training_fault())
            version = self._model.version
            successful, grad_norm = False, None
            # of all gradients, also of those that Megatron's own norm leaves to other ranks
            norm = get_total_norm([record.grad_data for record in iter_buffers(chunks)])
            is_faulty = is_true_anywhere(~norm.isfinite().to(self.data_parallel.device))
            # with a loss scale Megatron's optimizer looks for itself, to lower the scale
            if self._has_loss_scale or not is_faulty:
                successful, grad_norm, _ = optimizer.step()
            if successful:
                # set, not counted: the optimizer of a fully frozen stage takes no step
                set_weight_version(optimizer, version + 1)
                # The step stands, and with it the biases that the backward pass has moved.
                undo.pop_all()
        report = self._average(reports)
        # from 2**32 the scale can be halved 32 times
        max_skipped = MAX_SKIPPED + 32 * self._has_loss_scale
        self._optimizer.conclude_step(successful, max_skipped)
        report["skipped"] = float(not successful)
        report["learning_rate"] = learning_rate
        report["grad_norm"] = float(grad_norm) if grad_norm is not None else float("nan")
        return report

    def run(self, batch: Batch, loss_function: MicroLoss, *, forward_only: bool) -> list[Report]:
        """Run all micro batches through Megatron's schedule.

        Returns the reports on the last pipeline stage, and [] on the others.
        """
        self._model.guard(["param"])
        if forward_only:
            # otherwise only the next training step would finish overlapped parameter gathers
            self._model.weights.finish_pending()
        chunks = self._model.chunks
        is_pipelined = parallel_state.get_pipeline_model_parallel_world_size() > 1
        parts = micro_batches(
            batch,
            self._micro_batch_size,
            self.data_parallel.device,
            self._row_multiple,
            # stages allocate receive buffers of one shape for all micro batches
            same_length=is_pipelined,
        )
        num_rows, seq_length = self._inputs.shape_of(parts[0].rows)
        forward_backward = get_forward_backward_func()
        for chunk in chunks:
            chunk.train(not forward_only)
        # each virtual stage reads all micro batches
        iterators = [iter(parts) for _ in chunks]
        without_mtp = without_multi_token_prediction(unwrap_model(chunks))
        with contextlib.ExitStack() as ends:
            ends.callback(self._routers.clear)
            if forward_only:
                ends.enter_context(without_mtp)
            return forward_backward(
                forward_step_func=self._forward_step(loss_function),
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=chunks if len(chunks) > 1 else chunks[0],
                num_microbatches=len(parts),
                seq_length=seq_length,
                micro_batch_size=num_rows,
                forward_only=forward_only,
            )

    def _forward_step(
        self,
        loss_function: MicroLoss,
    ) -> Callable[[Iterator[MicroBatch], torch.nn.Module], Any]:
        """Return the function that Megatron's schedules call for each micro batch."""

        def forward_step(
            iterator: Iterator[MicroBatch],
            model: torch.nn.Module,
        ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
            micro_batch = next(iterator)

            def loss(output: torch.Tensor) -> Loss:
                visible_batch = self._output.visible_batch(micro_batch)
                return loss_function(visible_batch, self._output.result(micro_batch.rows, output))

            rows = micro_batch.rows
            with self._routers.given(unwrap_model(model), rows, self._inputs):
                return self._output.forward(model, rows, self._inputs), loss

        return forward_step

    def _average(self, reports: Sequence[Report]) -> dict[str, float]:
        """Return the means over micro batches and data parallel ranks, on every pipeline stage."""
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        # other stages learn the names, and so the number of values, from the last one
        message = encode(sorted(reports[0]) if reports else [])
        names = decode(broadcast_bytes(last, message, group, self.data_parallel.device), list[str])
        values = torch.zeros(len(names), dtype=torch.float32, device=self.data_parallel.device)
        if reports:
            for index, name in enumerate(names):
                values[index] = torch.stack([report[name].float() for report in reports]).mean()
            torch.distributed.all_reduce(values, group=self.data_parallel.group)
            values /= self.data_parallel.size
        torch.distributed.broadcast(values, src=last, group=group)
        return dict(zip(names, values.tolist(), strict=True))


def conclude_without_job(phase: str, error: Exception | None) -> None:
    """Raise this rank's error, or RemoteError if another rank has one. Collective."""
    # all ranks take part, with an error or without
    has_failed = is_true_anywhere(torch.tensor(error is not None, device=model_device()))
    if error is not None:
        raise error
    if has_failed:
        raise RemoteError(
            f"{phase}: failed on another rank; see that rank's log", code="rank-failed"
        )

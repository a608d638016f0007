"""What trains and reads a Megatron model through Megatron's own pipeline schedules, whatever its output is."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from hybrid_engine.backends.megatron.forward_probe import model_device, without_multi_token_prediction
from hybrid_engine.backends.megatron.live_model import LiveModel
from hybrid_engine.errors import RemoteError, StateError
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Batch, LossFunction, Report
from hybrid_engine.trainer.batches.arrangement import MicroBatch, Rows, micro_batches
from hybrid_engine.trainer.batches.batch_checks import BatchLimits
from hybrid_engine.trainer.batches.loss_results import CheckedLoss
from hybrid_engine.trainer.learning_rate import learning_rate_of, set_learning_rate
from hybrid_engine.trainer.megatron.build import Actor
from hybrid_engine.trainer.megatron.model_inputs import ModelInputs
from megatron_patches.optimizers import set_weight_version

_Loss = Callable[[Batch, torch.Tensor], tuple[torch.Tensor, Report]]


class PipelineEngine(LiveModel, ABC):
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

    @property
    def dp_rank(self) -> int:
        """This rank's data parallel rank."""
        return parallel_state.get_data_parallel_rank()

    @property
    def dp_size(self) -> int:
        """Number of data parallel ranks."""
        return parallel_state.get_data_parallel_world_size()

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return learning_rate_of(self._require_optimizer().param_groups)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of every parameter group. Raises StateError where a schedule does that."""
        set_learning_rate(self._require_optimizer().param_groups, self.scheduler, learning_rate)

    def train_step(self, batch: Batch, loss_function: LossFunction) -> dict[str, float]:
        """One optimizer step on this rank's share of the batch.

        Args:
            batch: B is a multiple of `micro_batch_size`.
            loss_function: see `batches.LossFunction`; what it gets is that of `_result`.

        Returns the scalars averaged over micro batches and data parallel ranks, on every rank, with `grad_norm`, the
        `learning_rate` of this step, and `skipped`: 1 when float16 gradients overflowed; then no weight changed,
        Megatron has lowered its loss scale, and a schedule stays where it is. Raises, and no weight has changed,
        LossError for a loss function that fails or returns no loss, and RemoteError with its text on the ranks that are
        not at fault.
        """
        optimizer, learning_rate = self._require_optimizer(), self.learning_rate
        self.guard(KINDS)
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

    def gather_over_data_parallel(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the shares [B, …] of all data parallel ranks along dim 0, in order of rank."""
        own = tensor.to(model_device()).contiguous()
        shares = [torch.empty_like(own) for _ in range(self.dp_size)]
        torch.distributed.all_gather(shares, own, group=parallel_state.get_data_parallel_group())
        return torch.cat(shares).to(tensor.device)

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

    def _require_optimizer(self) -> MegatronOptimizer:
        if self.optimizer is None:
            raise StateError("this model has no optimizer and cannot be trained")
        return self.optimizer

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
                result = self._result(micro_batch.rows, output)
                mean_loss, report = loss_function(self._seen_by_losses(micro_batch), result)
                # Megatron divides the loss in place, which must not change a report that shares its memory
                return mean_loss, {name: value.detach().clone() for name, value in report.items()}

            return self._forward(model, micro_batch.rows), loss

        return forward_step

    def _average(self, reports: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """Mean over micro batches and data parallel ranks, sent from the last pipeline stage to all."""
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        group = parallel_state.get_pipeline_model_parallel_group()
        told = [sorted(reports[0]) if reports else []]
        torch.distributed.broadcast_object_list(told, src=last, group=group)
        (names,) = told
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

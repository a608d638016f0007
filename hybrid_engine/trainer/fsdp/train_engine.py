"""Trains and scores with a sharded transformers model, as `backends.megatron.TrainEngine` does with Megatron's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hybrid_engine.backends.fsdp.names import transformers_model
from hybrid_engine.backends.fsdp.sharded_model import ShardedModel
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Batch, LossFunction, Report
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.batches.arrangement import Rows, micro_batches
from hybrid_engine.trainer.batches.batch_checks import BatchLimits
from hybrid_engine.trainer.batches.loss_results import CheckedLoss
from hybrid_engine.trainer.batches.token_outputs import NO_OUTPUTS, Outputs, token_outputs
from hybrid_engine.trainer.learning_rate import Scheduler, resume
from hybrid_engine.trainer.trained_model import TrainedModel


class FsdpTrainEngine(TrainedModel, ShardedModel):
    """One rank's share of a model that is trained here (or only read), and its loop. Every rank is data parallel.

    Args:
        model: sharded; see `ShardedModel`.
        optimizer: over its parameters; None for a model that is only read.
        table: the model's name table.
        job: of all ranks.
        micro_batch_size: sequences per micro batch.
        clip_grad: largest norm of the gradients; 0 does not clip.
        scheduler: of learning rate and weight decay; None where these stay.
        seq_length: the most tokens of a row; None: not known here.

    Batches are those of `ports.Batch`. Gradients of a micro batch are reduced at once, so that no rank holds whole
    ones; replicas (HSDP) add theirs up with the last.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        table: ModelTable,
        job: Job,
        micro_batch_size: int,
        clip_grad: float = 1.0,
        scheduler: Scheduler | None = None,
        seq_length: int | None = None,
    ) -> None:
        super().__init__(model, table, job.rank, [] if optimizer is None else [optimizer])
        self.optimizer, self.scheduler = optimizer, scheduler
        self.micro_batch_size = micro_batch_size
        self._clip_grad = clip_grad
        self._seq_length = seq_length
        self._job, self._device, self._data_parallel = job, job.device, None
        self.dp_rank, self.dp_size = job.rank, job.world_size

    @property
    def limits(self) -> BatchLimits:
        """What of a batch can be computed."""
        return BatchLimits(
            self.table.dims.vocab_size,
            self.micro_batch_size,
            self.dp_rank,
            self.dp_size,
            self._seq_length,
            no_packing=self._no_packing,
        )

    def train_step(self, batch: Batch, loss_function: LossFunction, outputs: Outputs = NO_OUTPUTS) -> dict[str, float]:
        """As `ActorTrainer.train_step`. `skipped` is 0: without float16 nothing overflows."""
        optimizer, learning_rate = self.trained_by, self.learning_rate
        self.guard(KINDS)
        self.before_step()
        parts = micro_batches(batch, self.micro_batch_size, self._device)
        optimizer.zero_grad()
        checked, reports = CheckedLoss(loss_function), []
        for index, part in enumerate(parts):
            self._whole.set_requires_all_reduce(index == len(parts) - 1)
            log_probs, further = self._read(part.rows, outputs)
            loss, report = checked({**part.given, **further} if further else part.given, log_probs)
            (loss / len(parts)).backward()
            reports.append({name: value.float() for name, value in report.items()})
        checked.finish(self._device)
        self._job.agreement.conclude("loss function", checked.fault)
        grad_norm = self._clip_gradients()
        optimizer.step()
        optimizer.zero_grad()  # what has done its work need not be offloaded
        if self.scheduler is not None:
            self.scheduler.step(1)
        return self._average(reports) | {"skipped": 0.0, "learning_rate": learning_rate, "grad_norm": grad_norm}

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probability [B, S] fp32 of every label. Collective."""
        return self.scores(batch)["log_probs"]

    @torch.no_grad()
    def scores(self, batch: Batch, outputs: Outputs = NO_OUTPUTS) -> dict[str, torch.Tensor]:
        """`log_probs` [B, S] fp32 of every label, and what `outputs` asks for. Collective."""
        parts = micro_batches(batch, self.micro_batch_size, self._device)
        read = [self._read(part.rows, outputs) for part in parts]
        whole = {name: torch.cat([further[name] for _, further in read]) for name in outputs.names}
        return {"log_probs": torch.cat([log_probs for log_probs, _ in read]), **whole}

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, vocab_size] fp32 of `tokens` [B, S]; for checks. Collective."""
        parts = micro_batches({"tokens": tokens}, self.micro_batch_size, self._device)
        return torch.cat([self._logits(part.rows) for part in parts])

    @torch.no_grad()
    def copy_weights_from(self, other: FsdpTrainEngine) -> None:
        """Copy another engine's weights, which are sharded the same way."""
        self.guard(["param"])
        other.guard(["param"])
        other.weights.prepare()
        sources = other.weights.tensors.tensors
        for name, tensor in self.weights.tensors.tensors.items():
            local_of(tensor).copy_(local_of(sources[name]))

    def restore(
        self,
        optimizer_state: Mapping[torch.Tensor, dict[str, Any]],
        param_groups: Sequence[Mapping[str, Any]],
        version: int,
        num_scheduled_updates: int | None = None,
    ) -> None:
        """Take up an optimizer's state and hyperparameters, and the number of steps that the weights have taken.

        Args:
            optimizer_state: by parameter; those that are not in it have none.
            param_groups: their hyperparameters, in order.
            version: see `ShardedModel.version`.
            num_scheduled_updates: where a schedule goes on; None where there was none.
        """
        optimizer = self.trained_by
        optimizer.state.clear()
        optimizer.state.update(optimizer_state)
        for group, values in zip(optimizer.param_groups, param_groups, strict=True):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
        self._num_steps[optimizer] = version
        resume(self.scheduler, num_scheduled_updates)

    @property
    def _whole(self) -> FSDPModule:
        whole = self.model if isinstance(self.model, FSDPModule) else transformers_model(self.model)
        assert isinstance(whole, FSDPModule)
        return whole

    @property
    def _no_packing(self) -> str:
        """Why rows of several sequences cannot be computed; empty where they can."""
        attention = getattr(getattr(self.model, "config", None), "_attn_implementation", None) or ""
        # transformers makes masks of positions for other attention; for this one it looks for sequences in one row only
        is_refused = self.micro_batch_size > 1 and "flash" in attention
        return "flash attention heeds positions in single rows only" if is_refused else ""

    def _logits(self, rows: Rows) -> torch.Tensor:
        # positions that begin anew are how transformers knows of several sequences in a row; see _no_packing
        positions = {} if rows.sequence_ids is None else {"position_ids": rows.position_ids}
        logits: torch.Tensor = self.model(rows.tokens, use_cache=False, **positions).logits
        return logits.float()

    def _read(self, rows: Rows, outputs: Outputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Log-probabilities [b, S] of the labels, and what `outputs` asks for."""
        assert rows.labels is not None
        logits = self._logits(rows)
        if rows.temperature is not None:
            logits = logits / rows.temperature.unsqueeze(-1)
        losses = cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), reduction="none")
        further = {name: rows.restore(value) for name, value in token_outputs(logits, outputs).items()}
        return rows.restore_log_probs(-losses.view(rows.labels.shape)), further

    def _clip_gradients(self) -> float:
        """The norm of all gradients, which are scaled down if it is too large."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self._clip_grad:
            clip_grads_with_norm_(parameters, self._clip_grad, norm)
        return norm.item()

    def _average(self, reports: Sequence[Report]) -> dict[str, float]:
        """Mean over micro batches and ranks, all of which report the same names."""
        names = sorted(reports[0])
        if not names:
            return {}
        values = torch.stack([torch.stack([report[name] for report in reports]).mean() for name in names])
        values = values.to(self._device)
        dist.all_reduce(values)
        return dict(zip(names, (values / self.dp_size).tolist(), strict=True))

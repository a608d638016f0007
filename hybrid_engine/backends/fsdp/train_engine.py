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

from hybrid_engine.backends.fsdp.sharded_model import ShardedModel
from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.backends.learning_rate import Scheduler, learning_rate_of, resume, set_learning_rate
from hybrid_engine.backends.micro_batches import micro_batches
from hybrid_engine.errors import StateError
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Batch, LossFunction, Report
from hybrid_engine.ranks.job import Job


class FsdpTrainEngine(ShardedModel):
    """One rank's share of a model that is trained here (or only read), and its loop. Every rank is data parallel.

    Args:
        model: sharded; see `ShardedModel`.
        optimizer: over its parameters; None for a model that is only read.
        table: the model's name table.
        job: of all ranks.
        micro_batch_size: sequences per micro batch.
        clip_grad: largest norm of the gradients; 0 does not clip.
        scheduler: of learning rate and weight decay; None where these stay.

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
    ) -> None:
        super().__init__(model, table, job.rank, [] if optimizer is None else [optimizer])
        self.optimizer, self.scheduler = optimizer, scheduler
        self.micro_batch_size = micro_batch_size
        self._clip_grad = clip_grad
        self._job = job

    @property
    def dp_rank(self) -> int:
        """This rank's data parallel rank."""
        return self._job.rank

    @property
    def dp_size(self) -> int:
        """Number of data parallel ranks."""
        return self._job.world_size

    @property
    def trained_by(self) -> torch.optim.Optimizer:
        """The optimizer. Raises StateError where there is none."""
        if self.optimizer is None:
            raise StateError("this model has no optimizer and cannot be trained")
        return self.optimizer

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return learning_rate_of(self.trained_by.param_groups)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of every parameter group. Raises StateError where a schedule does that."""
        set_learning_rate(self.trained_by.param_groups, self.scheduler, learning_rate)

    def train_step(self, batch: Batch, loss_function: LossFunction) -> dict[str, float]:
        """One optimizer step on this rank's share of the batch. Collective.

        Args:
            batch: B is a multiple of `micro_batch_size`.
            loss_function: (micro batch, log-probabilities [b, S] fp32 of the labels) -> (mean loss, scalars to report).

        Returns the scalars averaged over micro batches and ranks, on every rank, with `grad_norm`, the `learning_rate`
        of this step, and `skipped`, which is 0: without float16 nothing overflows.
        """
        optimizer, learning_rate = self.trained_by, self.learning_rate
        self.guard(KINDS)
        parts = micro_batches(batch, self.micro_batch_size, self._job.device)
        optimizer.zero_grad()
        reports = []
        for index, part in enumerate(parts):
            self._whole.set_requires_all_reduce(index == len(parts) - 1)
            loss, report = loss_function(part, self._label_log_probs(part))
            (loss / len(parts)).backward()
            reports.append({name: value.detach().float() for name, value in report.items()})
        grad_norm = self._clip_gradients()
        optimizer.step()
        optimizer.zero_grad()  # what has done its work need not be offloaded
        if self.scheduler is not None:
            self.scheduler.step(1)
        return self._average(reports) | {"skipped": 0.0, "learning_rate": learning_rate, "grad_norm": grad_norm}

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probability [B, S] fp32 of every label. Collective."""
        parts = micro_batches(batch, self.micro_batch_size, self._job.device)
        return torch.cat([self._label_log_probs(part) for part in parts])

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, vocab_size] fp32 of `tokens` [B, S]; for checks. Collective."""
        parts = micro_batches({"tokens": tokens}, self.micro_batch_size, self._job.device)
        return torch.cat([self._logits(part) for part in parts])

    def gather_over_data_parallel(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the shares [B, …] of all ranks along dim 0, in order of rank."""
        own = tensor.to(self._job.device).contiguous()
        shares = [torch.empty_like(own) for _ in range(self.dp_size)]
        dist.all_gather(shares, own)
        return torch.cat(shares).to(tensor.device)

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

    def reload_main_params(self) -> None:
        """Nothing: the optimizer steps on the parameters themselves."""

    @property
    def _whole(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    def _logits(self, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.model(batch["tokens"], use_cache=False).logits
        return logits.float()

    def _label_log_probs(self, batch: Batch) -> torch.Tensor:
        labels = batch["labels"]
        losses = cross_entropy(self._logits(batch).flatten(0, 1), labels.flatten(), reduction="none")
        return -losses.view(labels.shape)

    def _clip_gradients(self) -> float:
        """The norm of all gradients, which are scaled down if it is too large."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self._clip_grad:
            clip_grads_with_norm_(parameters, self._clip_grad, norm)
        return norm.item()

    def _average(self, reports: Sequence[Report]) -> dict[str, float]:
        """Mean over micro batches and ranks."""
        values = torch.stack([torch.stack([report[name] for report in reports]).mean() for name in reports[0]])
        values = values.to(self._job.device)
        dist.all_reduce(values)
        return dict(zip(reports[0], (values / self.dp_size).tolist(), strict=True))

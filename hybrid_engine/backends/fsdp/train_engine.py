"""Trains and scores with a sharded transformers model, as `backends.megatron.TrainEngine` does with Megatron's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybrid_engine.backends.fsdp.sharded_model import ShardedModel
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.job import Job

Batch = Mapping[str, torch.Tensor]
Report = dict[str, torch.Tensor]
LossFunction = Callable[[Batch, torch.Tensor], tuple[torch.Tensor, Report]]


class FsdpTrainEngine(ShardedModel):
    """One rank's share of a model that is trained here, and its loop. Every rank is a data parallel rank.

    Args:
        model: sharded; see `ShardedModel`.
        optimizer: over its parameters.
        table: the model's name table.
        job: of all ranks.
        micro_batch_size: sequences per micro batch.
        clip_grad: largest norm of the gradients; 0 does not clip.

    Batches as for Megatron's `TrainEngine`: `tokens` and `labels` [B, S] int64, and whatever the loss function reads.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        table: ModelTable,
        job: Job,
        micro_batch_size: int,
        clip_grad: float = 1.0,
    ) -> None:
        super().__init__(model, table, job.rank, [optimizer])
        self.optimizer = optimizer
        self.dp_rank, self.dp_size = job.rank, job.world_size
        self.micro_batch_size = micro_batch_size
        self.clip_grad = clip_grad
        self._device = job.device

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def train_step(self, batch: Batch, loss_function: LossFunction) -> dict[str, float]:
        """One optimizer step on this rank's share of the batch. Collective.

        Args:
            batch: B is a multiple of `micro_batch_size`.
            loss_function: (micro batch, log-probabilities [b, S] fp32 of the labels) -> (mean loss, scalars to report).

        Returns the scalars averaged over micro batches and ranks, on every rank, with `grad_norm` and `skipped` (0).
        """
        self.guard(KINDS)
        self.model.train()
        self.optimizer.zero_grad()
        micro_batches = list(self._micro_batches(batch))
        reports = []
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            self._sharded.set_requires_gradient_sync(is_last)
            self._sharded.set_is_last_backward(is_last)
            loss, report = loss_function(micro_batch, self._label_log_probs(micro_batch))
            (loss / len(micro_batches)).backward()
            reports.append({name: value.detach().float() for name, value in report.items()})
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad or float("inf"))
        self.optimizer.step()
        averaged = self._average(reports)
        norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        return averaged | {"skipped": 0.0, "grad_norm": norm.item()}

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probability [B, S] fp32 of every label. Collective."""
        self.guard(["param"])
        self.model.eval()
        return torch.cat([self._label_log_probs(micro_batch) for micro_batch in self._micro_batches(batch)])

    def gather_over_data_parallel(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the shares [B, …] of all ranks along dim 0, in order of rank."""
        shares = [torch.empty_like(tensor) for _ in range(self.dp_size)]
        dist.all_gather(shares, tensor.contiguous())
        return torch.cat(shares)

    @property
    def _sharded(self) -> FSDPModule:
        assert isinstance(self.model, FSDPModule)
        return self.model

    def _label_log_probs(self, batch: Batch) -> torch.Tensor:
        logits = self.model(batch["tokens"], use_cache=False).logits
        return logits.float().log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]

    def _micro_batches(self, batch: Batch) -> Iterator[Batch]:
        num_sequences, size = batch["tokens"].shape[0], self.micro_batch_size
        if num_sequences % size:
            raise ValueError(
                f"number of sequences must be a multiple of micro_batch_size {size}, got {num_sequences}; pad the batch"
            )
        for start in range(0, num_sequences, size):
            yield {name: tensor[start : start + size].to(self._device) for name, tensor in batch.items()}

    def _average(self, reports: Sequence[Report]) -> dict[str, float]:
        """Mean over micro batches and ranks."""
        values = torch.stack([torch.stack([report[name] for report in reports]).mean() for name in reports[0]])
        dist.all_reduce(values)
        return dict(zip(reports[0], (values / self.dp_size).tolist(), strict=True))

"""The comparison of `verify` on one rank (change the weights, switch, compare), and its verdict over all ranks."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from hybrid_engine.errors import ReshardError, StateError
from hybrid_engine.models.table import ModelTable
from hybrid_engine.trainer.worker import ActorHybridWorker
from hybrid_engine.verification.cases import SEQ_LENGTH
from hybrid_engine.verification.reference import Reference

NUM_SEQUENCES = 8
"""Of a training step, or the next number that replicas and pipeline stages can share out."""
_NUM_COMPARED = 4
"""Sequences of which all log-probabilities are compared, likewise."""

_MOST_SKIPPED_STEPS = 40
NUM_SWITCHES = 3
"""Of each case, every one with different weights."""

LOGITS_ATOL = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.03}
"""Largest difference of log-probabilities from transformers' in float32: other kernels, other orders of summation."""


@dataclass
class Verdict:
    """What was found about one case, over all ranks.

    Attributes:
        different: vLLM parameters (rank and name) that differ in any bit from what vLLM's own loader gives.
        num_parameters: vLLM parameters compared, all switches and ranks.
        bytes_received, bytes_least: of one switch, over all ranks.
        trainer: "megatron" or "fsdp2".
        training, vllm: difference of log-probabilities from transformers', of the trainer's and of vLLM's; None where
            not computed.
        statistic: over positions: "largest", or "median" for a model with experts in half precision, where tokens
            whose router scores nearly tie go to another expert.
        spread: largest minus smallest log-probability.
        num_versions: different sets of weights that were switched.
        dtype, served_dtype: of the weights in training and in vLLM.
        remarks: why something was not computed.
        error: a failure, with its trace.
        seconds: the whole case.
        seen: by rank, what a `verify.Look` returned; not part of `as_dict`.
    """

    name: str
    different: list[str] = field(default_factory=list)
    num_parameters: int = 0
    bytes_received: int = 0
    bytes_least: int = 0
    trainer: str = "megatron"
    training: float | None = None
    vllm: float | None = None
    statistic: str = "largest"
    spread: float = 0.0
    num_versions: int = 0
    dtype: str = "float32"
    served_dtype: str = "float32"
    remarks: list[str] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0
    seen: list[Any] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The content of `verify --json` but for the faults; what is the trainer's has its name."""
        values = {self.trainer if key == "training" else key: value for key, value in asdict(self).items()}
        del values["trainer"], values["seen"]
        return values

    @property
    def faults(self) -> list[str]:
        """Everything that is wrong; empty when the case passed."""
        if self.error is not None:
            return [self.error]
        faults = [f"{name}: not bitwise what vLLM loads" for name in self.different]
        if self.num_parameters == 0 or self.num_versions != NUM_SWITCHES:
            faults.append(f"{self.num_parameters} parameters compared over {self.num_versions} changing versions")
        if self.bytes_received != self.bytes_least:
            faults.append(f"{self.bytes_received} bytes received, but {self.bytes_least} are enough")
        for engine, difference, dtype in (
            (self.trainer, self.training, self.dtype),
            ("vllm", self.vllm, self.served_dtype),
        ):
            atol = LOGITS_ATOL[dtype]
            if difference is not None and not difference <= atol:
                faults.append(f"{engine}: log-probabilities differ from transformers' by {difference:.2g}, over {atol}")
        if not self.spread > 1:
            faults.append(f"log-probabilities within {self.spread:.2g} of each other: too uniform to compare")
        return faults


def join(verdicts: Sequence[Verdict]) -> Verdict:
    """Return one verdict from those of all ranks."""
    first = verdicts[0]
    first.different = [f"rank {rank} {name}" for rank, one in enumerate(verdicts) for name in one.different]
    first.num_parameters = sum(one.num_parameters for one in verdicts)
    first.seen = [each for one in verdicts for each in one.seen]
    errors = [f"rank {rank}: {one.error}" for rank, one in enumerate(verdicts) if one.error]
    first.error = "\n".join(errors) or None
    for engine in ("training", "vllm"):
        seen = [difference for one in verdicts if (difference := getattr(one, engine)) is not None]
        setattr(first, engine, max(seen, default=None))
    first.remarks = list(dict.fromkeys(remark for one in verdicts for remark in one.remarks))
    return first


class Comparison:
    """The switches of one case on one rank; what it finds goes into `verdict`."""

    def __init__(self, worker: ActorHybridWorker, reference: Reference, scratch: Path, verdict: Verdict) -> None:
        self.worker, self.reference, self.scratch, self.verdict = worker, reference, scratch, verdict
        self.table: ModelTable = worker.table
        self.rank = worker.rank
        self.trains = not verdict.remarks  # remarks say why training does not compute here
        if self.table.dims.num_experts and verdict.served_dtype != "float32":
            verdict.statistic = "median"
        self._stages = (
            worker.config.actor_config.pipeline_model_parallel_size
        )  # virtual ones need as many micro batches
        self._digests: set[float] = set()

    def run(self) -> None:
        """Change the weights, switch, compare; `NUM_SWITCHES` times."""
        for version in range(NUM_SWITCHES):
            checkpoint = self.scratch / f"version{version}"
            with self.worker.train_context():
                trained = self._change_weights(version, checkpoint)
            expected = self._expected_logits(checkpoint)
            self._note("training", expected, trained)
            self._switch(checkpoint, expected)
        self.verdict.num_versions = len(self._digests)

    def _change_weights(self, version: int, checkpoint: Path) -> torch.Tensor | None:
        """Give the trainer new weights and save them to `checkpoint`; return its logits where it computes them."""
        if version == 0 or not self.trains:
            with self.worker.job.agreement.phase("writing a random checkpoint"):
                if self.rank == 0:
                    model_dir, dtype = self.worker.config.model, self.verdict.dtype
                    write_random_checkpoint(checkpoint, model_dir, self.table, dtype, version)
            self.worker.load_hf_checkpoint(checkpoint)
        else:
            self._train(version)
            self.worker.save_hf_checkpoint(checkpoint)
        if not self.trains:
            return None
        return self.worker.train.logits(self._tokens())

    def _train(self, version: int) -> None:
        """Take one optimizer step; with float16 as many as needed for a loss scale without overflow."""
        num_sequences = _next_multiple(NUM_SEQUENCES, self.worker.train.limits.dp_size * self._stages)
        for _ in range(_MOST_SKIPPED_STEPS):
            batch = tokens_and_labels(version, self.table.dims.vocab_size, num_sequences)
            report = self.worker.update(batch, cross_entropy)
            if not report["skipped"]:
                return
        raise ReshardError(f"{_MOST_SKIPPED_STEPS} steps in a row were skipped: gradients overflow at every loss scale")

    def _switch(self, checkpoint: Path, expected: torch.Tensor) -> None:
        """Switch, and compare vLLM's parameters with those that vLLM itself loads from the checkpoint."""
        from hybrid_engine.backends.vllm.native_load import native_parameters

        seen: dict[str, torch.Tensor] = {}

        def keep(name: str, tensor: torch.Tensor) -> None:
            seen[name] = tensor.detach().clone()

        with self.worker.inference.adaptor.observed(keep), self.worker.rollout_context():
            self._digests.add(float(expected.double().sum()) + sum(float(one.double().sum()) for one in seen.values()))
            # beside an adapter that is delivered apart, vLLM has the weights that training started from
            base = checkpoint if self.worker.adapter is None else checkpoint.with_name("version0")
            native = native_parameters(self.worker.inference, str(base))
            self.verdict.different += [
                name for name in sorted({*seen, *native}) if not _same_bits(seen.get(name), native.get(name))
            ]
            self.verdict.num_parameters += len(native)
            del native
            self._note("vllm", expected[:, :-1], self._served_logits())
        report, agreement = self.worker.sharding.last_report, self.worker.job.agreement
        assert report is not None, "there was a switch"
        self.verdict.bytes_received = agreement.total(report.bytes_received)
        self.verdict.bytes_least = agreement.total(report.bytes_least)

    def _served_logits(self) -> torch.Tensor | None:
        try:
            rows = self.worker.inference.prompt_distributions(self._tokens().tolist(), self.worker.adapter)
        except StateError as error:
            self.verdict.remarks.append(str(error))
            return None
        return torch.stack(rows)

    def _tokens(self) -> torch.Tensor:
        num_sequences = _next_multiple(_NUM_COMPARED, self._stages)
        return tokens_and_labels(99, self.table.dims.vocab_size, num_sequences)["tokens"]

    def _expected_logits(self, checkpoint: Path) -> torch.Tensor:
        """Return the log-probabilities by transformers in float32, computed on rank 0."""
        tokens = self._tokens()
        expected = torch.empty(*tokens.shape, self.table.dims.vocab_size)
        with self.worker.job.agreement.phase("logits by transformers"):
            if self.rank == 0:
                expected.copy_(self.reference.log_probs(checkpoint, tokens))
        on_device = expected.to(self.worker.job.device)
        dist.broadcast(on_device, src=0)
        expected = on_device.cpu()
        self.verdict.spread = float(expected.max() - expected.min())
        return expected

    def _note(self, engine: str, expected: torch.Tensor, logits: torch.Tensor | None) -> None:
        if logits is not None:
            difference = difference_of(logits.to(expected.device), expected, self.verdict.statistic)
            setattr(self.verdict, engine, max(difference, getattr(self.verdict, engine) or 0.0))


def write_random_checkpoint(path: Path, model_dir: Path, table: ModelTable, dtype: str, seed: int) -> None:
    """Write a checkpoint of random values under the names and shapes of a table, with the config of `model_dir`."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in table.shapes.items():
        values = torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        values += 1.0 if name.endswith("norm.weight") or "layernorm" in name else 0.0
        tensors[name] = values.to(getattr(torch, table.dtypes.get(name, dtype)))
    tensors |= {copy: tensors[name].clone() for copy, name in table.copies.items()}
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    shutil.copyfile(model_dir / "config.json", path / "config.json")


def tokens_and_labels(seed: int, vocab_size: int, num_sequences: int = NUM_SEQUENCES) -> dict[str, torch.Tensor]:
    """Random tokens and those that follow them, [num_sequences, SEQ_LENGTH]; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(vocab_size, (num_sequences, SEQ_LENGTH + 1), generator=generator)
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def cross_entropy(
    micro_batch: Mapping[str, torch.Tensor], log_probs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -log_probs.mean()
    return loss, {"loss": loss}


def difference_of(logits: torch.Tensor, log_probs: torch.Tensor, statistic: str) -> float:
    """Return how far log-probabilities [B, S, vocabulary] are apart: the largest difference at each position, and of
    these the largest or the median, as `statistic` says.

    `logits` need not be normalised; `log_probs` are.
    """
    by_position = (logits.float().log_softmax(-1) - log_probs).abs().amax(-1)
    return float(by_position.median() if statistic == "median" else by_position.max())


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))

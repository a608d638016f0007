"""Comparison of `verify` on one rank (change weights, switch, compare), and verdict over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from hybrid_engine.errors import StateError
from hybrid_engine.memory.host_pages import round_up
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Batch
from hybrid_engine.ranks.torch_internals import TensorDict
from hybrid_engine.tools.verify.cases import SEQ_LENGTH
from hybrid_engine.tools.verify.reference import Reference
from hybrid_engine.tools.verify.small_models import copy_companions
from hybrid_engine.trainer.batches.batch_building import NewBatch
from hybrid_engine.trainer.batches.loss_results import Loss
from hybrid_engine.trainer.worker import ActorHybridWorker

NUM_SEQUENCES = 8
"""Sequences of a training step; rounded up to a multiple of replicas and pipeline stages."""
_NUM_COMPARED = 4
"""Sequences whose log-probabilities are compared; rounded up to a multiple of pipeline stages."""

NUM_SWITCHES = 3
"""Switches of each case, all with different weights."""

LOGITS_ATOL = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.03}
"""Dtype -> difference of log-probabilities from transformers in float32 that is always accepted.

Kernels and orders of summation differ."""
_MAX_ROUNDING = 2.0
"""Largest accepted difference, in differences of transformers itself in that dtype."""


@dataclass
class Verdict:
    """Result of one case over all ranks.

    Attributes:
        name: name of the case.
        different: vLLM parameters ("rank and name") that are not bitwise those of vLLM's own
            loader.
        num_parameters: number of compared vLLM parameters, over all switches and ranks.
        bytes_received, bytes_least: bytes of one switch, over all ranks.
        trainer: "megatron" or "fsdp2".
        training, vllm: difference of the trainer's and of vLLM's log-probabilities from those of
            transformers; None if not computed.
        statistic: statistic of the differences over positions: "largest", or "median" for a model
            with experts in half precision, where tokens with nearly tied router scores go to
            another expert.
        rounding: dtype -> the same of transformers in that dtype, which multipliers may raise.
        spread: largest minus smallest log-probability.
        num_versions: number of different sets of weights that were switched.
        dtype, served_dtype: dtypes of the weights in training and in vLLM.
        remarks: reasons why a part was not computed.
        error: traceback of a failure, or message of a ConfigError.
        status: exit status of `verify` if there are faults; not part of `as_dict`.
        seconds: duration of the whole case.
        seen: by rank, the result of a `verify.Look`; not part of `as_dict`.
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
    rounding: dict[str, float] = field(default_factory=dict)
    spread: float = 0.0
    num_versions: int = 0
    dtype: str = "float32"
    served_dtype: str = "float32"
    remarks: list[str] = field(default_factory=list)
    error: str | None = None
    status: int = 1
    seconds: float = 0.0
    seen: list[Any] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `verify --json` without faults, with the trainer's name."""
        values = {}
        for key, value in asdict(self).items():
            values[self.trainer if key == "training" else key] = value
        for key in ("trainer", "seen", "status"):
            del values[key]
        return values

    @property
    def faults(self) -> list[str]:
        """All faults; empty if the case passed."""
        if self.error is not None:
            return [self.error]
        faults = [f"{name}: not bitwise what vLLM loads" for name in self.different]
        if self.num_parameters == 0 or self.num_versions != NUM_SWITCHES:
            faults.append(
                f"{self.num_parameters} parameters compared over "
                f"{self.num_versions} changing versions"
            )
        if self.bytes_received != self.bytes_least:
            faults.append(
                f"{self.bytes_received} bytes received, but {self.bytes_least} are enough"
            )
        for engine, difference, dtype in (
            (self.trainer, self.training, self.dtype),
            ("vllm", self.vllm, self.served_dtype),
        ):
            atol = max(LOGITS_ATOL[dtype], _MAX_ROUNDING * self.rounding.get(dtype, 0.0))
            # `not <=` instead of `>`, so that NaN is a fault.
            if difference is not None and not difference <= atol:
                faults.append(
                    f"{engine}: log-probabilities differ from transformers' "
                    f"by {difference:.2g}, over {atol:.2g}"
                )
        # A model that gives all tokens about the same probability would agree with any other.
        if not self.spread > 1:
            faults.append(
                f"log-probabilities within {self.spread:.2g} of each other: too uniform to compare"
            )
        return faults


def join(verdicts: Sequence[Verdict]) -> Verdict:
    """Join the verdicts of all ranks, in their order, into the first of them."""
    first = verdicts[0]
    errors: dict[str, str] = {}
    for rank, verdict in enumerate(verdicts):
        verdict.different = [f"rank {rank} {name}" for name in verdict.different]
        if verdict.error:
            errors.setdefault(verdict.error, f"rank {rank}: {verdict.error}")
    for others in verdicts[1:]:
        first.num_parameters += others.num_parameters
        first.different += others.different
        first.seen += others.seen
        first.remarks += others.remarks
    first.remarks = list(dict.fromkeys(first.remarks))
    first.error = "\n".join(errors.values()) or None
    first.status = min(verdict.status for verdict in verdicts)
    for engine in ("training", "vllm"):
        differences = [getattr(verdict, engine) for verdict in verdicts]
        computed = [difference for difference in differences if difference is not None]
        setattr(first, engine, max(computed, default=None))
    return first


class Comparison:
    """Switches of one case on one rank; results are added to `verdict`."""

    def __init__(
        self,
        worker: ActorHybridWorker,
        reference: Reference,
        scratch: Path,
        verdict: Verdict,
    ) -> None:
        self.worker = worker
        self.reference = reference
        self.scratch = scratch
        self.verdict = verdict
        self.table: ModelTable = worker.table
        self.rank = worker.rank
        self.trains = not verdict.remarks  # remarks are reasons why training cannot compute here
        if self.table.dims.num_experts and verdict.served_dtype != "float32":
            verdict.statistic = "median"
        # The interleaved schedule needs a multiple of as many micro batches.
        self._stages = worker.config.actor_config.pipeline_model_parallel_size
        self._digests: set[float] = set()

    def run(self) -> None:
        """Change the weights, switch and compare, `NUM_SWITCHES` times."""
        for version in range(NUM_SWITCHES):
            checkpoint = self.scratch / f"version{version}"
            with self.worker.train_context():
                trained = self._change_weights(version, checkpoint)
            expected = self._expected_logits(checkpoint)
            self._note("training", expected, trained)
            self._switch(checkpoint, expected)
        self.verdict.num_versions = len(self._digests)

    def _change_weights(self, version: int, checkpoint: Path) -> torch.Tensor | None:
        """Give the trainer new weights and save them to `checkpoint`.

        Returns the trainer's logits, or None if it does not compute.
        """
        if version == 0 or not self.trains:
            with self.worker.job.agreement.phase("writing a random checkpoint"):
                if self.rank == 0:
                    write_random_checkpoint(
                        checkpoint,
                        self.worker.config.model,
                        self.table,
                        self.verdict.dtype,
                        version,
                    )
            self.worker.load_hf_checkpoint(checkpoint)
        else:
            self._train(version)
            self.worker.save_hf_checkpoint(checkpoint)
        if not self.trains:
            return None
        return self.worker.actor.engine.logits(self._tokens())

    def _train(self, version: int) -> None:
        """Take one optimizer step; with float16, steps until the loss scale does not overflow."""
        unit = self.worker.actor.engine.limits.dp_size * self._stages
        num_sequences = round_up(NUM_SEQUENCES, unit)
        batch = self._batch(version, num_sequences)
        while self.worker.update(batch, cross_entropy)["skipped"]:
            pass

    def _switch(self, checkpoint: Path, expected: torch.Tensor) -> None:
        """Switch, and compare vLLM's parameters with those that vLLM loads from the checkpoint."""
        from hybrid_engine.backends.vllm.native_load import native_parameters

        switched: TensorDict = {}

        def keep(name: str, tensor: torch.Tensor) -> None:
            switched[name] = tensor.detach().clone()

        with self.worker.inference.adaptor.observed(keep), self.worker.rollout_context():
            digest = float(expected.double().sum())
            digest += sum(float(tensor.double().sum()) for tensor in switched.values())
            # Weights that a step did not change would pass every
            # comparison; `Verdict` counts these sums.
            self._digests.add(digest)
            # With adapters that are delivered apart, vLLM holds the weights of the first version.
            has_adapter = self.worker.adapter is not None
            base = checkpoint.with_name("version0") if has_adapter else checkpoint
            native = native_parameters(self.worker.inference, str(base))
            for name in sorted({*switched, *native}):
                if not _same_bits(switched.get(name), native.get(name)):
                    self.verdict.different.append(name)
            self.verdict.num_parameters += len(native)
            del native
            # vLLM has no distribution after the last token of a prompt.
            self._note("vllm", expected[:, :-1], self._served_logits())
        report = self.worker.sharding.last_report
        assert report is not None, "there was a switch"
        agreement = self.worker.job.agreement
        self.verdict.bytes_received = agreement.total(report.bytes_received)
        self.verdict.bytes_least = agreement.total(report.bytes_least)

    def _served_logits(self) -> torch.Tensor | None:
        try:
            tokens = self._tokens().tolist()
            rows = self.worker.inference.prompt_distributions(tokens, self.worker.adapter)
        except StateError as error:
            self.verdict.remarks.append(str(error))
            return None
        return torch.stack(rows)

    def _tokens(self) -> torch.Tensor:
        num_sequences = round_up(_NUM_COMPARED, self._stages)
        # A seed of no training step: versions are 0 to 2.
        return self._batch(99, num_sequences)["tokens"]

    def _batch(self, seed: int, num_sequences: int) -> NewBatch:
        batch = tokens_and_labels(seed, self.table.dims.vocab_size, num_sequences)
        for tokens in batch.values():
            # A batch has no images, which placeholders stand for.
            for placeholder in self.table.placeholders.values():
                tokens[tokens == placeholder] = 0
        return batch

    def _expected_logits(self, checkpoint: Path) -> torch.Tensor:
        """Return the log-probabilities that transformers computes on rank 0, in float32.

        In the dtypes of both sides it computes them as well, for `Verdict.rounding`.
        """
        verdict = self.verdict
        tokens = self._tokens()
        expected = torch.empty(*tokens.shape, self.table.dims.vocab_size)
        with self.worker.job.agreement.phase("logits by transformers"):
            if self.rank == 0:
                expected.copy_(self.reference.log_probs(checkpoint, tokens))
                for dtype in {verdict.dtype, verdict.served_dtype} - {"float32"}:
                    rounded = self.reference.log_probs(checkpoint, tokens, dtype)
                    difference = difference_of(rounded, expected, verdict.statistic)
                    verdict.rounding[dtype] = max(difference, verdict.rounding.get(dtype, 0.0))
        on_device = expected.to(self.worker.job.device)
        dist.broadcast(on_device, src=0)
        expected = on_device.cpu()
        verdict.spread = float(expected.max() - expected.min())
        return expected

    def _note(self, engine: str, expected: torch.Tensor, logits: torch.Tensor | None) -> None:
        """Raise the verdict's difference of `engine` to that of `logits`; do nothing without."""
        if logits is None:
            return
        logits = logits.to(expected.device)
        difference = difference_of(logits, expected, self.verdict.statistic)
        previous = getattr(self.verdict, engine) or 0.0
        setattr(self.verdict, engine, max(difference, previous))


def write_random_checkpoint(
    path: Path,
    model_dir: Path,
    table: ModelTable,
    dtype: str,
    seed: int,
) -> None:
    """Write a random checkpoint with a table's names and shapes, and `model_dir`'s other files."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in table.shapes.items():
        # Scaled by fan-in, with norms around 1, so that activations stay in range over all layers.
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        values = torch.randn(shape, generator=generator) * scale
        is_norm = name.endswith("norm.weight") or "layernorm" in name
        values += 1.0 if is_norm else 0.0
        tensors[name] = values.to(getattr(torch, table.dtypes.get(name, dtype)))
    for copy, name in table.copies.items():
        tensors[copy] = tensors[name].clone()
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    copy_companions(model_dir, path)


def tokens_and_labels(seed: int, vocab_size: int, num_sequences: int = NUM_SEQUENCES) -> NewBatch:
    """Return random tokens and their successors [num_sequences, SEQ_LENGTH], equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(vocab_size, (num_sequences, SEQ_LENGTH + 1), generator=generator)
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def cross_entropy(micro_batch: Batch, log_probs: torch.Tensor) -> Loss:
    """Return the mean negative log-probability of the labels; a loss function for training."""
    loss = -log_probs.mean()
    return loss, {"loss": loss}


def difference_of(logits: torch.Tensor, log_probs: torch.Tensor, statistic: str) -> float:
    """Return the difference of log-probabilities [B, S, vocabulary].

    It is the largest difference at each position, and of these the largest or the median, by
    `statistic`. `logits` need not be normalised; `log_probs` are.
    """
    by_position = (logits.float().log_softmax(-1) - log_probs).abs().amax(-1)
    return float(by_position.median() if statistic == "median" else by_position.max())


def _same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return False
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    # As bytes: NaN equals NaN, and -0.0 differs from 0.0.
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))

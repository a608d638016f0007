"""The comparison on one rank: change the weights, switch, compare with vLLM's own loader and with transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_engine.errors import ReshardError, StateError
from hybrid_engine.models.table import ModelTable
from hybrid_engine.verification.cases import SEQ_LENGTH
from hybrid_engine.verification.reference import Reference
from hybrid_engine.verification.verdict import NUM_SWITCHES, Verdict

if TYPE_CHECKING:
    import torch

    from hybrid_engine.trainer.worker import ActorHybridWorker

NUM_SEQUENCES = 8
"""Of a training step, or the next number that replicas and pipeline stages can share out."""
_NUM_COMPARED = 4
"""Sequences of which all log-probabilities are compared, likewise."""

_MOST_SKIPPED_STEPS = 40


class Comparison:
    """The switches of one case on one rank; what it finds goes into `verdict`, what it is doing to `say`."""

    def __init__(
        self,
        worker: ActorHybridWorker,
        reference: Reference,
        scratch: Path,
        verdict: Verdict,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.worker, self.reference, self.scratch, self.verdict, self._say = worker, reference, scratch, verdict, say
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
            self._say(f"weights {version + 1} of {NUM_SWITCHES}: training")
            with self.worker.train_context():
                trained = self._change_weights(version, checkpoint)
            self._say(f"weights {version + 1} of {NUM_SWITCHES}: transformers")
            expected = self._expected_logits(checkpoint)
            self._note("training", expected, trained)
            self._say(f"weights {version + 1} of {NUM_SWITCHES}: switch and comparison")
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
        import torch

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
        import torch
        import torch.distributed as dist

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
            difference = difference_of(logits, expected, self.verdict.statistic)
            setattr(self.verdict, engine, max(difference, getattr(self.verdict, engine) or 0.0))


def write_random_checkpoint(path: Path, model_dir: Path, table: ModelTable, dtype: str, seed: int) -> None:
    """Write a checkpoint of random values under the names and shapes of a table, with the config of `model_dir`."""
    import torch
    from safetensors.torch import save_file

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
    import torch

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
    import torch

    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))

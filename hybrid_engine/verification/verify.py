"""`python -m hybrid_engine verify`: does this model survive the switch between these two layouts?

Both real engines are built at a small size. Three times the weights change and are switched:

    random checkpoint --load_hf_checkpoint--> Megatron --switch--> vLLM     (then: one training step, save, switch)
            |                                     |                  |
            +--- vLLM's own loader: same bits? ---|------------------+
            +--- transformers: same logits? ------+------------------+

A model whose computation megatron-core lacks is not trained: its weights come from a new checkpoint each time.

The command starts the ranks; each runs `main` of this module on a list of cases.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_engine.config import HybridConfig, find_violations, load_config
from hybrid_engine.config.constraints import INFER_KEYS, TRAIN_KEYS
from hybrid_engine.errors import ReshardError, StateError
from hybrid_engine.files.scratch import scratch_directory
from hybrid_engine.layouts.inference import InferenceParallelism
from hybrid_engine.layouts.training import TrainParallelism
from hybrid_engine.models import table_for
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ranks.launching import run_ranks
from hybrid_engine.verification.reference import Reference

if TYPE_CHECKING:
    import torch

    from hybrid_engine.worker import ActorHybridWorker

SCRATCH_PREFIX = "hybrid-engine-verify-"
NUM_SWITCHES = 3
SEQ_LENGTH = 32
NUM_SEQUENCES = 8

LOGITS_ATOL = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.03}
"""What log-probabilities may differ by from transformers' in float32: other kernels, other orders of summation."""

_SECONDS_TO_WAIT = 300
"""Longest wait of one rank for another."""

_MOST_SKIPPED_STEPS = 40

_DEFAULTS = {
    "actor_config": {
        "params_dtype": "float32",
        "make_vocab_size_divisible_by": 8,
        "micro_batch_size": 1,
        "seq_length": SEQ_LENGTH,
        "optimizer": {"lr": 1e-2},
    },
    "generate_config": {"max_model_len": 2 * SEQ_LENGTH, "max_num_seqs": 16, "bucket_mb": 1, "timeout_seconds": 120},
}


@dataclass(frozen=True)
class Case:
    """A model directory (a small config.json) with both sides' layouts; keys of `actor_config`, `generate_config`."""

    name: str
    model: str
    actor: Mapping[str, Any] = field(default_factory=dict)
    generate: Mapping[str, Any] = field(default_factory=dict)

    def config(self, world_size: int) -> HybridConfig:
        """The checked configuration; training need not compute. Raises ConfigError."""
        values = {
            "model": self.model,
            "actor_config": {**_DEFAULTS["actor_config"], **self.actor},
            "generate_config": {**_DEFAULTS["generate_config"], **self.generate},
        }
        return load_config(values, world_size, weights_only=True)


@dataclass
class Verdict:
    """What was seen of one case, over all ranks.

    Attributes:
        different: vLLM parameters (rank and name) that differ in any bit from what vLLM's own loader gives.
        num_parameters: vLLM parameters compared, all switches and ranks.
        bytes_received, bytes_least: of one switch, over all ranks.
        megatron, vllm: difference of log-probabilities from transformers; None where not computed.
        statistic: which position's difference that is, "largest" or, of a model with experts in half precision, where
            tokens whose scores nearly tie go to another expert, "median".
        remarks: why something was not computed.
        error: a failure, with its trace.
        seconds: the whole case.
    """

    name: str
    different: list[str] = field(default_factory=list)
    num_parameters: int = 0
    bytes_received: int = 0
    bytes_least: int = 0
    megatron: float | None = None
    vllm: float | None = None
    statistic: str = "largest"
    spread: float = 0.0
    num_versions: int = 0
    dtype: str = "float32"
    served_dtype: str = "float32"
    remarks: list[str] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0

    @property
    def faults(self) -> list[str]:
        """Everything that is not as it must be; empty when the case passed."""
        if self.error is not None:
            return [self.error]
        faults = [f"{name}: not the bits that vLLM loads" for name in self.different]
        if self.num_parameters == 0 or self.num_versions != NUM_SWITCHES:
            faults.append(f"{self.num_parameters} parameters compared over {self.num_versions} changing versions")
        if self.bytes_received != self.bytes_least:
            faults.append(f"{self.bytes_received} bytes received, {self.bytes_least} is the least")
        dtypes = {"megatron": self.dtype, "vllm": self.served_dtype}
        for engine, difference in (("megatron", self.megatron), ("vllm", self.vllm)):
            atol = LOGITS_ATOL[dtypes[engine]]
            if difference is not None and not difference <= atol:
                faults.append(f"{engine}: log-probabilities differ from transformers' by {difference:.2g}, over {atol}")
        if not self.spread > 1:
            faults.append(f"log-probabilities that spread over {self.spread:.2g} only say nothing")
        return faults


def run_cases(cases: Sequence[Case], num_ranks: int, timeout: float = 1800) -> list[Verdict]:
    """Run cases one after the other on the same `num_ranks` processes. Raises ReshardError when they cannot end.

    Configurations are checked by the caller (`Case.config`), before anything is started.
    """
    with scratch_directory(SCRATCH_PREFIX) as directory:
        job, out = directory / "cases.json", directory / "verdicts.json"
        job.write_text(json.dumps([asdict(case) for case in cases]))
        ended = run_ranks(
            ["-m", "hybrid_engine.verification.verify", str(job), str(out)],
            num_ranks,
            timeout,
            environment={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        if ended.status is None:
            raise ReshardError(f"no verdict within {timeout:g} s:\n{ended.output}")
        if ended.status != 0 or not out.is_file():
            raise ReshardError(f"verify ended with status {ended.status}:\n{ended.output}")
        return [Verdict(**verdict) for verdict in json.loads(out.read_text())]


def main(job: str, out: str) -> None:
    """One rank: run the cases, write the verdicts of all ranks."""
    import torch.distributed as dist

    timeout = timedelta(seconds=_SECONDS_TO_WAIT)
    dist.init_process_group("cpu:gloo,cuda:nccl" if _on_gpu() else "gloo", timeout=timeout)
    directory = Path(job).parent
    cases = [Case(**case) for case in json.loads(Path(job).read_text())]
    verdicts = []
    with Reference() as reference:
        for number, case in enumerate(cases):
            scratch = directory / str(number)
            gc.collect()
            gc.freeze()  # vLLM collects garbage many times per engine, and would go through all modules each time
            own = _verdict_of_rank(case, reference, scratch)
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, own)
            verdicts.append(_join(everyone))
            if dist.get_rank() == 0:
                Path(out).write_text(json.dumps([asdict(verdict) for verdict in verdicts]))
                shutil.rmtree(scratch, ignore_errors=True)
            dist.barrier()
    dist.destroy_process_group()


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _verdict_of_rank(case: Case, reference: Reference, scratch: Path) -> Verdict:
    """Errors become part of the verdict, so that the other cases run; one that only this rank sees ends them all."""
    import torch.distributed as dist

    from hybrid_engine.worker import ActorHybridWorker

    started, verdict = time.perf_counter(), Verdict(case.name)
    try:
        config = case.config(dist.get_world_size())
        verdict.dtype, verdict.served_dtype = config.actor_config.params_dtype, config.wire_dtype
        verdict.remarks = [str(violation) for violation in find_violations(config, dist.get_world_size())]
        worker = ActorHybridWorker(config, weights_only=bool(verdict.remarks))
        try:
            _Examination(worker, reference, scratch, verdict).run()
        finally:
            worker.shutdown()
    except Exception:
        verdict.error = traceback.format_exc()
    verdict.seconds = time.perf_counter() - started
    return verdict


def _join(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict from those of all ranks."""
    first = verdicts[0]
    first.different = [f"rank {rank} {name}" for rank, one in enumerate(verdicts) for name in one.different]
    first.num_parameters = sum(one.num_parameters for one in verdicts)
    errors = [f"rank {rank}: {one.error}" for rank, one in enumerate(verdicts) if one.error]
    first.error = "\n".join(errors) or None
    for engine in ("megatron", "vllm"):
        seen = [difference for one in verdicts if (difference := getattr(one, engine)) is not None]
        setattr(first, engine, max(seen, default=None))
    first.remarks = list(dict.fromkeys(remark for one in verdicts for remark in one.remarks))
    return first


class _Examination:
    """The three switches of one case on one rank; findings go into `verdict`."""

    def __init__(self, worker: ActorHybridWorker, reference: Reference, scratch: Path, verdict: Verdict) -> None:
        self.worker, self.reference, self.scratch, self.verdict = worker, reference, scratch, verdict
        self.table: ModelTable = worker.table
        self.rank = worker.rank
        self.trains = not verdict.remarks  # they say why training does not compute here
        if self.table.dims.num_experts and verdict.served_dtype != "float32":
            verdict.statistic = "median"
        self._digests: set[float] = set()

    def run(self) -> None:
        """Change the weights, switch, compare; `NUM_SWITCHES` times."""
        for version in range(NUM_SWITCHES):
            checkpoint = self.scratch / f"version{version}"
            with self.worker.train_context():
                megatron = self._change_weights(version, checkpoint)
            expected = self._expected_logits(checkpoint)
            self._note("megatron", expected, megatron)
            self._switch(checkpoint, expected)
        self.verdict.num_versions = len(self._digests)

    def _change_weights(self, version: int, checkpoint: Path) -> torch.Tensor | None:
        """New weights in Megatron and, the same, in `checkpoint`; returns Megatron's logits where it computes them."""
        if version == 0 or not self.trains:
            with self.worker.sharding.agreement.phase("writing a random checkpoint"):
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
        """One optimizer step; with float16 as many as it takes to find a loss scale that does not overflow."""
        for _ in range(_MOST_SKIPPED_STEPS):
            report = self.worker.update(_tokens_and_labels(version, self.table.dims.vocab_size), _cross_entropy)
            if not report["skipped"]:
                return
        raise ReshardError(f"{_MOST_SKIPPED_STEPS} steps in a row were skipped: gradients overflow at every loss scale")

    def _switch(self, checkpoint: Path, expected: torch.Tensor) -> None:
        """Switch, and compare vLLM's parameters with those that vLLM itself loads from the checkpoint."""

        from hybrid_engine.backends.vllm.native_load import native_parameters

        seen: dict[str, torch.Tensor] = {}
        adaptor = self.worker.inference.adaptor
        adaptor.observer = lambda name, tensor: seen.update({name: tensor.detach().clone()})
        with self.worker.rollout_context():
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
        report, agreement = self.worker.sharding.last_report, self.worker.sharding.agreement
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
        return _tokens_and_labels(99, self.table.dims.vocab_size)["tokens"][:4]

    def _expected_logits(self, checkpoint: Path) -> torch.Tensor:
        """Log-probabilities by transformers in float32, computed on rank 0."""
        import torch
        import torch.distributed as dist

        tokens = self._tokens()
        expected = torch.empty(*tokens.shape, self.table.dims.vocab_size)
        with self.worker.sharding.agreement.phase("logits by transformers"):
            if self.rank == 0:
                expected.copy_(self.reference.log_probs(checkpoint, tokens))
        dist.broadcast(expected, src=0)
        self.verdict.spread = float(expected.max() - expected.min())
        return expected

    def _note(self, engine: str, expected: torch.Tensor, logits: torch.Tensor | None) -> None:
        if logits is not None:
            difference = difference_of(logits, expected, self.verdict.statistic)
            setattr(self.verdict, engine, max(difference, getattr(self.verdict, engine) or 0.0))


def write_random_checkpoint(path: Path, model_dir: Path, table: ModelTable, dtype: str, seed: int) -> None:
    """A checkpoint of random values under the names and shapes of a table, with the config of `model_dir`."""
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


def _tokens_and_labels(seed: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Random tokens and those that follow them, [NUM_SEQUENCES, SEQ_LENGTH]; the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(vocab_size, (NUM_SEQUENCES, SEQ_LENGTH + 1), generator=generator)
    return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def _cross_entropy(
    micro_batch: Mapping[str, torch.Tensor], log_probs: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -log_probs.mean()
    return loss, {"loss": loss}


def difference_of(logits: torch.Tensor, log_probs: torch.Tensor, statistic: str) -> float:
    """Between log-probabilities [B, S, vocabulary], by position the largest; of these the largest or the median."""
    by_position = (logits.float().log_softmax(-1) - log_probs).abs().amax(-1)
    return float(by_position.median() if statistic == "median" else by_position.max())


def _same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    import torch

    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def case_of(
    name: str,
    model: Path,
    directory: Path,
    training: TrainParallelism,
    inference: InferenceParallelism,
    num_layers: int,
    rank_order: str,
    dtype: str,
) -> Case:
    """The case for a published model in these layouts; its small model is written below `directory`."""
    small = prepare_model(model, directory, num_layers, (training.tensor, inference.tensor))
    actor = {key: getattr(training, attribute) for attribute, key in TRAIN_KEYS.items()}
    generate = {key: getattr(inference, attribute) for attribute, key in INFER_KEYS.items()}
    actor["make_vocab_size_divisible_by"] = min(actor["make_vocab_size_divisible_by"], 8)
    actor["params_dtype"] = dtype
    # what training with experts asks for
    actor["sequence_parallel"] = training.tensor > 1 and bool(
        table_for(json.loads(_config_text(small))).dims.num_experts
    )
    return Case(name, str(small), actor, {**generate, "infer_rank_order": rank_order})


def _config_text(model: Path) -> str:
    return (model / "config.json").read_text()


def prepare_model(model: Path, directory: Path, num_layers: int, tp_sizes: Sequence[int]) -> Path:
    """A directory with the reduced config of the model in `model`. Raises UnknownModelError without a name table."""
    from hybrid_engine.verification.small_model import reduced_config

    config = reduced_config(json.loads(_config_text(model)), num_layers, tp_sizes)
    table_for(config)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


if __name__ == "__main__":
    main(*sys.argv[1:])

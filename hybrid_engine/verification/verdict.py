"""What `verify` finds out about a case, and when that is a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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

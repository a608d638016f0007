"""`generate_config.check_compute`: whether vLLM and the trainer compute the same, by log-probabilities of fixed tokens.

    at set-up      how many tokens both sides of all ranks can compute; where they cannot, one line in the log says why
    ask_trainer    before anything leaves the device: the trainer's own forward pass
    compare        when vLLM could generate: its log-probabilities of the same tokens

`verify` shows that the bits arrived. What each side makes of them follows from settings of its own, and a setting that
one side does not know trains, switches and verifies all the same. Only numbers tell.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hybrid_engine.errors import ComputationError, shortened
from hybrid_engine.ports import InferenceCaches, Trainer
from hybrid_engine.probes import ProbeAnswer, Probed, ProbeLimits
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.switch.report import SwitchTally

logger = logging.getLogger("hybrid_engine")

NUM_ROWS, LENGTH, SHORTEST = 2, 64, 4
"""Sequences that are compared; their most and their fewest tokens."""

TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 0.01, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Dtype of the coarser side -> what rounding explains of the difference, as a share of the spread of the trainer's
log-probabilities. Two unrelated functions of this spread are about as far apart as it; measured in docs/failures.md."""

LEAST_SPREAD = 0.2
"""In nats: an untrained model gives all tokens nearly the same, and its rounding errors are not smaller for that."""

_NUM_NAMED = 12
"""Settings that a message names."""


@dataclass(frozen=True)
class _Sides:
    """Both sides, and token ids [B, L] that every rank of either can compute."""

    trainer: Probed
    inference: Probed
    tokens: torch.Tensor


class Computation:
    """The comparison of a job; one on every rank. Making one is collective, and so are `ask_trainer` and `compare`.

    Args:
        trainer: compared, where it is a `Probed`.
        inference: compared with it, where it is one too.
        job: of all ranks.
        when: "first": until it has gone well once; "always": in every switch; "off".

    Attributes:
        is_asking: the trainer computes for this; whoever begins a switch takes it back, should an interrupt leave it.
    """

    def __init__(
        self, trainer: Trainer, inference: InferenceCaches, job: Job, when: Literal["first", "always", "off"]
    ) -> None:
        self._trainer, self._inference, self._job, self._when = trainer, inference, job, when
        self._sides = None if when == "off" else self._agree()
        self._trained: ProbeAnswer | None = None
        self.is_asking = False

    @property
    def is_due(self) -> bool:
        """Whether the next switch to INFER is one to compare in; the same on all ranks."""
        return self._sides is not None and self._when != "off"

    def ask_trainer(self, tally: SwitchTally) -> None:
        """Have the trainer compute, where it is due; its parameters are on the device."""
        assert self._sides is not None, "it is due"
        with tally.timed("compute"), self._job.agreement.phase("compute", SHORT_PATIENCE), self._undisturbed():
            self._trained = self._sides.trainer.probe(self._sides.tokens)

    def compare(self, tally: SwitchTally) -> None:
        """Have vLLM compute, which can generate now, if the trainer was asked before.

        Raises ComputationError on ranks whose two sides are far apart.
        """
        sides, trained, self._trained = self._sides, self._trained, None
        if sides is None or trained is None:
            return
        with tally.timed("compute"), self._job.agreement.phase("compute", SHORT_PATIENCE):
            served = sides.inference.probe(sides.tokens)
            self._inference.reset_caches()
            gap = Gap(sides.tokens, trained, served)
            if not gap.is_rounding:
                settings = differing(sides.trainer.computed_settings(), sides.inference.computed_settings())
                raise ComputationError(f"vLLM does not compute what the trainer computes: {gap}. {settings}")
            if self._job.rank == 0:
                logger.info("[Reshard] vLLM computes what the trainer computes: %s", gap)
        if self._when == "first":
            self._when = "off"

    def _agree(self) -> _Sides | None:
        """None, and a line in the log, where a rank of either side cannot compute."""
        trainer, inference = self._trainer, self._inference
        with self._job.agreement.phase("looking at what can be compared"):
            own = [limits_of(trainer), limits_of(inference)]
        limits = self._job.agreement.gather(own, list[ProbeLimits], "looking at what can be compared")
        refusal, tokens = tokens_within([each for of_rank in limits for each in of_rank])
        if isinstance(trainer, Probed) and isinstance(inference, Probed) and tokens is not None:
            return _Sides(trainer, inference, tokens)
        if self._job.rank == 0:
            logger.warning("[Reshard] vLLM's computation is not compared with the trainer's: %s", refusal)
        return None

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """The trainer may compute, whichever state this is, and no generator moves."""
        devices = [self._job.device] if self._job.device.type == "cuda" else []
        self.is_asking = True
        try:
            with torch.random.fork_rng(devices):
                yield
        finally:
            self.is_asking = False


@dataclass(frozen=True)
class Gap:
    """Difference between two answers to `tokens` [B, L].

    Attributes:
        median: of the differences of the log-probabilities, in nats. Where experts are nearly equal rounding chooses
            others, which moves single tokens by a nat; another function moves all.
        tolerance: what rounding explains of that, in nats.
    """

    tokens: torch.Tensor
    trained: ProbeAnswer
    served: ProbeAnswer

    @property
    def _each(self) -> torch.Tensor:
        return (self.trained.log_probs.double() - self.served.log_probs.double()).abs()

    @property
    def median(self) -> float:
        return self._each.median().item()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the coarser side."""
        return max(self.trained.dtype, self.served.dtype, key=lambda each: torch.finfo(each).eps)

    @property
    def tolerance(self) -> float:
        share = TOLERANCES.get(self.dtype, max(TOLERANCES.values()))
        return share * max(LEAST_SPREAD, self.trained.log_probs.double().std().item())

    @property
    def is_rounding(self) -> bool:
        """Whether it is one function; NaN is not."""
        return self.median <= self.tolerance

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        row, column = divmod(int(self._each.nan_to_num(torch.inf).argmax()), self._each.shape[1])
        by_trainer, by_vllm = (each.log_probs[row, column].item() for each in (self.trained, self.served))
        return (
            f"log-probabilities of {self._each.numel()} tokens are {self.median:.3g} nats apart (median), rounding of "
            f"{dtype} explains {self.tolerance:g}; furthest apart is token {int(self.tokens[row, column + 1])} at "
            f"position {column + 1} of sequence {row}, {by_trainer:.4f} by the trainer and {by_vllm:.4f} by vLLM"
        )


def limits_of(side: object) -> ProbeLimits:
    """Return what a side can compute."""
    return side.probe_limits() if isinstance(side, Probed) else ProbeLimits(f"{type(side).__name__} cannot be asked")


def tokens_within(limits: Sequence[ProbeLimits]) -> tuple[str, torch.Tensor | None]:
    """Why nothing can be compared, or token ids [B, L] that all can compute, the same in every job."""
    if refusal := next((each.refusal for each in limits if each.refusal), ""):
        return refusal, None
    multiple = math.lcm(*(each.multiple for each in limits))
    longest = min([LENGTH, *(each.max_length for each in limits if each.max_length is not None)])
    length = longest // multiple * multiple
    if length < SHORTEST:
        return f"sequences of at most {longest} tokens, and of a multiple of {multiple}, are too short", None
    vocab_size = min(each.vocab_size for each in limits)
    return "", torch.randint(vocab_size, (NUM_ROWS, length), generator=torch.Generator().manual_seed(0))


def differing(trainer: Mapping[str, Any], inference: Mapping[str, Any]) -> str:
    """Describe which settings with a name differ, and what to do."""
    found = [
        f"{name} is {shortened(trainer[name], 80)} for the trainer and {shortened(inference[name], 80)} for vLLM"
        for name in sorted(trainer.keys() & inference.keys())
        if trainer[name] != inference[name]
    ]
    found += [
        f"the trainer has {name} {shortened(trainer[name], 80)}" for name in sorted(trainer.keys() - inference.keys())
    ]
    more = f"; and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
    return (
        f"Settings that differ: {'; '.join(found[:_NUM_NAMED]) or 'none of those with a name'}{more}. Make the model "
        "and its config.json agree; with generate_config.check_compute: off it is switched all the same"
    )

"""`generate_config.check_compute`: whether vLLM and the trainer compute the same.

    at set-up      windows, caps, scales and rotary frequencies of every layer, as the live modules of all ranks have
                   them; then how many tokens both sides can compute, or one line in the log that says why they cannot
    ask_trainer    before anything leaves the device: the trainer's own forward pass
    compare        when vLLM could generate: its log-probabilities of the same tokens

`verify` shows that the bits arrived. What each side makes of them follows from settings of its own, and a setting that
one side does not know trains, switches and verifies all the same. Log-probabilities of fixed tokens tell, but for what
acts on longer sequences alone, or less than rounding: therefore layers are compared too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hybrid_engine.errors import ComputationError, shortened
from hybrid_engine.ports import InferenceCaches, Trainer
from hybrid_engine.probes import (
    Attention,
    Layers,
    ProbeAnswer,
    Probed,
    ProbeLimits,
    WithAttention,
    attention_differences,
    ranges,
    unread_layers,
)
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job
from hybrid_engine.switch.report import SwitchTally

logger = logging.getLogger("hybrid_engine")

NUM_ROWS, LENGTH, LONGEST, SHORTEST = 2, 64, 256, 4
"""Sequences that are compared; their tokens where no window asks for more, the most, and the fewest."""

TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 0.01, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Dtype of the coarser side -> what rounding explains of the difference, as a share of the spread of the trainer's
log-probabilities. Two unrelated functions of this spread are about as far apart as it; measured in docs/failures.md."""

LEAST_SPREAD = 0.2
"""In nats: an untrained model gives all tokens nearly the same, and its rounding errors are not smaller for that."""

_NUM_NAMED = 12
"""Settings that a message names."""

_REMEDY = (
    "Make the model and its config.json agree; with generate_config.check_compute: off it is switched all the same"
)


@dataclass(frozen=True)
class _Layers:
    """Layers of one rank that compute the same attention."""

    attention: Attention
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class _Described:
    """What one rank says of its two sides before anything is compared."""

    limits: tuple[ProbeLimits, ProbeLimits]
    trainer: tuple[_Layers, ...]
    inference: tuple[_Layers, ...]


@dataclass(frozen=True)
class _Sides:
    """Both sides, and token ids [B, L] that every rank of either can compute."""

    trainer: Probed
    inference: Probed
    tokens: torch.Tensor


class AskingTrainer:
    """Base of a comparison that has the trainer compute, whichever state the devices are in.

    Attributes:
        is_asking: the trainer computes for the comparison, so guards let it; whoever begins a switch takes this back,
            should an interrupt leave it.
    """

    is_asking = False

    @contextmanager
    def _asking(self, device: torch.device) -> Iterator[None]:
        """Let the trainer compute inside, and put the state of random generators back."""
        devices = [device] if device.type == "cuda" else []
        self.is_asking = True
        try:
            with torch.random.fork_rng(devices):
                yield
        finally:
            self.is_asking = False


class Computation(AskingTrainer):
    """The comparison of a job; one on every rank. Making one is collective, and so are `ask_trainer` and `compare`.

    Args:
        trainer: compared, where it is a `Probed`.
        inference: compared with it, where it is one too.
        job: of all ranks.
        when: "first": until it has gone well once; "always": in every switch; "off".
    """

    def __init__(
        self, trainer: Trainer, inference: InferenceCaches, job: Job, when: Literal["first", "always", "off"]
    ) -> None:
        self._trainer, self._inference, self._job, self._when = trainer, inference, job, when
        self._sides = None if when == "off" else self._agree()
        self._trained: ProbeAnswer | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next switch to INFER is one to compare in; the same on all ranks."""
        return self._sides is not None and self._when != "off"

    def ask_trainer(self, tally: SwitchTally) -> None:
        """Have the trainer compute, where it is due; its parameters are on the device."""
        assert self._sides is not None, "it is due"
        with (
            tally.timed("compute"),
            self._job.agreement.phase("compute", SHORT_PATIENCE),
            self._asking(self._job.device),
        ):
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
        """Compare the layers of both sides, and choose the tokens of the probe.

        None, and a line in the log, where a rank of either side cannot compute them. Raises ComputationError, on all
        ranks, with every difference between layers.
        """
        trainer, inference = self._trainer, self._inference
        with self._job.agreement.phase("looking at what can be compared"):
            described = _Described(
                (limits_of(trainer), limits_of(inference)), _layers_of(trainer), _layers_of(inference)
            )
        by_rank = self._job.agreement.gather(described, _Described, "looking at what can be compared")
        limits = [limit for rank in by_rank for limit in rank.limits]
        by_trainer = _by_number(layers for rank in by_rank for layers in rank.trainer)
        by_vllm = _by_number(layers for rank in by_rank for layers in rank.inference)
        most = max_length_of(limits)
        self._require_same_attention(by_trainer, by_vllm, most)
        sizes = {attention.window or 0 for found in by_trainer.values() for attention in found}
        windows = {size for size in sizes if most is None or size <= most}
        refusal, tokens = tokens_within(limits, windows)
        if tokens is not None and (beyond := [size for size in windows if size >= tokens.shape[1]]):
            self._log(
                logging.INFO,
                "log-probabilities of %d tokens are compared; beyond a window of %d tokens it is the settings alone",
                *(tokens.shape[1], min(beyond)),
            )
        if isinstance(trainer, Probed) and isinstance(inference, Probed) and tokens is not None:
            return _Sides(trainer, inference, tokens)
        self._log(logging.WARNING, "vLLM's computation is not compared with the trainer's: %s", refusal)
        return None

    def _require_same_attention(self, trainer: Layers, inference: Layers, max_length: int | None) -> None:
        if differences := attention_differences(trainer, inference, max_length):
            raise ComputationError(
                f"vLLM does not compute what the trainer computes: {'; '.join(differences)}. {_REMEDY}"
            )
        unread = unread_layers(trainer, inference)
        if unread and isinstance(self._trainer, Probed):
            self._log(logging.WARNING, "the attention of %s is not compared: a side cannot be read", ranges(unread))

    def _log(self, level: int, message: str, *args: object) -> None:
        if self._job.rank == 0:
            logger.log(level, f"[Reshard] {message}", *args)


@dataclass(frozen=True)
class Gap:
    """Difference between two answers to `tokens` [B, L].

    Attributes:
        median: of the differences of the log-probabilities, in nats, in the block of positions where it is largest:
            what only a long sequence shows moves the later blocks. Where experts are nearly equal rounding chooses
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
        blocks = self._each.chunk(-(-self.tokens.shape[1] // LENGTH), dim=1)
        return torch.stack([block.median() for block in blocks]).max().item()

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


def max_length_of(limits: Sequence[ProbeLimits]) -> int | None:
    """The most tokens of a sequence that all sides can compute; None: any number."""
    return min((limit.max_length for limit in limits if limit.max_length is not None), default=None)


def tokens_within(limits: Sequence[ProbeLimits], windows: Collection[int] = ()) -> tuple[str, torch.Tensor | None]:
    """Why nothing can be compared, or token ids [B, L] that all can compute, the same in every job.

    Sequences are `LENGTH` tokens longer than the longest of `windows` with which they are not too long.
    """
    if refusal := next((each.refusal for each in limits if each.refusal), ""):
        return refusal, None
    multiple = math.lcm(*(each.multiple for each in limits))
    most = max_length_of(limits)
    reachable = [size for size in windows if LENGTH + size <= min(LONGEST, LONGEST if most is None else most)]
    longest = LENGTH + max(reachable, default=0)
    longest = longest if most is None else min(longest, most)
    length = longest // multiple * multiple
    if length < SHORTEST:
        return f"sequences of at most {longest} tokens, and of a multiple of {multiple}, are too short", None
    vocab_size = min(each.vocab_size for each in limits)
    return "", torch.randint(vocab_size, (NUM_ROWS, length), generator=torch.Generator().manual_seed(0))


def _layers_of(side: object) -> tuple[_Layers, ...]:
    """What a side says of its layers; most are alike, and say it once."""
    numbers: dict[Attention, list[int]] = {}
    for number, attention in side.attention().items() if isinstance(side, WithAttention) else ():
        numbers.setdefault(attention, []).append(number)
    return tuple(_Layers(attention, tuple(layers)) for attention, layers in numbers.items())


def _by_number(layers: Iterable[_Layers]) -> Layers:
    """The layers of all ranks."""
    attention: dict[int, list[Attention]] = {}
    for alike in layers:
        for number in alike.numbers:
            known = attention.setdefault(number, [])
            if alike.attention not in known:
                known.append(alike.attention)
    return attention


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
    return f"Settings that differ: {'; '.join(found[:_NUM_NAMED]) or 'none of those with a name'}{more}. {_REMEDY}"

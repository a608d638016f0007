"""`generate_config.check_compute`: vLLM's log-probabilities compared with the trainer's.

    set-up           all ranks exchange the window, softcap, scale and rotary frequencies of every
                     layer, read from the live modules, and agree on a probe length; if a side
                     cannot be probed, the log has the reason
    probe_trainer    the trainer's forward pass, before any state leaves the device
    compare          vLLM's log-probabilities of the same tokens, once vLLM can generate

`verify` shows that the bits arrived. How each side computes with them depends on its settings, and
a setting that one side ignores changes nothing in training, switching or verification.
Log-probabilities of fixed tokens reveal it unless its effect needs longer sequences or is below
rounding; therefore the layers are compared as well.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hybrid_engine.compute_check.attention import (
    Attention,
    Layers,
    attention_differences,
    ranges,
    unread_layers,
)
from hybrid_engine.compute_check.gap import Gap, max_length_of, tokens_within
from hybrid_engine.compute_check.probes import ProbeAnswer, Probed, ProbeLimits, WithAttention
from hybrid_engine.errors import ComputationError, shortened
from hybrid_engine.ports import InferenceCaches, Trainer
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job

logger = logging.getLogger("hybrid_engine")

_NUM_NAMED = 12
"""Maximum number of settings in a message."""

_MISMATCH = "vLLM does not compute what the trainer computes"
_REMEDY = (
    "Make the model and its config.json agree, "
    "or set generate_config.check_compute: off to skip this check"
)
_PHASE = "looking at what can be compared"
_EXACTNESS = (
    "Equality needs kernels that do not depend on the batch, on both sides, and equal "
    "tensor-parallel sizes: {}. Otherwise set generate_config.check_compute: always, which allows "
    "rounding"
)


@dataclass(frozen=True)
class _Layers:
    """Layers of one rank that share the same attention settings."""

    attention: Attention
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class _RankDescription:
    """Probe limits (trainer, inference) and layers of one rank.

    They are exchanged before anything is compared.
    """

    limits: tuple[ProbeLimits, ProbeLimits]
    trainer: tuple[_Layers, ...]
    inference: tuple[_Layers, ...]


@dataclass(frozen=True)
class _JobProbe:
    """Both sides, and token ids [B, L] that every rank of both sides can compute."""

    trainer: Probed
    inference: Probed
    tokens: torch.Tensor


class ProbingTrainer:
    """Base class of a check that runs the trainer's forward pass in any state of the devices.

    Attributes:
        is_probing: True while the trainer computes for the check; guards then let it pass. A switch
            resets it at its start because an interrupt may leave it set.
    """

    is_probing = False

    @contextmanager
    def _probing(self, device: torch.device) -> Iterator[None]:
        """Let the trainer compute inside, and restore random generators afterwards."""
        devices = [device] if device.type == "cuda" else []
        self.is_probing = True
        try:
            with torch.random.fork_rng(devices):
                yield
        finally:
            self.is_probing = False


class LogprobCheck(ProbingTrainer):
    """Comparison of log-probabilities in one job; every rank has one.

    Construction, `probe_trainer` and `compare` are collective.

    Args:
        trainer: compared if it is a `Probed`.
        inference: compared with the trainer if it is a `Probed`.
        job: job of all ranks.
        when: "first": until one comparison has passed; "always": in every switch; "exact": in
            every switch, without any difference; "off": never.
    """

    def __init__(
        self,
        trainer: Trainer,
        inference: InferenceCaches,
        job: Job,
        when: Literal["first", "always", "exact", "off"],
    ) -> None:
        self._trainer = trainer
        self._inference = inference
        self._job = job
        self._when = when
        self._probe = None if when == "off" else self._agree()
        self._trained: ProbeAnswer | None = None

    @property
    def is_due(self) -> bool:
        """True if the next switch to INFER compares; the same on all ranks."""
        return self._probe is not None and self._when != "off"

    @property
    def is_pending(self) -> bool:
        """True between `probe_trainer` and `compare`; the same on all ranks."""
        return self._trained is not None

    def probe_trainer(self) -> None:
        """Run the trainer's forward pass, if `is_due`. Its parameters must be on the device."""
        assert self._probe is not None, "call this only if is_due"
        with (
            self._job.agreement.phase("compute", SHORT_PATIENCE),
            self._probing(self._job.device),
        ):
            self._trained = self._probe.trainer.probe(self._probe.tokens)

    def compare(self) -> None:
        """Run vLLM's forward pass, and compare it with the trainer's, if `is_pending`.

        vLLM must be able to generate. Raises ComputationError on ranks on which the two sides
        differ by more than rounding.
        """
        probe = self._probe
        trained = self._trained
        self._trained = None
        assert probe is not None, "call this only if is_pending"
        assert trained is not None, "call this only if is_pending"
        with self._job.agreement.phase("compute", SHORT_PATIENCE):
            served = probe.inference.probe(probe.tokens)
            self._inference.reset_caches()
            gap = Gap(probe.tokens, trained, served)
            if self._when == "exact" and not gap.is_zero:
                raise ComputationError(
                    f"{_MISMATCH} bit by bit: {gap.inequality}. {exactness(self._job.device)}",
                    code="log-probabilities-unequal",
                )
            if not gap.is_rounding:
                settings = differing(
                    probe.trainer.computed_settings(), probe.inference.computed_settings()
                )
                raise ComputationError(
                    f"{_MISMATCH}: {gap}. {settings}", code="log-probabilities-differ"
                )
            if self._job.rank == 0:
                logger.info("[Reshard] vLLM computes what the trainer computes: %s", gap)
        if self._when == "first":
            self._when = "off"

    def _agree(self) -> _JobProbe | None:
        """Compare the layers of both sides, and choose the tokens of the probe.

        Returns None, and logs the reason, if any rank of either side cannot be probed. Raises
        ComputationError on all ranks with every difference between layers.
        """
        trainer = self._trainer
        inference = self._inference
        with self._job.agreement.phase(_PHASE):
            limits_here = (limits_of(trainer), limits_of(inference))
            description = _RankDescription(limits_here, _layers_of(trainer), _layers_of(inference))
        by_rank = self._job.agreement.gather(description, _RankDescription, _PHASE)
        limits = [limit for rank in by_rank for limit in rank.limits]
        by_trainer = _by_number(layers for rank in by_rank for layers in rank.trainer)
        by_vllm = _by_number(layers for rank in by_rank for layers in rank.inference)
        max_length = max_length_of(limits)
        self._require_same_attention(by_trainer, by_vllm, max_length)

        sizes = {attention.window or 0 for kinds in by_trainer.values() for attention in kinds}
        # A window beyond the longest possible sequence hides no token.
        windows = {size for size in sizes if max_length is None or size <= max_length}
        refusal, tokens = tokens_within(limits, windows)
        if tokens is not None:
            length = tokens.shape[1]
            uncovered = [size for size in windows if size >= length]
            if uncovered:
                self._log(
                    logging.INFO,
                    "log-probabilities of %d tokens are compared; "
                    "for windows of %d tokens and more, settings alone",
                    length,
                    min(uncovered),
                )
        if isinstance(trainer, Probed) and isinstance(inference, Probed) and tokens is not None:
            return _JobProbe(trainer, inference, tokens)
        if self._when == "exact":
            raise ComputationError(
                f"check_compute is exact, but log-probabilities cannot be compared: {refusal}. Set "
                "generate_config.check_compute to another value, or change that",
                code="cannot-compare",
            )
        self._log(
            logging.WARNING,
            "vLLM's computation is not compared with the trainer's: %s",
            refusal,
        )
        return None

    def _require_same_attention(
        self, trainer: Layers, inference: Layers, max_length: int | None
    ) -> None:
        differences = attention_differences(trainer, inference, max_length)
        if differences:
            raise ComputationError(
                f"{_MISMATCH}: {'; '.join(differences)}. {_REMEDY}", code="attention-differs"
            )
        unread = unread_layers(trainer, inference)
        if unread and isinstance(self._trainer, Probed):
            layers = ranges(unread)
            self._log(
                logging.WARNING,
                "the attention of %s is not compared: a side cannot be read",
                layers,
            )

    def _log(self, level: int, message: str, *args: object) -> None:
        if self._job.rank == 0:
            logger.log(level, f"[Reshard] {message}", *args)


def exactness(device: torch.device) -> str:
    """Describe what log-probabilities of two engines need to be equal, and what can be done."""
    if device.type == "cpu":
        kernels = "neither side has such kernels for CPUs"
    else:
        kernels = (
            "VLLM_BATCH_INVARIANT=1, which is set, replaces torch's in this process; Megatron "
            "has more with actor_config.overrides.transformer: {batch_invariant_mode: true} and "
            "FlashAttention"
        )
    return _EXACTNESS.format(kernels)


def limits_of(side: object) -> ProbeLimits:
    """Return the probe limits of a side; a side that is not `Probed` refuses every probe."""
    if isinstance(side, Probed):
        return side.probe_limits()
    return ProbeLimits(f"{type(side).__name__} cannot be probed")


def _layers_of(side: object) -> tuple[_Layers, ...]:
    """Return the layers of a side, grouped by their settings because most layers are alike."""
    numbers: dict[Attention, list[int]] = {}
    if isinstance(side, WithAttention):
        for number, attention in side.attention().items():
            numbers.setdefault(attention, []).append(number)
    return tuple(_Layers(attention, tuple(layers)) for attention, layers in numbers.items())


def _by_number(layers: Iterable[_Layers]) -> Layers:
    """Merge the layers of all ranks: layer number -> its distinct settings."""
    attention: dict[int, list[Attention]] = {}
    for alike in layers:
        for number in alike.numbers:
            known = attention.setdefault(number, [])
            if alike.attention not in known:
                known.append(alike.attention)
    return attention


def differing(trainer: Mapping[str, Any], inference: Mapping[str, Any]) -> str:
    """Describe the settings that differ between the sides, and the remedy."""
    differences = []
    for name in sorted(trainer.keys() & inference.keys()):
        if trainer[name] != inference[name]:
            by_trainer = shortened(trainer[name], 80)
            by_vllm = shortened(inference[name], 80)
            differences.append(f"{name} is {by_trainer} for the trainer and {by_vllm} for vLLM")
    for name in sorted(trainer.keys() - inference.keys()):
        differences.append(f"the trainer has {name} {shortened(trainer[name], 80)}")
    listed = "; ".join(differences[:_NUM_NAMED]) or "none of those with a name"
    num_more = len(differences) - _NUM_NAMED
    more = f"; and {num_more} more" if num_more > 0 else ""
    return f"Settings that differ: {listed}{more}. {_REMEDY}"

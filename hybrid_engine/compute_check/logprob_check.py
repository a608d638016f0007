"""`generate_config.check_compute`: vLLM's log-probabilities compared with the trainer's.

    set-up           all ranks exchange the window, softcap, scale and rotation of every layer,
                     read from the live modules, and the keys of config.json that each side reads,
                     and agree on a probe length; if a side cannot be probed, the log has the reason
    probe_trainer    the trainer's forward pass, before any state leaves the device
    compare          vLLM's log-probabilities of the same tokens, once vLLM can generate
    must_repeat      in later switches: whether the structure of the model changed (fingerprint.py)

Where vLLM cannot be compared (quantised weights or caches, pipeline stages on a CPU), the trainer
is compared with transformers' class of config.json, which vLLM is built from.

`verify` shows that the bits arrived. How each side computes with them depends on its settings, and
a setting that one side ignores changes nothing in training, switching or verification.
Log-probabilities of fixed tokens decide wherever they reach. Settings that differ beyond their
length are refused at set-up; the others are named as causes if the log-probabilities differ.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hybrid_engine.compute_check.attention import (
    AlikeLayers,
    attention_differences,
    grouped,
    original_length,
    ranges,
    unread_layers,
)
from hybrid_engine.compute_check.config_reads import Read, merged_reads, one_sided
from hybrid_engine.compute_check.fingerprint import NUM_NAMED, Fingerprint
from hybrid_engine.compute_check.gap import Gap, max_length_of, tokens_within
from hybrid_engine.compute_check.probes import (
    ProbeAnswer,
    Probed,
    ProbedWithImages,
    ProbeImage,
    ProbeLimits,
    WithAttention,
    WithConfigReads,
    WithImagePrompt,
)
from hybrid_engine.errors import (
    ComputationError,
    HybridEngineError,
    require_none,
    shortened,
)
from hybrid_engine.files.model_files import HfConfig
from hybrid_engine.ports import InferenceCaches, Trainer
from hybrid_engine.ranks.agreement import SHORT_PATIENCE
from hybrid_engine.ranks.job import Job

logger = logging.getLogger("hybrid_engine")

_NUM_NAMED = 12
"""Maximum number of settings in a message."""

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
class Description:
    """Limits and layers of one rank's part of a side, exchanged before anything is compared.

    Attributes:
        limits: limits of a probe.
        layers: the decoder layers of this rank; none if the side cannot be read.
        reads: keys of config.json that its code reads; None if it does not record them.
    """

    limits: ProbeLimits
    layers: tuple[AlikeLayers, ...] = ()
    reads: dict[str, Read] | None = None


@dataclass(frozen=True)
class ConfigModel:
    """transformers' class of config.json with the trainer's weights, for what vLLM cannot answer.

    Attributes:
        build: builds it on every rank. Raises HybridEngineError if transformers has no such class.
        is_needed: the layout follows from the names of tensors alone, so that nothing but a
            comparison shows what the trainer computes.
    """

    build: Callable[[], Probed]
    is_needed: bool


When = Literal["first", "always", "exact", "off"]
"""Switches that compare.

"first": the first, and each in which the structure of the model has changed, until one comparison
has passed. "always": every switch. "exact": every switch, without any difference. "off": none.
"""


class TrainerCheck:
    """Comparison of the trainer with inference engines, on one rank of the trainers.

    `agree` and `probe_trainer` are collective over the trainers.

    Args:
        trainer: compared if it is a `Probed`.
        job: job of the trainers.
        when: switches that compare.
        reference: compared with the trainer where the engines cannot be; None: nothing is.

    Attributes:
        is_probing: True while the trainer computes for the check; guards then let it pass. A switch
            resets it at its start because an interrupt may leave it set.
        tokens: [B, L] token ids that both sides compute; None if nothing is compared.
    """

    is_probing = False

    def __init__(
        self,
        trainer: Trainer,
        job: Job,
        when: When,
        reference: ConfigModel | None = None,
    ) -> None:
        # None: nothing is compared, or the model of these weights is unknown.
        self._fingerprint: Fingerprint | None = (
            None if when == "off" else getattr(trainer.weights, "fingerprint", None)
        )
        self._has_passed = when == "off"
        self._refusal = ""  # reason for which nothing is compared
        self._trainer = trainer
        self._job = job
        self._when = when
        self._source = reference
        self._reference: Probed | None = None
        self._trained: ProbeAnswer | None = None
        # Of tensors that no gradient trains, when the trainer computed.
        self._magnitudes: dict[str, float] = {}
        self._causes: list[str] = []
        self._knows_routes = True  # until a warning has been logged
        self.tokens: torch.Tensor | None = None

    @property
    def is_due(self) -> bool:
        """True if the next fill compares; the same on all ranks."""
        return self.tokens is not None and not self._has_passed

    @property
    def asks_engines(self) -> bool:
        """True if the next fill asks engines or servers for log-probabilities; as `is_due`."""
        return self.is_due and self._reference is None

    def must_repeat(self, *, has_trained: bool, will_fill: bool) -> bool:
        """Return whether this rank's model may compute otherwise than when the sides were compared.

        No collective; ranks may differ, and the caller calls `repeat` if any returns True. Raises
        ComputationError if it may, and the sides cannot be compared.

        Args:
            has_trained: the switch begins in TRAIN. Values may have changed, and are on the device.
            will_fill: the switch ends in INFER, so the structure of the model is compared.
        """
        will_compare = not self._has_passed and not self._refusal
        if self._fingerprint is None or will_compare:
            return False
        differences = self._fingerprint.differences() if will_fill else []
        if has_trained and self._magnitudes and not self._refusal:
            differences += [
                f"{name} has grown to {largest:.3g}"
                for name, largest in self._fingerprint.magnitudes().items()
                # A tensor that was not there before has not grown.
                if largest > 2 * self._magnitudes.get(name, math.inf)
            ]
        if not differences:
            return False
        since = "the trainer's function may have changed since the engine was built or compared"
        text = f"{since}: {'; '.join(differences[:NUM_NAMED])}"
        if self._refusal:
            raise ComputationError(
                f"{text}. It cannot be compared: {self._refusal}. Restore the model, or build a "
                f"new engine. {_REMEDY}",
                code="function-may-differ",
            )
        logger.info("[Reshard] %s", text)
        return True

    def repeat(self) -> None:
        """Compare in this switch, and in those after it until one comparison has passed."""
        self._has_passed = False

    def _note_passed(self) -> None:
        """Record that a comparison has passed on all ranks."""
        # With "always" and "exact" the next switch compares again.
        self._has_passed = self._when == "first"
        if self._fingerprint is not None:
            self._fingerprint.renew()

    def agree(self, inference: Sequence[Description]) -> None:
        """Compare the layers of both sides, and choose the tokens of the probe.

        If a side cannot be probed, the trainer is compared with `reference` instead.

        Args:
            inference: the engines of this rank, or the servers that it knows.

        Raises:
            ComputationError: on all ranks: listing every difference between layers that no probe
                reaches; or neither vLLM nor transformers can be compared, and one must be.
            ConfigError: on all ranks: one side alone reads a limit from config.json.
        """
        with self._job.agreement.phase(_PHASE):
            positions = sorted({at for side in inference for at in side.limits.positions})
            here = (described(self._trainer, positions), tuple(inference))
            settings = (
                self._trainer.computed_settings() if isinstance(self._trainer, Probed) else {}
            )
        by_rank = self._job.agreement.gather(
            here, tuple[Description, tuple[Description, ...]], _PHASE
        )
        trainers = [trainer for trainer, _ in by_rank]
        engines = [engine for _, of_rank in by_rank for engine in of_rank]
        limits = [side.limits for side in (*trainers, *engines)]
        max_length = max_length_of(limits)
        # Of both sides: one of them may ignore its window.
        layers = [alike for side in (*trainers, *engines) for alike in side.layers]
        # 0 for layers without a window: it makes no sequence longer.
        sizes = {alike.attention.window or 0 for alike in layers}
        # A window beyond the longest possible sequence hides no token.
        windows = {size for size in sizes if max_length is None or size <= max_length}
        refusal, self.tokens = tokens_within(limits, windows)
        self._reference = self._trained = None
        self._compare_readings(trainers, engines, max_length, original_length(settings))
        self._refusal = refusal
        if self.tokens is not None:
            length = self.tokens.shape[1]
            uncovered = [size for size in windows if size >= length]
            if uncovered:
                self._log(
                    logging.INFO,
                    "log-probabilities of %d tokens are compared; "
                    "for windows of %d tokens and more, settings alone",
                    length,
                    min(uncovered),
                )
            return
        if self._when == "exact":
            raise ComputationError(
                f"check_compute is exact, but log-probabilities cannot be compared: {refusal}. Set "
                "generate_config.check_compute to another value, or change that",
                code="cannot-compare",
            )
        self._log(
            logging.WARNING, "vLLM's computation is not compared with the trainer's: %s", refusal
        )
        self._compare_with_reference([trainer.limits for trainer in trainers], refusal)

    def _compare_with_reference(self, trainers: list[ProbeLimits], refusal: str) -> None:
        """Choose the tokens on which the trainers are compared with `reference`."""
        if self._source is None:
            return
        limits = [*trainers]
        if not any(limit.refusal for limit in trainers):
            try:
                with self._job.agreement.phase("building transformers' model"):
                    self._reference = self._source.build()
                limits.append(self._reference.probe_limits())
            except HybridEngineError as error:
                limits.append(ProbeLimits(str(error)))
        problem, self.tokens = tokens_within(limits)
        if self.tokens is not None:
            self._refusal = ""
            self._log(logging.INFO, "the trainer is compared with transformers' class instead")
        elif self._source.is_needed:
            raise ComputationError(
                f"the names of this model's tensors do not show what it computes, and nothing can "
                f"be compared with it: not vLLM, because {refusal}; not transformers, because "
                f"{problem}. Change the first, or set generate_config.check_compute: off if you "
                "know that they agree",
                code="cannot-compare",
            )

    def probe_trainer(self) -> None:
        """Run the trainer's forward pass. Its parameters must be on the device."""
        assert self.tokens is not None, "call this only if tokens were chosen"
        # `agree` chooses tokens only for a `Probed`.
        trainer: Probed = self._trainer  # type: ignore[assignment]
        with self._job.agreement.phase("compute", SHORT_PATIENCE), self._probing():
            if self._fingerprint is not None:
                self._magnitudes = self._fingerprint.magnitudes()
            self._trained = trainer.probe(self.tokens)
        if self._reference is not None:
            with self._probing():
                answer = self._reference.probe(self.tokens)
            with self._job.agreement.phase("compute", SHORT_PATIENCE):
                gap = self._gap(answer, "transformers")
                self._require_same(gap, self._reference.computed_settings())

    @contextmanager
    def _probing(self) -> Iterator[None]:
        """Let the trainer compute inside, and restore random generators afterwards."""
        devices = [self._job.device] if self._job.device.type == "cuda" else []
        self.is_probing = True
        try:
            with torch.random.fork_rng(devices):
                yield
        finally:
            self.is_probing = False

    def _gap(self, answer: ProbeAnswer, name: str = "vLLM") -> Gap:
        """Return the difference between the trainer's answer and that of the side `name`."""
        assert self.tokens is not None, "tokens were chosen"
        assert self._trained is not None, "the trainer was probed"
        return Gap(self.tokens, self._trained, answer, name)

    def _require_same(self, gap: Gap, settings: HfConfig) -> None:
        """Raise ComputationError if two answers differ by more than rounding.

        `settings`: settings of the other side.
        """
        name = gap.name
        if self._when == "exact" and (inequality := gap.inequality):
            raise ComputationError(
                f"{name} does not compute what the trainer computes bit by bit: {inequality}. "
                f"{exactness(self._job.device)}",
                code="log-probabilities-unequal",
            )
        if not gap.is_rounding:
            own_settings = self._trainer.computed_settings()  # type: ignore[attr-defined]
            raise ComputationError(
                f"{name} does not compute what the trainer computes: {gap}. "
                f"{differing(own_settings, settings, self._causes)}",
                code="log-probabilities-differ",
            )
        self._log(logging.INFO, "%s computes what the trainer computes: %s", name, gap)
        if not gap.misrouted and (gap.trained.routes or gap.served.routes) and self._knows_routes:
            self._knows_routes = False
            self._log(
                logging.WARNING,
                "the experts that %s selects are compared by log-probabilities alone: a side does "
                "not return them, for example because a fused kernel or a captured graph selects",
                name,
            )

    def _compare_readings(
        self,
        trainers: Sequence[Description],
        engines: Sequence[Description],
        max_length: int | None,
        original: int | None,
    ) -> None:
        """Raise an error for what one side alone does and no run with `tokens` reaches.

        `max_length`, `original`: tokens of the longest sequence, and of those before rotations
        change.
        """
        remedy = _REMEDY
        scales_positions = original is not None and (max_length is None or max_length >= original)
        if scales_positions:
            remedy = (
                f"If later positions alone differ, set generate_config.max_model_len to at most "
                f"{original}. {_REMEDY}"
            )
        by_trainer = merged_reads(side.reads for side in trainers)
        by_vllm = merged_reads(side.reads for side in engines)
        violations, texts = one_sided(by_trainer, by_vllm, scales_positions)
        require_none(violations)
        trained, served = (
            [alike for side in of for alike in side.layers] for of in (trainers, engines)
        )
        num_run = 0 if self.tokens is None else self.tokens.shape[1]
        unreached, reached = attention_differences(trained, served, max_length, num_run)
        if unreached:
            listed = "; ".join([*unreached, *reached])
            raise ComputationError(
                f"vLLM does not compute what the trainer computes: {listed}. {remedy}",
                code="attention-differs",
            )
        self._causes = [*reached, *texts]
        unread = unread_layers(trained, served)
        if unread and isinstance(self._trainer, Probed):
            self._log(
                logging.WARNING,
                "the attention of %s is not compared: a side cannot be read",
                ranges(unread),
            )

    def _log(self, level: int, message: str, *args: object) -> None:
        if self._job.rank == 0:
            logger.log(level, f"[Reshard] {message}", *args)


class LogprobCheck(TrainerCheck):
    """Comparison with the engine in the same ranks; every rank has one.

    Construction, `probe_trainer` and `compare` are collective. `inference` is compared with the
    trainer if it is a `Probed`; for the other arguments see `TrainerCheck`.
    """

    def __init__(
        self,
        trainer: Trainer,
        inference: InferenceCaches,
        job: Job,
        when: When,
        reference: ConfigModel | None = None,
    ) -> None:
        super().__init__(trainer, job, when, reference)
        self._inference = inference
        self._image: ProbeImage | None = None
        self._trained_image: ProbeAnswer | None = None
        if when != "off":
            self.agree([described(inference)])
            # The prompt with an image that both sides compute, unless a rank cannot.
            with job.agreement.phase(_PHASE):
                if (
                    self.asks_engines
                    and isinstance(trainer, ProbedWithImages)
                    and isinstance(inference, WithImagePrompt)
                ):
                    self._image = inference.image_prompt()
            (is_missing,) = job.agreement.any_of([self._image is None], _PHASE)
            if is_missing:
                self._image = None

    def probe_trainer(self) -> None:
        super().probe_trainer()
        if self._image is not None:
            with self._job.agreement.phase("compute", SHORT_PATIENCE), self._probing():
                trainer: ProbedWithImages = self._trainer  # type: ignore[assignment]
                self._trained_image = trainer.probe_image(self._image)

    @property
    def is_pending(self) -> bool:
        """True between `probe_trainer` and `compare`; the same on all ranks."""
        return self._trained is not None

    def compare(self) -> None:
        """Run vLLM's forward pass, and compare it with the trainer's, if `is_pending`.

        vLLM must be able to generate. Raises ComputationError on ranks on which the two sides
        differ by more than rounding.
        """
        assert self.tokens is not None, "call this only if is_pending"
        try:
            if self._reference is None:
                with self._job.agreement.phase("compute", SHORT_PATIENCE):
                    # `agree` chooses tokens only for a `Probed`, and images for `WithImagePrompt`.
                    inference: Any = self._inference
                    gaps = [self._gap(inference.probe(self.tokens))]
                    if self._image is not None:
                        assert self._trained_image is not None, "the trainer was probed"
                        answer = inference.probe_image(self._image)
                        name = "vLLM, given an image,"
                        gaps.append(Gap(self._image.tokens, self._trained_image, answer, name))
                    inference.reset_caches()
                    for gap in gaps:
                        self._require_same(gap, inference.computed_settings())
        finally:
            self._trained = None
        self._note_passed()


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


def described(side: object, positions: Sequence[int] = ()) -> Description:
    """Return the limits and layers of a side; one that is not `Probed` refuses every probe.

    `positions`: positions at which rotations are read; by default those of its limits.
    """
    limits = ProbeLimits(f"{type(side).__name__} cannot be probed")
    if isinstance(side, Probed):
        limits = side.probe_limits()
    layers: tuple[AlikeLayers, ...] = ()
    if isinstance(side, WithAttention):
        layers = grouped(side.attention(positions or limits.positions))
    reads = dict(side.config_reads()) if isinstance(side, WithConfigReads) else None
    return Description(limits, layers, reads)


def differing(trainer: HfConfig, inference: HfConfig, causes: Sequence[str] = ()) -> str:
    """Describe the settings that differ between the sides, `causes` first, and the remedy."""
    differences = [*causes]
    for name in sorted(trainer, key=lambda name: (name not in inference, name)):
        by_trainer = shortened(trainer[name], 80)
        if name not in inference:
            differences.append(f"the trainer has {name} {by_trainer}")
        elif trainer[name] != inference[name]:
            by_vllm = shortened(inference[name], 80)
            differences.append(f"{name} is {by_trainer} for the trainer and {by_vllm} for vLLM")
    listed = "; ".join(differences[:_NUM_NAMED]) or "none of those with a name"
    num_more = len(differences) - _NUM_NAMED
    more = f"; and {num_more} more" if num_more > 0 else ""
    return f"Settings that differ: {listed}{more}. {_REMEDY}"

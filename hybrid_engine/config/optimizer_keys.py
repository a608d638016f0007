"""`actor_config.optimizer` and its schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hybrid_engine.config.values import Decay, NonNegative, Positive, Section, Steps


class ScheduleConfig(Section):
    """`actor_config.optimizer.schedule`: learning rate and weight decay by update, as megatron-core's
    OptimizerParamScheduler names it."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """What becomes of the learning rate after the warm-up. WSD (warmup-stable-decay) keeps it up to the last
    lr_wsd_decay_steps."""
    lr_warmup_init: NonNegative = 0.0
    """Learning rate of the first update of the warm-up, which rises to `lr` linearly."""
    lr_warmup_steps: Steps = 0
    """Updates of the warm-up; 0 has none."""
    lr_warmup_fraction: Decay | None = None
    """The same as a share of lr_decay_steps, in place of lr_warmup_steps."""
    lr_decay_steps: Annotated[Steps, Field(ge=1)] | None = None
    """Updates until min_lr, the warm-up included; later ones use min_lr. All styles but constant need it."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end."""
    lr_wsd_decay_steps: Annotated[Steps, Field(ge=1)] | None = None
    """With WSD, the updates of the decay, which are the last of lr_decay_steps."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """With WSD, the form of the decay."""
    start_weight_decay: NonNegative | None = None
    """Weight decay of the first update; default: weight_decay, from the first to the last."""
    end_weight_decay: NonNegative | None = None
    """Weight decay after weight_decay_incr_steps; no less than start_weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay grows from start_weight_decay to end_weight_decay."""
    weight_decay_incr_steps: Annotated[Steps, Field(ge=1)] | None = None
    """Updates until end_weight_decay; default: lr_decay_steps."""

    @property
    def num_warmup_steps(self) -> int:
        """Updates of the warm-up, by whichever key says so."""
        if self.lr_warmup_fraction is None or self.lr_decay_steps is None:
            return self.lr_warmup_steps
        return int(self.lr_warmup_fraction * self.lr_decay_steps)

    @property
    def num_weight_decay_steps(self) -> int | None:
        """Updates until end_weight_decay; None if nothing says so."""
        return self.weight_decay_incr_steps or self.lr_decay_steps


class OptimizerConfig(Section):
    """`actor_config.optimizer`: Adam, as megatron-core's OptimizerConfig names it."""

    lr: NonNegative = 1e-6
    """Learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    adam_beta1: Decay = 0.9
    """Decay of the first moment."""
    adam_beta2: Decay = 0.95
    """Decay of the second moment."""
    adam_eps: Positive = 1e-8
    """Added to the denominator."""
    clip_grad: NonNegative = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    schedule: ScheduleConfig | None = None
    """Change learning rate and weight decay with every update; see below. Default: they stay, and
    `worker.set_learning_rate` sets them."""

    @property
    def weight_decays(self) -> tuple[float, float]:
        """Of the first update, and in the end."""
        given = (
            (None, None)
            if self.schedule is None
            else (
                self.schedule.start_weight_decay,
                self.schedule.end_weight_decay,
            )
        )
        start, end = (self.weight_decay if value is None else value for value in given)
        return start, end

"""What a run of GRPO or PPO does, beside the configuration of its engines: `GrpoConfig`, `PpoConfig`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from hybrid_engine.config.keys import (
    MAY_CHANGE,
    Count,
    HybridConfig,
    NonNegative,
    Positive,
    ScheduleConfig,
    Section,
    Seed,
    Steps,
)
from hybrid_engine.config.loading import violations_of
from hybrid_engine.errors import ConfigError
from hybrid_engine.rl.losses import Aggregation
from hybrid_engine.rl.run_files import defaults_of, flat
from hybrid_engine.trainer.learning_rate import learning_rate


class LoopConfig(Section):
    """Settings that both algorithms have. Immutable; raises ConfigError with everything that is wrong."""

    steps: Count = 100
    """Steps of the run: in each, completions are drawn, scored and learned from."""
    prompts_per_step: Count = 8
    """Prompts of a step. They come in a new order in each pass over all prompts."""
    samples_per_prompt: Annotated[Count, Field(le=2**14)] = 8
    """Completions of each prompt."""
    max_tokens: Count = 256
    """Most tokens of a completion; of a conversation, of all that follows the prompt."""
    max_tokens_per_turn: Count | None = None
    """Most tokens of an answer in a conversation; default: max_tokens."""
    temperature: Annotated[Positive, Field(ge=0.01, le=2)] = 1.0
    """Temperature of sampling, and of all log-probabilities."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, beside the model's own end tokens."""
    stop: tuple[str, ...] = ()
    """Texts before which a completion ends."""
    epochs: Count = 1
    """Times that each completion is learned from."""
    minibatches: Count = 1
    """Optimizer steps per epoch: each learns from an equal part of the completions."""
    learning_rate: Positive | None = None
    """Learning rate after the warm-up; default: `actor_config.optimizer.lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from the warm-up to the last step, towards 0."""
    warmup_steps: Steps = 0
    """Steps in which the learning rate rises linearly; the last of them has all of it."""
    clip_ratio: Annotated[Positive, Field(lt=1)] = 0.2
    """A token whose probability fell by more than this share since the step began is not pushed further down."""
    clip_ratio_high: Positive | None = None
    """The same of a token whose probability rose; default: clip_ratio."""
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL to the model that the run began with. 0 keeps no such copy."""
    aggregation: Aggregation = "token"
    """The mean that a loss is: over all tokens of an optimizer step, over sequences of their own means (sequence), or
    over sequences of their sums over max_tokens (constant)."""
    importance_cap: Positive | None = None
    """Truncated importance sampling: weight tokens by how much more probable the trainer finds them than vLLM did, up
    to this. None: no weights."""
    evaluate_every: Count = 10
    """Steps between two calls of `evaluate`; the last step is always followed by one."""
    save_every: Count = 50
    """Steps between two checkpoints; there is always one after the last step."""
    seed: Seed = 0
    """Seed of prompts, completions and minibatches. Step n depends on this and n alone."""

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except pydantic.ValidationError as error:
            raise ConfigError(violations_of(error, type(self), f"{self.name}.")) from None

    @property
    def name(self) -> str:
        """Of the class, as messages call it."""
        return type(self).__name__

    @property
    def completions_per_step(self) -> int:
        """Completions of a step: B."""
        return self.prompts_per_step * self.samples_per_prompt

    def learning_rate_share(self, step: int) -> float:
        """Share of the learning rate, from 0 to 1, that step 1, 2, ... has."""
        schedule = ScheduleConfig(
            lr_decay_style=self.schedule, lr_warmup_steps=self.warmup_steps, lr_decay_steps=self.steps + 1
        )
        return learning_rate(schedule, 1.0, step)

    def is_due(self, step: int, every: int) -> bool:
        """Whether what happens `every` so many steps does after this one."""
        return step % every == 0 or step == self.steps

    def defaults(self) -> dict[str, Any]:
        """What a setting is that a run began without: it is older than the option."""
        return {self.name: defaults_of(self)}

    def shared(self) -> dict[str, Any]:
        """All that a resumed run must have in common with the run that it continues."""
        free = {"evaluate_every", "save_every", *(["steps"] if self.schedule == "constant" else [])}
        return {self.name: self.model_dump(mode="json", exclude=free)}


def shared_engine_settings(engines: HybridConfig, world_size: int) -> dict[str, Any]:
    """Settings of the engines that a resumed run must have in common with the run that it continues.

    All but those that are marked MAY_CHANGE. Trained weights come from the checkpoint, which also has the digest of
    those that a KL is measured from.
    """
    has_any_size = engines.actor_config.fsdp is not None  # its checkpoints fit any number of ranks
    shared = {"world_size": "any" if has_any_size else world_size, **engines.model_dump(exclude=_free_in(engines))}
    found: dict[str, Any] = json.loads(json.dumps(shared, default=str, sort_keys=True))
    return found


def free_engine_settings(engines: HybridConfig) -> frozenset[str]:
    """Dotted keys of the engines that may change in a run, though an older one may have written them down."""
    return frozenset(flat(_free_in(engines)))


def _free_in(section: Section) -> dict[str, Any]:
    """The keys of a section that are marked MAY_CHANGE, and those of the sections inside it, as pydantic excludes
    them."""
    free: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if MAY_CHANGE in field.metadata:
            free[name] = True
        elif isinstance(value, Section) and (inside := _free_in(value)):
            free[name] = inside
    return free


class GrpoConfig(LoopConfig):
    """GRPO: an advantage is how much better a completion is than others of the same prompt."""

    samples_per_prompt: Annotated[Count, Field(ge=2, le=2**14)] = 8
    """Completions of each prompt: the group in which rewards are compared."""
    scale_rewards: bool = True
    """Divide advantages by the standard deviation of rewards in their group."""


class PpoConfig(LoopConfig):
    """PPO: advantages of tokens come from a critic, the model of `critic_config`, which learns beside the actor.

    Its optimizer steps are `critic_epochs` x `minibatches` a step.
    """

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of later rewards, per token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalized advantage estimation: 0 trusts the critic, 1 the rewards."""
    value_clip: Positive | None = 0.2
    """A value that moved further than this in a step is not pushed further. None: no limit."""
    critic_learning_rate: Positive | None = None
    """Learning rate of the critic, by the same schedule; default: `critic_config.optimizer.lr`."""
    critic_epochs: Count = 1
    """Times that the critic learns from each completion."""
    critic_warmup_steps: Steps = 0
    """First steps, in which only the critic learns."""

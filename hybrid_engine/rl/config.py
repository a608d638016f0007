"""Settings of GRPO and PPO runs: `GrpoConfig` and `PpoConfig`. Engines have their own settings."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import pydantic
import torch
from pydantic import BeforeValidator, Field

from hybrid_engine.config.keys import (
    MAY_CHANGE,
    Count,
    HybridConfig,
    Name,
    NonNegative,
    Positive,
    Section,
    Seed,
    Steps,
)
from hybrid_engine.config.loading import violations_of
from hybrid_engine.errors import ConfigError, first_of, shortened
from hybrid_engine.rl.losses import (
    Aggregation,
    Baseline,
    Clipping,
    KlEstimator,
    PolicyLoss,
    Ratio,
    Scale,
    policy_loss,
)

if TYPE_CHECKING:
    from hybrid_engine.backends.vllm import Sampling

_FREE = (
    "evaluate_every",
    "evaluate_first",
    "save_every",
    "save_minutes",
    "keep_checkpoints",
    "keep_best",
    "best",
    "export_every",
    "log_completions_every",
    "show_completions",
)
"""Settings that may change within a run: no weight depends on them."""

_FIXED = (
    "prompts_per_step",
    "passes",
    "max_staleness",
    "ratio",
    "clipping",
    "aggregation",
    "baseline",
    "scale_rewards",
    "kl_estimator",
    "kl_place",
)
"""Settings that cannot change within a run: the place in the prompts, and the algorithm."""
_DRAWN = (
    "samples_per_prompt",
    "max_tokens",
    "max_tokens_per_turn",
    "temperature",
    "stop",
    "stop_token_ids",
)
"""The same with `max_staleness`: a checkpoint has completions that were drawn with them."""


class LoopConfig(Section):
    """Settings that both algorithms share. Immutable; raises ConfigError with all violations."""

    page = "docs/rl.md"
    _name: str

    steps: Count = 100
    """Number of steps. Each draws completions, scores them and learns from them."""
    passes: Annotated[Positive, Field(le=10**6)] | None = None
    """Passes over all prompts, in place of `steps`, which follows from it."""
    prompts_per_step: Count = 8
    """Prompts per step. Each pass over all prompts has a new order."""
    samples_per_prompt: Annotated[Count, Field(le=2**14)] = 8
    """Completions of each prompt."""
    max_tokens: Count = 256
    """Upper bound of the tokens of a completion; of all tokens after a conversation's prompt."""
    max_tokens_per_turn: Count | None = None
    """Upper bound of the tokens of an answer in a conversation; default: max_tokens."""
    temperature: Annotated[Positive, Field(ge=0.01, le=2)] = 1.0
    """Temperature of sampling, and of all log-probabilities."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion, in addition to the model's own end tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they are not part of it."""
    epochs: Count = 1
    """Passes over the completions of a step."""
    max_staleness: Steps = 0
    """With servers: publishes by which the weights that drew a token may be older than those that
    learn from it. Up to this many further steps are drawn while one is learned."""
    minibatches: Count = 1
    """Optimizer steps per epoch; each learns from an equal part of the completions."""
    learning_rate: Positive | None = None
    """Learning rate after the warm-up; default: `actor_config.optimizer.lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape in which the learning rate falls towards 0, from the warm-up to the last step."""
    warmup_steps: Steps = 0
    """Steps in which the learning rate rises linearly; the last of them has the full rate."""
    clip_ratio: Annotated[Positive, Field(lt=1)] = 0.2
    """A token whose probability fell by more than this share in a step is not pushed down more."""
    clip_ratio_high: Positive | None = None
    """The same limit for a token whose probability rose; default: clip_ratio."""
    ratio: Ratio = "token"
    """Ratio of new to old probability: of each token, or one for a sequence (GSPO)."""
    clipping: Clipping = "ppo"
    """PPO's clipped surrogate, the minimum of both terms; or CISPO's clipped ratio, without
    gradient, as the weight of every log-probability."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """With a negative advantage a token's loss is at most this many times the advantage."""
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL to the initial model. With 0 no copy of that model is kept."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of the KL, in the loss or in the reward."""
    kl_place: Literal["loss", "reward"] = "loss"
    """A term of the loss; or subtracted from the reward, between the policy that drew the tokens
    and the reference: of each token with PPO and baseline step, of a completion the sum over its
    tokens otherwise."""
    aggregation: Aggregation = "token"
    """Average of the losses of tokens: over all tokens of an optimizer step (token), over the means
    of sequences (sequence), or over the sums of sequences divided by max_tokens (constant)."""
    importance_cap: Positive | None = None
    """Truncated importance sampling: weight each token by its probability in the trainer over its
    probability in vLLM, but at most by this. None: no weights."""
    importance_of: Ratio = "token"
    """Ratio that importance_cap bounds: of each token, or the product over a completion."""
    above_importance_cap: Literal["truncate", "mask"] = "truncate"
    """A ratio above importance_cap counts as the cap, or nothing is learned from its tokens."""
    importance_veto: Positive | None = None
    """Learn nothing from a completion with a token whose ratio is smaller, such as 1e-4."""
    pack: bool = False
    """Compute several completions in a row of seq_length tokens, which has less padding."""
    mask_truncated: bool = False
    """Learn nothing from completions that ended at max_tokens."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus in the loss."""
    reward_weights: dict[str, Annotated[float, Field(ge=-1e18, le=1e18)]] = Field(
        default_factory=dict
    )
    """Weights of several rewards, by name; default: 1 each."""
    reward_retries: Steps = 0
    """Times that a reward is called again after an exception."""
    reward_failures: Literal["end", "skip"] = "end"
    """After the last retry: end the run with a checkpoint of the step before, or leave the
    completion out of the step."""
    overlong_tokens: Steps = 0
    """Lower the reward of a completion linearly over the last this many tokens before max_tokens
    (DAPO's soft punishment)."""
    overlong_penalty: Positive = 1.0
    """Amount by which overlong_tokens lowers the reward of a completion of max_tokens."""
    evaluate_every: Count = 10
    """Steps between two calls of `evaluate`; the last step is always followed by a call."""
    evaluate_first: bool = False
    """Call `evaluate` before step 1, too; its figures are a row of step 0."""
    save_every: Count = 50
    """Steps between two checkpoints; the last step always has one."""
    save_minutes: NonNegative = 30.0
    """Minutes after which a step is saved, too; 0: only as save_every says."""
    keep_checkpoints: Count = 1
    """Number of newest checkpoints that are kept."""
    keep_best: Name | None = None
    """Column, such as a figure of `evaluate`, by which the best checkpoint is kept in addition."""
    best: Literal["highest", "lowest"] = "highest"
    """Figure of `keep_best` that is the best."""
    export_every: Steps = 0
    """Steps between two Hugging Face checkpoints, which are all kept; 0: one at the end."""
    log_completions_every: Steps = 10
    """Steps between two logs of completions, beginning with step 1; 0: none."""
    show_completions: Steps = 0
    """Number of completions of a logged step that rank 0 prints."""
    seed: Seed = 0
    """Seed of prompts, completions and minibatches. Step n depends only on the seed and n."""

    def __init__(self, section: str = "", /, **values: Any) -> None:
        """`section`: section of a file that has the values; messages name it, or else the class."""
        name = section or type(self).__name__
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise ConfigError(violations_of(error, type(self), f"{name}.")) from None
        self._name = name

    def with_steps(self, num_prompts: int | None) -> Self:
        """Return these settings with `steps` in place of `passes`.

        `num_prompts`: number of all prompts; None: they come from a function or a stream.

        Raises ConfigError if both are set, or if there is no number of prompts.
        """
        if self.passes is None:
            return self
        problem = ""
        if "steps" in self.model_fields_set:
            problem = f"is {self.passes:g}, and steps is {self.steps}"
        elif num_prompts is None:
            problem = "needs a list of prompts, but prompts is a function or a stream"
        if problem:
            key = self.key("passes")
            raise ConfigError.of(key, problem, "Set steps alone", code="conflicting-keys")
        # 1.5 passes over 100 prompts with 8 in a step are 18.75, so 19 steps.
        steps = max(math.ceil(self.passes * (num_prompts or 0) / self.prompts_per_step), 1)
        return self.model_copy(update={"steps": steps, "passes": None})

    def changeable(self, names: Collection[str]) -> set[str]:
        """Return the dotted names of settings that may change within a run, if `names` are named.

        Raises ConfigError for names of settings that cannot change.
        """
        allowed = {"actor_config.optimizer.clip_grad", *type(self).model_fields}.difference(
            _FIXED, _DRAWN if self.max_staleness else ()
        )
        fixed: list[object] = [names]
        if isinstance(names, Collection) and not isinstance(names, Mapping | str):
            fixed = sorted({*names} - allowed, key=str)
        if fixed:
            raise ConfigError.of(
                "changed",
                f"{first_of([shortened(name) for name in fixed], 5)} cannot change in a run",
                f"Pass a list, of {first_of(sorted(allowed), 60)}",
                code="cannot-change",
            )
        dotted = (f"{type(self).__name__}.{name}" for name in {*names, *self._free})
        return {*names, *dotted}

    @property
    def name(self) -> str:
        """Name in messages: the section of a file, or the class."""
        return self._name

    def key(self, name: str) -> str:
        """Return the dotted key of a setting, for messages."""
        return f"{self.name}.{name}"

    @property
    def clips_to_sampler(self) -> bool:
        """True if ratios are to the probabilities with which tokens were drawn, in vLLM.

        Otherwise they are to those of the trainer before the step.
        """
        is_weighted = self.importance_cap is not None or self.importance_veto is not None
        return self.max_staleness > 0 and not is_weighted

    def policy_loss(self) -> PolicyLoss:
        """Return the loss of the policy by these settings."""
        return policy_loss(
            self.clip_ratio,
            self.kl_coefficient if self.kl_place == "loss" else 0.0,
            clip_ratio_high=self.clip_ratio_high,
            importance_cap=self.importance_cap,
            importance_of=self.importance_of,
            above_importance_cap=self.above_importance_cap,
            importance_veto=self.importance_veto,
            ratio_of=self.ratio,
            clipping=self.clipping,
            dual_clip=self.dual_clip,
            kl_estimator=self.kl_estimator,
            entropy_coefficient=self.entropy_coefficient,
        )

    def sampling(self, seed: int) -> Sampling:
        """Return how the completions of a prompt are drawn."""
        from hybrid_engine.backends.vllm import Sampling

        return Sampling(
            n=self.samples_per_prompt,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
            seed=seed,
        )

    def learning_rate_factor(self, step: int) -> float:
        """Return the factor, from 0 to 1, of the learning rate in a step; the first step is 1."""
        # lazily: the import takes seconds
        from transformers import get_scheduler

        schedule = get_scheduler(
            "constant_with_warmup" if self.schedule == "constant" else self.schedule,
            torch.optim.SGD([torch.empty(0)]),  # required, but not used by the factor
            num_warmup_steps=self.warmup_steps,
            num_training_steps=self.steps + 1,  # the last step learns: 0 would be one step later
        )
        factor: float = schedule.lr_lambdas[0](step)
        return factor

    def is_due(self, step: int, every: int) -> bool:
        """Return whether something that happens `every` so many steps is due after `step`."""
        return step % every == 0 or step == self.steps

    def shared(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share with the run that it continues."""
        return {type(self).__name__: self.model_dump(mode="json", exclude=self._free)}

    @property
    def _free(self) -> set[str]:
        # Any other schedule depends on the number of steps.
        return {*_FREE, "steps"} if self.schedule == "constant" else {*_FREE}


def shared_engine_settings(engines: HybridConfig, world_size: int) -> dict[str, Any]:
    """Return the engines' settings that a resumed run must share with the run that it continues.

    These are all settings that are not marked MAY_CHANGE. Trained weights come from the checkpoint,
    which also has the digest of the weights from which a KL is measured.
    """
    actor = engines.actor_config
    # Adapters of Megatron's model are read in the layout that wrote them.
    has_any_layout = actor.fsdp is not None or actor.lora is None
    settings = {
        "world_size": "any" if has_any_layout else str(actor.sizes(world_size)),
        **engines.model_dump(exclude=_free_keys(engines)),
    }
    # As JSON has them, because they are compared with the values in run.json.
    shared: dict[str, Any] = json.loads(json.dumps(settings, default=str, sort_keys=True))
    return shared


def _free_keys(section: Section) -> dict[str, Any]:
    """Return the keys marked MAY_CHANGE, nested like the section, in pydantic's `exclude` form."""
    free: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if MAY_CHANGE in field.metadata:
            free[name] = True
        elif isinstance(value, Section):
            inner = _free_keys(value)
            if inner:
                free[name] = inner
    return free


def _scale_of(value: object) -> object:
    """Return the name of a flag, as `scale_rewards` is in TRL."""
    if isinstance(value, bool):
        return "group" if value else "none"
    return value


class GrpoConfig(LoopConfig):
    """Settings of GRPO: the advantage of a completion is relative to others of the same prompt."""

    samples_per_prompt: Annotated[Count, Field(ge=2, le=2**14)] = 8
    """Completions of each prompt, the group in which rewards are compared."""
    baseline: Baseline = "group"
    """Subtract the mean of the group's rewards, of the group's other rewards (RLOO), or over all
    tokens of the step (REINFORCE++)."""
    redraws: Steps = 0
    """Times that a group whose rewards all agree is drawn again: for another prompt if prompts are
    a list that has more, else with another seed."""
    scale_rewards: Annotated[Scale, BeforeValidator(_scale_of)] = "group"
    """Divide advantages by the standard deviation of the rewards of which baseline is the mean
    (group), or whiten them over all tokens of the step (batch). true is group, false is none."""


class PpoConfig(LoopConfig):
    """Settings of PPO: a critic, the model of `critic_config`, gives each token its advantage.

    The critic is trained with the actor, in `critic_epochs` x `minibatches` optimizer steps per
    step.
    """

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of later rewards, per token."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalized advantage estimation: 0 trusts the critic, 1 the rewards."""
    value_clip: Positive | None = 0.2
    """A value that moved by more than this in a step is not pushed further. None: no limit."""
    critic_learning_rate: Positive | None = None
    """Learning rate of the critic, by the same schedule; default: `critic_config.optimizer.lr`."""
    critic_epochs: Count = 1
    """Passes of the critic over the completions of a step."""
    critic_warmup_steps: Steps = 0
    """Number of first steps in which only the critic learns."""

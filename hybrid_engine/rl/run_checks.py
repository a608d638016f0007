"""Checks of a run's arguments, before its engines are built and again with them.

Building the engines of a large model takes minutes of all devices, so `train` checks first what
follows from its arguments alone. Rank 0 checks, and all ranks raise the same error.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_engine.assembly import settings_of
from hybrid_engine.config import GenerateConfig, HybridConfig
from hybrid_engine.errors import (
    ConfigError,
    Violation,
    Violations,
    nearest,
    require_none,
    shortened,
)
from hybrid_engine.layouts.memory import MAIN_NBYTES, MOMENTS_NBYTES
from hybrid_engine.layouts.parallelism import TrainParallelism
from hybrid_engine.layouts.stages import chunks_of
from hybrid_engine.models.config_json import longest_of
from hybrid_engine.ranks.background import call_in_rounds
from hybrid_engine.ranks.job import Job
from hybrid_engine.records.layout import DTYPE_NBYTES
from hybrid_engine.rl.config import GrpoConfig, PpoConfig
from hybrid_engine.rl.conversation_state import prompt_of
from hybrid_engine.rl.packed_calls import packing_violations
from hybrid_engine.rl.prompt_source import are_listed, is_stream
from hybrid_engine.rl.rewards import BatchReward, argument_of, named_rewards, reward_violations
from hybrid_engine.rl.user_callbacks import is_coroutine_function
from hybrid_engine.serving.clients import silent_servers

if TYPE_CHECKING:
    import torch

    from hybrid_engine.backends.vllm.engine_settings import TokenIds
    from hybrid_engine.backends.vllm.prompts import ModelTokenizer
    from hybrid_engine.trainer.worker import ActorHybridWorker

_UNBOUNDED = 2**31
_MOST_PROMPTS = 10_000
"""Prompts that rank 0 checks while the others wait. `Loop` checks all, on every rank."""

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "prompts": ("step",),
    "evaluate": ("worker",),
    "on_step": ("row",),
    "should_stop": (),
    "environment": ("prompt",),
    "loss": ("micro_batch", "log_probs"),
    "advantages": ("rewards", "groups"),
}
"""Callback -> names of the arguments that it is called with."""
_REPLACED = {
    "loss": "clip_ratio clip_ratio_high ratio clipping dual_clip "
    "importance_of above_importance_cap",
    "advantages": "baseline scale_rewards",
}
"""Function of the caller -> settings that are of the one in its place."""
_CHAT_ARGUMENTS = ("tools", "chat_template_kwargs")
_KNOWN_ARGUMENTS = (*_PARAMETERS, *_CHAT_ARGUMENTS, "reward", "out", "trackers", "changed")


@dataclass(frozen=True)
class RunArguments:
    """Arguments of `train` or `Loop`, as of there.

    Attributes:
        chat: further keyword arguments, of the chat template.
        callbacks: name -> function of the caller.
    """

    prompts: Any
    reward: Any
    config: GrpoConfig | PpoConfig
    chat: Mapping[str, Any]
    callbacks: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        prompts: Any,
        reward: Any,
        config: Any,
        chat: Mapping[str, Any],
        **callbacks: Any,
    ) -> RunArguments:
        """Return the arguments, with a number of steps; a callback may be None.

        Raises ConfigError for another `config`, or one without a number of steps.
        """
        if not isinstance(config, GrpoConfig | PpoConfig):
            raise ConfigError.of(
                "config",
                f"got {shortened(config)}",
                "Call train(model, prompts, reward, GrpoConfig(...))",
                code="not-a-config",
            )
        num_prompts = None
        if are_listed(prompts):
            num_prompts = len(prompts) if hasattr(prompts, "__len__") else None
        elif not is_stream(prompts):
            callbacks["prompts"] = prompts
        config = config.with_steps(num_prompts)
        passed = {name: function for name, function in callbacks.items() if function is not None}
        return cls(prompts, reward, config, chat, passed)


@dataclass(frozen=True)
class RunLimits:
    """Limits of the engines of a run.

    Attributes:
        engines: their settings.
        micro_batch_size: sequences of the actor's micro batches.
        micro_batch_multiple: the number of micro batches of all data parallel ranks together is a
            multiple of this.
        tokenizer: tokenizer of texts and chats.
        check_prompts: (token ids of prompts, max_tokens) -> None; raises ArgumentError for prompts
            that vLLM cannot complete.
        no_packing: reason why the model computes one sequence a row only; "" if it is not known.
    """

    engines: HybridConfig
    micro_batch_size: int
    micro_batch_multiple: int
    tokenizer: ModelTokenizer
    check_prompts: Callable[[TokenIds, int], None]
    no_packing: str = ""

    @classmethod
    def of_worker(cls, worker: ActorHybridWorker) -> RunLimits:
        """Return the limits of engines that are built."""
        limits = worker.actor.engine.limits
        return cls(
            worker.config,
            limits.micro_batch_size,
            limits.dp_size * limits.micro_batch_multiple,
            worker.inference.tokenizer,
            worker.inference.check_prompts,
            limits.no_packing,
        )

    @classmethod
    def of_config(cls, engines: HybridConfig, world_size: int) -> RunLimits:
        """Return the limits of engines that are not built yet, by their configuration."""
        from hybrid_engine.backends.vllm.prompts import ModelTokenizer, check_token_ids

        longest = _longest_sequence(engines)
        dims = engines.table().dims
        sizes = engines.train_sizes(world_size)
        multiple = sizes.data
        if isinstance(sizes, TrainParallelism):
            chunks = chunks_of(sizes, dims.num_layers, dims.num_mtp_layers)
            # Virtual stages take micro batches in groups, as in `BatchLimits`.
            if len(chunks) > sizes.pipeline:
                multiple *= sizes.pipeline

        def check_prompts(prompts: TokenIds, max_tokens: int) -> None:
            check_token_ids(prompts, max_tokens, longest, dims.vocab_size)

        return cls(
            engines,
            engines.actor_config.micro_batch_size,
            multiple,
            ModelTokenizer(str(engines.model)),
            check_prompts,
        )


def _longest_sequence(engines: HybridConfig) -> int:
    """Return an upper bound of the tokens of a sequence; the engines know the exact number."""
    generate = engines.generate_config
    if generate.max_model_len is not None:
        return generate.max_model_len
    # Programs may replace values of config.json.
    if "hf_overrides" in generate.vllm:
        return _UNBOUNDED
    return longest_of(engines.hf_config()) or _UNBOUNDED


def require_runnable(
    engines: HybridConfig,
    arguments: RunArguments,
    job: Job,
    out: Path | None,
) -> None:
    """Raise ConfigError on all ranks with `run_violations`, and without the servers. Collective.

    Rank 0 checks alone, because it has the reward, and reads the prompts once.
    """
    violations: list[Violation] = []
    generate = engines.generate_config
    servers: Sequence[str] = ()
    with job.agreement.phase("checking the run"):
        if job.rank == 0:
            violations += run_violations(engines, arguments, job.world_size, out)
            servers = generate.servers
    silent = silent_servers(
        servers, generate.timeout_seconds, allow_public=generate.server_allow_public
    )
    violations += call_in_rounds(job.agreement, "asking the servers", lambda: [*silent])
    require_none(job.agreement.gather(violations, list[Violation], "checking the run")[0])


def run_violations(
    engines: HybridConfig,
    arguments: RunArguments,
    num_ranks: int,
    out: Path | None,
) -> Violations:
    """Yield everything that would end a run later, which starts nothing.

    Args:
        engines: settings of the engines, which are not built yet.
        arguments: arguments of the run.
        num_ranks: number of ranks.
        out: directory of the run, if there is one.
    """
    limits = RunLimits.of_config(engines, num_ranks)
    yield from train_violations(arguments)
    yield from limit_violations(arguments, limits, _MOST_PROMPTS)
    # Schedules in place of which the run sets learning rates.
    optimizers = {"actor_config": engines.actor_config.optimizer}
    if isinstance(arguments.config, PpoConfig) and engines.critic_config is not None:
        optimizers["critic_config"] = engines.critic_config.optimizer
    for section, optimizer in optimizers.items():
        if optimizer.schedule is not None:
            key = f"{section}.optimizer.schedule"
            yield Violation(
                key,
                "sets learning rates, which the run sets itself",
                f"Leave it out, and use schedule and warmup_steps of {arguments.config.name}",
                code="conflicting-keys",
            )
    if out is not None:
        yield from _disk_violations(engines, out)


def engines_of(
    model: Any,
    arguments: RunArguments,
    owner: ExitStack,
) -> tuple[HybridConfig, torch.nn.Module | None]:
    """Call `settings_of`. Raises ConfigError, also for the other arguments."""
    try:
        return settings_of(model, owner)
    except ConfigError as error:
        raise ConfigError([*error.findings, *train_violations(arguments)]) from None


def train_violations(arguments: RunArguments) -> Violations:
    """Yield what is wrong with the arguments of `train`, whatever its engines are."""
    config = arguments.config
    yield from argument_violations(arguments)
    if "evaluate" not in arguments.callbacks and config.evaluate_first:
        yield Violation(
            config.key("evaluate_first"),
            "is set, but there is no `evaluate`",
            "Pass one",
            code="needs-evaluate",
        )
    # Figures of `evaluate` are not in every row; these columns are.
    is_uneven = config.save_every % config.evaluate_every != 0 and config.keep_best != "reward"
    if config.keep_best is not None and "evaluate" in arguments.callbacks and is_uneven:
        yield Violation(
            config.key("save_every"),
            f"is {config.save_every}, no multiple of evaluate_every, {config.evaluate_every}, so "
            "there are checkpoints without a figure for keep_best",
            "Change one of them",
            code="not-divisible",
        )
    if config.best == "lowest" and config.keep_best is None:
        yield Violation(
            config.key("best"),
            "is set, but keep_best is not",
            "Set keep_best",
            code="needs-keep-best",
        )


def argument_violations(arguments: RunArguments) -> Violations:
    """Yield what is wrong with the arguments of a run, whatever its engines are."""
    yield from _unknown_arguments(arguments.chat)
    yield from reward_violations(arguments.reward, arguments.config)
    yield from _callback_violations(arguments)
    yield from _setting_violations(arguments)


def limit_violations(
    arguments: RunArguments,
    limits: RunLimits,
    most_prompts: int | None = None,
) -> Violations:
    """Yield what is wrong with the arguments of a run for these engines.

    `most_prompts`: number of first prompts that are checked; None: all.
    """
    config = arguments.config
    if isinstance(config, PpoConfig) and limits.engines.critic_config is None:
        yield Violation(
            "critic_config",
            "PPO needs a critic",
            "Set critic_config, for example {}, or use GrpoConfig",
            code="needs-critic",
        )
    yield from _size_violations(config, limits)
    yield from packing_violations(config, limits.no_packing)
    yield from staleness_violations(config, limits.engines.generate_config, config.name)
    if config.stop:
        # Without a tokenizer vLLM finds no strings.
        try:
            limits.tokenizer.loaded  # noqa: B018 - it is read from files at the first access
        except ConfigError as error:
            yield Violation(
                config.key("stop"),
                f"strings need a tokenizer: {error.findings[0].problem}",
                "Use stop_token_ids, or add a tokenizer to the model's directory",
                code="needs-tokenizer",
            )
    prompts = arguments.prompts
    if not are_listed(prompts):
        return
    prompts = prompts[:most_prompts]
    if not prompts:
        yield Violation("prompts", "the list is empty", "Pass some", code="no-prompts")
    try:
        require_room(prompts, arguments, limits)
    except ConfigError as error:
        yield from error.findings


def staleness_violations(config: Any, generate: GenerateConfig, name: str) -> Violations:
    """Yield settings with which no step can be drawn while another is learned.

    Args:
        config: settings of a loop, with max_staleness, epochs and minibatches.
        generate: settings of the servers.
        name: section of `config` in messages.
    """
    max_staleness = config.max_staleness
    num_updates = config.epochs * config.minibatches
    key = f"{name}.max_staleness"
    if not max_staleness:
        return
    of_run = f"max_staleness is {max_staleness}"
    if not generate.servers:
        yield Violation(
            key,
            f"is {max_staleness}, but vLLM generates in the ranks that train",
            "Start servers and set generate_config.servers, or leave it out",
            code="needs-servers",
        )
        return
    if generate.release_weights:
        key = "generate_config.release_weights"
        yield Violation(
            key,
            f"is true, so servers have no weights during training, but {of_run}",
            "Set it to false",
            code="needs-weights",
        )
    if generate.server_pause == "abort":
        key = "generate_config.server_pause"
        yield Violation(
            key,
            f"is abort, which ends completions at a publish, but {of_run}",
            "Set it to keep, or to wait",
            code="conflicting-keys",
        )
    if generate.server_max_lag < num_updates:
        key = "generate_config.server_max_lag"
        yield Violation(
            key,
            f"is {generate.server_max_lag}, but a step has {num_updates} optimizer steps",
            f"Set it to {num_updates}, epochs x minibatches",
            code="below-updates",
        )


def require_room(prompts: Sequence[Any], arguments: RunArguments, limits: RunLimits) -> None:
    """Raise ConfigError for invalid prompts, or without room for `max_tokens` in vLLM or a row."""
    from hybrid_engine.backends.vllm.prompts import token_ids_of

    max_tokens = arguments.config.max_tokens
    plain_prompts = [prompt_of(prompt) for prompt in prompts]
    # Others are in `_unknown_arguments` already.
    chat: Any = {name: arguments.chat.get(name) for name in _CHAT_ARGUMENTS}
    token_ids = token_ids_of(plain_prompts, limits.tokenizer, chat=chat)
    limits.check_prompts(token_ids, max_tokens)
    # Labels are shifted by one token, so a row of seq_length has room for one more token.
    limit = limits.engines.actor_config.seq_length + 1
    lengths = [len(ids) for ids in token_ids]
    too_long = [index for index, length in enumerate(lengths) if length + max_tokens > limit]
    if too_long:
        longest = max(too_long, key=lengths.__getitem__)
        raise ConfigError.of(
            "prompts",
            f"{len(too_long)} of {len(prompts)} are too long, the longest is prompts[{longest}]"
            f": {lengths[longest]} tokens and {max_tokens} of max_tokens, but seq_length has "
            f"room for {limit}",
            "Raise actor_config.seq_length, lower max_tokens, or leave them out",
            code="prompts-too-long",
        )


def _unknown_arguments(chat: Mapping[str, Any]) -> Violations:
    """Yield keyword arguments that are none of a run, with the one that was probably meant."""
    # In the order of the call, the same on all ranks.
    for name in [name for name in chat if name not in _CHAT_ARGUMENTS]:
        suggestion = nearest(name, _KNOWN_ARGUMENTS)
        remedy = f"Did you mean {suggestion}?" if suggestion else "Leave it out"
        yield Violation(name, "this call has no such argument", remedy, code="unknown-argument")


def _callback_violations(arguments: RunArguments) -> Violations:
    """Yield functions that cannot be called with the arguments that they will get."""
    for name, function in arguments.callbacks.items():
        # Only environments and rewards are awaited.
        if name != "environment" and is_coroutine_function(function):
            yield Violation(
                name,
                "is a coroutine function",
                "Make it a function without async; only environments and rewards are awaited",
                code="coroutine-function",
            )
        yield from _signature_violations(name, function, _PARAMETERS[name])
    for name, reward in named_rewards(arguments.reward).items():
        key = argument_of(name)
        if isinstance(reward, BatchReward):
            yield from _signature_violations(key, reward.function, ("prompts", "completions"))
        else:
            yield from _signature_violations(key, reward, ("prompt", "completion"))


def _signature_violations(name: str, function: Any, parameters: Sequence[str]) -> Violations:
    if not callable(function):
        return
    try:
        # A decorator may change the arguments of the function that it wraps.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some functions of extension modules have none
        return
    remedy = f"Make it a function of ({', '.join(parameters)})"
    names = signature.parameters.keys()
    try:
        if "completion" in {*parameters} - names and "completions" in names:
            remedy += "; columns of the data set are in the prompt. Or pass BatchReward(function)"
            raise TypeError("it takes `completions` of a whole step, as TRL's functions do")
        for name_here, expected in zip(names, parameters, strict=False):
            if name_here in parameters and name_here != expected:
                raise TypeError(f"`{name_here}` is in the place of `{expected}`")
        signature.bind(*parameters)
    except TypeError as error:
        yield Violation(
            name,
            f"cannot be called with ({', '.join(parameters)}): {error}",
            remedy,
            code="wrong-signature",
        )


def _setting_violations(arguments: RunArguments) -> Violations:
    """Yield settings that contradict other arguments."""
    config = arguments.config
    callbacks = arguments.callbacks
    if "environment" not in callbacks and config.max_tokens_per_turn is not None:
        yield Violation(
            config.key("max_tokens_per_turn"),
            f"is {config.max_tokens_per_turn}, but there is no `environment`",
            "Pass an environment, or set max_tokens",
            code="needs-environment",
        )
    if (
        config.importance_cap is None
        and {"importance_of", "above_importance_cap"} & config.model_fields_set
    ):
        yield Violation(
            config.key("importance_cap"),
            "is not set, and settings of its weights are",
            "Set it, such as to 2",
            code="has-no-effect",
        )
    if config.kl_place == "reward" and not config.kl_coefficient:
        yield Violation(
            config.key("kl_place"),
            "is reward, but kl_coefficient is 0",
            "Set both or neither",
            code="has-no-effect",
        )
    if config.clipping == "cispo" and config.dual_clip is not None:
        yield Violation(
            config.key("dual_clip"),
            f"is {config.dual_clip}, but clipping is cispo, which has no such bound",
            "Leave it out, or set clipping to ppo",
            code="has-no-effect",
        )
    for name in sorted(_REPLACED.keys() & callbacks):
        for key in sorted(config.model_fields_set.intersection(_REPLACED[name].split())):
            yield Violation(
                config.key(key),
                f"is set, but `{name}` is a function of your own, which does not read it",
                f"Leave it out, or `{name}`",
                code="has-no-effect",
            )
    of_rows = {
        "importance weights of a completion": config.importance_of == "sequence"
        or config.importance_veto is not None,
        "a ratio for a sequence": config.ratio == "sequence",
        "a `loss` of your own": "loss" in callbacks,
    }
    for name, is_set in of_rows.items():
        if config.pack and is_set:
            yield Violation(
                config.key("pack"),
                f"is true, but {name} needs one sequence a row",
                "Use one of the two",
                code="conflicting-keys",
            )
    if config.overlong_tokens > config.max_tokens:
        yield Violation(
            config.key("overlong_tokens"),
            f"is {config.overlong_tokens}, more than max_tokens, {config.max_tokens}",
            "Lower it",
            code="beyond-max-tokens",
        )
    if isinstance(config, PpoConfig):
        if "advantages" in callbacks:
            yield Violation(
                "advantages",
                "are a function, but PPO's come from its critic",
                "Use GrpoConfig, or leave them out",
                code="conflicting-keys",
            )
        if config.reward_failures == "skip":
            yield Violation(
                config.key("reward_failures"),
                "is skip, but the critic learns from every completion",
                "Use end, with reward_retries, or GrpoConfig",
                code="conflicting-keys",
            )


def _size_violations(config: GrpoConfig | PpoConfig, limits: RunLimits) -> Violations:
    """Yield sizes by which completions cannot be cut into minibatches and micro batches."""
    sizes = {"micro_batch_size": limits.micro_batch_size}
    critic = limits.engines.critic_config
    if isinstance(config, PpoConfig) and critic is not None and critic.micro_batch_size is not None:
        sizes["critic_config.micro_batch_size"] = critic.micro_batch_size
    count = config.prompts_per_step * config.samples_per_prompt
    for name, size in sizes.items():
        # Packing adds rows of padding.
        # 2 minibatches, micro batches of 4 on 8 data parallel ranks: a multiple of 64.
        factor = config.minibatches * (1 if config.pack else size * limits.micro_batch_multiple)
        if count % factor:
            yield Violation(
                config.key("minibatches"),
                f"prompts_per_step x samples_per_prompt is {count}, not a multiple of {factor}",
                f"minibatches x {name} x data parallel ranks (x pipeline ranks, with virtual "
                "stages): change one of them, or set pack, which needs a multiple of minibatches",
                code="not-divisible",
            )


def _disk_violations(engines: HybridConfig, out: Path) -> Violations:
    """Yield a violation if one checkpoint of the run does not fit onto the disk."""
    actor = engines.actor_config
    num_elements = sum(map(prod, engines.table().shapes.values()))
    nbytes = num_elements * DTYPE_NBYTES[actor.params_dtype]
    # Some or all weights have no optimizer state otherwise.
    if actor.lora is None and not actor.frozen_parameters and actor.fsdp is None:
        # A checkpoint has a fp32 copy of fp32 weights, too.
        # 8e9 elements in bfloat16: 16 GB of weights, and 12 bytes each, 96 GB, of optimizer state.
        nbytes += num_elements * (MAIN_NBYTES + MOMENTS_NBYTES)
    checkpoints = out.absolute() / "checkpoints"
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        return  # a run that is resumed replaces files
    place = next(path for path in (checkpoints, *checkpoints.parents) if path.is_dir())
    num_free = shutil.disk_usage(place).free
    if num_free < nbytes:
        yield Violation(
            "out",
            f"{num_free / 1e9:.1f} GB are free in {place}, "
            f"but a checkpoint has {nbytes / 1e9:.1f} GB",
            "Use another disk",
            code="disk-full",
        )

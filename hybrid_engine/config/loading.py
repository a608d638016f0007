"""Reading and checks of a configuration, all violations at once, before a process group exists.

`CONSTRAINTS` lists every rule. docs/configuration.md has those of sizes (`make docs`), and each
has a test that breaks it.

An engine around a transformers model is configured by two dictionaries: `rollout_config`, which
also takes the keys of `generate_config`, and `train_config`:

    rollout_config = {"tp_size": 4, "pp_size": 2, "dp_type": "none", "max_model_len": 2048}
    train_config = {"fsdp_config": {"mixed_precision": "amp", "sharding_strategy": "FULL_SHARD"}}
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pydantic

from hybrid_engine.config.inference_rules import IN_FILES, INFERENCE
from hybrid_engine.config.job_rules import (
    CRITIC,
    critic_of,
    critic_violations,
    memory_violations,
)
from hybrid_engine.config.keys import FsdpConfig, GenerateConfig, HybridConfig, Section
from hybrid_engine.config.rules import JobContext, TrainingContext
from hybrid_engine.config.training_rules import (
    FSDP,
    MEGATRON,
    TRAINING,
    replica_violations,
    rules_of_trainer,
)
from hybrid_engine.errors import (
    ConfigError,
    FileError,
    Violation,
    Violations,
    clipped,
    collect,
    nearest,
    require_none,
    shortened,
)
from hybrid_engine.files.documents import read_yaml
from hybrid_engine.files.hub import HubSnapshot, find_model
from hybrid_engine.files.model_files import weight_files
from hybrid_engine.layouts.parallelism import LARGEST_SIZE

CONSTRAINTS = (*TRAINING, *MEGATRON, *FSDP, *INFERENCE, *CRITIC)


def broken_rules(
    context: TrainingContext,
    *,
    weights_only: bool = False,
    own_loop: bool = False,
    own_weights: bool = False,
) -> list[Violation]:
    """Return the violations of the rules of training and, for a `JobContext`, of inference.

    Args:
        context: settings to check.
        weights_only: the training model only holds weights and need not compute, as for a check of
            the switch without training.
        own_loop: the caller's model and loop compute, as Megatron's own scripts do.
        own_weights: the caller provides the model with its weights.
    """
    skipped: tuple[str, ...] = ()
    if weights_only:
        skipped = ("stored", "here", "anywhere")
    elif own_loop:
        skipped = ("stored", "here")
    elif own_weights:
        skipped = ("stored",)
    violations: list[Violation] = []
    for rule in rules_of_trainer(context):
        if rule.computing not in skipped:
            violations += rule.find(context)
    if isinstance(context, JobContext):
        for inference_rule in INFERENCE:
            violations += inference_rule.find(context)
    return violations


def load_config(
    source: str | Path | Mapping[str, Any],
    world_size: int | None = None,
    *,
    weights_only: bool = False,
    own_loop: bool = False,
    own_weights: bool = False,
    num_mtp_layers: int | None = None,
    directory: Path | None = None,
) -> HybridConfig:
    """Read and check a configuration.

    A model on the Hub is downloaded without its weights; `model` of the result is its directory in
    the cache.

    Args:
        source: path of a YAML file, or a mapping with the same content, or a model's directory.
        world_size: number of ranks; default: WORLD_SIZE of the environment, which torchrun sets.
        weights_only, own_loop: see `broken_rules`.
        own_weights: the caller provides the weights, so the model's directory needs none.
        num_mtp_layers: MTP layers of the trainer's model; default: those of config.json.
        directory: base of relative paths in a mapping; default: the working directory. Paths in a
            file are relative to the file's directory.

    Raises:
        ConfigError: with every violation. Unknown keys and wrong values are reported first,
            because layouts depend on them; then all impossible layouts and missing weights.
    """
    file = None
    if isinstance(source, Mapping):
        values = source
    elif os.path.isdir(source):  # unlike Path, also for texts that are no path
        values = {"model": str(source)}
    else:
        file = str(source)
        values = read_yaml(source, "configuration")
        directory = Path(source).absolute().parent
    violations: list[Violation] = []
    num_ranks = collect(violations, _number_of_ranks, world_size)
    parsed = collect(violations, _parsed_config, values, directory)
    if num_ranks is None or parsed is None:
        raise ConfigError(violations, file)
    config, models = parsed
    violations = find_violations(
        config,
        num_ranks,
        weights_only=weights_only,
        own_loop=own_loop,
        own_weights=own_weights,
        num_mtp_layers=num_mtp_layers,
    )
    if not (own_weights or config.random_weights):
        for key, model in models.items():
            violations += _missing_weights(model, key)
    if violations:
        raise ConfigError(violations, file)
    return config


def _parsed_config(
    values: Mapping[str, Any],
    directory: Path | None,
) -> tuple[HybridConfig, dict[str, Path]]:
    """Return the configuration in `values` and its models' directories by key.

    Keys and types are checked, rules are not. Args as in `load_config`. Raises ConfigError.
    """
    try:
        config = HybridConfig.model_validate(values, context={"directory": directory})
    except pydantic.ValidationError as error:
        raise ConfigError(violations_of(error, HybridConfig)) from None
    models = {"model": find_model(config.model, config.revision, relative_to=directory)}
    config = config.model_copy(update=models)
    critic = config.critic_config
    if critic is not None and critic.model is not None:
        key = "critic_config.model"
        models[key] = find_model(critic.model, key=key, relative_to=directory)
        critic = critic.model_copy(update={"model": models[key]})
        config = config.model_copy(update={"critic_config": critic})
    return config, models


def _number_of_ranks(world_size: object) -> int:
    """Return the number of ranks, by default from WORLD_SIZE. Raises ConfigError for no number."""
    size = world_size
    if world_size is None:
        variable = os.environ.get("WORLD_SIZE")
        if variable is None:
            raise ConfigError.of(
                "world_size",
                "is not given, and WORLD_SIZE is not set",
                "Pass world_size, or start the script with hybrid-engine run",
                code="not-set",
            )
        # Not more digits than a size can have: int() of a long text is slow.
        is_number = variable.isascii() and variable.isdigit() and len(variable) < 20
        size = int(variable) if is_number else variable
    if type(size) is int and 1 <= size <= LARGEST_SIZE:
        return size
    raise ConfigError.of(
        "world_size",
        f"{shortened(size)} ranks",
        f"Use a whole number from 1 to {LARGEST_SIZE}",
        code="out-of-range",
    )


def _missing_weights(model: Path, key: str) -> Violations:
    """Yield why the weights in a directory cannot be loaded, judged by the names of its files."""
    if HubSnapshot.at(model) is not None:
        return  # weights of models on the Hub are downloaded later
    if not os.path.isdir(model):
        return  # reading config.json reports it
    try:
        weight_files(model, key)
    except ConfigError as error:
        alternative = "or set random_weights: true to begin without"
        for violation in error.findings:
            yield replace(violation, remedy=f"{violation.remedy}, {alternative}")
    except FileError as error:
        yield Violation(key, str(error), "Or name another directory", code="unreadable-weights")


def find_violations(
    config: HybridConfig,
    world_size: int,
    *,
    weights_only: bool = False,
    own_loop: bool = False,
    own_weights: bool = False,
    num_mtp_layers: int | None = None,
) -> list[Violation]:
    """Return everything that makes a configuration impossible on `world_size` ranks.

    The critic is checked once the actor is valid, and memory once both are.
    `weights_only`, `own_loop`, `own_weights`: see `broken_rules`; `num_mtp_layers`: see
    `load_config`.
    """
    try:
        context = JobContext.of(config, world_size, num_mtp_layers)
        violations = broken_rules(
            context,
            weights_only=weights_only,
            own_loop=own_loop,
            own_weights=own_weights,
        )
        if not violations and config.critic_config is not None:
            violations = critic_violations(critic_of(config, world_size))
    except ConfigError as error:
        return list(error.findings)
    return violations or list(memory_violations(config, world_size, num_mtp_layers))


SHORT_KEYS = {
    "tp_size": "infer_tensor_parallel_size",
    "pp_size": "infer_pipeline_parallel_size",
    "dp_size": "infer_data_parallel_size",
    "ep_size": "infer_expert_parallel_size",
}
"""Key of `rollout_config` -> key of `generate_config`."""


class TrainConfig(Section):
    """`train_config`."""

    fsdp_config: FsdpConfig = FsdpConfig()
    """See `FsdpConfig`."""


def read_train_config(values: Mapping[str, Any], world_size: int) -> FsdpConfig:
    """Check `train_config` and return its section. Raises ConfigError with every violation."""
    try:
        fsdp = TrainConfig.model_validate(values).fsdp_config
    except pydantic.ValidationError as error:
        raise ConfigError(violations_of(error, TrainConfig, "train_config.")) from None
    key = "train_config.fsdp_config.replicas"
    require_none(replica_violations(fsdp, world_size, key))
    return fsdp


def generate_values(rollout_config: object) -> dict[str, Any]:
    """Return the values of `generate_config`, and `model` if present, from `rollout_config`.

    Raises:
        ConfigError: with every unknown key and wrong value, under the keys of `rollout_config`.
    """
    if not isinstance(rollout_config, Mapping):
        raise ConfigError.of(
            "rollout_config",
            f"expected keys and values, found {shortened(rollout_config)}",
            "Pass a dictionary",
            code="not-a-mapping",
        )
    values = {
        SHORT_KEYS.get(key, str(key)): value
        for key, value in rollout_config.items()
        if key != "dp_type"
    }
    require_none(_rollout_violations(values, rollout_config))
    if rollout_config.get("dp_type") == "none":
        return values | {"infer_data_parallel_size": 1}
    return values


def _rollout_violations(values: Mapping[str, Any], rollout_config: Mapping[str, Any]) -> Violations:
    """Yield violations of values for `generate_config`, under the keys of `rollout_config`."""
    shorts = {long: short for short, long in SHORT_KEYS.items() if short in rollout_config}
    for long, short in shorts.items():
        if long in rollout_config:
            yield Violation(
                f"rollout_config.{short}",
                f"{long} is the same setting",
                "Use one of them",
                code="set-twice",
            )
    dp_type = rollout_config.get("dp_type", "auto")
    if dp_type not in ("auto", "none"):
        yield Violation(
            "rollout_config.dp_type",
            shortened(dp_type),
            "Use 'auto' (replicas fill the job) or 'none'",
            code="wrong-value",
        )
    section = dict(values)
    model = section.pop("model", None)
    if not isinstance(model, str | os.PathLike | None):
        yield Violation(
            "rollout_config.model",
            f"expected a directory, found {shortened(model)}",
            "Name a directory, or leave it out",
            code="wrong-value",
        )
    try:
        GenerateConfig.model_validate(section)
    except pydantic.ValidationError as error:
        for violation in violations_of(error, GenerateConfig, "rollout_config."):
            long = violation.key.removeprefix("rollout_config.")
            yield replace(violation, key=f"rollout_config.{shorts.get(long, long)}")


# -- unknown keys and wrong values -----------------------------------------------------------------

Place = tuple[str, ...]

ALIASES: Mapping[str, str] = {
    # verl
    "actor": "actor_config",
    "clip_ratio_low": "clip_ratio",
    "critic": "critic_config",
    "kl_loss_coef": "kl_coefficient",
    "loss_agg_mode": "aggregation",
    "n": "samples_per_prompt",
    "optim": "optimizer",
    "ppo_epochs": "epochs",
    "ppo_micro_batch_size_per_gpu": "micro_batch_size",
    "response_length": "max_tokens",
    "rollout": "generate_config",
    "total_training_steps": "lr_decay_steps steps",
    # TRL, PEFT and transformers
    "beta": "kl_coefficient",
    "betas": "adam_beta1 adam_beta2",
    "epsilon": "clip_ratio",
    "epsilon_high": "clip_ratio_high",
    "eval_steps": "evaluate_every",
    "gradient_checkpointing": "recompute_granularity activation_checkpointing",
    "learning_rate": "lr",
    "greater_is_better": "best",
    "loss_type": "aggregation",
    "lr_scheduler_type": "lr_decay_style",
    "max_completion_length": "max_tokens",
    "max_grad_norm": "clip_grad",
    "max_new_tokens": "max_tokens",
    "max_steps": "steps",
    "metric_for_best_model": "keep_best",
    "model_name_or_path": "model",
    "num_generations": "samples_per_prompt",
    "num_iterations": "epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "r": "rank",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
    "torch_dtype": "params_dtype",
    "warmup_ratio": "lr_warmup_fraction",
    # short forms, and Megatron's names in generate_config
    "ep": "expert_model_parallel_size infer_expert_parallel_size",
    "expert_model_parallel_size": "infer_expert_parallel_size",
    "offload": "offload_train_param offload_train_grad offload_train_optimizer",
    "pipeline_model_parallel_size": "infer_pipeline_parallel_size",
    "pp": "pipeline_model_parallel_size infer_pipeline_parallel_size",
    "tensor_model_parallel_size": "infer_tensor_parallel_size",
    "tp": "tensor_model_parallel_size infer_tensor_parallel_size",
}
"""Name of a key in another framework, or of a similar key of a section -> configuration keys, with
blanks between them."""

SAMPLING = ("n", "temperature", "top_p", "top_k", "min_p", "stop", "max_tokens", "max_new_tokens")
NO_KEYS = {
    **dict.fromkeys(
        ("dp", "data_parallel_size"),
        "Leave it out: it is the number of ranks over TP x PP x CP",
    ),
    "gradient_accumulation_steps": (
        "Leave it out: an update accumulates as many micro batches as a rank's rows take"
    ),
    **dict.fromkeys(
        ("prefetch", "prefetch_share", "prefetch_mb"),
        "Leave it out: optimizer state always comes back behind forward and backward passes",
    ),
    **dict.fromkeys(IN_FILES, "Put it under generate_config.vllm, as an argument of vLLM"),
    **dict.fromkeys(SAMPLING, "Pass a Sampling to generate_sequences: each call sets its sampling"),
}
"""Common name without a configuration key -> remedy."""

_MOST_KEYS = 5
"""Number of keys of a section that are proposed if none is near."""
_CRITIC = "critic_config"
"""Optional section that repeats keys of the actor, so it is not proposed from other sections."""


def proposal(place: Place, section: type[Section], root: type[Section], prefix: str) -> str:
    """Return a remedy for the unknown key at `place`.

    Args:
        place: parts of the key below `root`; the last is its name.
        section: section that contains the unknown key.
        root: section to search for similar keys.
        prefix: prefix of keys below `root`, for messages.
    """
    parent = place[:-1]
    name = clipped(place[-1])
    paths = [path for path in paths_of(root) if path[0] != _CRITIC or parent[:1] == (_CRITIC,)]
    known = {path[-1] for path in paths}
    meant = {name, *ALIASES.get(name.lower(), "").split()}
    if name in NO_KEYS and meant.isdisjoint(known):
        return NO_KEYS[name]
    close = nearest(name, section.model_fields) or nearest(name, known)
    for template, names in (("Use {}", meant), ("Did you mean {}?", {close})):
        nearby = _nearest_paths([path for path in paths if path[-1] in names], parent)
        if 0 < len(nearby) <= 3:  # a longer list is no help
            return template.format(", ".join(_shown(path, parent, prefix) for path in nearby))
    nearest_keys = difflib.get_close_matches(name, section.model_fields, _MOST_KEYS, cutoff=0)
    return f"Nearest keys: {', '.join(nearest_keys)}. {section.page} has all"


def _nearest_paths(paths: list[Place], parent: Place) -> list[Place]:
    """Return the paths that share the most leading parts with `parent`."""
    depths = [
        sum(path[:depth] == parent[:depth] for depth in range(1, len(parent) + 1)) for path in paths
    ]
    return [path for path, depth in zip(paths, depths, strict=True) if depth == max(depths)]


def section_in(annotation: Any) -> type[Section] | None:
    """Return the section that a key's (possibly optional) type is; None for other types."""
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def paths_of(section: type[Section], above: Place = ()) -> Iterator[Place]:
    """Yield the paths of all keys of a section and of the sections inside it."""
    for name, field in section.model_fields.items():
        yield (*above, name)
        inner = section_in(field.annotation)
        if inner is not None:
            yield from paths_of(inner, (*above, name))


def _shown(path: Place, parent: Place, prefix: str) -> str:
    """Return a key as a message names it: its name alone inside its own section."""
    if path[:-1] == parent:
        return path[-1]
    is_at_top = len(path) == 1 and not prefix
    return prefix + ".".join(path) + (" at the top level" if is_at_top else "")


def violations_of(
    error: pydantic.ValidationError,
    root: type[Section],
    prefix: str = "",
) -> list[Violation]:
    """Convert pydantic's errors in values of `root` to violations; keys begin with `prefix`."""
    items = error.errors(include_url=False, include_context=False)
    return [_violation_of(item, root, prefix) for item in items]


def _violation_of(item: Mapping[str, Any], root: type[Section], prefix: str) -> Violation:
    place = tuple(str(part) for part in item["loc"])
    dotted = (prefix + ".".join(place)).rstrip(".")
    key = clipped(dotted or "configuration")
    if item["type"] not in ("extra_forbidden", "missing"):
        message = item["msg"].removeprefix("Value error, ")
        return Violation(
            key,
            f"{message}, found {shortened(item.get('input'))}",
            "Correct the value",
            code="wrong-value",
        )
    section = root
    for part in place[:-1]:
        section = section_in(section.model_fields[part].annotation) or section
    if item["type"] == "missing":
        description = section.model_fields[place[-1]].description or ""
        sentence = " ".join(description.split()).split(". ")[0]
        return Violation(
            key, "is missing", f"Add it: {sentence[:1].lower()}{sentence[1:]}", code="is-missing"
        )
    remedy = proposal(place, section, root, prefix)
    return Violation(key, "unknown key", remedy, code="unknown-key")

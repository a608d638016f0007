"""Reads and checks a configuration: every violation at once, before a process group exists.

`CONSTRAINTS` are all rules. docs/configuration.md is made from them (`make docs`); each has a test that breaks it.

An engine around a transformers model is configured by two dictionaries, `rollout_config`, which takes the keys of
`generate_config` too, and `train_config`:

    rollout_config = {"tp_size": 4, "pp_size": 2, "dp_type": "none", "max_model_len": 2048}
    train_config = {"fsdp_config": {"mixed_precision": "amp", "sharding_strategy": "FULL_SHARD"}}
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pydantic

from hybrid_engine.config.inference_rules import INFERENCE
from hybrid_engine.config.job_rules import CRITIC, WITH_FSDP, critic_of, critic_violations, memory_violations
from hybrid_engine.config.keys import FsdpConfig, GenerateConfig, HybridConfig, Section
from hybrid_engine.config.rules import Constraint, JobContext, TrainingContext
from hybrid_engine.config.training_rules import FSDP, MEGATRON, TRAINING, replica_findings
from hybrid_engine.errors import ConfigError, FileError, Violation, clipped, nearest, shortened
from hybrid_engine.files.documents import read_yaml
from hybrid_engine.files.hub import Snapshot, find_model
from hybrid_engine.files.model_files import weight_files
from hybrid_engine.layouts.parallelism import LARGEST_SIZE

CONSTRAINTS = (*TRAINING, *MEGATRON, *FSDP, *INFERENCE, *WITH_FSDP, *CRITIC)


def training_rules(context: TrainingContext) -> list[Constraint[TrainingContext]]:
    """Return the rules of the configured trainer."""
    return [*TRAINING, *(MEGATRON if context.actor.fsdp is None else FSDP)]


def broken_rules(context: TrainingContext, *, weights_only: bool = False, own_loop: bool = False) -> list[Violation]:
    """Find what breaks the rules: those of training and, for a `JobContext`, those of inference.

    Args:
        context: what they look at.
        weights_only: the training model holds weights and need not compute, as for a check of the switch alone.
        own_loop: the caller's model and loop compute, as Megatron's own scripts do.
    """
    skipped = ("here", "anywhere") if weights_only else ("here",) if own_loop else ()
    rules = [rule for rule in training_rules(context) if rule.computing not in skipped]
    found = [found for rule in rules for found in rule.find(context)]
    if isinstance(context, JobContext):
        found += [found for rule in INFERENCE for found in rule.find(context)]
    return found


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

    Args:
        source: a YAML file, or the same as a mapping.
        world_size: number of ranks; default: WORLD_SIZE of the environment, which torchrun sets.
        weights_only, own_loop: see `broken_rules`.
        own_weights: the caller brings the weights: the model's directory needs none.
        num_mtp_layers: that the trainer has; default: those of the model.
        directory: where relative paths of a mapping begin; default: the working directory. Those of a file begin at the
            file's directory.

    A model on the Hub is downloaded, but for its weights; `model` is then the directory in the cache.

    Raises ConfigError with every violation: first of all unknown keys and wrong values; then, since these decide what
    a layout is, of all impossible layouts, and of a model without weights.
    """
    file = None if isinstance(source, Mapping) else str(source)
    if isinstance(source, Mapping):
        values = source
    else:
        values, directory = read_yaml(source, "configuration"), Path(source).absolute().parent
    found: list[Violation] = []
    num_ranks = _number_of_ranks(world_size, found)
    try:
        config, models = parsed_config(values, directory)
    except ConfigError as error:
        raise ConfigError([*found, *error.findings], file) from error
    if found:
        raise ConfigError(found, file)
    violations = find_violations(
        config, num_ranks, weights_only=weights_only, own_loop=own_loop, num_mtp_layers=num_mtp_layers
    )
    if not (own_weights or config.random_weights):
        violations += [found for key, model in models.items() for found in _missing_weights(model, key)]
    if violations:
        raise ConfigError(violations, file)
    return config


def parsed_config(values: Mapping[str, Any], directory: Path | None) -> tuple[HybridConfig, dict[str, Path]]:
    """Return a configuration whose keys have valid types, and its models' directories by key; rules are not checked.

    Args as in `load_config`. Raises ConfigError.
    """
    try:
        config = HybridConfig.model_validate(values, context={"directory": directory})
    except pydantic.ValidationError as error:
        raise ConfigError(violations_of(error, HybridConfig)) from None
    return _with_models(config, directory)


def _number_of_ranks(given: object, found: list[Violation]) -> int:
    """The number of ranks, by the environment where none is given; 1 with a violation in `found`."""
    size, remedy = given, f"Use a whole number from 1 to {LARGEST_SIZE}"
    if given is None:
        told = os.environ.get("WORLD_SIZE")
        if told is None:
            remedy = "Pass world_size, or start the script with torchrun"
            found.append(Violation("world_size", "is not given, and WORLD_SIZE is not set", remedy))
            return 1
        size = int(told) if told.isascii() and told.isdigit() and len(told) < 20 else told
    if isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= LARGEST_SIZE:
        return size
    found.append(Violation("world_size", f"{shortened(size)} ranks", remedy))
    return 1


def _with_models(config: HybridConfig, directory: Path | None) -> tuple[HybridConfig, dict[str, Path]]:
    """Return the configuration with ids replaced by directories, and these by key. Raises ConfigError."""
    models = {"model": find_model(config.model, config.revision, relative_to=directory)}
    config = config.model_copy(update=models)
    if (critic := config.critic_config) is not None and critic.model is not None:
        key = "critic_config.model"
        models[key] = find_model(critic.model, key=key, relative_to=directory)
        config = config.model_copy(update={"critic_config": critic.model_copy(update={"model": models[key]})})
    return config, models


def _missing_weights(model: Path, key: str) -> list[Violation]:
    """Why a directory's weights cannot be loaded, by the names of its files; those on the Hub come later."""
    if Snapshot.at(model) is not None:
        return []
    if not os.path.isdir(model):  # which is said where its config.json is read
        return []
    try:
        weight_files(model, key)
    except ConfigError as error:
        remedy = "or set random_weights: true to begin without"
        return [Violation(each.key, each.problem, f"{each.remedy}, {remedy}") for each in error.findings]
    except FileError as error:
        return [Violation(key, str(error), "Or name another directory")]
    return []


def find_violations(
    config: HybridConfig,
    world_size: int,
    *,
    weights_only: bool = False,
    own_loop: bool = False,
    num_mtp_layers: int | None = None,
) -> list[Violation]:
    """Everything that makes this configuration impossible on `world_size` ranks; empty when it is sound.

    `weights_only`, `own_loop`: see `broken_rules`; `num_mtp_layers`: see `load_config`.
    """
    try:
        context = JobContext.of(config, world_size, num_mtp_layers)
        found = broken_rules(context, weights_only=weights_only, own_loop=own_loop)
        if not found and config.critic_config is not None:
            found = critic_violations(critic_of(config, world_size))
    except ConfigError as error:
        return list(error.findings)
    return found or list(memory_violations(config, world_size, num_mtp_layers))


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
    """Check `train_config`. Raises ConfigError with every violation."""
    try:
        fsdp = TrainConfig.model_validate(values).fsdp_config
    except pydantic.ValidationError as error:
        raise ConfigError(violations_of(error, TrainConfig, "train_config.")) from None
    key = "train_config.fsdp_config.replicas"
    found = [Violation(key, *finding) for finding in replica_findings(fsdp, world_size)]
    if found:
        raise ConfigError(found)
    return fsdp


def generate_values(rollout_config: object) -> dict[str, Any]:
    """`generate_config` from `rollout_config`, and its `model`.

    Raises ConfigError with every unknown key and wrong value, by the names that were given.
    """
    if not isinstance(rollout_config, Mapping):
        problem = f"expected keys and values, found {shortened(rollout_config)}"
        raise ConfigError([Violation("rollout_config", problem, "Pass a dictionary")])
    found = [
        Violation(f"rollout_config.{short}", f"{long} says the same", "Use one of them")
        for short, long in SHORT_KEYS.items()
        if short in rollout_config and long in rollout_config
    ]
    dp_type = rollout_config.get("dp_type", "auto")
    if dp_type not in ("auto", "none"):
        found.append(
            Violation("rollout_config.dp_type", shortened(dp_type), "Use 'auto' (replicas fill the job) or 'none'")
        )
    values = {SHORT_KEYS.get(key, str(key)): value for key, value in rollout_config.items() if key != "dp_type"}
    if not isinstance(values.get("model"), str | os.PathLike | None):
        problem = f"expected a directory, found {shortened(values['model'])}"
        found.append(Violation("rollout_config.model", problem, "Name one, or leave it out"))
    found += _wrong_values(values, rollout_config)
    if found:
        raise ConfigError(found)
    return values | ({"infer_data_parallel_size": 1} if dp_type == "none" else {})


def _wrong_values(values: Mapping[str, Any], given: Mapping[str, Any]) -> list[Violation]:
    """Find wrong values for keys of `generate_config`, by their names in `rollout_config`."""
    try:
        GenerateConfig.model_validate({key: value for key, value in values.items() if key != "model"})
    except pydantic.ValidationError as error:
        names = {
            f"rollout_config.{long}": f"rollout_config.{short}" for short, long in SHORT_KEYS.items() if short in given
        }
        found = violations_of(error, GenerateConfig, "rollout_config.")
        return [Violation(names.get(one.key, one.key), one.problem, one.remedy) for one in found]
    return []


# -- unknown keys and wrong values -----------------------------------------------------------------------------------

Place = tuple[str, ...]

ALIASES: Mapping[str, tuple[str, ...]] = {
    # verl
    "actor": ("actor_config",),
    "clip_ratio_low": ("clip_ratio",),
    "critic": ("critic_config",),
    "kl_loss_coef": ("kl_coefficient",),
    "loss_agg_mode": ("aggregation",),
    "n": ("samples_per_prompt",),
    "optim": ("optimizer",),
    "ppo_epochs": ("epochs",),
    "ppo_micro_batch_size_per_gpu": ("micro_batch_size",),
    "response_length": ("max_tokens",),
    "rollout": ("generate_config",),
    "total_training_steps": ("lr_decay_steps", "steps"),
    # TRL, PEFT and transformers
    "beta": ("kl_coefficient",),
    "betas": ("adam_beta1", "adam_beta2"),
    "epsilon": ("clip_ratio",),
    "epsilon_high": ("clip_ratio_high",),
    "eval_steps": ("evaluate_every",),
    "gradient_checkpointing": ("recompute_granularity", "activation_checkpointing"),
    "learning_rate": ("lr",),
    "loss_type": ("aggregation",),
    "lr_scheduler_type": ("lr_decay_style",),
    "max_completion_length": ("max_tokens",),
    "max_grad_norm": ("clip_grad",),
    "max_new_tokens": ("max_tokens",),
    "max_steps": ("steps",),
    "model_name_or_path": ("model",),
    "num_generations": ("samples_per_prompt",),
    "num_iterations": ("epochs",),
    "per_device_train_batch_size": ("micro_batch_size",),
    "r": ("rank",),
    "save_steps": ("save_every",),
    "torch_dtype": ("params_dtype",),
    "warmup_ratio": ("lr_warmup_fraction",),
    # short forms, and Megatron's names on the side of inference
    "ep": ("expert_model_parallel_size", "infer_expert_parallel_size"),
    "expert_model_parallel_size": ("infer_expert_parallel_size",),
    "offload": ("offload_train_param", "offload_train_grad", "offload_train_optimizer"),
    "pipeline_model_parallel_size": ("infer_pipeline_parallel_size",),
    "pp": ("pipeline_model_parallel_size", "infer_pipeline_parallel_size"),
    "tensor_model_parallel_size": ("infer_tensor_parallel_size",),
    "tp": ("tensor_model_parallel_size", "infer_tensor_parallel_size"),
}
"""Names that other frameworks have for a key, or for a like key of another section -> keys of ours."""

SAMPLING = ("n", "temperature", "top_p", "top_k", "min_p", "stop", "max_tokens", "max_new_tokens")
NO_KEYS = {
    **dict.fromkeys(("dp", "data_parallel_size"), "Leave it out: it is the number of ranks over TP x PP x CP"),
    "gradient_accumulation_steps": "Leave it out: an update accumulates as many micro batches as a rank's rows take",
    **dict.fromkeys(SAMPLING, "Pass a Sampling to generate_sequences: each call says how it samples"),
}
"""Names that users try and that have no key -> remedy."""

_BESIDE = "critic_config"
"""A section that most jobs lack, with keys of the same names as the actor's."""


def proposal(place: Place, section: type[Section], root: type[Section], prefix: str = "") -> str:
    """Return a remedy for the unknown key at `place`, whose last part is its name.

    Args:
        place: parts of the key below `root`.
        section: that it was found in.
        root: where other keys are looked up.
        prefix: of keys below `root`, in messages.
    """
    here, name = place[:-1], clipped(place[-1])
    paths = [path for path in paths_of(root) if path[0] != _BESIDE or here[:1] == (_BESIDE,)]
    meant = {name, *ALIASES.get(name, ())}
    if name in NO_KEYS and meant.isdisjoint(path[-1] for path in paths):
        return NO_KEYS[name]
    close = nearest(name, section.model_fields) or nearest(name, {path[-1] for path in paths})
    for said, names in (("Use {}", meant), ("Did you mean {}?", {close})):
        found = [path for path in paths if path[-1] in names]
        shared = [sum(path[:depth] == here[:depth] for depth in range(1, len(here) + 1)) for path in found]
        best = [path for path, depth in zip(found, shared, strict=True) if depth == max(shared)]
        if 0 < len(best) <= 3:  # more are a list to search
            return said.format(", ".join(_shown(path, here, prefix) for path in best))
    return f"Known keys: {', '.join(section.model_fields)}"


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a key's type is, also where it may be left out; None for other types."""
    options = (annotation, *get_args(annotation))
    return next((one for one in options if isinstance(one, type) and issubclass(one, Section)), None)


def paths_of(section: type[Section], above: Place = ()) -> Iterator[Place]:
    """Every key of a section and of those in it."""
    for name, field in section.model_fields.items():
        yield (*above, name)
        if (inner := section_in(field.annotation)) is not None:
            yield from paths_of(inner, (*above, name))


def _shown(path: Place, here: Place, prefix: str) -> str:
    if path[:-1] == here:
        return path[-1]
    return prefix + ".".join(path) + (" at the top level" if len(path) == 1 and not prefix else "")


def violations_of(error: pydantic.ValidationError, root: type[Section], prefix: str = "") -> list[Violation]:
    """Convert pydantic's findings in values of `root`; keys begin with `prefix`."""
    return [_violation_of(item, root, prefix) for item in error.errors(include_url=False, include_context=False)]


def _violation_of(item: Mapping[str, Any], root: type[Section], prefix: str) -> Violation:
    key = clipped((prefix + ".".join(str(part) for part in item["loc"])).rstrip(".") or "configuration")
    if item["type"] not in ("extra_forbidden", "missing"):
        message = item["msg"].removeprefix("Value error, ")
        return Violation(key, f"{message}, found {shortened(item.get('input'))}", "Correct the value")
    place = tuple(str(part) for part in item["loc"])
    section = root
    for part in place[:-1]:
        section = section_in(section.model_fields[part].annotation) or section
    if item["type"] == "missing":
        what = " ".join((section.model_fields[place[-1]].description or "").split()).split(". ")[0]
        return Violation(key, "is missing", f"Add it: {what[:1].lower()}{what[1:]}")
    return Violation(key, "unknown key", proposal(place, section, root, prefix))

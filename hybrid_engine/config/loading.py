"""Reads and checks a configuration: every violation at once, before a process group exists.

`CONSTRAINTS` are all rules. docs/constraints.md is made from them (`make docs`); each has a test that breaks it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from hybrid_engine.config.critic_rules import CRITIC, WITH_FSDP, critic_of, critic_violations
from hybrid_engine.config.fsdp_rules import FSDP
from hybrid_engine.config.inference_rules import ENGINE_ARGUMENTS, INFERENCE
from hybrid_engine.config.keys import HybridConfig
from hybrid_engine.config.memory_rules import memory_violations
from hybrid_engine.config.override_rules import MEGATRON_TRAINS
from hybrid_engine.config.proposals import violations_of
from hybrid_engine.config.rules import Constraint, JobContext, TrainingContext
from hybrid_engine.config.training_rules import ANY_TRAINER
from hybrid_engine.errors import ConfigError, FileError, Violation, shortened
from hybrid_engine.files.documents import read_yaml
from hybrid_engine.files.hub import Snapshot, find_model
from hybrid_engine.files.model_files import weight_files
from hybrid_engine.layouts.parallelism import LARGEST_SIZE

GENERATES = (*INFERENCE, *ENGINE_ARGUMENTS)
CONSTRAINTS = (*ANY_TRAINER, *MEGATRON_TRAINS, *FSDP, *GENERATES, *WITH_FSDP, *CRITIC)


def training_rules(context: TrainingContext) -> list[Constraint[TrainingContext]]:
    """Those of the trainer that is configured."""
    return [*ANY_TRAINER, *(MEGATRON_TRAINS if context.actor.fsdp is None else FSDP)]


def broken_rules(context: TrainingContext, *, weights_only: bool = False, own_loop: bool = False) -> list[Violation]:
    """What breaks the rules: those of training and, for a `JobContext`, those of inference.

    Args:
        context: what they look at.
        weights_only: the training model holds weights and need not compute, as for a check of the switch alone.
        own_loop: the caller's model and loop compute, as Megatron's own scripts do.
    """
    skipped = ("here", "anywhere") if weights_only else ("here",) if own_loop else ()
    rules = [rule for rule in training_rules(context) if rule.computing not in skipped]
    found = [found for rule in rules for found in rule.find(context)]
    if isinstance(context, JobContext):
        found += [found for rule in GENERATES for found in rule.find(context)]
    return found


def load_config(
    source: str | Path | Mapping[str, Any],
    world_size: int | None = None,
    *,
    weights_only: bool = False,
    own_loop: bool = False,
    own_weights: bool = False,
    directory: Path | None = None,
) -> HybridConfig:
    """Read and check a configuration.

    Args:
        source: a YAML file, or the same as a mapping.
        world_size: number of ranks; default: WORLD_SIZE of the environment, which torchrun sets.
        weights_only, own_loop: see `broken_rules`.
        own_weights: the caller brings the weights: the model's directory needs none.
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
        config = HybridConfig.model_validate(values, context={"directory": directory})
    except pydantic.ValidationError as error:
        found += violations_of(error, HybridConfig)
    if found:
        raise ConfigError(found, file)
    try:
        config, models = _with_models(config, directory)
    except ConfigError as error:
        raise ConfigError(error.findings, file) from error
    violations = find_violations(config, num_ranks, weights_only=weights_only, own_loop=own_loop)
    if not (own_weights or config.random_weights):
        violations += [found for key, model in models.items() for found in _missing_weights(model, key)]
    if violations:
        raise ConfigError(violations, file)
    return config


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
    """The configuration with directories in place of ids, and these by key. Raises ConfigError."""
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
    config: HybridConfig, world_size: int, *, weights_only: bool = False, own_loop: bool = False
) -> list[Violation]:
    """Everything that makes this configuration impossible on `world_size` ranks; empty when it is sound.

    `weights_only`, `own_loop`: see `broken_rules`.
    """
    try:
        context = JobContext.of(config, world_size)
        found = broken_rules(context, weights_only=weights_only, own_loop=own_loop)
        if not found and config.critic_config is not None:
            found = critic_violations(critic_of(config, world_size))
    except ConfigError as error:
        return list(error.findings)
    return found or list(memory_violations(config, world_size))

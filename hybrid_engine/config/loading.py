"""Reads and checks a configuration: every violation at once, before a process group exists."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pydantic

from hybrid_engine.config.constraints import broken_rules
from hybrid_engine.config.critic_rules import critic_of, critic_violations
from hybrid_engine.config.keys import HybridConfig
from hybrid_engine.config.memory_rules import memory_violations
from hybrid_engine.config.rules import JobContext
from hybrid_engine.config.values import Section
from hybrid_engine.errors import ConfigError, FileError, Violation, clipped, shortened
from hybrid_engine.files.documents import read_yaml
from hybrid_engine.files.hub import Snapshot, find_model
from hybrid_engine.files.model_files import weight_files
from hybrid_engine.layouts.parallelism import LARGEST_SIZE


def load_config(
    source: str | Path | Mapping[str, Any],
    world_size: int,
    *,
    weights_only: bool = False,
    own_weights: bool = False,
    directory: Path | None = None,
) -> HybridConfig:
    """Read and check a configuration.

    Args:
        source: a YAML file, or the same as a mapping.
        world_size: number of ranks.
        weights_only: see `find_violations`.
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
        values, directory = read_yaml(source, clipped(str(source))), Path(source).absolute().parent
    found: list[Violation] = []
    if not isinstance(world_size, int) or isinstance(world_size, bool) or not 1 <= world_size <= LARGEST_SIZE:
        problem, remedy = f"{shortened(world_size)} ranks", f"Use a whole number from 1 to {LARGEST_SIZE}"
        found.append(Violation("world_size", problem, remedy))
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
    violations = find_violations(config, world_size, weights_only=weights_only)
    if not (own_weights or config.random_weights):
        violations += [found for key, model in models.items() for found in _missing_weights(model, key)]
    if violations:
        raise ConfigError(violations, file)
    return config


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


def find_violations(config: HybridConfig, world_size: int, *, weights_only: bool = False) -> list[Violation]:
    """Everything that makes this configuration impossible on `world_size` ranks; empty when it is sound.

    `weights_only`: the training model holds weights and need not compute (as for a check of the switch alone).
    """
    try:
        found = broken_rules(JobContext.of(config, world_size), weights_only=weights_only)
        if not found and config.critic_config is not None:
            found = critic_violations(critic_of(config, world_size))
    except ConfigError as error:
        return list(error.findings)
    return found or list(memory_violations(config, world_size))


def violations_of(error: pydantic.ValidationError, root: type[Section], prefix: str = "") -> list[Violation]:
    """What pydantic found in values of `root`; keys begin with `prefix`."""
    return [_violation_of(item, root, prefix) for item in error.errors(include_url=False, include_context=False)]


def _violation_of(item: Mapping[str, Any], root: type[Section], prefix: str) -> Violation:
    key = clipped((prefix + ".".join(str(part) for part in item["loc"])).rstrip(".") or "configuration")
    if item["type"] != "extra_forbidden":
        message = item["msg"].removeprefix("Value error, ")
        return Violation(key, f"{message}, found {shortened(item.get('input'))}", "Correct the value")
    section = root
    for part in item["loc"][:-1]:
        annotation = section.model_fields[part].annotation
        options = (annotation, *get_args(annotation))  # a section may be left out
        section = next(one for one in options if isinstance(one, type) and issubclass(one, Section))
    known = list(section.model_fields)
    close = difflib.get_close_matches(clipped(str(item["loc"][-1])), known, n=1)
    remedy = f"Did you mean {close[0]}" if close else f"Known keys: {', '.join(known)}"
    return Violation(key, "unknown key", remedy)

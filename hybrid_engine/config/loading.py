"""Reads and checks a configuration: every violation at once, before a process group exists."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pydantic

from hybrid_engine.config.constraints import broken_rules
from hybrid_engine.config.keys import HybridConfig, Section
from hybrid_engine.config.rules import JobContext
from hybrid_engine.errors import ConfigError, Violation, clipped, shortened
from hybrid_engine.files.documents import read_yaml
from hybrid_engine.layouts.parallelism import LARGEST_SIZE
from hybrid_engine.models.families import read_model


def load_config(source: str | Path | Mapping[str, Any], world_size: int, *, weights_only: bool = False) -> HybridConfig:
    """Read and check a configuration.

    Args:
        source: a YAML file, or the same as a mapping.
        world_size: number of ranks.
        weights_only: see `find_violations`.

    Raises ConfigError with every violation: first of all unknown keys and wrong values; then, since these decide what
    a layout is, of all impossible layouts.
    """
    values = source if isinstance(source, Mapping) else read_yaml(source, clipped(str(source)))
    found = []
    if isinstance(world_size, bool) or not 1 <= world_size <= LARGEST_SIZE:
        problem, remedy = f"{shortened(world_size)} ranks", f"Use a whole number from 1 to {LARGEST_SIZE}"
        found.append(Violation("world_size", problem, remedy))
    try:
        config = HybridConfig.model_validate(values)
    except pydantic.ValidationError as error:
        found += violations_of(error, HybridConfig)
    violations = found or find_violations(config, world_size, weights_only=weights_only)
    if violations:
        raise ConfigError(violations)
    return config


def find_violations(config: HybridConfig, world_size: int, *, weights_only: bool = False) -> list[Violation]:
    """Everything that makes this configuration impossible on `world_size` ranks; empty when it is sound.

    `weights_only`: the training model holds weights and need not compute (as for a check of the switch alone).
    """
    try:
        table, _ = read_model(config.model)
    except ConfigError as error:
        return list(error.findings)
    context = JobContext(config.actor_config, table, world_size, config.generate_config)
    return broken_rules(context, weights_only=weights_only)


def violations_of(error: pydantic.ValidationError, root: type[Section], prefix: str = "") -> list[Violation]:
    """What pydantic found in values of `root`; keys begin with `prefix`."""
    return [_violation_of(item, root, prefix) for item in error.errors(include_url=False, include_context=False)]


def _violation_of(item: Mapping[str, Any], root: type[Section], prefix: str) -> Violation:
    key = clipped(prefix + ".".join(str(part) for part in item["loc"]) or "configuration")
    if item["type"] != "extra_forbidden":
        return Violation(key, f"{item['msg']}, found {shortened(item.get('input'))}", "Correct the value")
    section = root
    for part in item["loc"][:-1]:
        annotation = section.model_fields[part].annotation
        options = (annotation, *get_args(annotation))  # a section may be left out
        section = next(one for one in options if isinstance(one, type) and issubclass(one, Section))
    known = list(section.model_fields)
    close = difflib.get_close_matches(clipped(str(item["loc"][-1])), known, n=1)
    remedy = f"Did you mean {close[0]}" if close else f"Known keys: {', '.join(known)}"
    return Violation(key, "unknown key", remedy)

"""The configuration of an attached engine: the training side is what the live model is."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.attaching.matching import BEYOND_MEGATRON, LIVE, model_mismatches, vocabulary_mismatches
from hybrid_engine.config import HybridConfig, load_config
from hybrid_engine.errors import ConfigError, Violation, shortened
from hybrid_engine.files.documents import read_yaml
from hybrid_engine.models.families import read_model
from hybrid_engine.models.table import ModelTable
from megatron_patches.review import live_refusals

logger = logging.getLogger("hybrid_engine")

_BUILT_HERE = ("fsdp", "lora")

ConfigSource = HybridConfig | str | Path | Mapping[str, Any]


def read_source(source: ConfigSource) -> tuple[dict[str, Any], Path | None]:
    """What the user has set, and where its relative paths begin. Raises ConfigError."""
    if isinstance(source, HybridConfig):
        values = source.model_dump(exclude_unset=True, exclude={"revision"})  # a directory by now
        if arguments := source.generate_config.vllm:
            values["generate_config"]["vllm"] = arguments  # as they are: pydantic dumps a plain dictionary
        return values, None
    if isinstance(source, Mapping):
        return dict(source), None
    return read_yaml(source, "configuration"), Path(source).absolute().parent


def live_config(
    values: Mapping[str, Any], directory: Path | None, chunks: Sequence[torch.nn.Module], optimizer: Any
) -> tuple[HybridConfig, ModelTable]:
    """The configuration for these chunks, and the model's table.

    Args:
        values: what the user has set; keys of `actor_config` may be left out, and are then as Megatron has them.
        directory: where relative paths of `values` begin.
        chunks: of Megatron's model.
        optimizer: Megatron's; None for a model that is only read.

    Raises ConfigError with everything that is wrong: chunks and optimizers that cannot be driven first, then keys that
    contradict the live model, rules of the inference side, settings that the guard refuses, and differences between
    Megatron's model and the Hugging Face config.
    """
    from hybrid_engine.backends.megatron import live_settings as megatron

    if unusable := [*megatron.unusable_chunks(chunks, optimizer)]:
        raise ConfigError(unusable)
    given, live = values.get("actor_config") or {}, megatron.actor_values(chunks)
    found: list[Violation] = []
    if isinstance(given, Mapping):
        found += _contradictions(given, live)
        values = {**values, "actor_config": {**given, **live, **dict.fromkeys(_BUILT_HERE)}}
    try:
        config = load_config(
            values,
            megatron.world_size(),
            weights_only=optimizer is None,
            own_loop=True,
            own_weights=True,
            directory=directory,
        )
    except ConfigError as error:
        raise ConfigError([*found, *error.findings]) from None
    table, _ = read_model(config.model)
    found += _guarded(chunks, optimizer)
    found += model_findings(table, chunks)
    if found:
        raise ConfigError(found)
    return config, table


def _contradictions(given: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[Violation]:
    for key in _BUILT_HERE:
        if given.get(key) is not None:
            yield Violation(f"actor_config.{key}", "is for models that are built here", "Leave it out")
    for key, found in live.items():
        if key in given and given[key] != found:
            problem = f"{shortened(given[key])}, but Megatron's model has {shortened(found)}"
            yield Violation(f"actor_config.{key}", problem, "Leave it out, or make them agree")


def _guarded(chunks: Sequence[torch.nn.Module], optimizer: Any) -> list[Violation]:
    """What of Megatron's configuration does not go with a switch."""
    found = live_refusals(chunks, optimizer)
    return [Violation(f"{one.section}.{one.field}", one.problem, one.remedy) for one in found]


def model_findings(table: ModelTable, chunks: Sequence[torch.nn.Module]) -> list[Violation]:
    """Report where Megatron's model is not the table's. What a class of the user's own computes is taken on trust.

    Raises ConfigError for a table that the megatron-core in use cannot build.
    """
    from hybrid_engine.backends.megatron import live_settings as megatron

    found: list[Violation] = []
    for chunk in chunks:
        arguments, config = megatron.model_arguments(chunk), megatron.config_of(chunk)
        found += model_mismatches(table, arguments, config, LIVE)
        found += vocabulary_mismatches(table, arguments, LIVE)
    found = list(dict.fromkeys(found))
    if (own := megatron.own_class(chunks[0])) is None:
        return found
    for each in found:
        if each.key == BEYOND_MEGATRON:
            logger.warning("%s; %s is trusted to", each.problem, own)
    return [each for each in found if each.key != BEYOND_MEGATRON]

"""Refuses configurations of Megatron that do not go with a switch."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import textwrap
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from megatron_patches.patch import release_of
from megatron_patches.review.fields import FUNCTION_FIELDS, READ_OFF_THE_MODEL, REFUSED

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """A field that keeps a switch from being possible.

    Attributes:
        section: its configuration class, of `REFUSED`.
        field: its name.
        problem: the value, and what is wrong with it.
        remedy: what to do.
    """

    section: str
    field: str
    problem: str
    remedy: str


def refusal(section: str, field: str, value: object, version: str = "") -> Refusal | None:
    """What is wrong with a value; None if nothing is. `version`: of megatron-core; default: the imported one's."""
    found = REFUSED[section].get(field)
    if found is None or found.accepts(value):
        return None
    if found.until and Version(version or _imported()) >= Version(found.until):
        return None
    shown = "" if value is True else f"{textwrap.shorten(str(value), 80)}: "
    choices = " or ".join(map(str, found.accepted))
    remedy = f"Leave it at {choices}" if len(found.accepted) == 1 else f"Use {choices}"
    return Refusal(section, field, f"{shown}{found.reason}", remedy)


def live_refusals(model_chunks: Sequence[Any], optimizer: Any) -> list[Refusal]:
    """What of live model chunks, their DDP and their optimizer (None for a model that is only read) is refused."""
    from megatron.core.utils import unwrap_model

    found: list[tuple[str, Any]] = []
    for chunk in model_chunks:
        found += [*_configured(getattr(unwrap_model(chunk), "config", None))]
        found += [*_configured(getattr(chunk, "ddp_config", None))]
    for one in _optimizers(optimizer):
        found += [*_configured(getattr(one, "config", None))]
        if _is_layer_wise(one):
            found.append(("OptimizerConfig", Namespace(optimizer="dist_muon")))
    return _refusals(found)


def argument_refusals(args: Namespace, transformer_config: Any) -> list[Refusal]:
    """What of Megatron-LM's validated arguments is refused, before anything is built.

    Megatron derives `transformer_config` from them, and fills the configurations of DDP and optimizer by name.
    """
    own = ("DistributedDataParallelConfig", "OptimizerConfig")
    return _refusals([*_configured(transformer_config), *((section, args) for section in own)])


def _refusals(objects: Iterable[tuple[str, Any]]) -> list[Refusal]:
    """Each once, in order."""
    found = (
        refusal(section, field, getattr(one, field))
        for section, one in objects
        for field in REFUSED[section]
        if hasattr(one, field)
    )
    return list(dict.fromkeys(each for each in found if each is not None))


def _configured(config: Any) -> Iterator[tuple[str, Any]]:
    """A configuration with the class of Megatron's that it is of; nothing for anything else."""
    names = [base.__name__ for base in type(config).__mro__]
    for section in (section for section in REFUSED if section in names):
        _log_others(section, config)
        yield section, config


def _log_others(section: str, config: Any) -> None:
    """Fields that are in no list pass; log those that are not at their default, for whoever looks for what they do."""
    listed = {*REFUSED[section], *FUNCTION_FIELDS, *READ_OFF_THE_MODEL}
    others = [
        field.name
        for field in (dataclasses.fields(config) if dataclasses.is_dataclass(config) else ())
        if field.name not in listed and field.default_factory is dataclasses.MISSING
        if getattr(config, field.name, field.default) != field.default
    ]
    if others:
        logger.debug("%s: in no list, and not at their default: %s", section, ", ".join(others))


def _optimizers(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    for member in getattr(optimizer, "chained_optimizers", ()):
        yield from _optimizers(member)


def _is_layer_wise(optimizer: Any) -> bool:
    """Whether its configuration conceals that it is layer-wise: 0.16 overwrites the name with that of a member."""
    config = getattr(optimizer, "config", None)
    is_layer_wise = any(base.__name__ == "LayerWiseDistributedOptimizer" for base in type(optimizer).__mro__)
    return is_layer_wise and not getattr(config, "use_layer_wise_distributed_optimizer", False)


def _imported() -> str:
    return release_of(importlib.import_module("megatron.core").__version__)

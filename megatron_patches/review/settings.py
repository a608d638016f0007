"""What a running Megatron is configured as: every field of its configuration objects, with value and default."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatron_patches.review.sources import SECTIONS


class _Unknown(enum.Enum):
    NO_DEFAULT = "none"
    NOT_KEPT = "a value that the model does not keep"


NO_DEFAULT: Final = _Unknown.NO_DEFAULT
NOT_KEPT: Final = _Unknown.NOT_KEPT
"""The value of a model's argument that is no attribute of the model."""


@dataclass(frozen=True)
class Setting:
    """One field of one configuration object.

    Attributes:
        section: the configuration class, of `SECTIONS`.
        field: its name.
        value: that it has, or `NOT_KEPT`.
        default: Megatron's own, or `NO_DEFAULT`.
    """

    section: str
    field: str
    value: object
    default: object

    @property
    def is_default(self) -> bool:
        return bool(self.value is self.default or self.value == self.default)


def live_settings(model_chunks: Sequence[Any], optimizer: Any) -> list[Setting]:
    """Of live model chunks, their DDP and their optimizer (None for a model that is only read), each field once.

    Fields that a class outside of megatron.core adds are its own business and left out.
    """
    from megatron.core.utils import unwrap_model

    objects: list[Any] = []
    for chunk in model_chunks:
        model = unwrap_model(chunk)
        objects += [getattr(model, "config", None), getattr(chunk, "ddp_config", None), model]
    optimizers = list(_optimizers(optimizer))
    objects += [getattr(one, "config", None) for one in optimizers]
    distinct = {id(found): found for found in objects}.values()
    settings = [setting for found in distinct for setting in _settings_of(found)]
    settings += [setting for one in optimizers for setting in _layer_wise(one)]
    return list({(one.section, one.field, repr(one.value)): one for one in settings}.values())


def argument_settings(args: Namespace, transformer_config: Any) -> list[Setting]:
    """Of Megatron-LM's validated arguments, before anything is built.

    Megatron derives `transformer_config` from them, and fills the configurations of DDP and optimizer by name. What
    arguments the model gets shows when it is there: here they have their defaults.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig

    settings = list(_settings_of(transformer_config))
    settings += [Setting(GPTModel.__name__, name, default, default) for name, default in _arguments_of(GPTModel)]
    for config in (DistributedDataParallelConfig, OptimizerConfig):
        settings += [
            Setting(config.__name__, field.name, getattr(args, field.name), _default(field))
            for field in dataclasses.fields(config)
            if hasattr(args, field.name)
        ]
    return settings


def _optimizers(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    for member in getattr(optimizer, "chained_optimizers", ()):
        yield from _optimizers(member)


def _layer_wise(optimizer: Any) -> Iterator[Setting]:
    """The name that asked for a layer-wise optimizer: 0.16 and 0.17 overwrite it with that of a member.

    From 0.18 on its configuration keeps what was asked for.
    """
    config = getattr(optimizer, "config", None)
    is_layer_wise = any(base.__name__ == "LayerWiseDistributedOptimizer" for base in type(optimizer).__mro__)
    if is_layer_wise and not getattr(config, "use_layer_wise_distributed_optimizer", False):
        yield Setting("OptimizerConfig", "optimizer", "dist_muon", "adam")


def _settings_of(found: Any) -> Iterator[Setting]:
    core = [base for base in type(found).__mro__ if base.__module__.startswith("megatron.core.")]
    named = {base.__name__: base for base in core}
    section = next((section for section in SECTIONS if section in named), None)
    if section is None:
        return
    if dataclasses.is_dataclass(core[0]):
        for field in dataclasses.fields(core[0]):
            yield Setting(section, field.name, getattr(found, field.name, NOT_KEPT), _default(field))
        return
    for name, default in _arguments_of(named[section]):
        yield Setting(section, name, getattr(found, name, NOT_KEPT), default)


def _arguments_of(model: type) -> Iterator[tuple[str, object]]:
    """The arguments of a model's class, with their defaults."""
    for name, parameter in inspect.signature(model).parameters.items():
        yield name, NO_DEFAULT if parameter.default is parameter.empty else parameter.default


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return NO_DEFAULT if field.default is dataclasses.MISSING else field.default

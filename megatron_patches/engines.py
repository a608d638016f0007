"""What ``--enable-resharding`` hands training to: the protocol of an engine, and how one is found.

    validate_args        engine = factory(script)          checks everything; nothing is built yet
    get_model            with engine.building(): ...       DDP's flat buffers are allocated
                         engine.model_built(chunks)        before the optimizer is made
    train                engine.attach(chunks, optimizer, num_steps)    checkpoint loaded, all is on the device
      every N steps      engine.switch(iteration)          to inference and back
                         engine.detach()                   also on sys.exit
    (then Megatron evaluates and saves as usual)

An engine registers a factory under the entry-point group "megatron_patches.engines".
"""

from __future__ import annotations

import importlib
import importlib.metadata
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_patches.arguments import ReshardingOptions
from megatron_patches.errors import ScriptError

ENTRY_POINT_GROUP = "megatron_patches.engines"
_INSTALL_HINT = "pip install 'hybrid-engine[train,infer]', or choose one by --resharding-engine MODULE:OBJECT"


@dataclass(frozen=True)
class MegatronScript:
    """The running script, as an engine sees it.

    Attributes:
        options: of our command line.
        args: Megatron's validated arguments. Not to be changed: checkpoints contain them.
    """

    options: ReshardingOptions
    args: Namespace

    def transformer_config(self) -> Any:
        """megatron-core's TransformerConfig, as Megatron derives it from the arguments."""
        from megatron.training.arguments import core_transformer_config_from_args

        return core_transformer_config_from_args(self.args)

    @property
    def timers(self) -> Any:
        """Megatron's timers."""
        from megatron.training.global_vars import get_timers

        return get_timers()

    @property
    def tokenizer(self) -> Any:
        """Megatron's tokenizer."""
        from megatron.training.global_vars import get_tokenizer

        return get_tokenizer()

    @property
    def tensorboard_writer(self) -> Any:
        """None on all ranks but the last, and without --tensorboard-dir."""
        from megatron.training.global_vars import get_tensorboard_writer

        return get_tensorboard_writer()

    @property
    def wandb_writer(self) -> Any:
        """None on all ranks but the last, and without --wandb-project."""
        from megatron.training.global_vars import get_wandb_writer

        return get_wandb_writer()


class ReshardingEngine(Protocol):
    """Called on every rank at the same points; all methods may be collective.

    `building` and `model_built` may raise ScriptError, too. Between calls the training state is on the device, at its
    original addresses. No call changes a random state.
    """

    def building(self) -> AbstractContextManager[None]:
        """Entered around Megatron's `get_model`. The tokenizer exists; may raise to refuse the model."""
        ...

    def model_built(self, model_chunks: Sequence[Any]) -> None:
        """The DDP-wrapped chunks exist, without an optimizer; parameters may still be moved."""
        ...

    def attach(self, model_chunks: Sequence[Any], optimizer: Any, num_steps: int) -> None:
        """Training is about to start; the optimizer has taken `num_steps` steps, not counting skipped ones."""
        ...

    def switch(self, iteration: int) -> None:
        """Switch to inference and back; `iteration` iterations are complete."""
        ...

    def detach(self) -> None:
        """Training is over; release what inference holds."""
        ...


EngineFactory = Callable[[MegatronScript], ReshardingEngine]
"""Raises ScriptError with every problem of the options, before any collective: the script ends with its message."""


def find_engine(reference: str | None = None) -> EngineFactory:
    """The factory that `reference` (``module:object``) names; default: the only installed one. Raises ScriptError."""
    if reference is not None:
        return _imported(reference)
    found = list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
    if not found:
        raise ScriptError([f"no resharding engine is installed: {_INSTALL_HINT}"])
    if len(found) > 1:
        names = ", ".join(sorted(point.value for point in found))
        raise ScriptError([f"several resharding engines are installed: choose one of {names} by --resharding-engine"])
    factory: EngineFactory = found[0].load()
    return factory


def _imported(reference: str) -> EngineFactory:
    module_name, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        message = f"--resharding-engine {reference} cannot be imported ({error}); use an importable MODULE:OBJECT"
        raise ScriptError([message]) from error

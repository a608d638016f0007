"""Hooks of ``--enable-resharding`` in ``megatron.training``: a decorator on each function.

    way 1   python -m megatron_patches pretrain_gpt.py ...    applies them at run time (`PATCHES`)
    way 2   patches/core_v*/                                  writes them into the source tree

    parse_args      with_arguments     adds the resharding options to the parser
    validate_args   with_validation    checks options, applies "hooks" patches, creates the engine
    get_model       with_buffers       the engine provides DDP's flat buffers; since 0.19 also
                                       around the builder that some scripts have instead
    train           with_engine        the engine is attached during training
    train_step      with_switch        the engine gets the devices every N optimizer steps

Without the flag each decorator only calls the original.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_patches.engines import (
    ALLOW_VERSION_FLAG,
    ENABLE_FLAG,
    MegatronScript,
    ReshardingEngine,
    ReshardingOptions,
    add_arguments,
    find_engine,
    performs_rl,
)
from megatron_patches.errors import MegatronPatchError, ScriptError
from megatron_patches.patch import (
    Function,
    Patch,
    apply,
    around,
    check_version,
    stand_in_groups,
)

logger = logging.getLogger(__name__)

_MARK = "_enters_resharding"
_SECONDS_FOR_RANK_0 = 10.0
"""Delay in seconds of the message of another rank, during which rank 0 may report the same problem.

Imports take that long, and differ in speed between ranks.
"""


@dataclass
class _ScriptRun:
    """Run of a script in this process.

    Attributes:
        options: resharding options of the command line.
        engine: None until Megatron has validated its arguments.
        num_steps: optimizer steps taken, without skipped ones; continues from a checkpoint.
        starts: True until the first step after the engine was attached begins.
        attached: True while the engine is attached and training runs.
        flags: all flags of Megatron's parser; None before it has parsed.
    """

    options: ReshardingOptions = field(default_factory=ReshardingOptions)
    engine: ReshardingEngine | None = None
    num_steps: int = 0
    starts: bool = False
    attached: bool = False
    flags: frozenset[str] | None = None


_run = _ScriptRun()


def options() -> ReshardingOptions:
    """Return the resharding options, which are not among Megatron's arguments."""
    return _run.options


def allows_version() -> bool:
    """Return True if the command line accepts untested versions."""
    # Needed before Megatron parses the command line.
    return ALLOW_VERSION_FLAG in sys.argv


def is_enabled() -> bool:
    """Return True if the command line has --enable-resharding."""
    # Needed before Megatron parses the command line.
    return ENABLE_FLAG in sys.argv


def prepare() -> None:
    """Apply the CPU patches if this run reshards and there is no CUDA.

    Called once, when the ``megatron.training`` of a patched source tree is imported. Nothing
    changes for scripts without the flag, and for converters.
    """
    if is_enabled():
        with _refusing():
            apply_stand_ins()


def apply_stand_ins() -> None:
    """Apply corrections, and the stand-ins for what is missing; without CUDA also those of scripts.

    Raises:
        PatchSetError: they do not fit the installed Megatron.
    """
    groups: tuple[str, ...] = ("routers", *stand_in_groups())
    if "cpu" in groups:
        groups = (*groups, "cpu_training")
    apply(groups, allow_version=allows_version())


def _decorator(call: Function) -> Callable[[Function], Function]:
    """Return a decorator that has an effect once, even if both the source and a patch apply it.

    Decorated functions call `call(original, *args, **kwargs)`.
    """

    @functools.wraps(call)
    def apply_once(original: Function) -> Function:
        if getattr(original, _MARK, None) == call.__name__:
            return original
        decorated = around(call)(original)
        setattr(decorated, _MARK, call.__name__)
        return decorated

    return apply_once


@_decorator
def with_arguments(
    parse_args: Function, extra_args_provider: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Decorate `parse_args(extra_args_provider, ignore_unknown_args)`: add our options."""
    global _run
    values: dict[str, Any] = {}
    flags: frozenset[str] | None = None

    def provide(parser: ArgumentParser) -> ArgumentParser:
        nonlocal values, flags
        parser = extra_args_provider(parser) if extra_args_provider is not None else parser
        values = add_arguments(parser)
        # A private attribute, because the usage text lacks flags without help, and all but the
        # first name of a flag.
        flags = frozenset(parser._option_string_actions)
        return parser

    parsed = parse_args(provide, *args, **kwargs)
    with _refusing():
        options = ReshardingOptions.of(values)
    # Megatron may parse the same command line again after the engine was created.
    if _run.engine is None or _run.options != options:
        _run = _ScriptRun(options, flags=flags)
    return parsed


@_decorator
def with_validation(validate_args: Function, *args: Any, **kwargs: Any) -> Any:
    """Decorate `validate_args(args, defaults)`: create the engine."""
    validated = validate_args(*args, **kwargs)
    if _run.options.enabled:
        with _refusing():
            _run.engine = _make_engine(MegatronScript(_run.options, validated, _run.flags))
    return validated


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """End the script with the message of a MegatronPatchError instead of a traceback."""
    try:
        yield
    except MegatronPatchError as error:
        refuse(error)


def refuse(error: MegatronPatchError) -> NoReturn:
    """End the script with the message of an error.

    Other ranks wait before they end. If all ranks fail, rank 0 ends first, and the launcher ends
    the others before they print the same message.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_SECONDS_FOR_RANK_0)
    sys.exit(f"{type(error).__name__}: {error}")


def _make_engine(script: MegatronScript) -> ReshardingEngine:
    factory = find_engine(script.options.engine)
    allow_version = script.options.allow_version
    # A patched source tree has not applied any patches yet, so nothing has checked the version.
    check_version(allow_version=allow_version)
    apply(("hooks",), allow_version=allow_version)
    engine = factory(script)
    # Applying these imports megatron.rl, which only the RL loop needs.
    if performs_rl(script.args):
        groups = ("rl",) if torch.cuda.is_available() else ("rl", "cpu_rl")
        apply(groups, allow_version=allow_version)
    return engine


@_decorator
def with_buffers(get_model: Function, *args: Any, **kwargs: Any) -> Any:
    """Decorate `get_model(…, wrap_with_ddp, …)`: the engine provides the memory of the buffers.

    Models without DDP are not trained, so they stay as they are.
    """
    if not (_run.options.enabled and _argument(get_model, "wrap_with_ddp", args, kwargs)):
        return get_model(*args, **kwargs)
    with _refusing():
        engine = required_engine()
        with engine.building():
            chunks = get_model(*args, **kwargs)
        engine.model_built(chunks)
    return chunks


@_decorator
def with_engine(train: Function, *args: Any, **kwargs: Any) -> Any:
    """Decorate `train(…, model, optimizer, opt_param_scheduler, …)`: attach the engine."""
    if not _run.options.enabled:
        return train(*args, **kwargs)
    model, optimizer, scheduler = (
        _argument(train, name, args, kwargs)
        for name in ("model", "optimizer", "opt_param_scheduler")
    )
    engine = required_engine()
    # Megatron's iterations include skipped steps, but its scheduler counts the samples of steps
    # that were taken. Exact if all steps have the same number of samples.
    megatron_args = _megatron_args()
    # 12,800 samples read and 12,544 trained on, in batches of 128: 2 of 100 iterations were
    # skipped.
    skipped_samples = megatron_args.consumed_train_samples - scheduler.num_steps
    num_skipped = skipped_samples // megatron_args.global_batch_size
    num_steps = max(0, megatron_args.iteration - num_skipped)
    with _attached(engine, model, optimizer, num_steps):
        return train(*args, **kwargs)


@contextlib.contextmanager
def _attached(
    engine: ReshardingEngine, model: Any, optimizer: Any, num_steps: int
) -> Iterator[None]:
    """Attach the engine within a with block, and detach it at the end or on Megatron's exit."""
    # All ranks reach the end and Megatron's exit. After an error ranks may be at different points,
    # so `detach`, which may be collective, is not called.
    engine.attach(model, optimizer, num_steps)
    _run.num_steps = num_steps
    _run.starts = True
    _run.attached = True
    try:
        yield
    except SystemExit:
        try:
            engine.detach()
        # An error here must not replace Megatron's exit status.
        except Exception:
            logger.exception("the resharding engine could not be detached")
        raise
    finally:
        _run.attached = False
    engine.detach()


@_decorator
def with_switch(train_step: Function, *args: Any, **kwargs: Any) -> Any:
    """Decorate `train_step`, which returns (losses, was_skipped, …): switch every N steps."""
    if _run.options.enabled and not _run.attached:
        raise ScriptError(
            ["train_step was called outside of megatron.training's train(); call it in there"]
        )
    if _run.starts and _run.options.at_start:
        required_engine().switch(_megatron_args().curr_iteration)
    _run.starts = False
    result = train_step(*args, **kwargs)
    _, was_skipped, *_ = result
    if _run.options.enabled and not was_skipped:
        _run.num_steps += 1
        if _run.num_steps % _run.options.interval == 0:
            required_engine().switch(_megatron_args().curr_iteration + 1)
    return result


def required_engine() -> ReshardingEngine:
    """Return the engine of this run.

    Raises:
        ScriptError: no engine was created.
    """
    if _run.engine is None:
        raise ScriptError(
            [
                "Megatron did not validate its arguments, as with --yaml-cfg; pass them as flags "
                "instead"
            ]
        )
    return _run.engine


def _megatron_args() -> Any:
    from megatron.training.global_vars import get_args

    return get_args()


def _argument(function: Function, name: str, args: Any, kwargs: Any) -> Any:
    """Return the value of parameter `name` in a call of `function` with these arguments."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments[name]


def _patch(
    decorator: Callable[[Function], Function],
    target: str,
    reason: str,
    name: str = "",
    since: str = "",
) -> Patch:
    return Patch(
        name=f"script.{name or decorator.__name__}",
        group="script",
        target=f"megatron.training.{target}",
        reason=reason,
        remove_when="megatron.training calls such hooks itself, or the source tree is patched",
        build=decorator,
        since=since,
    )


@around
def _compile_if_needed(compile_helpers: Any) -> None:
    folder = Path(compile_helpers.__globals__["__file__"]).parent
    is_compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if (folder / "Makefile").exists() or not is_compiled:
        compile_helpers()


PATCHES: tuple[Patch, ...] = (
    _patch(with_arguments, "arguments:parse_args", "adds the arguments of --enable-resharding"),
    _patch(
        with_validation,
        "arguments:validate_args",
        "checks them and creates the engine, before anything is built",
    ),
    _patch(
        with_buffers,
        "training:get_model",
        "lets the engine allocate the memory of parameters and gradients",
    ),
    _patch(
        with_buffers,
        "models.dist_utils:unimodal_build_distributed_models",
        "builds the model in place of get_model if a script passes its configuration to pretrain",
        name="with_buffers.builders",
        since="0.19.0",
    ),
    _patch(with_engine, "training:train", "attaches the engine during training"),
    _patch(
        with_switch, "training:train_step", "gives the engine the devices every N optimizer steps"
    ),
    Patch(
        name="script.compiled_helpers",
        group="script",
        target="megatron.core.datasets.utils:compile_helpers",
        reason="calls make, which ends scripts that run with the wheel: it has compiled helpers, "
        "but no Makefile",
        remove_when="the wheel has a Makefile, or megatron.training does not recompile the helpers",
        build=_compile_if_needed,
        since="0.17.0",
    ),
)

"""Where ``--enable-resharding`` enters ``megatron.training``: a decorator on each function.

    way 1   python -m megatron_patches pretrain_gpt.py ...    applies the decorators at run time (`PATCHES`)
    way 2   patches/core_v*/ (here)                           writes them into the source tree (apply.sh there)

    parse_args      with_arguments     our arguments join the parser
    validate_args   with_validation    options are checked, the "hooks" patches applied, the engine made
    get_model       with_buffers       the engine provides DDP's flat buffers; since 0.19 also where scripts have a
                                       builder in place of get_model
    train           with_engine        the engine lives as long as training
    train_step      with_switch        every N optimizer steps the engine gets the devices

Without the flag each calls the original and does nothing else.
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
from megatron_patches.patch import Patch, apply, check_version, stand_in_groups

logger = logging.getLogger(__name__)

Function = Callable[..., Any]
_MARK = "_enters_resharding"
_SECONDS_FOR_RANK_0 = 10.0
"""That another rank waits before it says what is wrong there: ranks import for as long, and not at one speed."""


@dataclass
class _Run:
    """This process's run of a script.

    Attributes:
        options: of the command line.
        engine: None until Megatron has validated its arguments.
        num_steps: optimizer steps taken, not counting skipped ones; continues from a checkpoint.
        starts: no step has begun since the engine was attached.
        attached: training runs, and the engine is attached to it.
        flags: all that Megatron's parser has.
    """

    options: ReshardingOptions = field(default_factory=ReshardingOptions)
    engine: ReshardingEngine | None = None
    num_steps: int = 0
    starts: bool = False
    attached: bool = False
    flags: frozenset[str] | None = None


_run = _Run()


def options() -> ReshardingOptions:
    """The resharding options of this run's command line, which are not among Megatron's arguments."""
    return _run.options


def allows_version() -> bool:
    """Whether the command line accepts untested versions; needed before Megatron parses it."""
    return ALLOW_VERSION_FLAG in sys.argv


def is_enabled() -> bool:
    """Whether the command line has the flag; needed before Megatron parses it."""
    return ENABLE_FLAG in sys.argv


def prepare() -> None:
    """Apply the CPU patches where there is no CUDA, if this run reshards.

    Called once, when the ``megatron.training`` of a patched source tree is imported: by scripts without the flag, too,
    and by converters, for which nothing changes.
    """
    if is_enabled():
        with _refusing():
            apply_stand_ins()


def apply_stand_ins() -> None:
    """Apply the stand-ins for what this machine lacks, and without CUDA those of scripts. Raises PatchSetError."""
    groups = stand_in_groups()
    if "cpu" in groups:
        groups = (*groups, "cpu_training")
    if groups:
        apply(groups, allow_version=allows_version())


def _decorator(decorate: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """A decorator that is applied once, even if both the source and a patch apply it."""

    @functools.wraps(decorate)
    def apply_once(original: Function) -> Function:
        if getattr(original, _MARK, None) == decorate.__name__:
            return original
        decorated = functools.wraps(original)(decorate(original))
        setattr(decorated, _MARK, decorate.__name__)
        return decorated

    return apply_once


@_decorator
def with_arguments(parse_args: Function) -> Function:
    """Decorate `parse_args(extra_args_provider, ignore_unknown_args)`: our arguments join the parser."""

    def parse(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        global _run
        given: dict[str, Any] = {}
        flags: frozenset[str] | None = None

        def provide(parser: ArgumentParser) -> ArgumentParser:
            nonlocal given, flags
            parser = extra_args_provider(parser) if extra_args_provider is not None else parser
            given = add_arguments(parser)
            # private; the usage text lacks flags without help, and all names of a flag but the first
            flags = frozenset(parser._option_string_actions)
            return parser

        parsed = parse_args(provide, *args, **kwargs)
        with _refusing():
            options = ReshardingOptions.of(given)
        if _run.engine is None or _run.options != options:  # Megatron may parse again when the engine is there
            _run = _Run(options, flags=flags)
        return parsed

    return parse


@_decorator
def with_validation(validate_args: Function) -> Function:
    """Decorate `validate_args(args, defaults)`: the engine is made."""

    def validate(args: Any, *rest: Any, **kwargs: Any) -> Any:
        validated = validate_args(args, *rest, **kwargs)
        if _run.options.enabled:
            with _refusing():
                _run.engine = _make_engine(MegatronScript(_run.options, validated, _run.flags))
        return validated

    return validate


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """End the script with what is wrong in place of a traceback."""
    try:
        yield
    except MegatronPatchError as error:
        refuse(error)


def refuse(error: MegatronPatchError) -> NoReturn:
    """End the script with what is wrong. What is wrong on all ranks rank 0 says.

    The launcher ends the others as soon as rank 0 has ended; one that is wrong alone speaks after a while.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(_SECONDS_FOR_RANK_0)
    sys.exit(f"{type(error).__name__}: {error}")


def _make_engine(script: MegatronScript) -> ReshardingEngine:
    factory = find_engine(script.options.engine)
    allow_version = script.options.allow_version
    check_version(allow_version=allow_version)  # in a patched source tree nothing has applied them
    apply(("hooks",), allow_version=allow_version)
    engine = factory(script)
    if performs_rl(script.args):  # not before: what these replace is imported for it alone
        apply(("rl",) if torch.cuda.is_available() else ("rl", "cpu_rl"), allow_version=allow_version)
    return engine


@_decorator
def with_buffers(get_model: Function) -> Function:
    """Decorate what builds a model, `get_model(…, wrap_with_ddp, …)`: the engine provides memory.

    Models without DDP are not trained.
    """

    def get(*args: Any, **kwargs: Any) -> Any:
        if not (_run.options.enabled and _argument(get_model, "wrap_with_ddp", args, kwargs)):
            return get_model(*args, **kwargs)
        with _refusing():
            engine = required_engine()
            with engine.building():
                chunks = get_model(*args, **kwargs)
            engine.model_built(chunks)
        return chunks

    return get


@_decorator
def with_engine(train: Function) -> Function:
    """Decorate `train(…, model, optimizer, opt_param_scheduler, …)`: the engine is attached meanwhile."""

    def train_with_engine(*args: Any, **kwargs: Any) -> Any:
        if not _run.options.enabled:
            return train(*args, **kwargs)
        model, optimizer, scheduler = (
            _argument(train, name, args, kwargs) for name in ("model", "optimizer", "opt_param_scheduler")
        )
        with _attached(required_engine(), model, optimizer, _steps_taken(_megatron_args(), scheduler)):
            return train(*args, **kwargs)

    return train_with_engine


@contextlib.contextmanager
def _attached(engine: ReshardingEngine, model: Any, optimizer: Any, num_steps: int) -> Iterator[None]:
    """Detach at the end and on Megatron's exit, which all ranks reach; not after an error: ranks may be anywhere."""
    engine.attach(model, optimizer, num_steps)
    _run.num_steps, _run.starts, _run.attached = num_steps, True, True
    try:
        yield
    except SystemExit:
        try:
            engine.detach()
        except Exception:  # must not replace Megatron's exit status
            logger.exception("the resharding engine could not be ended")
        raise
    finally:
        _run.attached = False
    engine.detach()


def _steps_taken(args: Any, scheduler: Any) -> int:
    """Optimizer steps that led to a checkpoint. Exact as long as a step always has the same number of samples."""
    # Megatron counts iterations, skipped ones too, but its scheduler counts the samples of steps that were taken
    skipped_samples = args.consumed_train_samples - scheduler.num_steps
    return max(0, args.iteration - skipped_samples // args.global_batch_size)


@_decorator
def with_switch(train_step: Function) -> Function:
    """Decorate `train_step`, whose result begins with (losses, whether the step was skipped): the engine switches."""

    def step(*args: Any, **kwargs: Any) -> Any:
        if _run.options.enabled and not _run.attached:
            raise ScriptError(["train_step was called outside of megatron.training's train(); call it in there"])
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

    return step


def required_engine() -> ReshardingEngine:
    """The engine of this run. Raises ScriptError where none was made."""
    if _run.engine is None:
        raise ScriptError(["Megatron did not validate its arguments, as with --yaml-cfg; pass them as flags instead"])
    return _run.engine


def _megatron_args() -> Any:
    from megatron.training.global_vars import get_args

    return get_args()


def _argument(function: Function, name: str, args: Any, kwargs: Any) -> Any:
    """What `function` gets for parameter `name` when called with these arguments."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments[name]


def _patch(
    decorator: Callable[[Function], Function], target: str, reason: str, name: str = "", since: str = ""
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


def _compiling_where_possible(compile_helpers: Function) -> Function:
    @functools.wraps(compile_helpers)
    def compile_or_go_on() -> None:
        folder = Path(compile_helpers.__globals__["__file__"]).parent
        is_compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
        if (folder / "Makefile").exists() or not is_compiled:
            compile_helpers()

    return compile_or_go_on


PATCHES: tuple[Patch, ...] = (
    _patch(with_arguments, "arguments:parse_args", "adds the arguments of --enable-resharding"),
    _patch(with_validation, "arguments:validate_args", "checks them and makes the engine, before anything is built"),
    _patch(with_buffers, "training:get_model", "lets the engine allocate the memory of parameters and gradients"),
    _patch(
        with_buffers,
        "models.dist_utils:unimodal_build_distributed_models",
        "builds the model in place of get_model where the script passes its configuration to pretrain",
        name="with_buffers.builders",
        since="0.19.0",
    ),
    _patch(with_engine, "training:train", "attaches the engine during training"),
    _patch(with_switch, "training:train_step", "gives the engine the devices every N optimizer steps"),
    Patch(
        name="script.compiled_helpers",
        group="script",
        target="megatron.core.datasets.utils:compile_helpers",
        reason="calls make, which ends scripts beside the wheel alone: it has the compiled helpers, but no Makefile",
        remove_when="the wheel has a Makefile, or megatron.training does not compile what is compiled",
        build=_compiling_where_possible,
        since="0.17.0",
    ),
)

"""What ``--enable-resharding`` hands training to: the protocol of an engine, how one is found, and the command line.

    validate_args        engine = factory(script)          checks everything; nothing is built yet
    get_model            with engine.building(): ...       DDP's flat buffers are allocated
                         engine.model_built(chunks)        before the optimizer is made
    train                engine.attach(chunks, optimizer, num_steps)    checkpoint loaded, all is on the device
      every N steps      engine.switch(iteration)          to inference and back
                         engine.detach()                   also on sys.exit
    (then Megatron evaluates and saves as usual)

With --perform-rl-step Megatron's RL loop says when to switch: `switch` is called all the same, and
    MegatronLocal.launch   await engine.launch_rollouts()    before the first rollout

An engine registers a factory under the entry-point group "megatron_patches.engines". What is given on the command line
goes into `ReshardingOptions`, never into Megatron's Namespace: Megatron saves that with every checkpoint, and a
checkpoint must not show whether a run resharded.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from megatron_patches.errors import ScriptError

ENABLE_FLAG = "--enable-resharding"
ALLOW_VERSION_FLAG = "--resharding-allow-version"


@dataclass(frozen=True)
class ReshardingOptions:
    """The command line: one field per flag, whose help in `add_arguments` says what it does.

    None: the configuration file, or its default, decides. Without `prompts` nothing is generated, without `engine` the
    installed one is used; skipped optimizer steps do not count in `interval`.
    """

    enabled: bool = False
    config: Path | None = None
    interval: int = 1
    at_start: bool = False
    infer_tensor_parallel_size: int | None = None
    infer_pipeline_parallel_size: int | None = None
    infer_data_parallel_size: int | None = None
    infer_expert_parallel_size: int | None = None
    offload_train_param: bool | None = None
    offload_train_grad: bool | None = None
    offload_train_optimizer: bool | None = None
    prompts: Path | None = None
    output: Path | None = None
    verify: str | None = None
    callback: str | None = None
    engine: str | None = None
    allow_version: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ReshardingOptions:
        """From what `add_arguments` collected. Raises ScriptError for options without --enable-resharding."""
        options = cls(**given)
        useless = sorted(set(given) - {"enabled", "allow_version"})
        if useless and not options.enabled:
            flags = ", ".join(_FLAGS[name] for name in useless)
            raise ScriptError([f"{flags}: no effect without --enable-resharding; add that, or remove this"])
        return options


_FLAGS = {
    field.name: "--" + ("" if field.name.startswith(("infer_", "offload_")) else "resharding-") + field.name
    for field in fields(ReshardingOptions)
} | {"enabled": ENABLE_FLAG}
_FLAGS = {name: flag.replace("_", "-") for name, flag in _FLAGS.items()}


def add_arguments(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Add the group "resharding" to `parser`; returns the dict that parsing fills, by fields of `ReshardingOptions`."""
    given: dict[str, Any] = {}
    group = parser.add_argument_group(
        "resharding", "Generate with an inference engine from the live weights, on the devices that train."
    )

    def add(name: str, help_text: str, **settings: Any) -> None:
        group.add_argument(_FLAGS[name], action=_Collect, given=given, field=name, help=help_text, **settings)

    add("enabled", "Switch to the inference engine and back while training.", nargs=0)
    add("config", "YAML file of the engine: model, generate_config, sampling.", type=Path, metavar="FILE")
    add("interval", "Optimizer steps between two switches (default: 1).", type=_positive, metavar="N")
    add("at_start", "Also switch before the first step of this run.", nargs=0)
    for axis in ("tensor", "pipeline", "data", "expert"):
        text = f"{axis.capitalize()} parallel size of inference; overrides the file."
        add(f"infer_{axis}_parallel_size", text, type=_positive, metavar="N")
    for what, of in {"param": "parameters", "grad": "gradients", "optimizer": "optimizer state"}.items():
        text = f"Take {of} off the device while generating, or not; overrides the file."
        name = f"offload_train_{what}"
        no_flag = _FLAGS[name].replace("--", "--no-", 1)
        group.add_argument(_FLAGS[name], no_flag, action=_Collect, given=given, field=name, nargs=0, help=text)
    add("prompts", 'JSON lines with "prompt": text, or a list of token ids.', type=Path, metavar="FILE")
    add("output", "Directory for samples and timings.", type=Path, metavar="DIR")
    choices = ("off", "sample", "full")
    add("verify", "Compare inference weights with training's, bit by bit (default: as in the file).", choices=choices)
    add("callback", "Called with the live inference engine in every switch.", metavar="MODULE:FUNCTION")
    add("engine", "The engine, where none is installed or several are.", metavar="MODULE:OBJECT")
    add("allow_version", "Accept versions of Megatron and of the engine that were not tested.", nargs=0)
    return given


class _Collect(argparse.Action):
    """Stores into `given` instead of the Namespace; a flag without a value is True, or False in its --no- form."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, *, given: dict[str, Any], field: str, **kwargs: Any
    ) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **kwargs)
        self._given = given
        self._field = field

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        is_switch = self.nargs == 0
        self._given[self._field] = not str(option_string).startswith("--no-") if is_switch else values


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


ENTRY_POINT_GROUP = "megatron_patches.engines"
_INSTALL_HINT = "pip install 'hybrid-engine[train,infer]', or choose one by --resharding-engine MODULE:OBJECT"


def performs_rl(args: argparse.Namespace) -> bool:
    """Whether these arguments of Megatron's are of its RL loop; before 0.19 there is none."""
    return bool(getattr(args, "perform_rl_step", False))


@dataclass(frozen=True)
class MegatronScript:
    """The running script, as an engine sees it.

    Attributes:
        options: of our command line.
        args: Megatron's validated arguments. Not to be changed: checkpoints contain them.
        flags: all that Megatron's parser has; None where nobody has seen it.
    """

    options: ReshardingOptions
    args: Namespace
    flags: frozenset[str] | None = None

    def transformer_config(self) -> Any:
        """megatron-core's TransformerConfig, as Megatron derives it from the arguments."""
        from megatron.training.arguments import core_transformer_config_from_args

        return core_transformer_config_from_args(self.args)

    @property
    def timers(self) -> Any:
        """Megatron's timers."""
        return _global("timers")

    @property
    def tokenizer(self) -> Any:
        """Megatron's tokenizer."""
        return _global("tokenizer")

    @property
    def tensorboard_writer(self) -> Any:
        """None on all ranks but the last, and without --tensorboard-dir."""
        return _global("tensorboard_writer")

    @property
    def wandb_writer(self) -> Any:
        """None on all ranks but the last, and without --wandb-project."""
        return _global("wandb_writer")


def _global(name: str) -> Any:
    """One of Megatron's global variables, by its function `get_<name>`."""
    return getattr(importlib.import_module("megatron.training.global_vars"), f"get_{name}")()


class ReshardingEngine(Protocol):
    """Called on every rank at the same points; all methods may be collective.

    `building` and `model_built` may raise ScriptError, too. Between calls the training state is on the device, at its
    original addresses. No call changes a random state.
    """

    def building(self) -> AbstractContextManager[None]:
        """Entered around Megatron's `get_model`. The tokenizer exists; may raise to refuse the model."""

    def model_built(self, model_chunks: Sequence[Any]) -> None:
        """The DDP-wrapped chunks exist, without an optimizer; parameters may still be moved."""

    def attach(self, model_chunks: Sequence[Any], optimizer: Any, num_steps: int) -> None:
        """Training is about to start; the optimizer has taken `num_steps` steps, not counting skipped ones."""

    def switch(self, iteration: int) -> None:
        """Switch to inference and back; `iteration` iterations are complete."""

    def detach(self) -> None:
        """Training is over; release what inference holds."""

    async def launch_rollouts(self) -> Any:
        """With --perform-rl-step: an `InferenceServer` of megatron.rl, which Megatron's loop resumes for rollouts,
        suspends to train, and kills at the end, on every rank; its agents ask the one of rank 0."""


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

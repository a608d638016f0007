"""Engine protocol of ``--enable-resharding``, selection of an engine, and the command line.

    validate_args        engine = factory(script)          checks everything; nothing is built yet
    get_model            with engine.building(): ...       DDP's flat buffers are allocated
                         engine.model_built(chunks)        before the optimizer is built
    train                engine.attach(chunks, optimizer, num_steps)    checkpoint is loaded, all
                                                           state is on the device
      every N steps      engine.switch(iteration)          to inference and back
                         engine.detach()                   also on sys.exit
    (Megatron then evaluates and saves as usual)

With --perform-rl-step Megatron's RL loop decides when to switch. `switch` is still called, and
    MegatronLocal.launch   await engine.launch_rollouts()    before the first rollout

An engine registers a factory in the entry-point group "megatron_patches.engines". Options of the
command line go into `ReshardingOptions`, never into Megatron's Namespace, because Megatron saves
that in every checkpoint, and a checkpoint must not depend on resharding.
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
    """Options of the command line, one field per flag; the help in `add_arguments` describes each.

    None: the configuration file, or its default, decides. Without `prompts` the engine generates
    nothing, and without `engine` the installed one is used. Skipped optimizer steps do not count in
    `interval`.
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
    def of(cls, values: Mapping[str, Any]) -> ReshardingOptions:
        """Return the options from the values that `add_arguments` collected.

        Raises:
            ScriptError: options are present without --enable-resharding.
        """
        options = cls(**values)
        unused = sorted(set(values) - {"enabled", "allow_version"})
        if unused and not options.enabled:
            flags = ", ".join(_FLAGS[name] for name in unused)
            problem = f"{flags}: no effect without --enable-resharding; add that, or remove this"
            raise ScriptError([problem])
        return options


def _flag_of(name: str) -> str:
    """Return the flag of a field of `ReshardingOptions`."""
    if name == "enabled":
        return ENABLE_FLAG
    prefix = "" if name.startswith(("infer_", "offload_")) else "resharding-"
    return f"--{prefix}{name}".replace("_", "-")


_FLAGS = {field.name: _flag_of(field.name) for field in fields(ReshardingOptions)}


def add_arguments(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Add the group "resharding" to `parser`.

    Returns the dict that parsing fills with values of `ReshardingOptions`.
    """
    values: dict[str, Any] = {}
    group = parser.add_argument_group(
        "resharding",
        "Generate with an inference engine from the live weights, on the devices that train.",
    )

    def add(name: str, help_text: str, **settings: Any) -> None:
        flag = _FLAGS[name]
        group.add_argument(
            flag, action=_Collect, collected=values, field=name, help=help_text, **settings
        )

    add("enabled", "Switch to the inference engine and back while training.", nargs=0)
    add(
        "config",
        "YAML file of the engine: model, generate_config, sampling.",
        type=Path,
        metavar="FILE",
    )
    add(
        "interval",
        "Optimizer steps between two switches (default: 1).",
        type=_positive,
        metavar="N",
    )
    add("at_start", "Also switch before the first step of this run.", nargs=0)
    for axis in ("tensor", "pipeline", "data", "expert"):
        text = f"{axis.capitalize()} parallel size of inference; overrides the file."
        add(f"infer_{axis}_parallel_size", text, type=_positive, metavar="N")
    descriptions = {"param": "parameters", "grad": "gradients", "optimizer": "optimizer state"}
    for kind, description in descriptions.items():
        name = f"offload_train_{kind}"
        flag = _FLAGS[name]
        group.add_argument(
            flag,
            flag.replace("--", "--no-", 1),
            action=_Collect,
            collected=values,
            field=name,
            nargs=0,
            help=f"Take {description} off the device while generating, or not; overrides the file.",
        )
    add(
        "prompts",
        'JSON lines with "prompt": text, or a list of token ids.',
        type=Path,
        metavar="FILE",
    )
    add("output", "Directory for samples and timings.", type=Path, metavar="DIR")
    choices = ("off", "sample", "full")
    add(
        "verify",
        "Compare inference weights with training's, bit by bit (default: as in the file).",
        choices=choices,
    )
    add(
        "callback",
        "Called with the live inference engine in every switch.",
        metavar="MODULE:FUNCTION",
    )
    add("engine", "The engine, where none is installed or several are.", metavar="MODULE:OBJECT")
    add(
        "allow_version",
        "Accept versions of Megatron and of the engine that were not tested.",
        nargs=0,
    )
    return values


class _Collect(argparse.Action):
    """Action that stores into `collected` instead of the Namespace.

    A flag without a value is True, or False in its --no- form.
    """

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        *,
        collected: dict[str, Any],
        field: str,
        **kwargs: Any,
    ) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **kwargs)
        self._collected = collected
        self._field = field

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        if self.nargs == 0:
            values = not str(option_string).startswith("--no-")
        self._collected[self._field] = values


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


ENTRY_POINT_GROUP = "megatron_patches.engines"
_INSTALL_HINT = "pip install '.[train,infer]', or choose one by --resharding-engine MODULE:OBJECT"


def performs_rl(args: argparse.Namespace) -> bool:
    """Return True if Megatron's arguments select its RL loop."""
    # There is no such loop before 0.19.
    return bool(getattr(args, "perform_rl_step", False))


@dataclass(frozen=True)
class MegatronScript:
    """Running script, as an engine uses it.

    Attributes:
        options: resharding options of the command line.
        args: Megatron's validated arguments. Do not change them: checkpoints contain them.
        flags: all flags of Megatron's parser; None if they are not known.
    """

    options: ReshardingOptions
    args: Namespace
    flags: frozenset[str] | None

    def transformer_config(self) -> Any:
        """Return the TransformerConfig that Megatron derives from the arguments."""
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
    """Return a global variable of Megatron, from its function `get_<name>`."""
    module = importlib.import_module("megatron.training.global_vars")
    return getattr(module, f"get_{name}")()


class ReshardingEngine(Protocol):
    """Engine that a script calls on every rank at the same points; all methods may be collective.

    `building` and `model_built` may raise ScriptError. Between calls the training state is on the
    device, at its original addresses. No call changes a random state.
    """

    def building(self) -> AbstractContextManager[None]:
        """Return a context for Megatron's `get_model`. The tokenizer exists.

        Raises:
            ScriptError: the engine does not support the model.
        """

    def model_built(self, model_chunks: Sequence[Any]) -> None:
        """Take the DDP-wrapped chunks. There is no optimizer yet, so parameters may still move."""

    def attach(self, model_chunks: Sequence[Any], optimizer: Any, num_steps: int) -> None:
        """Start, before training.

        `num_steps`: steps that the optimizer has taken, not counting skipped ones.
        """

    def switch(self, iteration: int) -> None:
        """Switch to inference and back; `iteration` iterations are complete."""

    def detach(self) -> None:
        """Release the resources of inference, after training."""

    async def launch_rollouts(self) -> Any:
        """Return an `InferenceServer` of megatron.rl, with --perform-rl-step.

        Megatron's loop resumes it for rollouts, suspends it to train, and kills it at the end, on
        every rank. Its agents send requests to the one of rank 0.
        """


EngineFactory = Callable[[MegatronScript], ReshardingEngine]
"""Function that returns an engine.

Before any collective, it raises ScriptError with every problem of the options. The script then ends
with the message.
"""


def find_engine(reference: str | None) -> EngineFactory:
    """Return the factory at `reference` (``module:object``); default: the only installed one.

    Raises:
        ScriptError: `reference` cannot be imported, or not exactly one engine is installed.
    """
    if reference is not None:
        return _imported(reference)
    entry_points = list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
    if not entry_points:
        raise ScriptError([f"no resharding engine is installed: {_INSTALL_HINT}"])
    if len(entry_points) > 1:
        names = ", ".join(sorted(point.value for point in entry_points))
        problem = f"several resharding engines are installed: choose one of {names}"
        raise ScriptError([f"{problem} by --resharding-engine"])
    factory: EngineFactory = entry_points[0].load()
    return factory


def _imported(reference: str) -> EngineFactory:
    module_name, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        problem = f"--resharding-engine {reference} cannot be imported ({error})"
        raise ScriptError([f"{problem}; use an importable MODULE:OBJECT"]) from error

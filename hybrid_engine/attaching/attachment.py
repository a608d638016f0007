"""`prepare` and `attach`: vLLM for a Megatron model, optimizer and training loop of the user.

The training side of the configuration is read from the live model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import pydantic
import torch

import megatron_patches
from hybrid_engine.assembly import inference_side
from hybrid_engine.attaching.config_check import (
    BEYOND_MEGATRON,
    LIVE,
    model_mismatches,
    vocabulary_mismatches,
)
from hybrid_engine.backends.training_side import Modules
from hybrid_engine.config import GenerateConfig, HybridConfig, load_config
from hybrid_engine.errors import (
    ConfigError,
    DependencyError,
    Violation,
    Violations,
    require_none,
    shortened,
)
from hybrid_engine.files.documents import read_yaml
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.layouts.memory import gib
from hybrid_engine.memory.elastic import allocate_elastic, exported_buffer_of, is_elastic
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Trainer
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.signals_and_forks import Ends
from megatron_patches.buffers import set_buffer_allocator
from megatron_patches.errors import PatchSetError

logger = logging.getLogger("hybrid_engine")

_BUILT_HERE = ("fsdp", "lora")

ConfigSource = HybridConfig | str | Path | Mapping[str, Any]


def prepare() -> AbstractContextManager[object]:
    """Have Megatron build its buffers in memory that a switch can release page by page.

    Call it on every rank before the model is wrapped in DDP. Without CUDA, call it before the model
    is built, because it also applies the patches that let Megatron run on a CPU. As a context
    manager it covers the DDP that is built in its block:

        hybrid_engine.prepare()
        with hybrid_engine.prepare(): model = DistributedDataParallel(...)

    It is not collective. Raises DependencyError for a version of megatron-core that was not tested.
    """
    apply_patches()
    set_buffer_allocator(allocate_elastic)
    undo = ExitStack()
    undo.callback(set_buffer_allocator, None)
    return undo


def apply_patches() -> None:
    """Apply the hooks and, without CUDA, the patches for a CPU.

    Idempotent; raises DependencyError.
    """
    try:
        megatron_patches.apply()
    except PatchSetError as error:
        raise DependencyError(str(error), code="megatron-core-untested") from error


def read_source(source: ConfigSource) -> tuple[dict[str, Any], Path | None]:
    """Return the keys that the user has set, and the directory of relative paths in them.

    Raises ConfigError.
    """
    if isinstance(source, HybridConfig):
        # `model` is a directory by now, to which `revision` does not apply.
        values = source.model_dump(exclude_unset=True, exclude={"revision"})
        arguments = source.generate_config.vllm
        if arguments:
            # Engine arguments of vLLM stay objects; pydantic would dump plain dictionaries.
            values["generate_config"]["vllm"] = arguments
        return values, None
    if isinstance(source, Mapping):
        return dict(source), None
    return read_yaml(source, "configuration"), Path(source).absolute().parent


def live_config(
    values: Mapping[str, Any],
    directory: Path | None,
    chunks: Modules,
    optimizer: Any,
) -> tuple[HybridConfig, ModelTable]:
    """Return the configuration for these chunks, and the model's table.

    Args:
        values: keys that the user has set; keys of `actor_config` default to the live model's.
        directory: directory of relative paths in `values`.
        chunks: chunks of Megatron's model.
        optimizer: Megatron's optimizer; None for a model that is only read.

    Raises ConfigError with every violation: unusable chunks and optimizers first, then keys that
    contradict the live model, rules of the inference side, settings of Megatron that a switch
    refuses, and differences between Megatron's model and the Hugging Face config.
    """
    from hybrid_engine.backends.megatron import live_model as megatron

    require_none(megatron.unusable_chunks(chunks, optimizer))
    actor_keys = values.get("actor_config") or {}
    live = megatron.actor_values(chunks)
    violations: list[Violation] = []
    if isinstance(actor_keys, Mapping):
        violations += _contradictions(actor_keys, live)
        values = {**values, "actor_config": {**actor_keys, **live, **dict.fromkeys(_BUILT_HERE)}}
    try:
        config = load_config(
            values,
            megatron.world_size(),
            weights_only=optimizer is None,
            own_loop=True,
            own_weights=True,
            num_mtp_layers=megatron.config_of(chunks[0]).mtp_num_layers or 0,
            directory=directory,
        )
    except ConfigError as error:
        raise ConfigError([*violations, *error.findings]) from None
    table = config.table()
    violations += megatron.refused_state(chunks, optimizer)
    violations += model_findings(table, chunks, f"{config.model}/config.json")
    require_none(violations)
    return config, table


def _contradictions(actor_keys: Mapping[str, Any], live: Mapping[str, Any]) -> Violations:
    for key in _BUILT_HERE:
        if actor_keys.get(key) is not None:
            yield Violation(
                f"actor_config.{key}",
                "is for models that are built here",
                "Leave it out",
                code="not-for-attach",
            )
    for key, actual in live.items():
        if key in actor_keys and actor_keys[key] != actual:
            yield Violation(
                f"actor_config.{key}",
                f"{shortened(actor_keys[key])}, but Megatron's model has {shortened(actual)}",
                "Leave it out, or make them agree",
                code="differs-from-model",
            )


def model_findings(table: ModelTable, chunks: Modules, source: str) -> list[Violation]:
    """Return the differences between Megatron's model and the table, which was read from `source`.

    A model class of the user is trusted to compute what Megatron's own models have no setting for;
    a warning names each such computation. Raises ConfigError for a table that the installed
    megatron-core cannot build.
    """
    from hybrid_engine.backends.megatron import live_model as megatron

    violations: list[Violation] = []
    for chunk in chunks:
        arguments = megatron.model_arguments(chunk)
        config = megatron.config_of(chunk)
        violations += model_mismatches(table, arguments, config, LIVE, source)
        violations += vocabulary_mismatches(table, arguments, LIVE)
    violations = list(dict.fromkeys(violations))
    users_class = megatron.own_class(chunks[0])
    if users_class is None:
        return violations
    for violation in violations:
        if violation.key == BEYOND_MEGATRON:
            logger.warning("%s; %s is trusted to", violation.problem, users_class)
    return [violation for violation in violations if violation.key != BEYOND_MEGATRON]


def attach(
    model_chunks: torch.nn.Module | Modules,
    optimizer: Any,
    config: ConfigSource,
    *,
    num_steps: int = 0,
) -> HybridEngine:
    """Build vLLM for a Megatron model that exists already. Collective.

        hybrid_engine.prepare()                                  # before DDP is built
        model, optimizer = …                                     # your own code, your own loop
        engine = hybrid_engine.attach(model, optimizer, "config.yaml")
        with engine.rollout_context():
            completions = engine.generate(prompts, Sampling(n=8, max_tokens=64))
        with engine.train_context():
            …                                                    # your training step
        engine.shutdown()

    Args:
        model_chunks: megatron-core's GPTModel or HybridModel, one or a list in virtual-pipeline
            order; wrapped in DDP if it is trained.
        optimizer: Megatron's optimizer, with its state on the device; None for a model that is only
            read.
        config: a YAML file, a mapping or a HybridConfig. `actor_config` may be left out; its keys
            are compared with the live model. The model's directory needs no weights.
        num_steps: optimizer steps that the weights have taken, for a run that is resumed.

    The caller owns model and optimizer. Outside of switches their values are bitwise unchanged.
    Forward passes while the weights are off the device raise StateError. The engine is in state
    TRAIN.

    Without `prepare` DDP's buffers are in ordinary memory. A switch then works but needs more
    memory; a warning says how much.

    Raises, on all ranks and before anything is built, ConfigError with every violation, and
    DependencyError for versions that were not tested. If vLLM cannot be built, model and optimizer
    are on the device as before.
    """
    if isinstance(model_chunks, torch.nn.Module):
        model_chunks = [model_chunks]
    chunks = list(model_chunks)
    values, directory = read_source(config)
    with Ends() as owner:
        job = owner.enter_context(closing(Job.join(_timeout_in(values))))
        with job.building():
            with job.agreement.phase("checking Megatron's model"):
                apply_patches()
                checked, table = live_config(values, directory, chunks, optimizer)
                inference_side(checked).check(job)
                job.require_timeout(checked.generate_config.timeout_seconds)

            with job.agreement.phase("looking at the training model"):
                from hybrid_engine.backends.megatron.live_model import in_ddp, live_model

                live = live_model(
                    chunks,
                    optimizer,
                    table,
                    num_steps=num_steps,
                    noop_layers=checked.actor_config.noop_layers,
                )
                owner.callback(live.close)
                _warn_of_ordinary_memory(live, job, in_ddp=in_ddp(chunks))
            engine = HybridEngine.beside(live, checked, table, job, owner)
        engine.take_over(owner)
    return engine


def _timeout_in(values: Mapping[str, Any]) -> float:
    """Return the job's timeout in seconds, or the default if its value is invalid.

    An invalid value is refused later, with the rest of the configuration.
    """
    generate = values.get("generate_config")
    timeout = generate.get("timeout_seconds") if isinstance(generate, Mapping) else None
    keys = {} if timeout is None else {"timeout_seconds": timeout}
    try:
        return GenerateConfig.model_validate(keys).timeout_seconds
    except pydantic.ValidationError:
        return GenerateConfig().timeout_seconds


def _warn_of_ordinary_memory(live: Trainer, job: Job, *, in_ddp: bool) -> None:
    ordinary_nbytes = sum(
        item.tensor.nbytes
        for item in live.offload_items()
        if item.kind in ("param", "grad")
        and item.action != "rebuild"
        and exported_buffer_of(item.tensor) is None
    )
    if not ordinary_nbytes or not is_elastic(job.device):
        return
    reason = "the model is not in DDP"
    if in_ddp:
        reason = "hybrid_engine.prepare() was not called before DDP was built"
    logger.warning(
        "rank %d: %s of parameters and gradients are in ordinary memory, since %s. Parameters then "
        "leave the device as a whole at the end of a switch, and are sent to other ranks of the "
        "host in messages",
        job.rank,
        gib(ordinary_nbytes),
        reason,
    )

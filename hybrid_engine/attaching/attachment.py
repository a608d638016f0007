"""`prepare` and `attach`: vLLM beside a Megatron model, optimizer and loop of the user's own.

The training side of the configuration is what the live model is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import pydantic
import torch

import megatron_patches
from hybrid_engine.attaching.matching import BEYOND_MEGATRON, LIVE, model_mismatches, vocabulary_mismatches
from hybrid_engine.config import GenerateConfig, HybridConfig, load_config
from hybrid_engine.errors import ConfigError, DependencyError, Violation, shortened
from hybrid_engine.files.documents import read_yaml
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.layouts.memory import gib
from hybrid_engine.memory.elastic import allocate_elastic, exported_buffer_of, is_elastic
from hybrid_engine.models.families import read_model
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Trainer
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.process import Ends
from megatron_patches.buffers import set_buffer_allocator
from megatron_patches.errors import PatchSetError
from megatron_patches.review import live_refusals

logger = logging.getLogger("hybrid_engine")

_BUILT_HERE = ("fsdp", "lora")

ConfigSource = HybridConfig | str | Path | Mapping[str, Any]


def prepare() -> AbstractContextManager[object]:
    """Have Megatron build its buffers in memory that a switch can release page by page.

    Call it before the model is wrapped in DDP, on every rank; without CUDA before the model is built, for it also
    applies what Megatron needs to run on a CPU. As a context manager it is for the DDP that is built in its block:

        hybrid_engine.prepare()
        with hybrid_engine.prepare(): model = DistributedDataParallel(...)

    Nothing is collective. Raises DependencyError for a megatron-core that was not tested.
    """
    apply_patches()
    set_buffer_allocator(allocate_elastic)
    undo = ExitStack()
    undo.callback(set_buffer_allocator, None)
    return undo


def apply_patches() -> None:
    """Apply the hooks and, without CUDA, what it takes to run; idempotent. Raises DependencyError."""
    try:
        megatron_patches.apply()
    except PatchSetError as error:
        raise DependencyError(str(error)) from error


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
    from hybrid_engine.backends.megatron import live_model as megatron

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
            num_mtp_layers=megatron.config_of(chunks[0]).mtp_num_layers or 0,
            directory=directory,
        )
    except ConfigError as error:
        raise ConfigError([*found, *error.findings]) from None
    table, _ = read_model(config.model)
    refused = live_refusals(chunks, optimizer)  # what of Megatron's configuration does not go with a switch
    found += [Violation(f"{one.section}.{one.field}", one.problem, one.remedy) for one in refused]
    found += model_findings(table, chunks, f"{config.model}/config.json")
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


def model_findings(table: ModelTable, chunks: Sequence[torch.nn.Module], source: str) -> list[Violation]:
    """Report where Megatron's model is not the table's, which was read from `source`. What a class of the user's own
    computes is taken on trust.

    Raises ConfigError for a table that the megatron-core in use cannot build.
    """
    from hybrid_engine.backends.megatron import live_model as megatron

    found: list[Violation] = []
    for chunk in chunks:
        arguments, config = megatron.model_arguments(chunk), megatron.config_of(chunk)
        found += model_mismatches(table, arguments, config, LIVE, source)
        found += vocabulary_mismatches(table, arguments, LIVE)
    found = list(dict.fromkeys(found))
    if (own := megatron.own_class(chunks[0])) is None:
        return found
    for each in found:
        if each.key == BEYOND_MEGATRON:
            logger.warning("%s; %s is trusted to", each.problem, own)
    return [each for each in found if each.key != BEYOND_MEGATRON]


def attach(
    model_chunks: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any,
    config: ConfigSource,
    *,
    num_steps: int = 0,
) -> HybridEngine[Trainer]:
    """Put vLLM beside a Megatron model that is there already. Collective.

        hybrid_engine.prepare()                                  # before DDP is built
        model, optimizer = …                                     # your own code, your own loop
        engine = hybrid_engine.attach(model, optimizer, "config.yaml")
        with engine.rollout_context():
            completions = engine.generate(prompts, Sampling(n=8, max_tokens=64))
        with engine.train_context():
            …                                                    # your training step
        engine.shutdown()

    Args:
        model_chunks: megatron-core's GPTModel or HybridModel, one or a list in virtual-pipeline order; in DDP where it
            is trained.
        optimizer: Megatron's, with its state on the device; None for a model that is only read.
        config: a YAML file, a mapping or a HybridConfig. `actor_config` may be left out: what it says is compared with
            the live model. The model's directory needs no weights.
        num_steps: optimizer steps that the weights have taken, for a run that is resumed.

    Model, optimizer and their values stay the caller's, outside of switches bitwise what they were. Forward passes
    while the weights are off the device raise StateError. The engine is in state TRAIN.

    Without `prepare` DDP's buffers are in ordinary memory: a switch works, and needs more memory; a warning says how
    much.

    Raises, on all ranks and before anything is built: ConfigError with everything that does not fit, DependencyError
    for versions that were not tested. If vLLM cannot be built, model and optimizer are on the device as before.
    """
    chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
    values, directory = read_source(config)
    with Ends() as owner:
        job = owner.enter_context(closing(Job.join(_timeout_in(values))))
        with job.agreement.building():
            with job.agreement.phase("checking Megatron's model"):
                apply_patches()
                checked, table = live_config(values, directory, chunks, optimizer)
                if not checked.generate_config.servers:
                    from hybrid_engine.backends.vllm import require_vllm

                    require_vllm(allow_version=checked.generate_config.allow_version)
                job.require_timeout(checked.generate_config.timeout_seconds)

            def found() -> Trainer:
                from hybrid_engine.backends.megatron.live_model import in_ddp, live_model

                noop_layers = checked.actor_config.noop_layers
                live = live_model(chunks, optimizer, table, num_steps=num_steps, noop_layers=noop_layers)
                owner.callback(live.close)  # at the end the model is its owner's alone
                _warn_of_ordinary_memory(live, job, in_ddp=in_ddp(chunks))
                return live

            engine = HybridEngine.beside(found, checked, table, job, owner)
        engine.take_over(owner)
    return engine


def _timeout_in(values: Mapping[str, Any]) -> float:
    """The job's timeout; anything else in its place is refused with the rest of the configuration."""
    generate = values.get("generate_config")
    given = generate.get("timeout_seconds") if isinstance(generate, Mapping) else None
    try:
        return GenerateConfig.model_validate({} if given is None else {"timeout_seconds": given}).timeout_seconds
    except pydantic.ValidationError:
        return GenerateConfig().timeout_seconds


def _warn_of_ordinary_memory(live: Trainer, job: Job, *, in_ddp: bool) -> None:
    kept = [item for item in live.offload_items() if item.kind in ("param", "grad") and item.action != "rebuild"]
    ordinary = sum(item.tensor.nbytes for item in kept if exported_buffer_of(item.tensor) is None)
    if ordinary and is_elastic(job.device):
        logger.warning(
            "rank %d: %s of parameters and gradients are in ordinary memory, since %s. Parameters then leave the "
            "device at the end of a switch as a whole, and cross to other ranks of the host in messages",
            *(job.rank, gib(ordinary)),
            "hybrid_engine.prepare() was not called before DDP was built" if in_ddp else "the model is not in DDP",
        )

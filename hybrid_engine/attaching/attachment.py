"""`attach`: vLLM beside a Megatron model, optimizer and loop of the user's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pydantic
import torch

from hybrid_engine.attaching.engine_beside import engine_beside
from hybrid_engine.attaching.live_config import ConfigSource, live_config, read_source
from hybrid_engine.attaching.preparing import apply_patches
from hybrid_engine.config import GenerateConfig, HybridConfig
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.layouts.memory_plan import gib
from hybrid_engine.memory.elastic import exported_buffer_of, is_elastic
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import Trainer
from hybrid_engine.ranks.job import Job

logger = logging.getLogger("hybrid_engine")


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
    from hybrid_engine.backends.vllm import require_vllm

    chunks = [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)
    values, directory = read_source(config)
    with ExitStack() as owner:
        job = owner.enter_context(closing(Job.join(_timeout_in(values))))
        with job.agreement.building():
            with job.agreement.phase("checking Megatron's model"):
                apply_patches()
                checked, table = live_config(values, directory, chunks, optimizer)
                require_vllm(allow_version=checked.generate_config.allow_version)
                job.require_timeout(checked.generate_config.timeout_seconds)
            engine = engine_beside(
                lambda: _live_model(chunks, optimizer, checked, table, num_steps, job, owner),
                checked,
                table,
                job,
                owner,
            )
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


def _live_model(
    chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    config: HybridConfig,
    table: ModelTable,
    num_steps: int,
    job: Job,
    owner: ExitStack,
) -> Trainer:
    """The live model; at the end it is its owner's alone."""
    from hybrid_engine.backends.megatron.live_model import live_model
    from hybrid_engine.backends.megatron.live_settings import in_ddp

    live = live_model(
        chunks,
        optimizer,
        table,
        num_steps=num_steps,
        noop_layers=config.actor_config.noop_layers,
    )
    owner.callback(live.close)
    _warn_of_ordinary_memory(live, job, in_ddp=in_ddp(chunks))
    return live


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

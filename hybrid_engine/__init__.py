"""Train with Megatron and generate with vLLM in turn on the same devices, resharding the weights.

    Megatron parameters                                             vLLM parameters
    backends/megatron/adaptor.py                                    backends/vllm/weights/adaptor.py
    name table (models/) + live modules                             trace of vLLM's weight loader
            |  layout(): "this region of tensor T is stored here" (records/)  |
            +----------------------> planning/planner.py <--------------------+
                                     box intersection, once
                                              |  ReshardPlan: buckets of transfers
                                              v
    training buffers --- transports/ (local, shared_memory, ...) ---> switch/weight_container.py
    memory/elastic.py                                               allocate, fill, commit, release
            |                                                                 |
            +---------------------- switch/sharding_manager.py ---------------+
                       states train / forward / infer / idle; offload;
                       agreement of all ranks (ranks/)
                                              |
                      hybrid_engine.py, trainer/worker.py

A canonical tensor is a tensor of a Hugging Face checkpoint. Parallel axes occur only in backends/
and layouts/, which build the layouts, in config/, which checks their sizes, and in the user's
settings.

    attaching/         `prepare` and `attach`: vLLM beside the user's Megatron model and loop
    hybrid_engine.py   HybridEngine: around a transformers model, or a trainer of your own
    rl/                GRPO: a loop around a worker, and its losses
    trainer/           ActorHybridWorker: both engines from a configuration; batches, steps, critic,
                       checkpoints
    assembly.py        an inference engine beside a live training model
    compute_check/     whether vLLM computes what the trainer computes
    ports.py           interfaces of a trainer and of an inference engine, and their calls
    errors.py          every exception
    messages.py        what processes tell each other: typed and of bounded size
    switch/            the state machine: what is on the device when, and the order of a switch
    planning/          who sends what to whom
    transports/        how bytes move
    records/           regions, places and layouts
    layouts/           layouts and memory of both engines, computed without the engines
    backends/          Megatron, FSDP2, vLLM, Hugging Face checkpoints
    models/            name tables of model families
    memory/            elastic buffers, offloading
    ranks/             ranks of a job: start, agreement, failures
    tracing.py         timeline of the switches
    vllm_plugin.py     vLLM's entry point: prepares server processes, and no others
    serving/           trainer's and server's parts for vLLM in separate processes
    config/            configuration keys and their rules
    integrations/      engines inside trainers of other frameworks
    files/             reading users' files, writing durable files
    megatron_script/   --enable-resharding for Megatron-LM's own scripts
    tools/             commands plan, verify, certify and env, and code that only they use; not
                       imported by jobs

docs/architecture.md follows one weight through all of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hybrid_engine.errors import DependencyError, HybridEngineError
from hybrid_engine.ranks import uncaught

if TYPE_CHECKING:
    from hybrid_engine.attaching import attach, prepare
    from hybrid_engine.backends.vllm import Completion, InferenceEngine, Sampling
    from hybrid_engine.config import HybridConfig, load_config
    from hybrid_engine.hybrid_engine import HybridEngine
    from hybrid_engine.ranks.job import Job
    from hybrid_engine.switch.report import ReshardReport
    from hybrid_engine.switch.sharding_manager import ShardingManager
    from hybrid_engine.switch.states import State
    from hybrid_engine.trainer.batches import build_batch, pack, pack_rows
    from hybrid_engine.trainer.megatron.train_engine import TrainEngine
    from hybrid_engine.trainer.reference_and_critic import (
        ReferenceModel,
        ValueModel,
        generalized_advantages,
        value_loss,
    )
    from hybrid_engine.trainer.worker import ActorHybridWorker

uncaught.install()

# Names are imported at their first use, together with torch, Megatron or vLLM if they need them.
_LAZY = {
    "ActorHybridWorker": "hybrid_engine.trainer.worker",
    "Completion": "hybrid_engine.backends.vllm",
    "HybridConfig": "hybrid_engine.config",
    "HybridEngine": "hybrid_engine.hybrid_engine",
    "InferenceEngine": "hybrid_engine.backends.vllm",
    "Job": "hybrid_engine.ranks.job",
    "ReferenceModel": "hybrid_engine.trainer.reference_and_critic",
    "ReshardReport": "hybrid_engine.switch.report",
    "Sampling": "hybrid_engine.backends.vllm",
    "ShardingManager": "hybrid_engine.switch.sharding_manager",
    "State": "hybrid_engine.switch.states",
    "TrainEngine": "hybrid_engine.trainer.megatron.train_engine",
    "ValueModel": "hybrid_engine.trainer.reference_and_critic",
    "build_batch": "hybrid_engine.trainer.batches",
    "generalized_advantages": "hybrid_engine.trainer.reference_and_critic",
    "load_config": "hybrid_engine.config",
    "pack": "hybrid_engine.trainer.batches",
    "pack_rows": "hybrid_engine.trainer.batches",
    "value_loss": "hybrid_engine.trainer.reference_and_critic",
    "attach": "hybrid_engine.attaching",
    "prepare": "hybrid_engine.attaching",
}

__version__ = "0.1.0"

__all__ = [
    "ActorHybridWorker",
    "Completion",
    "HybridConfig",
    "HybridEngine",
    "HybridEngineError",
    "InferenceEngine",
    "Job",
    "ReferenceModel",
    "ReshardReport",
    "Sampling",
    "ShardingManager",
    "State",
    "TrainEngine",
    "ValueModel",
    "attach",
    "build_batch",
    "generalized_advantages",
    "load_config",
    "pack",
    "pack_rows",
    "prepare",
    "value_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise DependencyError(
            f"{name} needs torch and an engine: in a checkout pip install '.[gpu]', or on CPUs "
            "make env",
            code="torch-is-missing",
        ) from error

"""verl's trainers and workers, unchanged, with vLLM's weights delivered by a switch of this engine.

    export VERL_ENGINE_VENDOR=hybrid_engine
    actor_rollout_ref.rollout.checkpoint_engine.backend=hybrid_engine

verl imports this module by its entry point `verl.plugins`, in each of its processes. verl has a
place for each class:

    TaggedEngine   EngineRegistry, by the vendor   wraps FSDP2's and Megatron's engines: their
                                                   weights carry a reference to their engine
    Publisher      CheckpointEngineRegistry        in each actor: publishes, instead of sending
                                                   tensors
    Manager        verl.checkpoint_engine          in the controller: gives the actors the
                                                   addresses of the servers

verl's default trainers have no key for the manager's class. They import the name
`CheckpointEngineManager`, which this module has replaced by then, if the vendor is ours.

    CheckpointEngineManager.update_weights
      -> ActorRolloutRefWorker.update_weights  -> Publisher.send_weights
             one switch of all actors and vLLM's workers
      -> CheckpointEngineWorker.update_weights -> Publisher.receive_weights
             nothing: vLLM's workers have the weights by then

If actors and vLLM share devices, there are no CheckpointEngineWorkers, and `sleep_replicas` ends
the rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any

from hybrid_engine.attaching import attach, prepare
from hybrid_engine.config.loading import generate_values
from hybrid_engine.errors import (
    DependencyError,
    StateError,
    Violation,
    Violations,
    require_none,
)
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.integrations import OWN_DEVICES, require_tested
from hybrid_engine.serving import NAME
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State

TESTED_VERSION = "0.9.1"
"""Tested version of verl, which does not promise to keep all of the names that are used here."""


def _register_refusal(reason: str) -> None:
    """Register a function in place of `Publisher` that raises DependencyError when it is called.

    verl drops errors that plug-ins raise while it imports them, so the error must come later.
    """

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise DependencyError(reason, code="untested-version")

    # If verl is missing, or has no such registry, nothing will look the class up.
    with contextlib.suppress(ImportError, AttributeError):
        registry = import_module("verl.checkpoint_engine.base").CheckpointEngineRegistry
        registry.register(NAME)(refuse)


try:
    require_tested("verl", TESTED_VERSION, f"verl=={TESTED_VERSION}")
except DependencyError as error:
    _register_refusal(str(error))
    raise

import ray  # noqa: E402
from verl.checkpoint_engine.base import (  # noqa: E402
    CheckpointEngine,
    CheckpointEngineManager,
    CheckpointEngineRegistry,
)
from verl.utils.ray_utils import auto_await  # noqa: E402
from verl.workers.rollout.replica import RolloutMode  # noqa: E402


class LiveWeights:
    """Weights of a training engine: an iterable of tensors, as in verl, and the engine itself.

    Attributes:
        engine: verl's training engine.
    """

    def __init__(self, engine: Any, tensors: Iterable[tuple[str, Any]]) -> None:
        self.engine = engine
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._tensors)


class TaggedEngine:
    """First base of a training engine of verl. Its weights become `LiveWeights`."""

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[LiveWeights, Any]:
        tensors, adapter = super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]
        return LiveWeights(self, tensors), adapter


class ElasticMegatronEngine(TaggedEngine):
    """First base of Megatron's engine. Its DDP buffers are elastic: a switch frees their pages."""

    def initialize(self) -> None:
        """Build the engine as verl does.

        Raises ConfigError for settings of an actor that a switch cannot honour. Settings of a
        reference policy are not checked: it takes no part in a switch.
        """
        engine: Any = self
        if not engine.engine_config.forward_only:
            require_none(_engine_violations(engine))
        with prepare():
            super().initialize()  # type: ignore[misc]


# NAME is also the name of verl's checkpoint engine and vendor.
@CheckpointEngineRegistry.register(NAME)
class Publisher(CheckpointEngine):
    """verl's checkpoint engine, in an actor or a CheckpointEngineWorker.

    `send_weights` and `withdraw` are collective.

    Args:
        bucket_size: verl's argument, unused: a switch has the key `bucket_mb`.
        is_master: verl's argument: rank 0, which prints the report of the first publish.
        rollout_config: `checkpoint_engine.engine_kwargs.hybrid_engine`: keys as `HybridEngine`
            takes them.

    Attributes:
        engine: the engine that publishes. None until the first publish, and always in a
            CheckpointEngineWorker.
        last_report: report of the last publish.
    """

    wire_format = "delta_flush"
    """Format with which verl's rollout accepts an empty stream: it records the step, and calls no
    worker of vLLM."""

    def __init__(self, bucket_size: int, is_master: bool = False, **rollout_config: Any) -> None:
        self._config: dict[str, Any] = rollout_config
        self._is_master = is_master
        self._servers: Sequence[str] = ()
        self._shares_devices = False
        self.engine: HybridEngine | None = None
        self.last_report: ReshardReport | None = None

    # -- called by verl -----------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: list[dict[str, Any]],
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}  # actors and servers connect to each other without verl

    def init_process_group(self, servers: Sequence[str] = (), shares_devices: bool = False) -> None:
        """Take the servers' addresses from a `Manager`. Raises StateError if they have changed.

        `shares_devices`: the servers' workers are on the actors' devices.
        """
        if self.engine is not None and self._servers != servers:
            raise StateError(
                f"servers were {self._servers}, and now {servers}: replicas must stay the same in "
                "a run",
                code="different-servers",
            )
        self._servers = servers
        self._shares_devices = shares_devices

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish the weights; return metrics of the switch.

        On shared devices training state stays offloaded until `withdraw`.
        """
        if self.engine is None:
            self.engine = self._build_engine(weights)
        report = self.engine.sharding.enter(State.INFER)
        if not self._shares_devices:
            self.engine.sharding.enter(State.TRAIN)
        if report is None:  # the servers have these weights already
            return {}
        if self._is_master and self.last_report is None:
            print(report, flush=True)
        self.last_report = report
        return {
            f"{NAME}/seconds": float(report.seconds),
            f"{NAME}/bytes_received": float(report.bytes_received),
        }

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Any]:
        """Yield nothing: the server's own workers take part in the switch."""
        nothing: Sequence[Any] = ()
        # The loop makes this an asynchronous generator, which verl iterates.
        for tensor in nothing:
            yield tensor

    def finalize(self) -> None:
        """Do nothing: the servers' job stays for the next update."""

    # -- called by a Manager ------------------------------------------------------------------

    def withdraw(self) -> None:
        """Bring training state back; servers on shared devices release their weights."""
        if self.engine is not None:
            self.engine.sharding.enter(State.TRAIN)

    # -- parts --------------------------------------------------------------------------------

    def _build_engine(self, weights: Any) -> HybridEngine:
        """Build an engine around verl's. Raises ConfigError for settings that are not supported."""
        engine: Any = getattr(weights, "engine", None)
        servers = self._config.get("servers", self._servers)
        require_none(_violations(engine, servers))
        defaults: dict[str, Any] = {}
        if not self._shares_devices:
            # verl itself bounds how far the actors may be ahead.
            defaults = {**OWN_DEVICES, "server_max_lag": 1 << 20}
        keys = {**defaults, **self._config, "servers": [*servers]}
        if not isinstance(engine.module, list):
            return HybridEngine(model=engine.module, rollout_config=keys, shard=False)
        # Megatron's engine has a list of model chunks.
        config = {"model": engine.model_config.local_path, "generate_config": generate_values(keys)}
        return attach(engine.module, engine.optimizer, config)


def _violations(engine: Any, servers: Sequence[str]) -> Violations:
    """Report settings of verl that a switch cannot honour."""
    if engine is None:
        # These weights do not come from one of our engines.
        yield Violation(
            "actor.strategy",
            f"is verl's own with VERL_ENGINE_VENDOR={os.environ.get('VERL_ENGINE_VENDOR')}",
            f"Use fsdp2 or megatron, and export VERL_ENGINE_VENDOR={NAME}",
            code="wrong-engine",
        )
        return
    yield from _engine_violations(engine)
    if not servers:
        yield Violation(
            "servers",
            "no vLLM server is configured",
            f"Export VERL_ENGINE_VENDOR={NAME} in all of verl's processes",
            code="no-servers",
        )


def _engine_violations(engine: Any) -> Violations:
    """Report settings of verl's training engine that a switch cannot honour."""
    config = engine.engine_config
    if config.strategy not in ("fsdp2", "megatron"):
        yield Violation(
            "actor.strategy", config.strategy, "Use fsdp2 or megatron", code="unsupported-value"
        )
    is_megatron = config.strategy == "megatron"
    section = "actor.megatron" if is_megatron else "actor.fsdp_config"
    offload_remedy = "Set it to false: a switch moves training state"
    # key -> (value, remedy if it is set)
    settings: dict[str, tuple[object, str]] = {
        f"{section}.param_offload": (engine.is_param_offload_enabled, offload_remedy),
        f"{section}.optimizer_offload": (engine.is_optimizer_offload_enabled, offload_remedy),
    }
    if is_megatron:
        settings[f"{section}.use_megatron_fsdp"] = (
            config.use_megatron_fsdp,
            "Set it to false, or use fsdp2",
        )
        settings[f"{section}.qat.enable"] = (
            config.qat.enable,
            "Set it to false: weights arrive as they are trained",
        )
        # verl sets it itself with float16.
        is_precision_aware = engine.optimizer_config.use_precision_aware_optimizer
        settings["actor.optim.use_precision_aware_optimizer"] = (
            is_precision_aware or config.dtype == "float16",
            "Set it to false: a switch supports only Megatron's plain optimizer state; "
            "with dtype float16 verl sets it, with bfloat16 not",
        )
        settings["model.lora.rank"] = (
            engine.model_config.lora.get("rank"),
            "Use 0: verl with Megatron-Bridge's adapters was not tried",
        )
    else:
        settings[f"{section}.offload_policy"] = (config.offload_policy, offload_remedy)
    for key, (value, remedy) in settings.items():
        if value:
            yield Violation(key, "is set", remedy, code="unsupported-value")


class Manager(CheckpointEngineManager):
    """verl's manager, which gives its actors the addresses of the servers.

    vLLM's caches leave and return in the actors' switch. Raises ConfigError if replicas have
    another backend.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        super().__init__(config, actor_wg, replicas)
        # verl's trainers replace the backend of the manager's configuration, not the replicas'.
        backends = {replica.config.checkpoint_engine.backend for replica in replicas}
        key = "rollout.checkpoint_engine.backend"
        require_none(
            Violation(key, backend, f"Use {NAME}", code="unsupported-value")
            for backend in backends - {NAME}
        )

    def build_process_group(self, rollout: Any) -> None:
        servers = [f"http://{replica.server_address}" for replica in self.replicas]
        self._on_actors("init_process_group", servers=servers, shares_devices=self._shares_devices)

    @auto_await
    async def release_kv_cache_replicas(self) -> None:
        """Do nothing: a switch releases caches if they must leave, and brings them back."""

    resume_kv_cache_replicas = release_kv_cache_replicas

    @auto_await
    async def sleep_replicas(self) -> None:
        """Bring the actors' training state back.

        On shared devices vLLM's weights and caches leave to make room.
        """
        self._on_actors("withdraw")

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Publish the actors' weights to all replicas; return metrics of the switch."""
        if not self._shares_devices:
            return dict(await super().update_weights(global_steps))
        self.build_process_group(None)
        # On shared devices there are no CheckpointEngineWorkers, which verl's own update calls, and
        # `self.backend` may be "naive".
        results = ray.get(self.actor_wg.update_weights(global_steps=global_steps, mode=NAME))
        if global_steps is not None:
            calls = [
                server.set_global_steps.remote(global_steps)
                for replica in self.replicas
                for server in replica.servers
            ]
            await asyncio.gather(*calls)
        return dict(results[0])

    @property
    def _shares_devices(self) -> bool:
        return any(replica.rollout_mode is RolloutMode.HYBRID for replica in self.replicas)

    def _on_actors(self, method: str, **arguments: Any) -> None:
        """Call a method of each actor's `Publisher` with the same arguments."""
        size = self.actor_wg.world_size
        # verl takes a list with one value per actor for each argument.
        per_actor = {name: [value] * size for name, value in arguments.items()}
        ray.get(self.actor_wg.execute_checkpoint_engine([method] * size, **per_actor))


def register_classes() -> None:
    """Register verl's training engines with our classes as first bases, under our vendor, and make
    `Manager` verl's manager.
    """
    # verl's trainers, which are imported later, import this name.
    checkpoint_engine: Any = import_module("verl.checkpoint_engine")
    checkpoint_engine.CheckpointEngineManager = Manager
    # Not at the top: verl.workers.engine imports every framework that is installed.
    engines = import_module("verl.workers.engine")
    bases: dict[type, tuple[Any, Sequence[str]]] = {
        TaggedEngine: (engines.FSDPEngineWithLMHead, ["fsdp", "fsdp2"]),
        ElasticMegatronEngine: (engines.MegatronEngineWithLMHead, ["megatron"]),
    }
    for base, (verl_engine, strategies) in bases.items():
        # None if verl could not import Megatron.
        if verl_engine is None:
            continue
        engine = type(f"Sharded{verl_engine.__name__}", (base, verl_engine), {})
        register = engines.EngineRegistry.register
        register("language_model", strategies, device=["cuda", "cpu"], vendor=NAME)(engine)


if os.environ.get("VERL_ENGINE_VENDOR") == NAME:
    register_classes()

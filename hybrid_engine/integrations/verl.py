"""verl: its trainers and workers stay as they are, and vLLM's weights come by a switch of this engine.

    export VERL_ENGINE_VENDOR=hybrid_engine
    actor_rollout_ref.rollout.checkpoint_engine.backend=hybrid_engine
    actor_rollout_ref.rollout.checkpoint_manager_class=hybrid_engine.integrations.verl.Manager

verl imports this module by its entry point `verl.plugins`, in each of its processes. Each class has a place of verl's:

    HandsItselfOn    EngineRegistry, by the vendor     in front of FSDP2's and Megatron's engines: they say whose the
                                                       weights are
    Publisher        CheckpointEngineRegistry          in each actor: publishes them, instead of sending tensors
    Manager          checkpoint_manager_class          the controller's: tells actors where the servers are

    CheckpointEngineManager.update_weights
      -> ActorRolloutRefWorker.update_weights  -> Publisher.send_weights -> one switch of all actors and vLLM's workers
      -> CheckpointEngineWorker.update_weights -> Publisher.receive_weights: nothing, vLLM's workers have them by then

Where actors and vLLM share devices, there are no CheckpointEngineWorkers, and `sleep_replicas` ends the rollout.
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
from hybrid_engine.errors import ConfigError, DependencyError, StateError, Violation
from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.integrations import NAME, require_tested  # the name of verl's checkpoint engine and vendor, too
from hybrid_engine.switch.report import ReshardReport
from hybrid_engine.switch.states import State

TESTED_VERSION = "0.9.1"
"""Of verl: the names used here are not all among those that it keeps."""


def _register_refusal(reason: str) -> None:
    """Put what raises DependencyError in the place of `Publisher`: verl's import of its plug-ins drops their errors."""

    class Refusal:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            raise DependencyError(reason)

        @classmethod
        def build_topology(cls, *args: Any, **kwargs: Any) -> None:
            raise DependencyError(reason)

    # a verl that is missing, or has no such registry, has nobody who would ask it
    with contextlib.suppress(ImportError, AttributeError):
        import_module("verl.checkpoint_engine.base").CheckpointEngineRegistry.register(NAME)(Refusal)


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
    """The weights of a training engine: tensor by tensor, as verl takes them, and the engine that has them.

    Attributes:
        engine: verl's.
    """

    def __init__(self, engine: Any, tensors: Iterable[tuple[str, Any]]) -> None:
        self.engine, self._tensors = engine, tensors

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._tensors)


class HandsItselfOn:
    """In front of a training engine of verl: its weights say whose they are. Nothing else changes."""

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[LiveWeights, Any]:
        tensors, adapter = super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]
        return LiveWeights(self, tensors), adapter


class BuildsElastic(HandsItselfOn):
    """In front of Megatron's engine, whose DDP has its buffers in memory that a switch releases page by page."""

    def initialize(self) -> None:
        """Build the engine as verl does. Raises ConfigError for settings of an actor that a switch cannot honour; those
        of a reference policy, which has no part in a switch, are not checked."""
        engine: Any = self
        if not engine.engine_config.forward_only and (found := [*_settings(engine)]):
            raise ConfigError(found)
        with prepare():
            super().initialize()  # type: ignore[misc]


@CheckpointEngineRegistry.register(NAME)
class Publisher(CheckpointEngine):
    """verl's checkpoint engine in an actor or a CheckpointEngineWorker. `send_weights` and `withdraw` are collective.

    Args:
        bucket_size: verl's; that of a switch is the key `bucket_mb`.
        is_master: of no use here.
        rollout_config: `checkpoint_engine.engine_kwargs.hybrid_engine`: keys as `HybridEngine` takes them.

    Attributes:
        engine: whose switch publishes; None until the first, and always in a CheckpointEngineWorker.
        last_report: of the last publish.
    """

    wire_format = "delta_flush"
    """Of these, verl's rollout takes none at all for weights that are there: it notes the step, and calls no worker."""

    def __init__(self, bucket_size: int, is_master: bool = False, **rollout_config: Any) -> None:
        self._config: dict[str, Any] = rollout_config
        self._servers: Sequence[str] = ()
        self._shares_devices = False
        self.engine: HybridEngine[Any] | None = None
        self.last_report: ReshardReport | None = None

    # -- what verl calls -----------------------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}  # actors and servers meet by themselves

    def init_process_group(self, servers: Sequence[str] = (), shares_devices: bool = False) -> None:
        """Take what a `Manager` says: the servers' addresses, and whether their workers are on the actors' devices."""
        if self.engine is not None and self._servers != servers:
            raise StateError(f"servers were {self._servers}, and now {servers}: replicas stay the same in a run")
        self._servers, self._shares_devices = servers, shares_devices

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish the weights. On shared devices training state is away until `withdraw`."""
        if self.engine is None:
            self.engine = self._built(weights)
        report = self.engine.sharding.enter(State.INFER)
        if not self._shares_devices:
            self.engine.sharding.enter(State.TRAIN)
        if report is None:  # they have these weights
            return {}
        self.last_report = report
        told = {"seconds": report.seconds, "bytes_received": report.bytes_received}
        return {f"{NAME}/{name}": float(value) for name, value in told.items()}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Any]:
        """Yield nothing: the server's own workers take part in the switch."""
        nothing: Sequence[Any] = ()
        for each in nothing:
            yield each

    def finalize(self) -> None:
        """The servers' job stays for the next update."""

    # -- what a Manager calls ------------------------------------------------------------------------------------------

    def withdraw(self) -> None:
        """Bring training state back; servers give their weights up, where they share devices."""
        if self.engine is not None:
            self.engine.sharding.enter(State.TRAIN)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _built(self, weights: Any) -> HybridEngine[Any]:
        engine: Any = getattr(weights, "engine", None)
        servers = self._config.get("servers", self._servers)
        if found := [*_findings(engine, servers)]:
            raise ConfigError(found)
        keys = {**_defaults(self._shares_devices), **self._config, "servers": [*servers]}
        if not isinstance(engine.module, list):
            return HybridEngine(model=engine.module, rollout_config=keys, shard=False)
        config = {"model": engine.model_config.local_path, "generate_config": generate_values(keys)}
        return attach(engine.module, engine.optimizer, config)  # a list is Megatron's chunks


def _defaults(shares_devices: bool) -> dict[str, Any]:
    if shares_devices:
        return {}
    offload = {f"offload_train_{kind}": False for kind in ("param", "grad", "optimizer")}
    # how far actors are ahead, verl bounds itself
    return {"release_weights": False, "server_max_lag": 1 << 20, **offload}


def _findings(engine: Any, servers: Sequence[str]) -> Iterator[Violation]:
    """Settings of verl that a switch cannot honour."""
    if engine is None:
        problem = f"its engine is verl's own, and VERL_ENGINE_VENDOR is {os.environ.get('VERL_ENGINE_VENDOR')}"
        yield Violation("actor.strategy", problem, f"Use fsdp2 or megatron, and export VERL_ENGINE_VENDOR={NAME}")
        return
    yield from _settings(engine)
    if not servers:
        remedy = f"Set rollout.checkpoint_manager_class={__name__}.Manager"
        yield Violation("servers", "nobody has said where they are", remedy)


def _settings(engine: Any) -> Iterator[Violation]:
    config, moves = engine.engine_config, "Set it to false: a switch moves training state"
    if config.strategy not in ("fsdp2", "megatron"):
        yield Violation("actor.strategy", config.strategy, "Use fsdp2 or megatron")
    section = "actor.megatron" if config.strategy == "megatron" else "actor.fsdp_config"
    refused: dict[str, tuple[object, str]] = {
        f"{section}.param_offload": (engine.is_param_offload_enabled, moves),
        f"{section}.optimizer_offload": (engine.is_optimizer_offload_enabled, moves),
    }
    if config.strategy != "megatron":
        refused[f"{section}.offload_policy"] = config.offload_policy, moves
    else:
        own_forms = "Set it to false: a switch knows Megatron's plain optimizer state alone"
        refused |= {
            f"{section}.use_megatron_fsdp": (config.use_megatron_fsdp, "Set it to false, or use fsdp2"),
            f"{section}.qat.enable": (config.qat.enable, "Set it to false: weights arrive as they are trained"),
            "actor.optim.use_precision_aware_optimizer": (
                engine.optimizer_config.use_precision_aware_optimizer or config.dtype == "float16",
                f"{own_forms}; with dtype float16 verl sets it, with bfloat16 not",
            ),
            "model.lora.rank": (engine.model_config.lora.get("rank"), "Use 0: Megatron-Bridge's adapters are not read"),
        }
    yield from (Violation(key, "is set", remedy) for key, (is_set, remedy) in refused.items() if is_set)


class Manager(CheckpointEngineManager):
    """verl's manager, which tells its actors where the servers are. Caches leave and come back in their switch."""

    def build_process_group(self, rollout: Any) -> None:
        servers = [f"http://{each.server_address}" for each in self.replicas]
        self._on_actors("init_process_group", servers=servers, shares_devices=self._shares_devices)

    @auto_await
    async def release_kv_cache_replicas(self) -> None:
        """A switch does, where caches must leave."""

    @auto_await
    async def resume_kv_cache_replicas(self) -> None:
        """A switch does."""

    @auto_await
    async def sleep_replicas(self) -> None:
        """Bring the actors' training state back; on shared devices vLLM's weights and caches leave for it."""
        self._on_actors("withdraw")

    @auto_await
    async def wake_up_replicas(self) -> None:
        """`update_weights` does."""

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Publish the actors' weights to all replicas. Returns the switch's metrics."""
        if not self._shares_devices:
            metrics: dict[str, Any] = await super().update_weights(global_steps)
            return metrics
        self.build_process_group(None)
        first, *_ = ray.get(self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend))
        if global_steps is not None:
            told = [each.set_global_steps.remote(global_steps) for replica in self.replicas for each in replica.servers]
            await asyncio.gather(*told)
        return dict(first)

    @property
    def _shares_devices(self) -> bool:
        return any(each.rollout_mode is RolloutMode.HYBRID for each in self.replicas)

    def _on_actors(self, method: str, **said: Any) -> None:
        size = self.actor_wg.world_size
        each = {name: [value] * size for name, value in said.items()}
        ray.get(self.actor_wg.execute_checkpoint_engine([method] * size, **each))


def register_engines() -> None:
    """Put our classes in front of verl's training engines, for whoever asks for this vendor."""
    # verl.workers.engine imports each framework that it finds: only where it is asked for
    engines = import_module("verl.workers.engine")
    fronts: dict[type, tuple[Any, Sequence[str]]] = {
        HandsItselfOn: (engines.FSDPEngineWithLMHead, ["fsdp", "fsdp2"]),
        BuildsElastic: (engines.MegatronEngineWithLMHead, ["megatron"]),  # None where verl could not import Megatron
    }
    for front, (theirs, strategies) in fronts.items():
        if theirs is not None:
            register = engines.EngineRegistry.register
            kind = type(f"Sharded{theirs.__name__}", (front, theirs), {})
            register("language_model", strategies, device=["cuda", "cpu"], vendor=NAME)(kind)


if os.environ.get("VERL_ENGINE_VENDOR") == NAME:
    register_engines()

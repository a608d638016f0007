"""vLLM's weight transfer engine of this name: its calls, as those of a `WeightReceiver`.

On a GPU weights and KV cache sleep while trainers have the device, by vLLM's sleep mode in each worker
(`vllm serve --enable-sleep-mode`). **Never run on hardware yet**; tested over a GPU in software.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.requests import zero_caches
from hybrid_engine.backends.vllm.server.capture import take_captured
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.backends.vllm.weights.weight_memory import SleepingWorker, SleepMode, WeightMemory
from hybrid_engine.errors import HybridEngineError, MessageError, StateError
from hybrid_engine.serving.invitation import Invitation, Update
from hybrid_engine.serving.receiver import WeightReceiver

logger = logging.getLogger("hybrid_engine")

_TransferEngine: Any = internals.TRANSFER_ENGINE.load()


class HybridEngineReceiver(_TransferEngine):
    """One worker's, made by vLLM once its model is there."""

    init_info_cls, update_info_cls = internals.INIT_INFO.load(), internals.UPDATE_INFO.load()
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        captured = take_captured(model)
        if captured is None:
            raise StateError(
                f"the weight transfer backend hybrid_engine needs --load-format hybrid_engine, not "
                f"{vllm_config.load_config.load_format}"
            )
        if vllm_config.speculative_config is not None:
            raise StateError("a draft model's weights are not resharded: start the server without speculative decoding")
        parallel = vllm_config.parallel_config
        if parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe:
            raise StateError(
                "data parallel replicas of a model with experts compute together, also on empty batches, and would do "
                "so without weights: start a server for each replica"
            )
        if vllm_config.kv_transfer_config is not None and vllm_config.model_config.enable_sleep_mode:
            raise StateError(
                "a KV connector writes into a cache that sleeps while trainers have the device: start the "
                "server without --kv-transfer-config"
            )
        index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        memory, self._caches = WeightMemory(), WorkerCaches()
        if device.type == "cpu":
            from hybrid_engine.backends.vllm.cpu.host_memory import CpuWeightMemory

            memory = CpuWeightMemory()
        elif vllm_config.model_config.enable_sleep_mode:
            internals.require_names(device.type, with_lora=False)
            memory = self._caches.sleep_mode = SleepMode(self._caches.sleeper)
        self._weights = VllmAdaptor(captured, memory)
        self.receiver = WeightReceiver(self._weights, self._caches, index, device)

    def take_worker(self, worker: Any) -> None:
        """Belong to this worker of vLLM's, which is ready; and hold no memory of weights, for it has none."""
        self._caches.sleeper.worker = worker
        self._weights.release()

    def parse_init_info(self, init_dict: Mapping[str, Any]) -> Any:
        return _read(Invitation, init_dict)

    def parse_update_info(self, update_dict: Mapping[str, Any]) -> Any:
        return _read(Update, update_dict)

    def init_transfer_engine(self, init_info: Any) -> None:
        self.receiver.join(init_info)
        self._caches.sleeper.worker._weight_update_active = False  # of trainers that are gone, or did not wait for it

    def start_weight_update(self) -> None:
        """All of an update is in `receive_weights`."""

    def receive_weights(self, update_info: Any) -> None:
        self.receiver.switch(update_info)

    def finish_weight_update(self) -> None:
        """All of an update but its end is in `receive_weights`."""
        self.receiver.finish()

    def shutdown(self) -> None:
        self.receiver.leave()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.26 demands a class's own; ours is a `WeightPublisher`."""
        raise StateError("weights come from a hybrid_engine.serving.publisher.WeightPublisher")


class WorkerCaches:
    """Those of a server's worker (`ports.InferenceCaches`). Requests that had anything in them were told to begin anew
    when the server was paused.

    Attributes:
        sleeper: knows the worker.
        sleep_mode: where the KV cache sleeps; None where it does not.
    """

    taken_before = 0

    def __init__(self) -> None:
        self.sleeper = SleepingWorker()
        self.sleep_mode: SleepMode | None = None

    def wake_kv_cache(self) -> None:
        if self.sleep_mode is not None:
            self.sleep_mode.wake_kv_cache()

    def reset_caches(self) -> None:
        zero_caches(self.sleeper.worker.model_runner)


class UnreadableCallError(MessageError, ValueError):
    """What vLLM expects of such a call, as a refusal of this package."""


def _read(kind: type[Any], values: Mapping[str, Any]) -> Any:
    try:
        return kind.read(values)
    except MessageError as error:
        raise UnreadableCallError(str(error)) from None


def begin(worker: Any) -> None:
    """Called by the gate in each worker, once the engine is there."""
    if isinstance(engine := worker.weight_transfer_engine, HybridEngineReceiver):
        engine.take_worker(getattr(worker, "worker", worker))  # not the wrapper, which only reads through


def weights_of(worker: Any, also_uncompared: bool = False) -> tuple[str, str, int]:
    """Return why this worker of vLLM's can draw no token, "" where it can; and job and version of its weights.

    Called by the gate, in each worker; raises nothing. See `WeightReceiver.obstacle`.
    """
    engine = worker.weight_transfer_engine
    if isinstance(engine, HybridEngineReceiver):
        return engine.receiver.obstacle(also_uncompared), engine.receiver.job, engine.receiver.version
    why = "the load format is hybrid_engine and there is no weight transfer backend of that name: no weights come"
    return why, "", -1


def answer(worker: Any, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, Any]:
    """What a call of a worker brings, or what it raises. Called by the gate, in each worker; raises nothing itself."""
    try:
        call = functools.partial(method, worker) if callable(method) else getattr(worker, method)
        return "", call(*args, **kwargs)
    except HybridEngineError as error:  # a refusal, which the engine core logs
        return f"{type(error).__name__}: {error}", None
    except Exception as error:
        logger.exception("%s failed in this worker", method)
        return f"{type(error).__name__}: {error}", None

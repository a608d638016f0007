"""vLLM's weight transfer engine of this package: translates vLLM's calls to a `WeightReceiver`.

On a GPU weights and KV cache sleep while trainers have the device, by vLLM's sleep mode in each
worker (`vllm serve --enable-sleep-mode`). **Never run on hardware yet**; tested over a GPU in
software.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.live_layers import captured_routes, live_attention
from hybrid_engine.backends.vllm.requests import probe_limits, zero_caches
from hybrid_engine.backends.vllm.server.capture import take_captured
from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor
from hybrid_engine.backends.vllm.weights.weight_memory import (
    SleepMode,
    WeightMemory,
)
from hybrid_engine.compute_check.attention import AlikeLayers, grouped
from hybrid_engine.compute_check.config_reads import Reads
from hybrid_engine.compute_check.routes import LayerRoutes
from hybrid_engine.errors import HybridEngineError, MessageError, StateError
from hybrid_engine.serving.invitation import Invitation, Update
from hybrid_engine.serving.receiver import WeightReceiver

logger = logging.getLogger("hybrid_engine")

_TransferEngine: Any = internals.TRANSFER_ENGINE


class HybridEngineReceiver(_TransferEngine):
    """Weight transfer engine of one worker; vLLM makes it after the model.

    Attributes:
        layers: attention of the model's layers.
        reads: keys of config.json that the model reads.
        receiver: receiver of weights.
        model: the model.
        capture: capture of experts for a comparison, and, after it, `routes`.
    """

    init_info_cls = internals.INIT_INFO
    update_info_cls = internals.UPDATE_INFO
    supports_draft_weight_update = False  # an update fills model and drafter together

    def __init__(self, config: Any, *of_worker: Any) -> None:
        super().__init__(config, *of_worker)
        # The model is last in all versions; vLLM 0.24 passes no more than a part of the rest.
        model: torch.nn.Module = of_worker[-1]
        captured, vllm_config, self.reads = take_captured(model)
        device = next(model.parameters()).device
        # Now, because rotary tables leave the device with the weights.
        layers = vllm_config.compilation_config.static_forward_context
        positions = probe_limits(vllm_config).positions
        self.layers = grouped(live_attention(model, layers, positions))
        parallel = vllm_config.parallel_config
        if parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe:
            raise StateError(
                "data parallel replicas of a model with experts compute together, also on empty "
                "batches, and would do so without weights: start a server for each replica",
                code="replicas-with-experts",
            )
        sleeps = vllm_config.model_config.enable_sleep_mode
        if vllm_config.kv_transfer_config is not None and sleeps:
            raise StateError(
                "a KV connector writes into a cache that sleeps while trainers have the device: "
                "start the server without --kv-transfer-config",
                code="kv-connector",
            )
        self.model = model
        self.capture = ExitStack()
        self.routes: list[LayerRoutes] = []
        self._caches = WorkerCaches()
        memory = WeightMemory()
        if device.type == "cpu":
            from hybrid_engine.backends.vllm.cpu.host_memory import CpuWeightMemory

            memory = CpuWeightMemory()
        elif sleeps:
            internals.require_names(device.type, with_lora=False)
            self._caches.sleep_mode = SleepMode(lambda: self._caches.worker)
            memory = self._caches.sleep_mode
        self._weights = VllmAdaptor(captured, memory)
        index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.receiver = WeightReceiver(self._weights, self._caches, index, device)

    def take_worker(self, worker: Any) -> None:
        """Attach to vLLM's worker, which is ready, and free the memory of its missing weights."""
        self._caches.worker = worker
        self._weights.release()

    def parse_init_info(self, init_dict: Mapping[str, Any]) -> Any:
        return _read(Invitation, init_dict)

    def parse_update_info(self, update_dict: Mapping[str, Any]) -> Any:
        return _read(Update, update_dict)

    def init_transfer_engine(self, init_info: Any) -> None:
        self.receiver.join(init_info)
        # Left over from trainers that have gone, or that did not wait for the update's end.
        self._caches.worker._weight_update_active = False

    def start_weight_update(self) -> None:
        """Do nothing; `receive_weights` does the whole update."""

    def receive_weights(self, update_info: Any) -> None:
        self.receiver.switch(update_info)

    def finish_weight_update(self) -> None:
        """Finish the update that `receive_weights` did."""
        self.receiver.finish()

    def shutdown(self) -> None:
        self.receiver.leave()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise StateError: a `WeightPublisher` sends weights. vLLM 0.26 requires the method."""
        raise StateError(
            "weights come from a hybrid_engine.serving.publisher.WeightPublisher",
            code="not-supported",
        )


class WorkerCaches:
    """Caches of a server's worker (`ports.InferenceCaches`).

    Requests with cached values were restarted when the server was paused.

    Attributes:
        worker: vLLM's; its engine core would manage its memory as its own, and is not involved.
        sleep_mode: the KV cache's sleep mode; None if the cache does not sleep.
    """

    def __init__(self) -> None:
        self.worker: Any = None
        self.sleep_mode: SleepMode | None = None

    def wake_kv_cache(self) -> None:
        if self.sleep_mode is not None:
            self.sleep_mode.wake_kv_cache()

    def reset_caches(self) -> None:
        zero_caches(self.worker.model_runner)


class UnreadableCallError(MessageError, ValueError):
    """A call with invalid arguments: a ValueError for vLLM, and a refusal of this package."""


def _read(kind: type[Any], values: Mapping[str, Any]) -> Any:
    try:
        return kind.read(values)
    except MessageError as error:
        raise UnreadableCallError(str(error), code="unreadable-call") from None


def begin(worker: Any) -> None:
    """Attach the receiver of a worker; the gate calls this in each, once the engine exists."""
    engine = worker.weight_transfer_engine
    if isinstance(engine, HybridEngineReceiver):
        # The worker itself: assignments to its wrapper would not reach it.
        engine.take_worker(getattr(worker, "worker", worker))


def readings_of(worker: Any) -> tuple[tuple[AlikeLayers, ...], Reads | None]:
    """Return the attention of a worker's layers, and its reads; none if it has another receiver.

    The gate calls this in each worker; it raises nothing.
    """
    engine = worker.weight_transfer_engine
    if not isinstance(engine, HybridEngineReceiver):
        return (), None
    return engine.layers, engine.reads


def begin_capture(worker: Any, num_tokens: int) -> None:
    """Capture the experts of the next `num_tokens` tokens in a worker, until `end_capture`."""
    engine = worker.weight_transfer_engine
    engine.routes = engine.capture.enter_context(captured_routes(engine.model, num_tokens))


def end_capture(worker: Any) -> list[list[list[int]]]:
    """Return the experts of each token in each layer with experts; none if unknown."""
    worker.weight_transfer_engine.capture.close()
    return [layer.experts.tolist() for layer in worker.weight_transfer_engine.routes]


def weights_of(worker: Any, also_uncompared: bool = False) -> tuple[str, str, int]:
    """Return why this worker cannot draw tokens ("" if it can), and its weights' job and version.

    The gate calls this in each worker; it raises nothing. See `WeightReceiver.obstacle`.
    """
    engine = worker.weight_transfer_engine
    if isinstance(engine, HybridEngineReceiver):
        receiver = engine.receiver
        return receiver.obstacle(also_uncompared), receiver.job, receiver.version
    obstacle = (
        "the load format is hybrid_engine, but there is no weight transfer "
        "backend of that name: no weights arrive"
    )
    return obstacle, "", -1


def answer(
    worker: Any,
    method: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[str, Any]:
    """Call a worker; return its error ("" if there is none) and its result.

    The gate calls this in each worker; it raises nothing.
    """
    try:
        call = partial(method, worker) if callable(method) else getattr(worker, method)
        return "", call(*args, **kwargs)
    except HybridEngineError as error:  # a refusal: the engine core logs it
        return f"{type(error).__name__}: {error}", None
    except Exception as error:
        logger.exception("%s failed in this worker", method)
        return f"{type(error).__name__}: {error}", None

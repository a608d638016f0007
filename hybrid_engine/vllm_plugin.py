"""The entry point `vllm.general_plugins`: vLLM calls `register` in each process, maybe repeatedly.

Engines that do not use this project call it as well, so `register` only lets the configuration of
an engine reveal its load format. The processes of a server are prepared when they get that
configuration: the one that makes it in `create_engine_config`, and each other one when it unpickles
it, because the name of the load format is a `GatedFormat`. So no process of a server can lack the
gate, whatever starts it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hybrid_engine.errors import StateError
from hybrid_engine.serving import NAME


class GatedFormat(str):
    """The load format in a server's configuration; a process that unpickles it is prepared."""

    def __reduce__(self) -> tuple[Callable[[], GatedFormat], tuple[()]]:
        return prepare_process, ()


@functools.cache
def register() -> None:
    """Make configurations with the load format prepare their processes. Idempotent.

    If vLLM lacks names that servers need, such a configuration is refused, and no other.
    """
    from vllm import EngineArgs

    EngineArgs.create_engine_config = _prepares_servers(EngineArgs.create_engine_config)


@functools.cache
def prepare_process() -> GatedFormat:
    """Register both names in this process, close its gate, and return the load format.

    It also corrects workers: those on a CPU, and those of vLLM 0.24.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from hybrid_engine.backends.vllm import internals, server
    from hybrid_engine.backends.vllm.server import capture, gate, replaced_methods

    register_engine = WeightTransferEngineFactory.register_engine
    register_engine(NAME, f"{server.__name__}.receiver", "HybridEngineReceiver")
    capture.register_loader(NAME)
    gate.close_gate(NAME)
    replaced_methods.unname_queues()
    if not hasattr(internals.TRANSFER_ENGINE, "start_weight_update"):
        replaced_methods.correct_workers()
    if current_platform.is_cpu():
        from hybrid_engine.backends.vllm.cpu import cpu_worker

        cpu_worker.correct_workers()
    return GatedFormat(NAME)


def _prepares_servers(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if str(self.load_format).lower() != NAME:
            backend = getattr(self.weight_transfer_config, "backend", None)
            if backend == NAME:
                raise StateError(
                    f"the weight transfer backend {NAME} needs --load-format {NAME}, not "
                    f"{self.load_format}",
                    code="wrong-load-format",
                )
            return create(self, *args, **kwargs)
        from hybrid_engine.backends.vllm import internals, requests
        from hybrid_engine.backends.vllm.server import routes

        internals.refuse_lacking(internals.missing_for_servers())
        load_format = prepare_process()
        config = create(self, *args, **kwargs)
        config.load_config.load_format = load_format
        routes.guard_routes()
        # The same mode as the engines in the training processes.
        config.model_config.logprobs_mode = requests.LOGPROBS_MODE
        return config

    return create_engine_config

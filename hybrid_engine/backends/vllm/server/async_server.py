"""An `AsyncLLM` in this process, as a publisher calls a server."""

from __future__ import annotations

import asyncio
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.errors import ServerError, clipped
from hybrid_engine.serving.clients import Server

_REQUESTS = {
    "init_weight_transfer_engine": internals.INIT_REQUEST,
    "update_weights": internals.UPDATE_REQUEST,
}
"""Call -> vLLM's class of what is said in it."""


class AsyncServer(Server):
    """An `AsyncLLM` in this process, whose event loop runs in another thread."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop, timeout_seconds: float) -> None:
        self._engine, self._loop, self._timeout = engine, loop, timeout_seconds

    def num_workers(self) -> int:
        return int(self._engine.vllm_config.parallel_config.world_size_across_dp)

    def _call(self, name: str, ends: bool = True, **fields: Any) -> Any:
        if (request := _REQUESTS.get(name)) is not None:
            fields = {"request": request.load()(**fields)}
        method = getattr(self._engine, f"{name}_generation" if name in ("pause", "resume") else name)
        try:
            answer = asyncio.run_coroutine_threadsafe(method(**fields), self._loop)
            return answer.result(self._timeout if ends else None)
        except Exception as error:
            raise ServerError(f"AsyncLLM.{name}: {type(error).__name__}: {clipped(str(error), 2000)}") from error

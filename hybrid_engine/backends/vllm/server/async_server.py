"""An `AsyncLLM` behind the publisher's `Server` interface: in this process, or in an actor."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Mapping
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.requests import scored
from hybrid_engine.backends.vllm.server.routes import drawn_with
from hybrid_engine.errors import ServerError, clipped
from hybrid_engine.serving import NAME
from hybrid_engine.serving.clients import CORE_CALLS, Server

_REQUESTS = {
    "init_weight_transfer_engine": "INIT_REQUEST",
    "update_weights": "UPDATE_REQUEST",
}
"""Call -> name in `internals` of vLLM's class of its request."""

Body = Mapping[str, Any]
"""Content of a request, an answer or a choice, as in JSON."""

_NOT_SAMPLING = ("prompt", "return_token_ids", "return_tokens_as_token_ids", "vllm_xargs")
"""Keys of a request body that are not sampling parameters."""


class AsyncServer(Server):
    """An `AsyncLLM` of this process, whose event loop runs in another thread.

    Attributes:
        engine: the `AsyncLLM`, also for the caller's own requests, which may stream.
        loop: its event loop.
    """

    def __init__(
        self,
        engine: Any,
        loop: asyncio.AbstractEventLoop,
        timeout_seconds: float,
    ) -> None:
        self.engine = engine
        self.loop = loop
        self._timeout = timeout_seconds
        self._request_ids = map("hybrid-engine-{}".format, itertools.count())

    def complete(self, body: Body) -> Body:
        response: Body = self._wait_for(self._complete(body), "complete", None)
        return response

    async def _complete(self, body: Body) -> Body:
        from vllm import SamplingParams

        # vLLM expects lists, as JSON has no tuples.
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in body.items()
            if name not in _NOT_SAMPLING
        }
        sampling = SamplingParams(
            **values,
            output_kind=internals.OUTPUT_KIND.FINAL_ONLY,
            detokenize=bool(values.get("stop")),
            extra_args=body.get("vllm_xargs"),
        )
        prompt = {"prompt_token_ids": body["prompt"]}
        async for output in self.engine.generate(prompt, sampling, next(self._request_ids)):
            last = output
        # The last output has the whole completions, because of FINAL_ONLY.
        return {
            "choices": [
                {**_choice(choice), **drawn_with(choice, sampling.extra_args)}
                for choice in last.outputs
            ]
        }

    def num_workers(self) -> int:
        return int(self.engine.vllm_config.parallel_config.world_size_across_dp)

    def _call(self, name: str, has_timeout: bool = True, **fields: Any) -> Any:
        if name in CORE_CALLS:
            args = (*fields.values(),)
            answer, *_ = self._call("collective_rpc", method=f"hybrid_engine_{name}", args=args)
            return answer
        if (request := _REQUESTS.get(name)) is not None:
            fields = {"request": getattr(internals, request)(**fields)}
        method = getattr(self.engine, f"{name}_generation" if name in ("pause", "resume") else name)
        return self._wait_for(method(**fields), name, self._timeout if has_timeout else None)

    def _wait_for(
        self,
        coroutine: Coroutine[Any, Any, Any],
        name: str,
        seconds: float | None,
    ) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)
        except Exception as error:
            cause = f"{type(error).__name__}: {clipped(str(error), 2000)}"
            raise ServerError(f"AsyncLLM.{name}: {cause}", code="call-failed") from error


class VllmActor(AsyncServer):
    """A server in a process of this class, such as a Ray actor; its engine ends with the process.

        actor = ray.remote(VllmActor).options(name="vllm", max_concurrency=64, max_restarts=-1)
        server = actor.remote(model=..., dtype=...)       trainers: servers: ["ray:vllm"]

    Each running completion uses one of `max_concurrency`, and so does a switch.

    Args:
        timeout_seconds: timeout of calls of the engine, except completions and switches.
        arguments: arguments of vLLM's `AsyncEngineArgs`.
    """

    def __init__(self, timeout_seconds: float = 600.0, **arguments: Any) -> None:
        loop = asyncio.new_event_loop()
        # A daemon, because nothing stops the loop when the process ends.
        thread = threading.Thread(target=loop.run_forever, name="vLLM's event loop", daemon=True)
        thread.start()
        super().__init__(None, loop, timeout_seconds)
        self.engine = self._wait_for(_engine(arguments), "from_engine_args", None)

    def shutdown(self) -> None:
        """End the engine."""
        self.engine.shutdown()


def _choice(output: Any) -> Body:
    """Return a choice in the format of the HTTP route."""
    logprobs = None
    if output.logprobs is not None:
        logprobs = {"token_logprobs": list(scored(output.logprobs, output.token_ids))}
    return {
        "index": output.index,
        "token_ids": list(output.token_ids),
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "text": output.text,
    }


async def _engine(arguments: Mapping[str, Any]) -> Any:
    from vllm import AsyncEngineArgs

    transfer = {"load_format": NAME, "weight_transfer_config": {"backend": NAME}}
    engine_args = AsyncEngineArgs(**transfer, **arguments)
    return internals.ASYNC_LLM.from_engine_args(engine_args)

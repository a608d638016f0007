"""An `AsyncLLM` as a publisher calls a server: one that this process has, or that an actor of its own makes."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Mapping
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.server.plugin import NAME
from hybrid_engine.backends.vllm.server.routes import drawn_with
from hybrid_engine.errors import ServerError, clipped
from hybrid_engine.serving.clients import Server

_REQUESTS = {
    "init_weight_transfer_engine": internals.INIT_REQUEST,
    "update_weights": internals.UPDATE_REQUEST,
}
"""Call -> vLLM's class of what is said in it."""

_OF_THE_ROUTE = ("prompt", "return_token_ids", "return_tokens_as_token_ids", "vllm_xargs")
"""Keys of a body that sampling parameters do not have."""


class AsyncServer(Server):
    """An `AsyncLLM` in this process, whose event loop runs in another thread.

    Attributes:
        engine, loop: for requests of one's own, which may stream.
    """

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop, timeout_seconds: float) -> None:
        self.engine, self.loop, self._timeout = engine, loop, timeout_seconds
        self._request_ids = map("hybrid-engine-{}".format, itertools.count())

    def complete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._wait_for(self._complete(body), "complete", None)
        return answer

    async def _complete(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        from vllm import SamplingParams

        said = {name: value for name, value in body.items() if name not in _OF_THE_ROUTE}
        said |= {name: list(value) for name, value in said.items() if isinstance(value, tuple)}  # JSON has no tuples
        kind = internals.OUTPUT_KIND.load().FINAL_ONLY
        asked = body.get("vllm_xargs")
        sampling = SamplingParams(
            **said, output_kind=kind, detokenize=bool(said.get("stop")), extra_args=asked and dict(asked)
        )
        answers = await asyncio.gather(*(self._answer(list(prompt), sampling) for prompt in body["prompt"]))
        return {"choices": [{**choice, "index": at} for at, choice in enumerate(itertools.chain(*answers))]}

    async def _answer(self, prompt: list[int], sampling: Any) -> list[dict[str, Any]]:
        async for output in self.engine.generate({"prompt_token_ids": prompt}, sampling, next(self._request_ids)):
            last = output
        outputs = sorted(last.outputs, key=lambda each: each.index)
        return [{**_choice(each), **drawn_with(each, sampling.extra_args)} for each in outputs]

    def describe(self) -> str:
        return str(self._call("collective_rpc", method="hybrid_engine_describe")[0])

    def probe(self, tokens: list[list[int]]) -> str:
        return str(self._call("collective_rpc", method="hybrid_engine_probe", args=(tokens,))[0])

    def num_workers(self) -> int:
        return int(self.engine.vllm_config.parallel_config.world_size_across_dp)

    def _call(self, name: str, ends: bool = True, **fields: Any) -> Any:
        if (request := _REQUESTS.get(name)) is not None:
            fields = {"request": request.load()(**fields)}
        method = getattr(self.engine, f"{name}_generation" if name in ("pause", "resume") else name)
        return self._wait_for(method(**fields), name, self._timeout if ends else None)

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any], name: str, seconds: float | None) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)
        except Exception as error:
            raise ServerError(f"AsyncLLM.{name}: {type(error).__name__}: {clipped(str(error), 2000)}") from error


class VllmActor(AsyncServer):
    """A server of its own, for a Ray actor or any other process; its engine ends with the process.

        actor = ray.remote(VllmActor).options(name="vllm", max_concurrency=64, max_restarts=-1)
        server = actor.remote(model=..., dtype=...)       trainers: servers: ["ray:vllm"]

    Each completion that is under way takes one of `max_concurrency`, and so does a switch.

    Args:
        timeout_seconds: longest wait for an answer of the engine, but for completions and switches.
        arguments: of vLLM's `AsyncEngineArgs`.
    """

    def __init__(self, timeout_seconds: float = 600.0, **arguments: Any) -> None:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="vLLM's event loop", daemon=True).start()
        super().__init__(None, loop, timeout_seconds)
        self.engine = self._wait_for(_engine(arguments), "from_engine_args", None)

    def shutdown(self) -> None:
        """End the engine."""
        self.engine.shutdown()


def _choice(output: Any) -> dict[str, Any]:
    """The same as the route's."""
    logprobs = None
    if output.logprobs is not None:
        chosen = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = {"token_logprobs": [by_token[token].logprob for token, by_token in chosen]}
    return {
        "token_ids": list(output.token_ids),
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "text": output.text,
    }


async def _engine(arguments: Mapping[str, Any]) -> Any:
    from vllm import AsyncEngineArgs

    transfer = {"load_format": NAME, "weight_transfer_config": {"backend": NAME}}
    return internals.ASYNC_LLM.load().from_engine_args(AsyncEngineArgs(**transfer, **arguments))

"""The HTTP routes of a server: which of them ask for the token, and what an answer says of the weights.

Where a server has HYBRID_ENGINE_TOKEN, requests for tokens and questions about its health are open to all, and every
other route asks for a proof that whoever calls has the token, too.
"""

from __future__ import annotations

import functools
import hmac
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.serving.invitation import JOB, PROOF_HEADER, TOKEN, VERSION, proof_of_request

_READ_BY_ALL = frozenset(
    {
        *("/health", "/ping", "/load", "/version", "/metrics", "/metrics/", "/v1/models", "/openapi.json"),
        *("/docs", "/redoc", "/weight_info", "/is_paused", "/is_sleeping"),
    }
)
_ASKED_BY_ALL = frozenset(
    {
        *("/v1/completions", "/v1/completions/render", "/v1/chat/completions", "/v1/chat/completions/render"),
        *("/v1/responses", "/v1/responses/render", "/v1/messages", "/v1/messages/render", "/v1/messages/count_tokens"),
        *("/inference/v1/generate", "/tokenize", "/detokenize"),
    }
)
_MOST_BYTES = 1 << 20
"""Of the body of a request that asks for a proof: an invitation is 2 KB."""

_OF_THE_CORE = re.compile(r"Call to \w+ method failed: ")
"""With which vLLM begins what a call of its engine core raised."""
_Send = Callable[[Mapping[str, Any]], Any]
_held = ExitStack()
"""Keeps vLLM's names replaced, for the life of the process."""


def guard_routes() -> None:
    """Guard the routes that this process is about to serve, and have answers say of which weights they are.

    Nothing where it serves none: vLLM's API server has been imported by then.
    """
    if not any(target.partition(":")[0] in sys.modules for target in internals.BUILD_APP.targets):
        return
    _held.close()
    _held.enter_context(internals.BUILD_APP.replaced(_guarded))
    _held.enter_context(internals.COMPLETION_ANSWER.replaced(_labelled))


def drawn_with(output: Any, asked: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a choice says of its weights, where the request `asked` for a job's: see `answers.Weights`.

    The engine core has refused the request unless they are those that were asked for. From vLLM 0.32 on an output says
    by itself which versions drew its tokens.
    """
    if not asked or JOB not in asked:
        return {}
    drawn: dict[str, Any] = {"job": asked[JOB]}
    spans = getattr(output, "weight_versions", None)
    if spans is not None:
        drawn["versions"] = sorted({span.version for span in spans})
    elif VERSION in asked:
        drawn["versions"] = [asked[VERSION]]
    return {"hybrid_engine": drawn}


def _labelled(answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    def request_output_to_completion_response(
        self: Any, final_res_batch: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        response = answer(self, final_res_batch, request, *args, **kwargs)
        outputs = [output for result in final_res_batch for output in result.outputs]
        for choice, output in zip(response.choices, outputs, strict=True):
            for name, value in drawn_with(output, request.vllm_xargs).items():
                setattr(choice, name, value)
        return response

    return request_output_to_completion_response


def _guarded(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def build_app(*args: Any, **kwargs: Any) -> Any:
        app = build(*args, **kwargs)
        # vLLM has built the stack by then, which takes no other
        app.middleware_stack = RouteGuard(app.middleware_stack or app.build_middleware_stack())
        return app

    return build_app


class RouteGuard:
    """ASGI middleware around a server's routes.

    Where the server has the token, it answers 403 to requests without a proof, but for those that are open to all. What
    the engine core refused has been answered and logged when it comes here, and would be logged once more, with vLLM's
    way to it.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app, self._asks_for_proof = app, bool(os.environ.get(TOKEN))

    async def __call__(self, scope: Mapping[str, Any], receive: Callable[[], Any], send: _Send) -> None:
        try:
            await self._pass(scope, receive, send)
        except Exception as error:
            if not _OF_THE_CORE.match(str(error)):
                raise

    async def _pass(self, scope: Mapping[str, Any], receive: Callable[[], Any], send: _Send) -> None:
        if not self._asks_for_proof or scope["type"] not in ("http", "websocket") or _is_open(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        body = await _body(receive)
        if body is None or not _is_proven(scope, body):
            await _refuse(send)
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)


def _is_open(scope: Mapping[str, Any]) -> bool:
    path, method = scope["path"].removeprefix(scope.get("root_path", "")), scope.get("method")
    if method == "OPTIONS":  # a browser asks first, and can prove nothing
        return True
    return (method in ("GET", "HEAD") and path in _READ_BY_ALL) or (method == "POST" and path in _ASKED_BY_ALL)


async def _body(receive: Callable[[], Any]) -> bytes | None:
    """Of a request; None where it is longer than any that asks for a proof, or whoever sent it has gone."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] == "http.disconnect" or len(body) > _MOST_BYTES:
            return None
        if not message.get("more_body"):
            return body


def _is_proven(scope: Mapping[str, Any], body: bytes) -> bool:
    given = dict(scope["headers"]).get(PROOF_HEADER.lower().encode(), b"")
    query = scope.get("query_string", b"")
    target = scope["raw_path"] + (b"?" + query if query else b"")
    return hmac.compare_digest(given, proof_of_request(scope["method"], target.decode("latin-1"), body).encode())


async def _refuse(send: _Send) -> None:
    why = f'{{"error": "this route asks for a proof of {TOKEN}, which this server has"}}'.encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(why)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": why})

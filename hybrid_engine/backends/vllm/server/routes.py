"""The HTTP routes of a server: which ones require the token, and the label of weights in answers.

If a server has HYBRID_ENGINE_TOKEN, requests for tokens and questions about its health are open to
all clients. Every other route requires a proof that the client has the token as well.
"""

from __future__ import annotations

import hmac
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.private_names import Function, around
from hybrid_engine.serving.invitation import JOB, PROOF_HEADER, TOKEN, VERSION, proof_of_request

_OPEN_TO_GET = frozenset(
    {
        *("/health", "/ping", "/load", "/version", "/metrics", "/metrics/", "/v1/models"),
        *("/openapi.json", "/docs", "/redoc", "/weight_info", "/is_paused", "/is_sleeping"),
    }
)
_OPEN_TO_POST = frozenset(
    {
        *("/v1/completions", "/v1/completions/render"),
        *("/v1/chat/completions", "/v1/chat/completions/render"),
        *("/v1/responses", "/v1/responses/render"),
        *("/v1/messages", "/v1/messages/render", "/v1/messages/count_tokens"),
        *("/inference/v1/generate", "/tokenize", "/detokenize"),
    }
)
_MAX_BODY_NBYTES = 1 << 20
"""Maximum size in bytes of a request body that requires a proof; an invitation has 2 KB."""

_OF_THE_CORE = re.compile(r"Call to \w+ method failed: ")
"""Prefix that vLLM adds to errors of calls of its engine core."""
_Scope = Mapping[str, Any]
"""Description of a connection, as ASGI has it."""
_Receive = Callable[[], Any]
_Send = Callable[[Mapping[str, Any]], Any]
_patches = ExitStack()
"""Keeps vLLM's names replaced for the life of the process."""


def guard_routes() -> None:
    """Guard the routes that this process is about to serve, and label answers with their weights.

    Does nothing in a process that serves no routes: it has not imported vLLM's API server.
    """
    modules = [target.partition(":")[0] for target in internals.BUILD_APP.targets]
    if not any(module in sys.modules for module in modules):
        return
    _patches.close()
    _patches.enter_context(internals.BUILD_APP.replaced(_guarded))
    _patches.enter_context(internals.COMPLETION_ANSWER.replaced(_labelled))


def drawn_with(output: Any, wanted: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a choice's label, if the request asked for a job's weights; see `answers.Weights`.

    The engine core has refused the request unless the weights match. From vLLM 0.32 on an output
    lists the versions that drew its tokens.
    """
    if not wanted or JOB not in wanted:
        return {}
    drawn: dict[str, Any] = {"job": wanted[JOB]}
    spans = getattr(output, "weight_versions", None)
    if spans is not None:
        drawn["versions"] = sorted({span.version for span in spans})
        if VERSION not in wanted:
            drawn["spans"] = [(span.version, span.start, span.end) for span in spans]
    elif VERSION in wanted:
        drawn["versions"] = [wanted[VERSION]]
    return {"hybrid_engine": drawn}


@around
def _labelled(
    answer: Function,
    serving: Any,
    final_res_batch: Any,
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    response = answer(serving, final_res_batch, request, *args, **kwargs)
    # The order of a response's choices: all outputs of the first prompt, then of the second.
    outputs = [output for result in final_res_batch for output in result.outputs]
    for choice, output in zip(response.choices, outputs, strict=True):
        for name, value in drawn_with(output, request.vllm_xargs).items():
            setattr(choice, name, value)
    return response


@around
def _guarded(build: Function, *args: Any, **kwargs: Any) -> Any:
    app = build(*args, **kwargs)
    # vLLM may have built the middleware stack already, which takes no further middleware then.
    stack = app.middleware_stack or app.build_middleware_stack()
    app.middleware_stack = RouteGuard(stack)
    return app


class RouteGuard:
    """ASGI middleware around a server's routes.

    If the server has the token, it answers 403 to requests without a proof, except on open routes.
    It also swallows errors of the engine core, which vLLM has answered and logged already; they
    would be logged again, with vLLM's traceback.
    """

    def __init__(self, app: Function) -> None:
        self._app = app
        self._requires_proof = bool(os.environ.get(TOKEN))

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        is_request = scope["type"] in ("http", "websocket")
        if self._requires_proof and is_request and not _is_open(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})  # policy violation
                return
            body = await _body(receive)
            if body is None or not _is_proven(scope, body):
                await _refuse(send)
                return
            receive = _replaying(body, receive)
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if not _OF_THE_CORE.match(str(error)):
                raise


def _replaying(body: bytes, receive: _Receive) -> _Receive:
    """Return `receive` with a body that was received already, because the proof covers it."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return messages.pop() if messages else await receive()

    return replay


def _is_open(scope: _Scope) -> bool:
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    method = scope.get("method")
    if method == "OPTIONS":  # a browser's preflight request cannot carry a proof
        return True
    if method in ("GET", "HEAD"):
        return path in _OPEN_TO_GET
    return method == "POST" and path in _OPEN_TO_POST


async def _body(receive: _Receive) -> bytes | None:
    """Return a request's body; None if it is too long, or the client has disconnected."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] == "http.disconnect" or len(body) > _MAX_BODY_NBYTES:
            return None
        if not message.get("more_body"):
            return body


def _is_proven(scope: _Scope, body: bytes) -> bool:
    proof = dict(scope["headers"]).get(PROOF_HEADER.lower().encode(), b"")
    query = scope.get("query_string", b"")
    # As the client wrote it: the decoded path may be that of another request.
    target = scope["raw_path"] + (b"?" + query if query else b"")
    expected = proof_of_request(scope["method"], target.decode("latin-1"), body)
    return hmac.compare_digest(proof, expected.encode())


async def _refuse(send: _Send) -> None:
    message = f"this route requires a proof of {TOKEN}, which this server has"
    body = f'{{"error": "{message}"}}'.encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})

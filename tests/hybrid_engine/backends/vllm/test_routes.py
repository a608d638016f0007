"""Public routes of a server with a token, and the weight versions attached to a choice."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_engine.backends.vllm.server import routes
from hybrid_engine.serving.invitation import JOB, PROOF_HEADER, TOKEN, VERSION, proof_of_request

# Routes that answer without a proof.
OPEN = [
    ("GET", path) for path in ("/health", "/metrics", "/metrics/", "/v1/models", "/weight_info")
]
OPEN += [("HEAD", "/health"), ("OPTIONS", "/v1/completions"), ("OPTIONS", "/collective_rpc")]
OPEN += [
    ("POST", f"{path}{end}")
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
    for end in ("", "/render")
]
OPEN += [
    ("POST", path)
    for path in ("/v1/messages/count_tokens", "/inference/v1/generate", "/tokenize", "/detokenize")
]
CLOSED = [
    ("GET", "/server_info"),
    ("GET", "/v1/completions"),
    ("POST", "/health"),
    ("POST", "/collective_rpc"),
]
CLOSED += [
    ("POST", path) for path in ("/update_weights", "/resume", "/v1/completions/x", "/v1/embeddings")
]


def status(method: str, path: str, headers: Mapping[str, str]) -> int:
    """Return the status of a request to a guarded server that answers everything with 200."""
    statuses: list[int] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"body"}

    async def send(message: Mapping[str, Any]) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
    }
    scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(routes.RouteGuard(answer)(scope, receive, send))
    return statuses[0]


def test_only_open_routes_answer_without_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    assert [route for route in OPEN if status(*route, {}) != 200] == []
    assert [route for route in CLOSED if status(*route, {}) != 403] == []
    for method, path in CLOSED:
        assert status(method, path, {PROOF_HEADER: proof_of_request(method, path, b"body")}) == 200
    monkeypatch.delenv(TOKEN)
    assert {status(*route, {}) for route in [*OPEN, *CLOSED]} == {200}


def test_a_choice_carries_the_known_weight_versions() -> None:
    plain = SimpleNamespace()
    parts = [("4", 0, 2), ("3", 2, 3), ("4", 3, 5)]
    versions = [
        SimpleNamespace(version=version, start=start, end=end) for version, start, end in parts
    ]
    spans = SimpleNamespace(weight_versions=versions)
    requested = {JOB: "a", VERSION: "3"}
    assert routes.drawn_with(plain, None) == routes.drawn_with(spans, {}) == {}
    assert routes.drawn_with(plain, requested) == {"hybrid_engine": {"job": "a", "versions": ["3"]}}
    assert routes.drawn_with(plain, {JOB: "a"}) == {"hybrid_engine": {"job": "a"}}
    assert routes.drawn_with(spans, requested) == {
        "hybrid_engine": {"job": "a", "versions": ["3", "4"]}
    }
    label = {"job": "a", "versions": ["3", "4"], "spans": parts}
    assert routes.drawn_with(spans, {JOB: "a"}) == {"hybrid_engine": label}

"""What a false server answers: no wrong completion is taken, and each is refused by an error with a name.

A real `ServedInference` asks a real HTTP server, which answers whatever a case says.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import Sampling, load_config
from hybrid_engine.backends.vllm.server import inference as server_inference
from hybrid_engine.backends.vllm.server.inference import ServedInference
from hybrid_engine.errors import GenerationError, ServerError
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from hybrid_engine.serving.clients import API_KEY
from hybrid_engine.serving.invitation import JOB, VERSION, DrawnWith

pytestmark = pytest.mark.slow  # imports vLLM

MODEL = Path(__file__).resolve().parents[3] / "examples" / "gpt_rl" / "model"
PROMPTS = [[3, 4, 5], [3, 4]]
MOST = 4
WEIGHTS = DrawnWith(job="host/1/abc", version=3)
SECONDS = 20.0
"""Longest that any answer may be waited for: nothing hangs."""


class Server(ThreadingHTTPServer):
    """A server that gives one answer.

    Attributes:
        status, headers, body: of the answer; a body of None never comes.
        asked: bodies of requests, and the key that each had.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.headers = 200, dict[str, str]()
        self.body: bytes | None = b""
        self.asked: list[tuple[dict[str, Any], str | None]] = []
        self.has_asked = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body, self.headers["Authorization"]))
        self.server.has_asked.set()
        if self.server.body is None:
            time.sleep(2 * SECONDS)
            return
        self.send_response(self.server.status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        if self.server.status != 204:
            self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        """Nothing is written."""


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ServedInference, Server]]:
    world = World(dist.HashStore(), 0, 1)
    with serving() as server, closing(Job.join(60, world=world, device=torch.device("cpu"))) as job:
        generate = {"servers": [f"http://127.0.0.1:{server.server_port}"], "max_model_len": 20, "timeout_seconds": 5}
        config = load_config({"model": str(MODEL), "random_weights": True, "generate_config": generate}, world_size=1)
        inference = ServedInference(config, job)
        inference._publisher = SimpleNamespace(drawn_with=WEIGHTS)  # type: ignore[assignment]
        yield inference, server


def choice(**changed: Any) -> dict[str, Any]:
    """A choice that is right, but for what is changed."""
    drawn = {"job": WEIGHTS.job, "versions": [str(WEIGHTS.version)]}
    right = {"index": 0, "token_ids": [7, 8], "finish_reason": "stop", "text": "", "hybrid_engine": drawn}
    return {**right, "logprobs": {"token_logprobs": [-1.0, -0.5]}, **changed}


def log_probs(*values: Any) -> dict[str, Any]:
    return {"logprobs": {"token_logprobs": list(values)}}


def answer(*choices: dict[str, Any]) -> bytes:
    return json.dumps({"choices": choices}).encode()


def first(**changed: Any) -> bytes:
    """An answer whose first choice is changed."""
    return answer(choice(**changed), choice(index=1))


RIGHT = {
    "right": first(),
    "out of order": answer(choice(index=1), choice()),
    "most tokens": first(token_ids=[1, 2, 3, 4], **log_probs(-1.0, -1.0, -1.0, -1.0)),
    "certain": first(**log_probs(0.0, -0.0)),
    "one token": first(token_ids=[7], finish_reason="length", **log_probs(-1)),
    "last id": first(token_ids=[7, 13]),
    "more fields": first(more={"x": [1]}),
    "stopped by a token": first(stop_reason=8),
    "lifted by rounding": first(**log_probs(1e-7, -1.0)),
}
DEEP = b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
OF_ANOTHER = {"job": "host/2/def", "versions": ["3"]}
WRONG: dict[str, bytes] = {
    **{f"token id {value!r}": first(token_ids=[7, value]) for value in (10**9, -5, 1.5, "a", True, [1], None, 14)},
    "token ids a string": first(token_ids="78"),
    "too many tokens": first(token_ids=[7] * 9, **log_probs(*[-1.0] * 9)),
    "no tokens": first(token_ids=[], **log_probs()),
    **{f"log-probability {value!r}": first(**log_probs(-1.0, value)) for value in (math.nan, math.inf, -math.inf)},
    **{f"log-probability {value!r}": first(**log_probs(-1.0, value)) for value in (5.0, None, "x", [-1.0])},
    "a log-probability too few": first(**log_probs(-1.0)),
    "no log-probabilities": first(logprobs=None),
    "one index twice": answer(choice(), choice()),
    "an index too high": answer(choice(), choice(index=2)),
    "a choice too few": answer(choice()),
    "a choice too many": answer(choice(), choice(index=1), choice(index=2)),
    "no choices": b"{}",
    "choices of another type": b'{"choices": {"0": 1}}',
    "a list": b"[]",
    "no JSON": b"<html>",
    "no UTF-8": b"\xff\xfe",
    "deep JSON": DEEP,
    "empty": b"",
    "aborted": first(finish_reason="abort"),
    "refused": first(finish_reason="abort", stop_reason="the server belongs to job host/2/def"),
    "unfinished": first(finish_reason=None),
    "weights of another job": first(hybrid_engine=OF_ANOTHER),
    "weights of another version": first(hybrid_engine={"job": WEIGHTS.job, "versions": ["3", "4"]}),
    "weights not said": first(hybrid_engine=None),
}
STATUSES = {
    "204": (204, {}),
    "302": (302, {"Location": "http://127.0.0.1:1/"}),
    "304 without a place": (304, {}),
    "500": (500, {}),
}
GENERATION_ERRORS = {"aborted", *(f"log-probability {value!r}" for value in (math.nan, math.inf, -math.inf))}


def ask(inference: ServedInference) -> list[Any]:
    return inference.generate_over_replicas(PROMPTS, Sampling(max_tokens=MOST))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_is_taken(served: tuple[ServedInference, Server], name: str) -> None:
    inference, server = served
    server.status, server.headers, server.body = 200, {}, RIGHT[name]
    assert [len(of_prompt) for of_prompt in ask(inference)] == [1, 1]
    body, key = server.asked[-1]
    assert body["vllm_xargs"] == {JOB: WEIGHTS.job, VERSION: "3"}
    assert key is None


@pytest.mark.parametrize("name", [*WRONG, *STATUSES])
def test_a_wrong_answer_is_an_error_with_a_name(served: tuple[ServedInference, Server], name: str) -> None:
    inference, server = served
    server.status, server.headers = STATUSES.get(name, (200, {}))
    server.body = WRONG.get(name, first())
    kind, started = GenerationError if name in GENERATION_ERRORS else ServerError, time.monotonic()
    with pytest.raises(kind) as caught:
        inference._ask(0, PROMPTS, Sampling(max_tokens=MOST))
    assert type(caught.value) is kind
    assert len(str(caught.value)) < 3000
    with pytest.raises((GenerationError, ServerError)):
        ask(inference)
    assert time.monotonic() - started < SECONDS


def test_after_a_failure_nothing_more_is_asked_for(
    served: tuple[ServedInference, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    inference, _ = served
    num_asked = itertools.count()

    def fail_first(number: int, prompts: object, sampling: object) -> list[Any]:
        if next(num_asked) == 0:
            raise ServerError("no memory")
        time.sleep(0.1)
        return []

    monkeypatch.setattr(server_inference, "_MOST_REQUESTS", 2)
    monkeypatch.setattr(inference, "_ask", fail_first)
    with pytest.raises(ServerError, match="no memory"):
        inference.generate_over_replicas([[3, 4]] * 20, Sampling(max_tokens=MOST, seed=1))
    assert next(num_asked) < 20


def test_the_key_of_a_server_is_sent(served: tuple[ServedInference, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    inference, server = served
    server.status, server.headers, server.body = 200, {}, first()
    monkeypatch.setenv(API_KEY, "sesame")
    ask(inference)
    assert server.asked[-1][1] == "Bearer sesame"


class Ended(Exception):
    """What a program may make of SIGTERM."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Ended])
def test_one_signal_ends_the_wait_for_a_silent_server(
    served: tuple[ServedInference, Server], kind: type[BaseException]
) -> None:
    inference, server = served
    server.body = None
    server.has_asked.clear()

    def interrupt() -> None:
        server.has_asked.wait(SECONDS)
        os.kill(os.getpid(), signal.SIGUSR1)

    def end(*_: object) -> None:
        raise kind

    before = signal.signal(signal.SIGUSR1, end)
    started = time.monotonic()
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises((kind, GenerationError)):
            ask(inference)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - started < SECONDS

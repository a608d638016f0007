"""Invalid responses of a server: each raises a named error, and no wrong completion is returned.

A real `ServedInference` sends requests to a real HTTP server that returns a prepared response.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import Sampling, load_config
from hybrid_engine.backends.vllm.completing import Completions
from hybrid_engine.backends.vllm.images import ImagePrompt
from hybrid_engine.backends.vllm.requests import Request
from hybrid_engine.backends.vllm.server import inference as server_inference
from hybrid_engine.backends.vllm.server.inference import ServedInference
from hybrid_engine.errors import ArgumentError, GenerationError, ServerError
from hybrid_engine.ranks import rank_tree
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from hybrid_engine.serving.clients import API_KEY
from hybrid_engine.serving.invitation import JOB, VERSION, DrawnWith
from tests.harness.errors import violated
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.hybrid_engine.serving.test_invitation import answering, begin

pytestmark = pytest.mark.slow  # imports vLLM

MODEL = Path(__file__).resolve().parents[3] / "examples" / "gpt_rl" / "model"
PROMPTS = [[3, 4, 5]]
MAX_TOKENS = 4
SAMPLING = Sampling(n=2, max_tokens=MAX_TOKENS)
WEIGHTS = DrawnWith(job="host/1/abc", version=3)
SECONDS = 20.0
"""Longest wait for any response."""


@dataclass
class Server:
    """Sends one prepared response to each request; with a body of None it never comes.

    Attributes:
        requests: body and API key of each request.
    """

    body: bytes | None = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[Values, str | None]] = field(default_factory=list)
    has_request: threading.Event = field(default_factory=threading.Event)

    def prepare(
        self, body: bytes | None, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        self.body = body
        self.status = status
        self.headers = headers or {}
        self.has_request.clear()

    def respond(self, handler: Any) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.requests.append((body, handler.headers["Authorization"]))
        self.has_request.set()
        if self.body is None:
            time.sleep(2 * SECONDS)  # the test ends first
            return
        length = (
            {} if self.status == 204 else {"Content-Length": str(len(self.body))}
        )  # 204 has no body
        begin(handler, self.status, **self.headers, **length)
        handler.wfile.write(self.body)


def served_by(url: str, job: Job, **generate: Any) -> ServedInference:
    keys = {"servers": [url], "timeout_seconds": 5, **generate}
    config = load_config(
        {"model": str(MODEL), "random_weights": True, "generate_config": keys}, world_size=1
    )
    inference = ServedInference(config, job)
    inference._publisher = SimpleNamespace(drawn_with=WEIGHTS)  # type: ignore[assignment]
    return inference


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[ServedInference, Server]]:
    world = World(dist.HashStore(), 0, 1)
    server = Server()
    with (
        answering(server.respond) as url,
        closing(Job.join(60, world=world, device=torch.device("cpu"))) as job,
    ):
        yield served_by(url, job, max_model_len=20), server


def choice(**changes: Any) -> Values:
    """Return a valid choice with some fields changed."""
    weights = {"job": WEIGHTS.job, "versions": [str(WEIGHTS.version)]}
    valid = {
        "index": 0,
        "token_ids": [7, 8],
        "finish_reason": "stop",
        "text": "",
        "hybrid_engine": weights,
    }
    return {**valid, "logprobs": {"token_logprobs": [-1.0, -0.5]}, **changes}


def log_probs(*values: Any) -> Values:
    return {"logprobs": {"token_logprobs": list(values)}}


def response(*choices: Values) -> bytes:
    return json.dumps({"choices": choices}).encode()


def first_choice(**changes: Any) -> bytes:
    """Return a response with some fields of its first choice changed."""
    return response(choice(**changes), choice(index=1))


VALID = {
    "unchanged": first_choice(),
    "out of order": response(choice(index=1), choice()),
    "most tokens": first_choice(token_ids=[1, 2, 3, 4], **log_probs(-1.0, -1.0, -1.0, -1.0)),
    "certain": first_choice(**log_probs(0.0, -0.0)),
    "one token": first_choice(token_ids=[7], finish_reason="length", **log_probs(-1)),
    "last id": first_choice(token_ids=[7, 13]),
    "more fields": first_choice(more={"x": [1]}),
    "stopped by a token": first_choice(stop_reason=8),
    "lifted by rounding": first_choice(**log_probs(1e-7, -1.0)),
    "its prompt": first_choice(prompt_token_ids=PROMPTS[0]),
}
DEEP = b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"  # RecursionError in json
OTHER_WEIGHTS = {"job": "host/2/def", "versions": ["3"]}
INVALID: dict[str, bytes] = {
    **{
        f"token id {value!r}": first_choice(token_ids=[7, value])
        for value in (10**9, -5, 1.5, "a", True, [1], None, 14)
    },
    "token ids a string": first_choice(token_ids="78"),
    "too many tokens": first_choice(token_ids=[7] * 9, **log_probs(*[-1.0] * 9)),
    "no tokens": first_choice(token_ids=[], **log_probs()),
    **{
        f"log-probability {value!r}": first_choice(**log_probs(-1.0, value))
        for value in (math.nan, math.inf, -math.inf, -1e308)
    },
    **{
        f"log-probability {value!r}": first_choice(**log_probs(-1.0, value))
        for value in (5.0, None, "x", [-1.0])
    },
    "a log-probability too few": first_choice(**log_probs(-1.0)),
    "no log-probabilities": first_choice(logprobs=None),
    "one index twice": response(choice(), choice()),
    "an index too high": response(choice(), choice(index=2)),
    "a choice too few": response(choice()),
    "a choice too many": response(choice(), choice(index=1), choice(index=2)),
    "no choices": b"{}",
    "choices of another type": b'{"choices": {"0": 1}}',
    "a list": b"[]",
    "no JSON": b"<html>",
    "no UTF-8": b"\xff\xfe",
    "deep JSON": DEEP,
    "empty": b"",
    "another prompt": first_choice(prompt_token_ids=[3, 4]),
    "aborted": first_choice(finish_reason="abort"),
    "refused": first_choice(
        finish_reason="abort", stop_reason="the server belongs to job host/2/def"
    ),
    "unfinished": first_choice(finish_reason=None),
    "weights of another job": first_choice(hybrid_engine=OTHER_WEIGHTS),
    "weights of another version": first_choice(
        hybrid_engine={"job": WEIGHTS.job, "versions": ["3", "4"]}
    ),
    "no weight version": first_choice(hybrid_engine=None),
}
STATUSES = {
    "204": (204,),
    "302": (302, {"Location": "http://127.0.0.1:1/"}),
    "304 without a location": (304,),
    "500": (500,),
}
GENERATION_ERRORS = {
    "aborted",
    *(f"log-probability {value!r}" for value in (math.nan, math.inf, -math.inf, -1e308)),
}


def generate(inference: ServedInference) -> list[Any]:
    return inference.generate_over_replicas(PROMPTS, SAMPLING)


@pytest.mark.parametrize("name", VALID)
def test_a_valid_response_is_accepted(served: tuple[ServedInference, Server], name: str) -> None:
    inference, server = served
    server.prepare(VALID[name])
    assert [len(completions) for completions in generate(inference)] == [2]
    body, key = server.requests[-1]
    assert body["vllm_xargs"] == {JOB: WEIGHTS.job, VERSION: "3"}
    assert key is None


@pytest.mark.parametrize(
    ("spans", "versions"),
    [
        ([("3", 0, 2)], (3, 3)),
        ([("3", 0, 1), ("4", 1, 2)], (3, 4)),
        *(
            (spans, None)
            for spans in (
                None,
                [],
                [("3", 0, 1)],
                [("3", 1, 2)],
                [("3", 0, 2), ("4", 1, 2)],
                [("x", 0, 2)],
            )
        ),
    ],
    ids=str,
)
def test_each_token_has_a_version_of_the_job(
    served: tuple[ServedInference, Server], spans: Any, versions: tuple[int, ...] | None
) -> None:
    inference, server = served
    request = Request.of(
        PROMPTS[0],
        Sampling(max_tokens=MAX_TOKENS),
        weights=DrawnWith(job=WEIGHTS.job, version=None),
    )
    server.prepare(response(choice(hybrid_engine={"job": WEIGHTS.job, "spans": spans})))
    with (
        nullcontext()
        if versions
        else pytest.raises(ServerError, match="not with any version of job")
    ):
        assert inference.answer(request).versions == versions


def test_prompts_with_images_are_refused(served: tuple[ServedInference, Server]) -> None:
    inference, server = served
    prompts = [[3, 4], ImagePrompt([3, 5, 5], [3, 5], [], {})]
    num_requests = len(server.requests)
    with violated(ArgumentError, ("prompts[1]", "images-unsupported")):
        inference.generate_over_replicas(prompts, Sampling(max_tokens=MAX_TOKENS))
    assert len(server.requests) == num_requests


@pytest.mark.parametrize("name", [*INVALID, *STATUSES])
def test_an_invalid_response_raises_a_named_error(
    served: tuple[ServedInference, Server], name: str
) -> None:
    inference, server = served
    server.prepare(INVALID.get(name, first_choice()), *STATUSES.get(name, ()))
    kind = GenerationError if name in GENERATION_ERRORS else ServerError
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        inference.complete([Request.of(PROMPTS[0], SAMPLING, weights=WEIGHTS)])
    assert type(caught.value) is kind
    assert len(str(caught.value)) < 3000
    with pytest.raises((GenerationError, ServerError)):
        generate(inference)
    assert time.monotonic() - started < SECONDS


def test_a_failure_stops_further_requests(
    served: tuple[ServedInference, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    inference, _ = served
    num_requests = itertools.count()

    def fail_first(requests: Sequence[Request]) -> Completions:
        if next(num_requests) == 0:
            raise ServerError("no memory")
        time.sleep(0.1)
        return [[] for _ in requests]

    monkeypatch.setattr(server_inference, "_MAX_REQUESTS", 2)
    monkeypatch.setattr(inference, "complete", fail_first)
    with pytest.raises(ServerError, match="no memory"):
        inference.generate_over_replicas([[3, 4]] * 20, Sampling(max_tokens=MAX_TOKENS, seed=1))
    assert next(num_requests) < 20


LENGTHS = range(1, 900, 100)


class ServerOfLengths:
    """Answers with as many tokens as the first token of the prompt says."""

    def complete(self, body: Values) -> Values:
        answer = choice(token_ids=[7] * body["prompt"][0], logprobs=None)
        return {"choices": [answer]}


@on_engines(2, timeout=120)
def test_completions_of_a_step_have_no_limit_in_bytes() -> None:
    """Draw a completion of each length on two ranks that send a kilobyte at a time."""
    dist.init_process_group("gloo")
    inference = served_by("http://127.0.0.1:1", Job.join(60), max_model_len=2000)
    inference._servers = [ServerOfLengths()]  # type: ignore[list-item]
    inference._vocab_size = 1000
    sampling = Sampling(max_tokens=max(LENGTHS), logprobs=False)
    with mock.patch.object(rank_tree, "_PART", 1000):
        completions = inference.generate_over_replicas([[length] for length in LENGTHS], sampling)
    assert [(*row[0].prompt_token_ids, len(row[0].token_ids)) for row in completions] == [
        (n, n) for n in LENGTHS
    ]
    own = [[2 + dist.get_rank()]]
    with violated(ArgumentError, ("data", "ranks-differ")):
        inference.generate_over_replicas(own, sampling)
    ((completion,),) = inference.generate_over_replicas(own, sampling, data="local")
    assert len(completion.token_ids) == own[0][0]


def test_the_api_key_is_sent(
    served: tuple[ServedInference, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    inference, server = served
    server.prepare(first_choice())
    monkeypatch.setenv(API_KEY, "sesame")
    generate(inference)
    assert server.requests[-1][1] == "Bearer sesame"


class Terminated(Exception):
    """Exception that a program may raise on SIGTERM."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Terminated])
def test_a_signal_ends_the_wait_for_a_silent_server(
    served: tuple[ServedInference, Server], kind: type[BaseException]
) -> None:
    inference, server = served
    server.prepare(None)

    def send_signal() -> None:
        server.has_request.wait(SECONDS)
        os.kill(os.getpid(), signal.SIGUSR1)

    def raise_kind(*_: object) -> None:
        raise kind

    previous = signal.signal(signal.SIGUSR1, raise_kind)
    started = time.monotonic()
    try:
        threading.Thread(target=send_signal, daemon=True).start()
        with pytest.raises((kind, GenerationError)):
            generate(inference)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert time.monotonic() - started < SECONDS

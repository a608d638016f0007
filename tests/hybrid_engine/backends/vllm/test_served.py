"""Requests to a server mean the same as calls of an engine in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_engine import Sampling, load_config
from hybrid_engine.backends.vllm.completing import seeded
from hybrid_engine.backends.vllm.requests import sampling_params
from hybrid_engine.backends.vllm.server import inference as server_inference
from hybrid_engine.backends.vllm.server.inference import ServedInference
from hybrid_engine.errors import ArgumentError
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from hybrid_engine.serving.invitation import DrawnWith
from tests.harness.errors import violated
from tests.harness.launch import REPO_ROOT

pytestmark = pytest.mark.slow  # imports vLLM

MODEL = REPO_ROOT / "examples" / "gpt_rl" / "model"
LONGEST = 20
PROMPTS = [[3, 4, 5], [3, 4]]
WEIGHTS = DrawnWith(job="trainers", version=3)
# Values of the model's generation_config.json, a server's defaults.
MODEL_DEFAULTS = {
    **{"temperature": 0.1, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "max_tokens": 2},
    **{"repetition_penalty": 1.3, "presence_penalty": 1.5, "frequency_penalty": 1.5},
}


class RecordingServer:
    """A server that records request bodies."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        logprobs = {"token_logprobs": [-1.0]}
        drawn = {"job": WEIGHTS.job, "versions": [str(WEIGHTS.version)]}
        choice = {
            "token_ids": [7],
            "logprobs": logprobs,
            "finish_reason": "stop",
            "hybrid_engine": drawn,
        }
        return {"choices": [{**choice, "index": index} for index in range(body["n"])]}


@pytest.fixture
def server() -> RecordingServer:
    return RecordingServer()


@pytest.fixture
def inference(server: RecordingServer) -> Iterator[ServedInference]:
    generate = {"servers": ["http://127.0.0.1:1"], "max_model_len": LONGEST}
    config = load_config(
        {"model": str(MODEL), "random_weights": True, "generate_config": generate}, world_size=1
    )
    with closing(
        Job.join(60, world=World(dist.HashStore(), 0, 1), device=torch.device("cpu"))
    ) as job:
        inference = ServedInference(config, job)
        inference._servers = [server]  # type: ignore[list-item]
        inference._publisher = SimpleNamespace(drawn_with=WEIGHTS)  # type: ignore[assignment]
        yield inference


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(max_tokens=None),
        Sampling(
            n=2,
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            seed=3,
            logprobs=False,
            ignore_eos=True,
            min_tokens=2,
        ),
        Sampling(
            temperature=0.0, min_p=0.1, repetition_penalty=1.1, stop_token_ids=(4, 5), max_tokens=3
        ),
    ],
    ids=["default", "unlimited", "drawn", "greedy"],
)
def test_requests_to_a_server_equal_sampling_in_this_process(
    inference: ServedInference, server: RecordingServer, sampling: Sampling
) -> None:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

    inference.generate_over_replicas(PROMPTS, sampling)
    expected = sampling_params(sampling)
    compared = {field.name for field in fields(Sampling)} - {
        "max_tokens",
        "seed",
    } | MODEL_DEFAULTS.keys()
    bodies = sorted(server.bodies, key=lambda body: PROMPTS.index(body["prompt"]))
    assert [body["prompt"] for body in bodies] == PROMPTS
    for body, seeded_sampling in zip(bodies, seeded([sampling] * 2, PROMPTS), strict=True):
        request = CompletionRequest(**body)
        length = len(body["prompt"])
        most = get_max_tokens(LONGEST, request.max_tokens, length, MODEL_DEFAULTS)
        assert most == (LONGEST - length if expected.max_tokens is None else expected.max_tokens)
        params = request.to_sampling_params(most, MODEL_DEFAULTS)
        for name in compared - {"max_tokens"}:
            assert getattr(params, name) == getattr(expected, name), name
        assert params.seed == seeded_sampling.seed


@pytest.mark.parametrize("is_allowed", [False, True])
def test_a_public_server_address_is_allowed_by_the_same_key_as_servers(
    inference: ServedInference, monkeypatch: pytest.MonkeyPatch, is_allowed: bool
) -> None:
    inference._generate = inference._generate.model_copy(update={"server_allow_public": is_allowed})
    monkeypatch.setattr(server_inference, "WeightPublisher", lambda *_, **settings: settings)
    assert inference.switch(None, None)["config"].server_allow_public is is_allowed  # type: ignore[arg-type, index]


def test_single_completions_alternate_between_servers(
    inference: ServedInference, server: RecordingServer
) -> None:
    second = RecordingServer()
    inference._servers = [server, second]  # type: ignore[list-item]
    drawn = [
        inference.complete_one(prompt, Sampling(n=3, max_tokens=4, temperature=0.5))
        for prompt in PROMPTS
    ]
    assert [completion.prompt_token_ids for completion in drawn] == [
        tuple(prompt) for prompt in PROMPTS
    ]
    assert [completion.token_ids for completion in drawn] == [(7,), (7,)]
    assert [body["prompt"] for body in (*server.bodies, *second.bodies)] == PROMPTS
    assert [body["n"] for body in server.bodies] == [1]
    with violated(ArgumentError, ("prompts[0]", "prompt-too-long")):
        inference.complete_one(PROMPTS[0], Sampling(max_tokens=LONGEST))


def test_every_prompt_is_sent_with_its_sampling(
    inference: ServedInference, server: RecordingServer
) -> None:
    inference.generate_over_replicas(
        PROMPTS, [Sampling(max_tokens=3), Sampling(n=2, max_tokens=2, seed=5)]
    )
    (of_second,) = seeded([Sampling(seed=5)], PROMPTS[1:])
    requests = sorted(
        (body["prompt"], body["n"], body["max_tokens"], body.get("seed")) for body in server.bodies
    )
    assert requests == [(PROMPTS[1], 2, 2, of_second.seed), (PROMPTS[0], 1, 3, None)]
    wrong = [
        ("sampling", "wrong-length"),
        ("sampling[0]", "not-over-http"),
        ("sampling[2]", "not-over-http"),
    ]
    with violated(ArgumentError, *wrong):
        inference.generate_over_replicas(PROMPTS, [5, Sampling(), "x"])  # type: ignore[arg-type]

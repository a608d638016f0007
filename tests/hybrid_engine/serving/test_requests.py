"""Requests in flight while a vLLM server switches weights: which version generated each token.

vLLM reports versions at the end of a response, streamed or not, as spans of its tokens:
`/inference/v1/generate` does on a server with --enable-scale-out, `/v1/completions` does not. Each
token is recomputed here by transformers from the checkpoint of its version.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import requests
import torch

from hybrid_engine import ActorHybridWorker, Sampling
from hybrid_engine.errors import ComputationError, ReshardError, ServerError, StateError
from hybrid_engine.serving.clients import HttpServer
from hybrid_engine.serving.invitation import NO_VERSION, TOKEN
from hybrid_engine.switch.states import State
from tests.harness.errors import refused
from tests.harness.launch import on_engines
from tests.harness.values import Values
from tests.harness.vllm_server import FILLED, PLAIN, Server, serving
from tests.hybrid_engine.serving.test_servers import config_of, train_step, write_model
from tests.zoo.families import read_config, write_config

MODES = ("keep", "wait", "abort")
LENGTH = 256
SECRET = "a secret of this server and its trainers"
SECONDS = 120.0
"""Longest wait for anything."""
TOLERANCE = 1e-4
"""Tolerance of float32 log-probabilities of two implementations."""
MIN_DISTINCT = 6
"""Length from which a span of tokens fits only its own version."""
FORBIDDEN_REQUESTS = (
    ("POST", "pause"),
    ("POST", "resume"),
    ("POST", "sleep?level=0"),
    ("POST", "abort_requests"),
    ("POST", "start_weight_update"),
    ("POST", "update_weights"),
    ("POST", "finish_weight_update"),
    ("POST", "reset_prefix_cache"),
    ("POST", "reset_mm_cache"),
    ("POST", "collective_rpc"),
    ("POST", "v1/load_lora_adapter"),
    ("GET", "server_info"),
    ("DELETE", "health"),
    ("POST", "no/such/route"),
)
"""Requests that a client without the token must not send."""
FORBIDDEN_METHODS = (
    "save_sharded_state",
    "update_environment_variables",
    "reload_weights",
    "execute_dummy_batch",
)
"""Methods of vLLM's workers that no client may call."""


# Settings of config.json that change results, but no weight. Short sequences are within the window.
OTHER_SETTINGS: dict[str, Values] = {
    "epsilon": {"rms_norm_eps": 0.5},
    "changed after a publish": {},
    "window": {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0},
}
MIN_PUBLISHES = 3
"""There are more until enough requests were in flight."""
NUM_REQUESTS = 4
"""New ones per publish, half without weights on the server, half with them."""
NUM_TOKENS = (12, 24, 40, 160)
"""Lengths of responses, in turn."""
UNFINISHED = 2
"""Weights leave once at most this many requests are running."""
PUBLISHES_MEANWHILE = 5


@dataclass
class Stream:
    """A request and its response.

    Attributes:
        spans: (version, first token, token after the last), from the end of the response.
        arrived: number of tokens that had arrived when the weights of each version had left.
        is_in_flight: when weights left, some of its tokens had arrived and others may not have.
    """

    prompt: list[int]
    num_tokens: int
    temperature: float
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish_reason: str = ""
    is_done: bool = False
    arrived: list[int] = field(default_factory=list)
    is_in_flight: bool = False

    def body(self, seed: int) -> Values:
        sampling = {
            "temperature": self.temperature,
            "max_tokens": self.num_tokens,
            "ignore_eos": True,
            "logprobs": 0,
        }
        return {
            "token_ids": self.prompt,
            "sampling_params": {**sampling, "seed": seed},
            "stream": True,
        }

    def take(self, choice: Values) -> None:
        """Append a part of the response."""
        self.tokens += choice["token_ids"]
        self.log_probs += [token["logprob"] for token in choice["logprobs"]["content"]]
        if choice["finish_reason"] is not None:
            self.finish_reason = choice["finish_reason"]
            self.spans = [
                (span["version"], span["start"], span["end"]) for span in choice["weight_versions"]
            ]

    @property
    def labels(self) -> list[int]:
        """Version of each token, as vLLM reports."""
        return [int(version) for version, start, end in self.spans for _ in range(start, end)]

    @property
    def rollouts(self) -> list[int]:
        """Published version when each token arrived."""
        before = [0, *self.arrived]
        return [
            version
            for version, count in enumerate(self.arrived)
            for _ in range(before[version], count)
        ]


class Clients:
    """Running requests. The context ends once all have ended."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(32)
        self._failures: list[BaseException] = []
        self.streams: list[Stream] = []

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def send(self, stream: Stream) -> None:
        """Send a request. The server has accepted it on return."""
        response = self._post(stream)
        self.streams.append(stream)
        self._pool.submit(self._read, stream, response)

    def send_and_leave(self, stream: Stream) -> None:
        """Send a request and close the connection."""
        self._post(stream).close()

    def send_until(self, is_over: threading.Event, new: Iterator[Stream], number: int) -> None:
        """Keep `number` requests running."""
        while not is_over.wait(0.01):
            for stream in itertools.islice(new, number - len(self.running())):
                self.send(stream)

    def num_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self.streams)

    def running(self) -> list[Stream]:
        return [stream for stream in self.streams if not stream.is_done]

    def wait_for_all_but(self, number: int) -> None:
        """Wait until at most `number` requests are running."""
        self._wait(lambda: len(self.running()) <= number)

    def wait_for_started(self) -> None:
        """Wait until every request that has tokens has ended."""
        self._wait(lambda: all(not stream.tokens for stream in self.running()))

    def wait_for_tokens(self, number: int) -> None:
        """Wait for `number` tokens of all requests together."""
        self._wait(lambda: self.num_tokens() >= number)

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            has_succeeded = self._changed.wait_for(lambda: bool(self._failures) or holds(), SECONDS)
        if self._failures:
            raise self._failures[0]
        message = f"timeout of {SECONDS:g} s: {self.num_tokens()} tokens, {self.running()}"
        assert has_succeeded, message

    def _post(self, stream: Stream) -> requests.Response:
        body = stream.body(len(self.streams))
        response = requests.post(
            f"{self._url}/inference/v1/generate", json=body, stream=True, timeout=SECONDS
        )
        assert response.ok, response.text
        return response

    def _read(self, stream: Stream, response: requests.Response) -> None:
        try:
            with response:
                for line in response.iter_lines():
                    if line.startswith(b"data: {"):
                        with self._changed:
                            stream.take(json.loads(line.removeprefix(b"data: "))["choices"][0])
                            self._changed.notify_all()
        except BaseException as error:  # raised by the waiting thread
            self._failures.append(error)
        with self._changed:
            stream.is_done = True
            self._changed.notify_all()


def fail_to_publish(worker: ActorHybridWorker, owner: object, call: str) -> None:
    """Fail a publish. The trainer's weights must not change."""
    failing = mock.patch.object(owner, call, side_effect=MemoryError("no memory for 3 GB"))
    with failing, pytest.raises(ReshardError, match="no memory for 3 GB"):
        worker.sharding.enter(State.INFER)
    assert worker.sharding.state is State.TRAIN


def streams_of(num_tokens: Sequence[int]) -> Iterator[Stream]:
    """Yield requests of these lengths in turn; half of them are greedy."""
    rng = random.Random(7)
    for number in itertools.count():
        prompt = [rng.randrange(3, 120) for _ in range(rng.randint(1, 12))]
        yield Stream(prompt, num_tokens[number % len(num_tokens)], float(number // 2 % 2))


def send(clients: Clients, new: Iterator[Stream], number: int) -> None:
    for stream in itertools.islice(new, number):
        clients.send(stream)


def version_of(server: HttpServer) -> str:
    return str(server.get("weight_info")["weight_version"])


def num_drawn(url: str) -> int:
    """Return the number of tokens that the server has generated since it started."""
    page = requests.get(f"{url}/metrics", timeout=60).text
    match = re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)
    assert match is not None, page
    return int(float(match[1]))


def replay(checkpoint: str, streams: Sequence[Stream]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Recompute each stream by a checkpoint.

    Returns, for each stream, log-probabilities of its tokens and of the most likely tokens in their
    place.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    sequences = [torch.tensor(stream.prompt + stream.tokens) for stream in streams]
    log_probs = []
    with torch.inference_mode():
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        all_scores = model(padded).logits.log_softmax(-1)
        for stream, sequence, scores in zip(streams, sequences, all_scores, strict=True):
            first = len(stream.prompt) - 1
            last = len(sequence) - 1
            drawn = scores[first:last].gather(-1, sequence[first + 1 :, None])[:, 0]
            log_probs.append((drawn.clone(), scores[first:last].amax(-1)))
    return log_probs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A model and the address of a server. Trainers of each test start with the same weights."""
    directory = tmp_path_factory.mktemp("requests")
    model = write_model(directory / "model", "qwen2", max_position_embeddings=LENGTH)
    arguments = ("--enable-scale-out", "--max-model-len", str(LENGTH))
    # `vllm serve` spawns workers too. Compilation would take a minute at the first request.
    spawning = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TORCH_COMPILE_DISABLE": "1",
        TOKEN: SECRET,
    }
    with serving(
        model, directory / "server", *FILLED, *PLAIN, *arguments, environment=spawning
    ) as served:
        assert requests.get(f"{served.url}/weight_info", timeout=60).json() == {
            "weight_version": NO_VERSION
        }
        assert requests.get(f"{served.url}/is_paused", timeout=60).json() == {"is_paused": True}
        check_queues(served)
        yield model, served.url
        check_clients_without_token(served)


def check_queues(served: Server) -> None:
    """Check that the server's shared-memory queues are unlinked, so that none outlives a kill."""
    pids = [pid for pids in served.processes().values() for pid in pids]
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    queues = [line for line in lines if "/dev/shm/psm_" in line]
    assert queues
    assert all(line.endswith("(deleted)") for line in queues)


def check_clients_without_token(served: Server) -> None:
    """Check that a client without the token is refused everything but /health.

    A refusal is one line of the server's log.
    """
    for method, route in FORBIDDEN_REQUESTS:
        response = requests.request(
            method, f"{served.url}/{route}", json={"method": "reset_weights"}, timeout=60
        )
        assert response.status_code == 403, route
    assert requests.get(f"{served.url}/health", timeout=60).ok
    before = len(served.log.read_text().splitlines())
    with mock.patch.dict(os.environ, {TOKEN: SECRET}):
        for method in FORBIDDEN_METHODS:
            with pytest.raises(ServerError, match="is refused"):
                HttpServer(served.url, 60).post("collective_rpc", {"method": method})
        with pytest.raises(ServerError, match="invalid Invitation"):
            HttpServer(served.url, 60).init_weight_transfer_engine({"place": "nowhere"})
    lines = served.log.read_text().splitlines()[before:]
    refusals = [line for line in lines if "refused" in line]
    assert len(refusals) == len(FORBIDDEN_METHODS) + 1
    assert len(lines) <= 2 * len(refusals), lines  # vLLM's API server logs a line, too


@on_engines(1, timeout=400)
@pytest.mark.parametrize("mode", MODES)
def test_requests_in_flight_while_weights_change(
    server: tuple[str, str], mode: str, tmp_path: Path
) -> None:
    """Publish while clients send requests. State comes from the server; nothing depends on time."""
    model, url = server
    os.environ[TOKEN] = SECRET
    reported = []
    drawn_without = []
    api = HttpServer(url, 60)
    new = streams_of(NUM_TOKENS)
    half = NUM_REQUESTS // 2
    api.pause("wait", clear_cache=True)  # earlier trainers may have left it generating
    with (
        ActorHybridWorker(config_of(model, [url], {}, server_pause=mode)) as worker,
        Clients(url) as clients,
    ):
        drawn_before = num_drawn(url)
        streams = clients.streams
        send(clients, new, half)
        for version in itertools.count():
            are_enough = any(stream.is_in_flight for stream in streams)
            is_last = version + 1 >= MIN_PUBLISHES * (1 if are_enough else 4)
            with worker.rollout_context():
                send(clients, new, NUM_REQUESTS - half)
                clients.wait_for_all_but(0 if is_last else UNFINISHED)
                name = version_of(api)
                drawing = [stream for stream in clients.running() if stream.tokens]
            with worker.train_context():
                drawn = num_drawn(url) - drawn_before
                clients.wait_for_tokens(drawn)
                if mode != "keep":
                    clients.wait_for_started()
                for stream in drawing:
                    stream.is_in_flight |= mode == "wait" or len(stream.tokens) < stream.num_tokens
                for stream in streams:
                    stream.arrived += [0] * (version - len(stream.arrived)) + [len(stream.tokens)]
                reported.append((name, version_of(api)))
                worker.save_hf_checkpoint(f"{tmp_path}/v{version}")
                if not is_last:
                    train_step(worker, version)
                    clients.send_and_leave(next(new))
                    send(clients, new, half)
                drawn_without.append(
                    max(num_drawn(url) - drawn_before, clients.num_tokens()) - drawn
                )
            if is_last:
                break
    assert reported == [(str(number), NO_VERSION) for number in range(version + 1)]
    assert drawn_without == [0] * len(reported), "tokens were generated after the weights had left"
    assert len(streams) >= MIN_PUBLISHES * NUM_REQUESTS
    check_versions(streams)
    check_replay(streams, tmp_path, len(reported))
    {"keep": check_kept, "wait": check_finished_first, "abort": check_aborted}[mode](streams)
    assert any(stream.is_in_flight for stream in streams)


@on_engines(1, timeout=400)
@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_a_server_with_other_settings_does_not_generate(
    server: tuple[str, str], name: str, tmp_path: Path
) -> None:
    """Publish from trainers of the same shapes and other settings."""
    model, url = server
    os.environ[TOKEN] = SECRET
    other = tmp_path / "model"
    shutil.copytree(model, other)
    config = read_config(other)
    write_config(other, {**config, **OTHER_SETTINGS[name]})
    with ActorHybridWorker(config_of(str(other), [url], {}, release_weights=False)) as worker:
        if name == "changed after a publish":
            worker.sharding.enter(State.INFER)
            worker.sharding.enter(State.TRAIN)
            worker.train.chunks[0].module.decoder.final_layernorm.eps = 0.5
        with pytest.raises(
            ComputationError, match=r"(?s)server 0 does not compute.*Settings that differ: "
        ):
            worker.sharding.enter(State.INFER)
        assert worker.sharding.state is State.TRAIN
        with pytest.raises(
            ServerError, match="requests wait: worker 0 has weights whose computation"
        ):
            HttpServer(url, 60).post("resume")
    (described,) = json.loads(HttpServer(url, 60).describe())["workers"]
    assert described["reads"]["rms_norm_eps"]["is_number"], (
        "trainers compare what vLLM's class reads"
    )


@on_engines(1, timeout=400)
def test_requests_continue_while_trainers_train(server: tuple[str, str], tmp_path: Path) -> None:
    """Requests continue from each version to the next, without a pause for training.

    The server reports the version published last, also when the trainer is a step ahead. A second
    step is refused. Before the third publish two publishes fail: one before anything is written,
    and one after.
    """
    model, url = server
    reported = []
    is_over = threading.Event()
    api = HttpServer(url, 60)
    drawn_before = num_drawn(url)
    os.environ[TOKEN] = SECRET
    config = config_of(model, [url], {}, release_weights=False, incremental="auto")
    with (
        ActorHybridWorker(config) as worker,
        Clients(url) as clients,
        ThreadPoolExecutor(1) as pool,
    ):
        # Twice the server's batch, so that it is never idle while this process is slow.
        sending = pool.submit(clients.send_until, is_over, streams_of((LENGTH - 16, 200)), 16)
        try:
            for version in range(PUBLISHES_MEANWHILE):
                if version == 2:
                    fail_to_publish(worker, worker.train.weights, "prepare")
                    assert version_of(api) == "1"
                    clients.wait_for_tokens(num_drawn(url) - drawn_before + MIN_DISTINCT)
                    fail_to_publish(worker, worker.sharding.offloader, "offload_parts")
                    assert (version_of(api), api.get("is_paused")["is_paused"]) == (
                        NO_VERSION,
                        True,
                    )
                    with pytest.raises(ServerError, match="requests wait: worker 0 has no weights"):
                        api.post("resume")
                with worker.rollout_context():
                    name = version_of(api)
                with worker.train_context():
                    worker.save_hf_checkpoint(f"{tmp_path}/v{version}")
                    train_step(worker, version)
                    assert worker.train.version == version + 1
                    with refused(StateError, "server-lag-exceeded", "server_max_lag is 1"):
                        train_step(worker, version + 1)
                    assert worker.train.version == version + 1
                    clients.wait_for_tokens(num_drawn(url) - drawn_before + MIN_DISTINCT)
                    reported.append((name, version_of(api)))
        finally:
            is_over.set()
        sending.result()
        clients.wait_for_all_but(0)
        assert worker.generate_sequences([[5, 6]], Sampling(max_tokens=2))
    streams = clients.streams
    assert reported == [(str(version), str(version)) for version in range(PUBLISHES_MEANWHILE)]
    check_replay(streams, tmp_path, PUBLISHES_MEANWHILE)
    check_kept(streams)
    assert {label for stream in streams for label in stream.labels} == set(
        range(PUBLISHES_MEANWHILE)
    )
    assert all(stream.labels == sorted(stream.labels) for stream in streams)
    assert (
        len({span[0] for stream in streams for span in stream.spans[1:]})
        >= PUBLISHES_MEANWHILE // 2
    )


def check_versions(streams: Sequence[Stream]) -> None:
    """Check that each token has one version, the one that was published when it arrived."""
    for stream in streams:
        assert stream.is_done
        starts = [start for _, start, _ in stream.spans]
        ends = [end for _, _, end in stream.spans]
        assert [0, *ends] == [*starts, len(stream.tokens)]
        assert stream.labels == stream.rollouts


def check_replay(streams: Sequence[Stream], checkpoints: Path, number: int) -> None:
    """Check that only the weights of its version reproduce a token's log-probability."""
    replayed = [replay(f"{checkpoints}/v{version}", streams) for version in range(number)]
    for stream, *by_version in zip(streams, *replayed, strict=True):
        received = torch.tensor(stream.log_probs, dtype=torch.float32)
        assert len(received) == len(stream.tokens)
        for label, start, end in stream.spans:
            fits = [
                version
                for version, (drawn, _) in enumerate(by_version)
                if torch.allclose(drawn[start:end], received[start:end], rtol=0, atol=TOLERANCE)
            ]
            assert int(label) in fits
            assert fits == [int(label)] or end - start < MIN_DISTINCT
            drawn, likeliest = by_version[int(label)]
            assert stream.temperature or torch.all(
                drawn[start:end] > likeliest[start:end] - TOLERANCE
            )


def check_complete(streams: Sequence[Stream]) -> None:
    assert {stream.finish_reason for stream in streams} == {"length"}
    assert all(len(stream.tokens) == stream.num_tokens for stream in streams)


def check_kept(streams: Sequence[Stream]) -> None:
    """Check that all are complete, and that those in flight continued with the next weights."""
    check_complete(streams)
    assert all(len(stream.spans) > 1 for stream in streams if stream.is_in_flight)


def check_finished_first(streams: Sequence[Stream]) -> None:
    """Check that all are complete, each with the weights with which it began."""
    check_complete(streams)
    assert all(len(stream.spans) == 1 for stream in streams)


def check_aborted(streams: Sequence[Stream]) -> None:
    """Check that requests in flight ended early, and that waiting ones were completed."""
    aborted = [stream for stream in streams if stream.finish_reason == "abort"]
    check_complete([stream for stream in streams if stream not in aborted])
    assert all(len(stream.tokens) < stream.num_tokens for stream in aborted)
    assert all(len(stream.spans) <= 1 for stream in streams)
    assert any(stream.tokens for stream in aborted)

"""Requests in flight while weights leave a vLLM server and new ones come: which weights drew each of their tokens.

vLLM says it where an answer ends, streamed or not, as spans over the answer's tokens: `/inference/v1/generate` does, of
a server with --enable-scale-out; `/v1/completions` says nothing of versions. Here each token is computed once more, by
transformers from the checkpoint of its version.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import pytest
import requests
import torch

from hybrid_engine import ActorHybridWorker, Sampling
from hybrid_engine.errors import ComputationError, ReshardError, ServerError, StateError
from hybrid_engine.serving.clients import HttpServer, PauseMode
from hybrid_engine.serving.invitation import NO_VERSION, TOKEN
from hybrid_engine.serving.publisher import WeightPublisher
from hybrid_engine.switch.states import State
from tests.harness.errors import has_code
from tests.harness.launch import Call, Outcomes, Ranks
from tests.harness.vllm_server import FILLED, PLAIN, Server, serving
from tests.hybrid_engine.backends.vllm.support import random_weights, write_checkpoint
from tests.hybrid_engine.serving.test_servers import config_of, train_step
from tests.zoo.families import served_config

MODES = ("keep", "wait", "abort")
LENGTH = 256
SECRET = "a secret of this server and its trainers"
SECONDS = 120.0
"""Longest wait for anything."""
TOLERANCE = 1e-4
"""Of log-probabilities in float32, of two implementations."""
TELLING = 6
"""Tokens of a span that fit no other version than theirs."""


OTHERWISE = {"rms_norm_eps": 0.5, "rope_theta": 3.0}
"""Settings of config.json that move no weight."""
STRANGERS = (
    *(("POST", "pause"), ("POST", "resume"), ("POST", "sleep?level=0"), ("POST", "abort_requests")),
    *(("POST", "start_weight_update"), ("POST", "update_weights"), ("POST", "finish_weight_update")),
    *(("POST", "reset_prefix_cache"), ("POST", "reset_mm_cache"), ("POST", "collective_rpc")),
    *(("POST", "v1/load_lora_adapter"), ("GET", "server_info"), ("DELETE", "health"), ("POST", "no/such/route")),
)
"""Requests of somebody who has no token."""
REFUSED = ("save_sharded_state", "update_environment_variables", "reload_weights", "execute_dummy_batch")
"""Methods of vLLM's workers that a server lets nobody call."""


@dataclass(frozen=True)
class Load:
    """What is asked of a server.

    Attributes:
        publishes: of weights, at least; there are more until enough requests were in flight when weights left.
        requests: new ones for each publish: half are sent while there are no weights, half once there are.
        num_tokens: lengths of answers, in turn.
        unfinished: weights leave once no more requests than these are under way.
        in_flight: requests that were in flight when weights left, in all.
    """

    publishes: int
    requests: int
    num_tokens: tuple[int, ...]
    unfinished: int
    in_flight: int


SMALL = Load(3, 4, (12, 24, 40, 160), 2, 1)
LARGE = Load(20, 10, (8, 60, 16, 90, 24, 160, 32, 120, 40, 200), 6, 40)


@dataclass
class Stream:
    """A request, and what has come of it.

    Attributes:
        spans: (version, first token, token after the last), from the last part of the answer.
        arrived: number of tokens that there were once the weights of each version had left.
        is_in_flight: it had some of its tokens when weights were asked to leave, and for all that was known not all.
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

    def body(self, seed: int) -> dict[str, Any]:
        sampling = {"temperature": self.temperature, "max_tokens": self.num_tokens, "ignore_eos": True, "logprobs": 0}
        return {"token_ids": self.prompt, "sampling_params": {**sampling, "seed": seed}, "stream": True}

    def take(self, choice: dict[str, Any]) -> None:
        """A part of the answer."""
        self.tokens += choice["token_ids"]
        self.log_probs += [each["logprob"] for each in choice["logprobs"]["content"]]
        if choice["finish_reason"] is not None:
            self.finish_reason = choice["finish_reason"]
            self.spans = [(each["version"], each["start"], each["end"]) for each in choice["weight_versions"]]

    @property
    def labels(self) -> list[int]:
        """Version of each token, as vLLM says."""
        return [int(version) for version, start, end in self.spans for _ in range(start, end)]

    @property
    def rollouts(self) -> list[int]:
        """Version that was published when each token came."""
        before = [0, *self.arrived]
        return [version for version, count in enumerate(self.arrived) for _ in range(before[version], count)]


class Clients:
    """Requests under way. A context manager: at its end all have ended."""

    def __init__(self, url: str) -> None:
        self._url, self._changed = url, threading.Condition()
        self._pool = ThreadPoolExecutor(32)
        self._failures: list[BaseException] = []
        self.streams: list[Stream] = []

    def __enter__(self) -> Clients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def send(self, stream: Stream) -> None:
        """Send it; the server has accepted it then."""
        response = self._post(stream)
        self.streams.append(stream)
        self._pool.submit(self._read, stream, response)

    def send_and_leave(self, stream: Stream) -> None:
        """Send it, and hang up."""
        self._post(stream).close()

    def send_until(self, is_over: threading.Event, new: Iterator[Stream], number: int) -> None:
        """Have so many under way."""
        while not is_over.wait(0.01):
            for stream in itertools.islice(new, number - len(self.under_way())):
                self.send(stream)

    def num_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self.streams)

    def under_way(self) -> list[Stream]:
        return [stream for stream in self.streams if not stream.is_done]

    def wait_for_all_but(self, number: int) -> None:
        """Until no more than so many are under way."""
        self._wait(lambda: len(self.under_way()) <= number)

    def wait_for_begun(self) -> None:
        """Until all have ended of which there are tokens."""
        self._wait(lambda: all(not stream.tokens for stream in self.under_way()))

    def wait_for_tokens(self, number: int) -> None:
        """Until so many have come, of all requests together."""
        self._wait(lambda: self.num_tokens() >= number)

    def _wait(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            is_there = self._changed.wait_for(lambda: bool(self._failures) or holds(), SECONDS)
        if self._failures:
            raise self._failures[0]
        assert is_there, f"not within {SECONDS:g} s: {self.num_tokens()} tokens, {self.under_way()}"

    def _post(self, stream: Stream) -> requests.Response:
        body = stream.body(len(self.streams))
        response = requests.post(f"{self._url}/inference/v1/generate", json=body, stream=True, timeout=SECONDS)
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
        except BaseException as error:  # handed to whoever waits
            self._failures.append(error)
        with self._changed:
            stream.is_done = True
            self._changed.notify_all()


@dataclass(frozen=True)
class Run:
    """What came of a load.

    Attributes:
        replayed: by version, of each stream: log-probabilities of its tokens, and of the likeliest in their place.
        said: by version, what the server called its weights while it had them, and then.
        drawn_without: by version, tokens that were drawn after its weights had left.
    """

    streams: list[Stream]
    replayed: list[list[tuple[torch.Tensor, torch.Tensor]]]
    said: list[tuple[str, str]]
    drawn_without: list[int]

    @property
    def in_flight(self) -> list[Stream]:
        return [stream for stream in self.streams if stream.is_in_flight]


def publish_under_load(model: str, url: str, mode: str, load: Load, out: str) -> Run:
    """One trainer publishes while its clients ask; everything is asked of the server, nothing is timed."""
    os.environ[TOKEN] = SECRET
    said, drawn_without = list[tuple[str, str]](), list[int]()
    server, new, half = HttpServer(url, 60), streams_of(load.num_tokens), load.requests // 2
    server.pause("wait", clear_cache=True)  # earlier trainers may have left it drawing tokens
    with ActorHybridWorker(config_of(model, [url], {}, server_pause=mode)) as worker, Clients(url) as clients:
        drawn_before, streams = num_drawn(url), clients.streams
        send(clients, new, half)
        for version in itertools.count():
            are_enough = sum(stream.is_in_flight for stream in streams) >= load.in_flight
            is_last = version + 1 >= load.publishes * (1 if are_enough else 4)
            with worker.rollout_context():
                send(clients, new, load.requests - half)
                clients.wait_for_all_but(0 if is_last else load.unfinished)
                name, drawing = version_of(server), [stream for stream in clients.under_way() if stream.tokens]
            with worker.train_context():
                drawn = num_drawn(url) - drawn_before
                clients.wait_for_tokens(drawn)
                if mode != "keep":
                    clients.wait_for_begun()
                for stream in drawing:
                    stream.is_in_flight |= mode == "wait" or len(stream.tokens) < stream.num_tokens
                for stream in streams:
                    stream.arrived += [0] * (version - len(stream.arrived)) + [len(stream.tokens)]
                said.append((name, version_of(server)))
                worker.save_hf_checkpoint(f"{out}/v{version}")
                if not is_last:
                    train_step(worker, version)
                    clients.send_and_leave(next(new))
                    send(clients, new, half)
                drawn_without.append(max(num_drawn(url) - drawn_before, clients.num_tokens()) - drawn)
            if is_last:
                break
    return Run(streams, [replay(f"{out}/v{number}", streams) for number in range(version + 1)], said, drawn_without)


def train_meanwhile(model: str, url: str, publishes: int, out: str) -> Run:
    """As many publishes to a server that keeps its weights, with a training step after each, while requests go on.

    Another step is refused. Two publishes fail, one before anything is written and one after, before the third one.
    """
    said, is_over, server = list[tuple[str, str]](), threading.Event(), HttpServer(url, 60)
    drawn_before = num_drawn(url)
    os.environ[TOKEN] = SECRET
    config = config_of(model, [url], {}, release_weights=False, incremental="auto")
    with ActorHybridWorker(config) as worker, Clients(url) as clients, ThreadPoolExecutor(1) as pool:
        # twice as many as the server draws for at once: it is never idle while this process is slow to ask again
        sending = pool.submit(clients.send_until, is_over, streams_of((LENGTH - 16, 200)), 16)
        try:
            for version in range(publishes):
                if version == 2:
                    fail_to_publish(worker, worker.train.weights, "prepare")
                    assert version_of(server) == "1"
                    clients.wait_for_tokens(num_drawn(url) - drawn_before + TELLING)
                    fail_to_publish(worker, worker.sharding.offloader, "offload_parts")
                    assert (version_of(server), server.get("is_paused")["is_paused"]) == (NO_VERSION, True)
                    with pytest.raises(ServerError, match="requests wait: worker 0 has no weights"):
                        server.post("resume")
                with worker.rollout_context():
                    name = version_of(server)
                with worker.train_context():
                    worker.save_hf_checkpoint(f"{out}/v{version}")
                    train_step(worker, version)
                    assert worker.train.version == version + 1
                    with pytest.raises(StateError, check=has_code("server-lag-exceeded", "server_max_lag is 1")):
                        train_step(worker, version + 1)
                    assert worker.train.version == version + 1
                    clients.wait_for_tokens(num_drawn(url) - drawn_before + TELLING)
                    said.append((name, version_of(server)))
        finally:
            is_over.set()
        sending.result()
        clients.wait_for_all_but(0)
        assert worker.generate_sequences([[5, 6]], Sampling(max_tokens=2))
        meet_others(worker, url)
    return Run(clients.streams, [replay(f"{out}/v{at}", clients.streams) for at in range(publishes)], said, [])


def meet_others(worker: ActorHybridWorker, url: str) -> None:
    """Others are refused while these trainers live, unless they take the server; then these get no token of theirs."""
    others = functools.partial(
        WeightPublisher, worker.train, [url], config=worker.config.generate_config, job=worker.job
    )
    with (
        closing(others()) as publisher,
        pytest.raises(ServerError, match=r"job .* whose trainers are alive"),
    ):
        publisher.publish()
    assert worker.generate_sequences([[5, 6]], Sampling(max_tokens=2))
    mark = worker.sharding.drawn_with.arguments()
    body = {"prompt": [5, 6], "max_tokens": LENGTH - 16, "ignore_eos": True, "vllm_xargs": mark}
    server, drawn_before = HttpServer(url, 60), num_drawn(url)
    with closing(others(take_over=True)) as publisher, ThreadPoolExecutor(1) as pool:

        def until_refused() -> dict[str, Any]:
            """Request one completion after the other: on a slow machine one may end before the publish."""
            while True:
                (choice,) = server.post("v1/completions", body)["choices"]
                if choice["finish_reason"] != "length":
                    return dict(choice)

        in_flight = pool.submit(until_refused)
        while num_drawn(url) == drawn_before:
            time.sleep(0.01)
        publisher.publish()
        ended = in_flight.result()
        assert ended["finish_reason"] == "abort"
        assert "the server belongs to job" in ended["stop_reason"]
        with pytest.raises(ServerError, match="the server belongs to job"):
            worker.generate_sequences([[5, 6]], Sampling(max_tokens=2))
        with pytest.raises(ServerError, check=has_code("server-lost")):
            worker.sharding.enter(State.INFER)
        with pytest.raises(ServerError, match=r"job .* whose trainers are alive"):
            worker.sharding.enter(State.INFER)
        publisher.withdraw()
    with worker.rollout_context():
        assert worker.generate_sequences([[5, 6]], Sampling(max_tokens=2))


def compute_otherwise(model: str, url: str, out: str, changed: dict[str, Any]) -> str:
    """Trainers of a model that has the server's shapes and computes something else; what they hear."""
    os.environ[TOKEN] = SECRET
    other = Path(out, "model")
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **changed}))
    with ActorHybridWorker(config_of(str(other), [url], {}, release_weights=False)) as worker:
        with pytest.raises(ComputationError) as caught:
            worker.sharding.enter(State.INFER)
        assert worker.sharding.state is State.TRAIN
        with pytest.raises(ServerError, match="requests wait: worker 0 has weights whose computation"):
            HttpServer(url, 60).post("resume")
    return str(caught.value)


def fail_to_publish(worker: ActorHybridWorker, owner: object, call: str) -> None:
    """The trainer's weights stay what they are."""
    failing = mock.patch.object(owner, call, side_effect=MemoryError("no memory for 3 GB"))
    with failing, pytest.raises(ReshardError, match="no memory for 3 GB"):
        worker.sharding.enter(State.INFER)
    assert worker.sharding.state is State.TRAIN


def take_over(model: str, url: str, out: str) -> Run:
    """Trainers end while the server has their weights; others publish to it while it draws tokens with them."""
    os.environ[TOKEN] = SECRET
    config, drawn_before, pause = config_of(model, [url], {}), num_drawn(url), HttpServer.pause

    def pause_while_drawing(server: HttpServer, mode: PauseMode, clear_cache: bool) -> None:
        while True:  # this process may be so slow to ask or to pause that nothing is in flight
            send(clients, streams_of((LENGTH - 16,)), 8)
            pause(server, mode, clear_cache)
            clients.wait_for_tokens(num_drawn(url) - drawn_before)
            for stream in clients.streams:
                stream.is_in_flight = 0 < len(stream.tokens) < stream.num_tokens
            if any(stream.is_in_flight for stream in clients.streams):
                return
            server.resume()

    with Clients(url) as clients:
        with ActorHybridWorker(config) as worker:
            worker.save_hf_checkpoint(f"{out}/v0")
            with worker.rollout_context():
                pass
        with ActorHybridWorker(config) as worker:
            train_step(worker, 0)
            worker.save_hf_checkpoint(f"{out}/v1")
            with mock.patch.object(HttpServer, "pause", pause_while_drawing):
                worker.sharding.enter(State.INFER)
            clients.wait_for_all_but(0)
            with worker.train_context():
                pass
    return Run(clients.streams, [replay(f"{out}/v{number}", clients.streams) for number in (0, 1)], [], [])


def streams_of(num_tokens: Sequence[int]) -> Iterator[Stream]:
    """Of these lengths, in turn; half of them are greedy."""
    chosen = random.Random(7)
    for number in itertools.count():
        prompt = [chosen.randrange(3, 120) for _ in range(chosen.randint(1, 12))]
        yield Stream(prompt, num_tokens[number % len(num_tokens)], float(number // 2 % 2))


def send(clients: Clients, new: Iterator[Stream], number: int) -> None:
    for stream in itertools.islice(new, number):
        clients.send(stream)


def version_of(server: HttpServer) -> str:
    return str(server.get("weight_info")["weight_version"])


def num_drawn(url: str) -> int:
    """Tokens that the server has drawn since it is up."""
    page = requests.get(f"{url}/metrics", timeout=60).text
    counted = re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", page, re.MULTILINE)
    assert counted is not None, page
    return int(float(counted[1]))


def replay(checkpoint: str, streams: Sequence[Stream]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By a checkpoint, of each stream: log-probabilities of its tokens, and of the likeliest in their place."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    sequences = [torch.tensor(stream.prompt + stream.tokens) for stream in streams]
    found = []
    with torch.inference_mode():
        all_scores = model(torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)).logits.log_softmax(-1)
        for stream, sequence, scores in zip(streams, sequences, all_scores, strict=True):
            first, last = len(stream.prompt) - 1, len(sequence) - 1
            drawn = scores[first:last].gather(-1, sequence[first + 1 :, None])[:, 0]
            found.append((drawn.clone(), scores[first:last].amax(-1)))
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A model and the address of a server; trainers of each test begin with the same weights."""
    directory = tmp_path_factory.mktemp("requests")
    config = served_config("qwen2", torch_dtype="float32", max_position_embeddings=LENGTH)
    model = write_checkpoint(directory / "model", config, random_weights(config, 7, torch.float32))
    arguments = ("--enable-scale-out", "--max-model-len", str(LENGTH))
    # as `vllm serve` does by itself; and without a compiler, which takes a minute at the first request
    spawning = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "TORCH_COMPILE_DISABLE": "1", TOKEN: SECRET}
    with serving(model, directory / "server", *FILLED, *PLAIN, *arguments, environment=spawning) as served:
        assert requests.get(f"{served.url}/weight_info", timeout=60).json() == {"weight_version": NO_VERSION}
        assert requests.get(f"{served.url}/is_paused", timeout=60).json() == {"is_paused": True}
        check_queues(served)
        yield model, served.url
        check_strangers(served)


def check_queues(served: Server) -> None:
    """The server's queues in shared memory have no name, so that nothing stays when it is killed."""
    pids = [pid for pids in served.processes().values() for pid in pids]
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    queues = [line for line in lines if "/dev/shm/psm_" in line]
    assert queues
    assert all(line.endswith("(deleted)") for line in queues)


def check_strangers(served: Server) -> None:
    """Whoever has no token neither holds up a server nor looks into it; a refusal is a line of its log."""
    for method, route in STRANGERS:
        answer = requests.request(method, f"{served.url}/{route}", json={"method": "reset_weights"}, timeout=60)
        assert answer.status_code == 403, route
    assert requests.get(f"{served.url}/health", timeout=60).ok
    before = len(served.log.read_text().splitlines())
    with mock.patch.dict(os.environ, {TOKEN: SECRET}):
        for method in REFUSED:
            with pytest.raises(ServerError, match="is refused"):
                HttpServer(served.url, 60).post("collective_rpc", {"method": method})
        with pytest.raises(ServerError, match="invalid Invitation"):
            HttpServer(served.url, 60).init_weight_transfer_engine({"place": "nowhere"})
    lines = served.log.read_text().splitlines()[before:]
    refused = [line for line in lines if "refused" in line]
    assert len(refused) == len(REFUSED) + 1
    assert len(lines) <= 2 * len(refused), lines  # vLLM's API server says that there was an error


@pytest.fixture(scope="module")
def outcomes(engines: Ranks, server: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Of the small load in each mode, and of `take_over`: on one rank, which takes seconds to start."""
    calls: dict[str, Call] = {
        mode: (publish_under_load, (*server, mode, SMALL, str(tmp_path_factory.mktemp(mode)))) for mode in MODES
    }
    calls["take over"] = (take_over, (*server, str(tmp_path_factory.mktemp("others"))))
    for key, value in OTHERWISE.items():
        directory = str(tmp_path_factory.mktemp("otherwise"))
        calls[key] = (compute_otherwise, (*server, directory, {key: value}))
    calls["off policy"] = (train_meanwhile, (*server, 5, str(tmp_path_factory.mktemp("off-policy"))))
    return engines.launch_in_turn(1, calls, timeout=400)


@pytest.mark.parametrize("mode", MODES)
def test_requests_in_flight(outcomes: Outcomes, mode: str) -> None:
    check(outcomes[mode][0], mode, SMALL)


def test_other_trainers_publish_to_a_server_that_draws_tokens(outcomes: Outcomes) -> None:
    """Requests go on as they do where the trainers are the same."""
    run = outcomes["take over"][0]
    print(figures(run))
    check_replay(run)
    assert run.in_flight
    check_kept(run)
    assert all(set(stream.labels) == {0, 1} and stream.labels == sorted(stream.labels) for stream in run.in_flight)


@pytest.mark.parametrize("key", OTHERWISE)
def test_a_server_that_computes_something_else_draws_no_token(outcomes: Outcomes, key: str) -> None:
    said = outcomes[key][0]
    assert "server 0 does not compute what the trainer computes" in said
    assert "Settings that differ: " in said


def test_requests_go_on_while_trainers_train(outcomes: Outcomes) -> None:
    check_off_policy(outcomes["off policy"][0], 5)


@pytest.mark.long
def test_many_publishes_while_requests_go_on(engines: Ranks, server: tuple[str, str], tmp_path: Path) -> None:
    run = engines.launch(train_meanwhile, 1, *server, 20, str(tmp_path), timeout=550)[0]
    check_off_policy(run, 20)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_many_requests_over_many_publishes(engines: Ranks, server: tuple[str, str], tmp_path: Path, mode: str) -> None:
    run = engines.launch(publish_under_load, 1, *server, mode, LARGE, str(tmp_path), timeout=550)[0]
    check(run, mode, LARGE)


def check_off_policy(run: Run, publishes: int) -> None:
    """A server says the version that was published last, also once the trainer is a step ahead, and draws tokens with
    each of them; requests go on from one to the next."""
    print(figures(run))
    assert run.said == [(str(version), str(version)) for version in range(publishes)]
    check_replay(run)
    check_kept(run)
    assert {label for stream in run.streams for label in stream.labels} == set(range(publishes))
    assert all(stream.labels == sorted(stream.labels) for stream in run.streams)
    assert len({span[0] for stream in run.streams for span in stream.spans[1:]}) >= publishes // 2


def check(run: Run, mode: str, load: Load) -> None:
    print(figures(run))
    assert len(run.said) >= load.publishes
    assert len(run.streams) >= load.publishes * load.requests
    check_versions(run)
    check_replay(run)
    {"keep": check_kept, "wait": check_finished_first, "abort": check_aborted}[mode](run)
    assert len(run.in_flight) >= load.in_flight


def check_versions(run: Run) -> None:
    """A token is of the weights that were published when it was drawn, and none was drawn while there were none."""
    assert run.said == [(str(version), NO_VERSION) for version in range(len(run.said))]
    assert run.drawn_without == [0] * len(run.said)
    for stream in run.streams:
        assert stream.is_done
        starts, ends = [start for _, start, _ in stream.spans], [end for _, _, end in stream.spans]
        assert [0, *ends] == [*starts, len(stream.tokens)]
        assert stream.labels == stream.rollouts


def check_replay(run: Run) -> None:
    """The weights of its version, and of no other, give a token the log-probability that it came with."""
    for number, stream in enumerate(run.streams):
        came = torch.tensor(stream.log_probs, dtype=torch.float32)
        assert len(came) == len(stream.tokens)
        for label, start, end in stream.spans:
            by_version = [of_version[number] for of_version in run.replayed]
            fits = [
                version
                for version, (drawn, _) in enumerate(by_version)
                if torch.allclose(drawn[start:end], came[start:end], rtol=0, atol=TOLERANCE)
            ]
            assert int(label) in fits
            assert fits == [int(label)] or end - start < TELLING
            drawn, likeliest = by_version[int(label)]
            assert stream.temperature or torch.all(drawn[start:end] > likeliest[start:end] - TOLERANCE)


def check_kept(run: Run) -> None:
    """All are whole; those that were in flight went on with the next weights."""
    assert {stream.finish_reason for stream in run.streams} == {"length"}
    assert all(len(stream.tokens) == stream.num_tokens for stream in run.streams)
    assert all(len(stream.spans) > 1 for stream in run.in_flight)


def check_finished_first(run: Run) -> None:
    """All are whole, by the weights with which they began."""
    assert {stream.finish_reason for stream in run.streams} == {"length"}
    assert all(len(stream.tokens) == stream.num_tokens for stream in run.streams)
    assert all(len(stream.spans) == 1 for stream in run.streams)


def check_aborted(run: Run) -> None:
    """Those in flight have ended with the tokens so far; those that waited for weights were not."""
    ended = [stream for stream in run.streams if stream.finish_reason == "abort"]
    assert {stream.finish_reason for stream in run.streams} == {"length", "abort"}
    assert all(len(stream.tokens) == stream.num_tokens for stream in run.streams if stream not in ended)
    assert all(len(stream.tokens) < stream.num_tokens for stream in ended)
    assert all(len(stream.spans) <= 1 for stream in run.streams)
    assert any(stream.tokens for stream in ended)


def figures(run: Run) -> str:
    tokens = sum(len(stream.tokens) for stream in run.streams)
    changed = [stream for stream in run.streams if len(stream.spans) > 1]
    after = sum(stream.labels[-1] != label for stream in changed for label in stream.labels)
    ended = sum(stream.finish_reason == "abort" for stream in run.streams)
    return (
        f"{len(run.said)} publishes, {len(run.streams)} requests, {tokens} tokens; in flight {len(run.in_flight)}; "
        f"of more than one version {len(changed)}, at most {max(len(stream.spans) for stream in run.streams)}, "
        f"{sum(len(stream.tokens) for stream in changed)} tokens, {after} not of the last; aborted {ended}"
    )

"""Trainers on one host fill servers on another: what these hold, and what goes over the link between them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import ActorHybridWorker
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.serving.clients import HttpServer
from hybrid_engine.serving.invitation import NO_VERSION, TOKEN
from hybrid_engine.switch.report import ReshardReport
from tests.harness.hosts import Host, two_hosts
from tests.harness.launch import Ranks, start_fork_server
from tests.harness.vllm_server import FILLED, PLAIN, serving
from tests.hybrid_engine.backends.vllm.support import random_weights, write_checkpoint, write_config
from tests.hybrid_engine.serving.test_servers import (
    PROMPTS,
    TP2,
    checksums,
    complete,
    config_of,
    train_step,
    write_model,
)
from tests.zoo.families import served_config

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SIZES = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
SERVERS = {"tp1": (), "tp2": TP2}
NUM_TRAINERS, NUM_VERSIONS, MAX_TOKENS = 2, 3, 8
LOST_SECONDS = 15
SECRET = "of these two hosts"
ANYWHERE = ("0.0.0.0:", ":::")
BESIDE, BESIDE_WITH_A_JOIN = 0.01, 0.02
"""Bytes over the link beside the plan's, in both directions and with all headers, as a share of the plan's. A join has
layouts and connections."""


@dataclass(frozen=True)
class Published:
    """One version, on servers.

    Attributes:
        report: of the switch.
        link: bytes that the trainers' host sent and received meanwhile; link_back: likewise, in the switch back.
        listeners: what listens for TCP on the trainers' host after the switch.
        versions, sums, answers: by server.
    """

    report: ReshardReport
    link: dict[str, int]
    link_back: dict[str, int]
    listeners: set[str]
    versions: list[str]
    sums: list[dict[str, str]]
    answers: list[Any]


class Counted:
    """Bytes over a link during a block, once all ranks are through it."""

    def __init__(self, worker: ActorHybridWorker, host: Host) -> None:
        self._worker, self._host = worker, host
        self.nbytes: dict[str, int] = {}

    def __enter__(self) -> Counted:
        self._worker.barrier("before")
        self._before = self._host.link_nbytes()
        self._worker.barrier("counted")
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.barrier("after")
        self.nbytes = {way: count - self._before[way] for way, count in self._host.link_nbytes().items()}
        self._worker.barrier("counted")


def publish_versions(host: Host, urls: list[str]) -> list[Published]:
    """On a rank of the trainers, from their host."""
    os.environ[TOKEN] = SECRET
    with host.entered():
        actor = {"tensor_model_parallel_size": 2}
        config = config_of("/tmp/model", urls, actor, server_address=host.address, bucket_mb=8)
        with ActorHybridWorker(config) as worker:
            servers = [HttpServer(url, 60) for url in urls]
            return [_publish(worker, host, servers, version) for version in range(NUM_VERSIONS)]


def _publish(worker: ActorHybridWorker, host: Host, servers: list[HttpServer], version: int) -> Published:
    with Counted(worker, host) as there:
        worker.sharding.publish()
    report = worker.sharding.last_report
    versions, sums, answers, listeners = [], [], [], host.listeners()
    if worker.rank == 0:
        versions = [server.get("weight_info")["weight_version"] for server in servers]
        sums = [checksums(server) for server in servers]
        answers = [answers_of(server) for server in servers]
    worker.barrier("looked at")
    with Counted(worker, host) as back:
        worker.sharding.withdraw()
    if worker.rank == 0:
        assert [server.get("weight_info")["weight_version"] for server in servers] == [NO_VERSION] * len(servers)
    worker.save_hf_checkpoint(f"/tmp/v{version}")
    train_step(worker, version)
    return Published(report, there.nbytes, back.nbytes, listeners, versions, sums, answers)


def answers_of(server: HttpServer) -> list[Any]:
    """One prompt after the other: products of other sizes, in a batch, are rounded otherwise."""
    return [complete(server, MAX_TOKENS, [prompt]) for prompt in PROMPTS]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@contextmanager
def started(host: Host, model: str, *load: str) -> Iterator[list[str]]:
    """Addresses of one server for each of SERVERS, on a host; `model`: a directory there."""
    with ExitStack() as ends, ThreadPoolExecutor(len(SERVERS)) as pool:

        def start(name: str) -> str:
            directory = host.path(f"{model} {name}")
            server = serving(model, directory, *load, *PLAIN, *SERVERS[name], environment={TOKEN: SECRET}, host=host)
            return ends.enter_context(server).url

        yield list(pool.map(start, SERVERS))


def test_servers_on_another_host_have_each_byte_once_over_the_link(engines: Ranks, hosts: tuple[Host, Host]) -> None:
    trainers, away = hosts
    config = {**served_config("qwen2", **SIZES), "torch_dtype": "float32"}
    weights = random_weights(config, 7, torch.float32)
    write_checkpoint(trainers.path("/tmp/model"), config, weights)
    write_config(away.path("/tmp/model"), config)
    start_fork_server()  # which is to be on neither host
    with started(away, "/tmp/model", *FILLED) as urls:
        before = away.listeners()
        with trainers.network():
            published = engines.launch(publish_versions, NUM_TRAINERS, trainers, urls, timeout=400)[0]
        new = away.listeners() - before
    assert {each.rpartition(":")[0] for each in new} == {away.address}
    assert not [each for found in published for each in found.listeners if each.startswith(ANYWHERE)]

    least = sum(weight.nbytes for weight in weights.values())  # both servers on one host: all of it, once
    for version, found in enumerate(published):
        report, link = found.report, sum(found.link.values())
        assert report.bytes_across_hosts == least
        assert report.bytes_received == report.bytes_least > least
        assert report.tensors_verified > 0
        assert found.versions == [str(version)] * len(urls)
        assert least < link < least * (1 + (BESIDE if version else BESIDE_WITH_A_JOIN))
        assert sum(found.link_back.values()) < least * BESIDE
    assert len({str(found.sums) for found in published}) == NUM_VERSIONS
    assert_cold(away, trainers.path(f"/tmp/v{NUM_VERSIONS - 1}"), published[-1])


def assert_cold(away: Host, checkpoint: Path, published: Published) -> None:
    """Servers that load the checkpoint hold and compute what those hold and compute that were filled."""
    shutil.copytree(checkpoint, away.path("/tmp/cold"))
    with started(away, "/tmp/cold") as urls, away.network():
        cold = [HttpServer(url, 60) for url in urls]
        assert [checksums(server) for server in cold] == published.sums
        assert [answers_of(server) for server in cold] == published.answers


@dataclass(frozen=True)
class Cut:
    """A publish during which the link was cut, and one after it was mended.

    Attributes:
        error: which the first one raised. seconds: until then.
        is_as_before: the training weights were, bit for bit.
        version: on the server, after the second one.
    """

    error: str
    seconds: float
    is_as_before: bool
    version: str


def publish_over_a_cut_link(host: Host, away: Host, url: str) -> dict[str, Cut]:
    os.environ[TOKEN] = SECRET
    with host.entered():
        keys = {"server_address": host.address, "timeout_seconds": LOST_SECONDS}
        config = config_of("/tmp/model", [url], {"tensor_model_parallel_size": 2}, **keys)
        with ActorHybridWorker(config) as worker:
            worker.sharding.publish()
            worker.sharding.withdraw()
            return {when: _cut(worker, away, HttpServer(url, 60), when) for when in ("before it", "within it")}


def _cut(worker: ActorHybridWorker, away: Host, server: HttpServer, when: str) -> Cut:
    flats = worker.sharding.trainer.weights.buffers()
    before = {name: flat.clone() for name, flat in flats.items()}

    def cut() -> None:
        if worker.rank == 0:
            away.set_link("down")
        worker.barrier("cut")

    manager = worker.sharding._connected()
    with pytest.MonkeyPatch.context() as patch:
        if when == "before it":
            cut()
        else:  # the server has begun
            enter = manager.enter
            patch.setattr(manager, "enter", lambda target: (cut(), enter(target)))
        started = time.monotonic()
        with pytest.raises(HybridEngineError) as caught:
            worker.sharding.publish()
        seconds = time.monotonic() - started
    is_as_before = all(torch.equal(flat, before[name]) for name, flat in flats.items())
    if worker.rank == 0:
        away.set_link("up")
    worker.barrier("mended")
    worker.sharding.publish()
    version = server.get("weight_info")["weight_version"] if worker.rank == 0 else ""
    worker.sharding.withdraw()
    return Cut(str(caught.value), seconds, is_as_before, version)


def test_trainers_outlive_a_link_that_is_cut(engines: Ranks, hosts: tuple[Host, Host]) -> None:
    trainers, away = hosts
    model = write_model(trainers.path("/tmp/model"), "qwen2")
    shutil.copytree(model, away.path("/tmp/model"))
    start_fork_server()
    arguments = "/tmp/model", away.path("/tmp/server"), *FILLED, *PLAIN
    with serving(*arguments, environment={TOKEN: SECRET}, host=away) as server, trainers.network():
        found = engines.launch(publish_over_a_cut_link, NUM_TRAINERS, trainers, away, server.url, timeout=300)
    for by_rank in found:
        for cut in by_rank.values():
            assert cut.seconds < LOST_SECONDS + 20
            assert cut.is_as_before
        assert (
            "asking the servers for a switch" in by_rank["before it"].error or server.url in by_rank["before it"].error
        )
        assert "a server was lost in a switch" in by_rank["within it"].error
    assert [cut.version for cut in found[0].values()] == ["0", "0"]

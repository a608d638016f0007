"""Trainers on one host fill servers on another: their weights, and the bytes between the hosts."""

from __future__ import annotations

import os
import re
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

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
}
SERVERS = {"tp1": (), "tp2": TP2}
NUM_TRAINERS = 2
NUM_VERSIONS = 3
MAX_TOKENS = 8
LOST_SECONDS = 15
SECRET = "of these two hosts"
ANYWHERE = ("0.0.0.0:", ":::")
OVERHEAD = 0.01
OVERHEAD_WITH_JOIN = 0.02
"""Bytes over the link in addition to the plan's, in both directions and with all headers, as a
share of the plan's. A join adds layouts and connections."""


@dataclass(frozen=True)
class Served:
    """Checksums and completions, by server."""

    sums: list[dict[str, str]]
    completions: list[Any]


class LinkCounter:
    """Counts bytes over a link in both directions during a block, from and to a barrier of all
    ranks.
    """

    def __init__(self, worker: ActorHybridWorker, host: Host) -> None:
        self._worker = worker
        self._host = host
        self.nbytes = 0

    def __enter__(self) -> LinkCounter:
        self._worker.barrier("before")
        self._before = self._host.link_nbytes()
        self._worker.barrier("counted")
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.barrier("after")
        self.nbytes = sum(self._host.link_nbytes().values()) - sum(self._before.values())
        self._worker.barrier("counted")


def publish_versions(host: Host, urls: list[str], least: int) -> list[Served]:
    """Publish from a rank of the trainers, on its host; `least`: bytes that must be sent."""
    os.environ[TOKEN] = SECRET
    with host.entered():
        actor = {"tensor_model_parallel_size": 2}
        config = config_of("/tmp/model", urls, actor, server_address=host.address, bucket_mb=8)
        with ActorHybridWorker(config) as worker:
            servers = [HttpServer(url, 60) for url in urls]
            return [
                _publish(worker, host, servers, version, least) for version in range(NUM_VERSIONS)
            ]


def _publish(
    worker: ActorHybridWorker, host: Host, servers: list[HttpServer], version: int, least: int
) -> Served:
    with LinkCounter(worker, host) as forth:
        worker.sharding.publish()
    report = worker.sharding.last_report
    assert report.bytes_across_hosts == least
    assert report.bytes_received == report.bytes_least > least
    assert report.tensors_verified > 0
    assert least < forth.nbytes < least * (1 + (OVERHEAD if version else OVERHEAD_WITH_JOIN))
    assert not any(listener.startswith(ANYWHERE) for listener in host.listeners())
    served = Served([], [])
    if worker.rank == 0:
        assert [server.get("weight_info")["weight_version"] for server in servers] == [
            str(version)
        ] * len(servers)
        served = Served(
            [checksums(server) for server in servers],
            [completions_of(server) for server in servers],
        )
    worker.barrier("checked")
    with LinkCounter(worker, host) as back:
        worker.sharding.withdraw()
    assert back.nbytes < least * OVERHEAD
    if worker.rank == 0:
        assert [server.get("weight_info")["weight_version"] for server in servers] == [
            NO_VERSION
        ] * len(servers)
    worker.save_hf_checkpoint(f"/tmp/v{version}")
    train_step(worker, version)
    return served


def completions_of(server: HttpServer) -> list[Any]:
    """Complete the prompts one at a time: rounding depends on the size of the batch."""
    return [complete(server, MAX_TOKENS, [prompt]) for prompt in PROMPTS]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@contextmanager
def start_servers(host: Host, model: str, *load: str) -> Iterator[list[str]]:
    """Start one server for each of SERVERS on a host; yield their addresses.

    `model`: a directory on that host.
    """
    with ExitStack() as ends, ThreadPoolExecutor(len(SERVERS)) as pool:

        def start(name: str) -> str:
            directory = host.path(f"{model} {name}")
            server = serving(
                model,
                directory,
                *load,
                *PLAIN,
                *SERVERS[name],
                environment={TOKEN: SECRET},
                host=host,
            )
            return ends.enter_context(server).url

        yield list(pool.map(start, SERVERS))


def test_each_byte_crosses_the_link_to_servers_once(
    engines: Ranks, hosts: tuple[Host, Host]
) -> None:
    trainers, away = hosts
    config = {**served_config("qwen2", **SIZES), "torch_dtype": "float32"}
    weights = random_weights(config, 7, torch.float32)
    write_checkpoint(trainers.path("/tmp/model"), config, weights)
    write_config(away.path("/tmp/model"), config)
    least = sum(weight.nbytes for weight in weights.values())  # once for both servers of the host
    start_fork_server()  # which must be on neither host
    with start_servers(away, "/tmp/model", *FILLED) as urls:
        before = away.listeners()
        with trainers.network():
            served = engines.launch(
                publish_versions, NUM_TRAINERS, trainers, urls, least, timeout=400
            )[0]
        new = away.listeners() - before
    assert {listener.rpartition(":")[0] for listener in new} == {away.address}
    assert len({str(version.sums) for version in served}) == NUM_VERSIONS
    assert_matches_cold_servers(away, trainers.path(f"/tmp/v{NUM_VERSIONS - 1}"), served[-1])


def assert_matches_cold_servers(away: Host, checkpoint: Path, served: Served) -> None:
    """Check that servers which load the checkpoint hold and compute the same as the filled ones."""
    shutil.copytree(checkpoint, away.path("/tmp/cold"))
    with start_servers(away, "/tmp/cold") as urls, away.network():
        cold = [HttpServer(url, 60) for url in urls]
        assert [checksums(server) for server in cold] == served.sums
        assert [completions_of(server) for server in cold] == served.completions


def publish_over_a_cut_link(host: Host, away: Host, url: str) -> None:
    os.environ[TOKEN] = SECRET
    with host.entered():
        keys = {"server_address": host.address, "timeout_seconds": LOST_SECONDS}
        config = config_of("/tmp/model", [url], {"tensor_model_parallel_size": 2}, **keys)
        with ActorHybridWorker(config) as worker:
            worker.sharding.publish()
            worker.sharding.withdraw()
            reached = f"asking the servers for a switch|{re.escape(url)}"
            publish_while_cut(worker, away, url, reached, has_begun=False)
            publish_while_cut(worker, away, url, "a server was lost in a switch", has_begun=True)


def publish_while_cut(
    worker: ActorHybridWorker, away: Host, url: str, error: str, has_begun: bool
) -> None:
    """Fail in time with the training weights unchanged, and publish again on the restored link."""
    flats = worker.sharding.trainer.weights.buffers()
    before = {name: flat.clone() for name, flat in flats.items()}

    def cut() -> None:
        if worker.rank == 0:
            away.set_link("down")
        worker.barrier("cut")

    manager = worker.sharding._connected()
    with pytest.MonkeyPatch.context() as patch:
        if has_begun:  # the server has started its switch
            enter = manager.enter
            patch.setattr(manager, "enter", lambda target: (cut(), enter(target)))
        else:
            cut()
        started = time.monotonic()
        with pytest.raises(HybridEngineError, match=error):
            worker.sharding.publish()
        assert time.monotonic() - started < LOST_SECONDS + 20
    assert all(torch.equal(flat, before[name]) for name, flat in flats.items())
    if worker.rank == 0:
        away.set_link("up")
    worker.barrier("restored")
    worker.sharding.publish()
    if worker.rank == 0:
        assert HttpServer(url, 60).get("weight_info")["weight_version"] == "0"
    worker.sharding.withdraw()


def test_trainers_survive_a_cut_link(engines: Ranks, hosts: tuple[Host, Host]) -> None:
    trainers, away = hosts
    model = write_model(trainers.path("/tmp/model"), "qwen2")
    shutil.copytree(model, away.path("/tmp/model"))
    start_fork_server()
    arguments = "/tmp/model", away.path("/tmp/server"), *FILLED, *PLAIN
    with serving(*arguments, environment={TOKEN: SECRET}, host=away) as server, trainers.network():
        engines.launch(
            publish_over_a_cut_link, NUM_TRAINERS, trainers, away, server.url, timeout=300
        )

"""Each side alone, in a job of one process without weights: the state that failures leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from hybrid_engine.compute_check.logprob_check import Description
from hybrid_engine.compute_check.probes import ProbeLimits
from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import ConfigError, HybridEngineError, ServerError
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from hybrid_engine.serving import publisher as publisher_module
from hybrid_engine.serving.clients import Server
from hybrid_engine.serving.comparison import ServerDescription
from hybrid_engine.serving.invitation import TOKEN, Invitation, Rendezvous, Update
from hybrid_engine.serving.publisher import WeightPublisher
from hybrid_engine.serving.receiver import WeightReceiver
from hybrid_engine.serving.roles import NoInference, NoTraining, OneSidedSwitch
from hybrid_engine.switch.states import State
from tests.harness.errors import violated

CPU = torch.device("cpu")


class NoWeights(NoInference):
    """Weights of a worker that has none."""

    def take_place(self, rank: int, *, keeps_memory: bool) -> None:
        self.rank = rank


class NoWorkers(Server):
    """A server without workers that fails in one call. Like vLLM, it allows one update at a
    time."""

    is_updating = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails_in = ""
        self.may_fail = threading.Event()

    def num_workers(self) -> int:
        return 0

    def describe(self) -> str:
        nothing = Description(ProbeLimits("a server without a model computes nothing"))
        return ServerDescription(workers=[nothing], settings={}).to_json()

    def _call(self, name: str, has_timeout: bool = True, **fields: Any) -> Any:
        self.calls.append(name)
        if name == self.fails_in:
            assert self.may_fail.wait(60)
            raise ServerError("the server is gone")
        if name == "start_weight_update" and self.is_updating:
            raise ServerError("start_weight_update called while a weight update is already active")
        if name in ("init_weight_transfer_engine", "start_weight_update", "finish_weight_update"):
            self.is_updating = name == "start_weight_update"


@pytest.fixture
def job() -> Iterator[Job]:
    with closing(Job.join(60, world=World(dist.HashStore(), 0, 1), device=CPU)) as joined:
        yield joined


def publisher_of(job: Job, *servers: object, trainer: Any = None) -> WeightPublisher:
    return WeightPublisher(
        trainer or NoTraining(), servers, config=GenerateConfig(timeout_seconds=60), job=job
    )


def test_a_refused_invitation_leaves_the_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    receiver = WeightReceiver(NoWeights(), NoWeights(), 0, CPU)
    with closing(Rendezvous(None)) as place:
        invitation = Invitation(
            place=place.place,
            name=place.name,
            first_rank=0,
            num_workers=1,
            size=1,
            settings={"timeout_seconds": 60},
        ).signed()
        receiver.join(invitation)
        receiver.switch(Update(name=place.name, to="infer", version=3))
        for refused in (replace(invitation, proof=""), replace(invitation, num_workers=0).signed()):
            with pytest.raises(HybridEngineError, match=r"HYBRID_ENGINE_TOKEN|counts 0 workers"):
                receiver.join(refused)
        receiver.switch(Update(name=place.name, to="train", version=3))
        receiver.leave()


class SignallingSwitch(OneSidedSwitch):
    is_built = threading.Event()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_built.set()


def test_servers_that_fail_after_joining_are_invited_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NoWorkers()
    with closing(publisher_of(job, server)) as publisher:
        server.fails_in = "init_weight_transfer_engine"
        monkeypatch.setattr(publisher_module, "OneSidedSwitch", SignallingSwitch)
        monkeypatch.setattr(SignallingSwitch, "is_built", server.may_fail)
        with pytest.raises(ServerError, match="the server is gone"):
            publisher.publish()
        assert publisher.state is State.TRAIN
        server.fails_in = ""
        publisher.publish()
        assert publisher.state is State.INFER
        assert server.calls.count("init_weight_transfer_engine") == 2


@pytest.mark.parametrize(
    ("servers", "key", "code"),
    [
        ((), "servers", "no-server"),
        (("http://127.0.0.1:1", "http://127.0.0.1:1/"), "servers", "duplicate-server"),
        ((7,), "servers", "invalid-server"),
        ((NoWorkers(), "http://127.0.0.1:1"), "generate_config.servers", "silent-server"),
    ],
)
def test_invalid_servers_are_refused(job: Job, servers: Any, key: str, code: str) -> None:
    with violated(ConfigError, (key, code)):
        publisher_of(job, *servers)


def test_ranks_wait_longer_for_servers_than_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(NoWorkers, "num_workers", lambda _: time.sleep(3))

    def publish(rank: int) -> None:
        with closing(Job.join(2, world=World(store, rank, 2), device=CPU)) as job:
            publisher_of(job, NoWorkers())

    with ThreadPoolExecutor() as ranks:
        list(ranks.map(publish, range(2)))


def test_a_model_is_not_taken_for_its_trainer(job: Job) -> None:
    with violated(ConfigError, ("trainer", "not-a-trainer")):
        publisher_of(job, NoWorkers(), trainer=torch.nn.Linear(1, 1))

"""A job of two trainers, which also have a default group, and a server, which has none.

Trainers have no inference side (`NoInference`), the server no training side (`NoTraining`).
"""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.config import GenerateConfig
from hybrid_engine.errors import LostRankError
from hybrid_engine.ranks.job import Job
from hybrid_engine.ranks.world import World
from hybrid_engine.serving.roles import NoInference, NoTraining
from hybrid_engine.switch.sharding_manager import ShardingManager
from tests.harness.launch import on_ranks
from tests.hybrid_engine.switch.fakes import (
    INFER,
    NBYTES,
    SHAPES,
    TRAIN,
    FakeInference,
    FakeTraining,
    Script,
    ScriptedOffloader,
    canonical,
)

NUM_TRAINERS = 2
SERVER = 2  # global rank
NUMBERS = itertools.count()
"""Numbers the jobs of these processes; each has keys of its own in the store."""


class Member:
    """A process of the job."""

    def __init__(self, hosts: str = "aaa", devices: str = "xyz", **settings: object) -> None:
        environment, self.rank, size = next(dist.rendezvous("env://"))
        store = dist.PrefixStore(f"member {next(NUMBERS)}", environment)
        self.script = Script()
        if self.rank < NUM_TRAINERS:
            trainer_store = dist.PrefixStore("trainers", store)
            dist.init_process_group(
                "gloo", store=trainer_store, rank=self.rank, world_size=NUM_TRAINERS
            )
            for _ in range(3):  # collectives of the trainers alone must not affect the job
                Job.join(60).close()
            self.training = FakeTraining(self.script, self.rank, NUM_TRAINERS, elastic=True)
            self.inference = NoInference()
        else:
            self.training = NoTraining()
            self.inference = FakeInference(self.script, self.rank)
        world = World(dist.PrefixStore("both", store), self.rank, size, may_end=self.rank != SERVER)
        where = {
            "host": hosts[self.rank],
            "device_name": devices[self.rank],
            "device": torch.device("cpu"),
        }
        self.job = Job.join(60, world=world, **where)
        self.offloader = ScriptedOffloader(self.script, self.training)
        # The fakes have no forward pass to compare.
        config = GenerateConfig(bucket_mb=1, timeout_seconds=60, check_compute="off", **settings)
        self.manager = ShardingManager(
            self.training,
            self.inference,
            caches=self.inference,
            offloader=self.offloader,
            config=config,
            job=self.job,
        )
        self.manager.start()

    @property
    def is_server(self) -> bool:
        return self.rank == SERVER

    def switch(self) -> str:
        """Enter inference and return to training; returns the error of a failed switch, or ""."""
        try:
            self.manager.enter(INFER)
        except Exception as error:
            self.assert_training_is_back()
            return f"{type(error).__name__}: {error}"
        report = self.manager.last_report
        # Bytes on the same device count as own.
        assert report.bytes_own + report.bytes_received == NBYTES
        assert report.bytes_received == report.bytes_least
        self.received = report.bytes_received
        self.transports = sorted(report.bytes_by_transport)
        if self.is_server:
            for name in SHAPES:
                assert torch.equal(
                    self.inference.live[name].view(SHAPES[name]), canonical(name, self.version)
                )
        else:
            assert self.offloader.is_offloaded("param")
        self.manager.enter(TRAIN)
        self.assert_training_is_back()
        return ""

    def assert_training_is_back(self) -> None:
        if self.is_server:
            assert not self.inference.live
        else:
            self.training.assert_unchanged()

    version = 0

    def step(self) -> None:
        self.version += 1
        if not self.is_server:
            self.training.step()

    def close(self) -> None:
        self.manager.close()
        self.job.close()
        if not self.is_server:
            dist.destroy_process_group()


@on_ranks(3, timeout=200)
@pytest.mark.parametrize(
    ("hosts", "devices", "transport", "received"),
    [
        ("aaa", "xyz", "shared_memory", NBYTES),
        ("aaa", "xyx", "shared_memory", NBYTES // 2),
        ("aab", "xyx", "collective", NBYTES),
    ],
    ids=["one host", "one device", "two hosts"],
)
@pytest.mark.parametrize(
    "settings",
    [{"verify": "off"}, {"verify": "full", "suspend_communicators": True}],
    ids=["plain", "verified"],
)
def test_two_trainers_fill_a_server(
    hosts: str, devices: str, transport: str, received: int, settings: dict[str, object]
) -> None:
    member = Member(hosts, devices, **settings)
    assert dist.is_initialized() is not member.is_server
    for _ in range(3):
        assert member.switch() == ""
        member.step()
    for side, failing, call in (("trainer", 1, "prepare"), ("server", SERVER, "commit second")):
        if member.rank == failing:
            member.script.arm(call, MemoryError(f"no memory in the {side}"))
        failure = member.switch()
        assert failure.startswith("ReshardError: " if member.rank == failing else "RemoteError: ")
        assert f"no memory in the {side}" in failure
        member.step()
    assert member.switch() == ""
    assert member.received == received
    assert not member.is_server or member.transports == [transport]
    member.close()


@on_ranks(3, timeout=200)
def test_a_server_outlives_a_trainer() -> None:
    """Trainer 1 is lost during a fill."""
    member = Member()
    member.switch()
    if member.rank == 1:
        member.job.close()  # closes its connections, like the end of the process
        return
    started = time.monotonic()
    with pytest.raises(LostRankError):
        member.manager.enter(INFER)
    member.assert_training_is_back()
    assert time.monotonic() - started < 30

"""One job over two kinds of processes: two trainers with a default group of their own, and a server with none.

Each has one side alone; the other is empty (`NoTraining`, `NoInference`).
"""

from __future__ import annotations

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
from tests.harness.launch import Ranks
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

NUM_TRAINERS, SERVER = 2, 2


class Member:
    """A process of the job, with its side."""

    def __init__(self, hosts: str = "aaa", devices: str = "xyz", **settings: object) -> None:
        store, self.rank, size = next(dist.rendezvous("env://"))
        self.script = Script()
        if self.rank < NUM_TRAINERS:
            own = dist.PrefixStore("trainers", store)
            dist.init_process_group("gloo", store=own, rank=self.rank, world_size=NUM_TRAINERS)
            for _ in range(3):  # what else trainers have connected, and the server has not
                Job.join(60).close()
            self.training = FakeTraining(self.script, self.rank, NUM_TRAINERS, elastic=True)
            self.inference = NoInference()
        else:
            self.training, self.inference = NoTraining(), FakeInference(self.script, self.rank)
        world = World(dist.PrefixStore("both", store), self.rank, size, may_end=self.rank != SERVER)
        where = {"host": hosts[self.rank], "device_name": devices[self.rank], "device": torch.device("cpu")}
        self.job = Job.join(60, world=world, **where)
        self.offloader = ScriptedOffloader(self.script, self.training)
        config = GenerateConfig(bucket_mb=1, timeout_seconds=60, check_compute="off", **settings)
        self.manager = ShardingManager(
            self.training, self.inference, caches=self.inference, offloader=self.offloader, config=config, job=self.job
        )
        self.manager.start()

    @property
    def is_server(self) -> bool:
        return self.rank == SERVER

    def switch(self) -> str:
        """To inference and, where it succeeds, back; says what failed."""
        try:
            self.manager.enter(INFER)
        except Exception as error:
            self.assert_training_is_back()
            return f"{type(error).__name__}: {error}"
        report = self.manager.last_report
        assert report.bytes_own + report.bytes_received == NBYTES
        assert report.bytes_received == report.bytes_least
        self.received = report.bytes_received
        self.transports = sorted(report.bytes_by_transport)
        if self.is_server:
            for name in SHAPES:
                assert torch.equal(self.inference.live[name].view(SHAPES[name]), canonical(name, self.version))
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


def train_and_serve(hosts: str, devices: str, settings: dict[str, object]) -> dict[str, object]:
    member = Member(hosts, devices, **settings)
    assert dist.is_initialized() is not member.is_server
    found: dict[str, object] = {"well": []}
    for _ in range(3):
        found["well"].append(member.switch())
        member.step()
    for name, failing, call in (("trainer", 1, "prepare"), ("server", SERVER, "commit second")):
        if member.rank == failing:
            member.script.arm(call, MemoryError(f"no memory in the {name}"))
        found[name] = member.switch()
        member.step()
    found["after"] = member.switch()
    found |= {"transports": member.transports, "received": member.received}
    member.close()
    return found


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
    "settings", [{"verify": "off"}, {"verify": "full", "suspend_communicators": True}], ids=["plain", "verified"]
)
def test_two_trainers_fill_a_server(
    ranks: Ranks, hosts: str, devices: str, transport: str, received: int, settings: dict[str, object]
) -> None:
    by_rank = ranks.launch(train_and_serve, 3, hosts, devices, settings, timeout=200)
    for rank, found in enumerate(by_rank):
        assert found["received"] == received
        assert found["well"] == [""] * 3
        assert found["after"] == ""
        for name, failing in (("trainer", 1), ("server", SERVER)):
            kind = "ReshardError" if rank == failing else "RemoteError"
            assert found[name].startswith(f"{kind}: "), found[name]
            assert f"no memory in the {name}" in found[name]
    assert by_rank[SERVER]["transports"] == [transport]


def lose_a_trainer() -> tuple[str, float] | None:
    """It is gone in the middle of a fill, for good; what the others raise, after how long."""
    member = Member()
    member.switch()
    if member.rank == 1:
        member.job.close()  # as a process that ends: its connections are closed
        return None
    started = time.monotonic()
    with pytest.raises(LostRankError) as caught:
        member.manager.enter(INFER)
    member.assert_training_is_back()
    return str(caught.value), time.monotonic() - started


def test_a_server_outlives_a_trainer(ranks: Ranks) -> None:
    for found in ranks.launch(lose_a_trainer, 3, timeout=200):
        if found is not None:
            assert found[1] < 30

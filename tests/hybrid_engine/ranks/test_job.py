"""Joining, leaving and describing a job."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybrid_engine.errors import ConfigError, LostRankError, StateError
from hybrid_engine.ranks.agreement import BUILD_TIMEOUT
from hybrid_engine.ranks.groups import host_id
from hybrid_engine.ranks.job import Job, _meet, default_backend, join_process_group, own_device
from hybrid_engine.ranks.world import World, store_at
from tests.harness.errors import has_violations, refused, violated
from tests.harness.launch import on_ranks


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def test_a_job_joins_an_existing_process_group(job: None) -> None:
    joined = Job.join(30, device=torch.device("meta"))
    assert (joined.rank, joined.world_size, joined.hosts) == (0, 1, (host_id(),))
    assert (joined.device.type, joined.timeout_seconds) == ("meta", 30)
    joined.close()
    joined.close()  # idempotent
    assert dist.is_initialized()
    with refused(StateError, "agreement-is-closed"):
        joined.agreement.conclude("phase")


def test_what_is_built_is_printed_unless_warnings_are_left_out(
    job: None, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    joined = Job.join(30)
    with joined.building("the critic"):
        joined.built("critic built")
    assert capsys.readouterr().out == "building the critic on 1 rank ...\ncritic built in 0 s\n"
    caplog.set_level(logging.ERROR, "hybrid_engine")
    joined.say("unread")
    assert not capsys.readouterr().out


def test_groups_end_with_their_owner(job: None) -> None:
    joined = Job.join(30)
    with ExitStack() as owner:
        group = joined.new_group(owner)
        assert group.gather(b"own") == {0: b"own"}
    with pytest.raises(AssertionError, match="closed"):
        group.gather(b"own")


def test_an_nccl_group_is_created_in_the_default_world_only(
    job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments passed to torch, because there is no GPU."""
    new_group = dist.new_group
    arguments = []

    def new_gloo_group(ranks: Sequence[int], timeout: timedelta, backend: str) -> dist.ProcessGroup:
        arguments.append((ranks, timeout, backend))
        return new_group(ranks, timeout, "gloo")

    monkeypatch.setattr(dist, "new_group", new_gloo_group)
    joined = Job.join(30)
    before = num_groups()
    with ExitStack() as owner:
        joined.new_nccl_group(owner, [[0]])
        assert num_groups() == before + 1
    assert arguments == [([0], timedelta(seconds=60), "nccl")]
    assert num_groups() == before
    in_own_world = Job.join(30, world=World(dist.HashStore(), 0, 1))
    not_default = violated(ConfigError, ("generate_config.transport", "not-default-group"))
    with not_default, ExitStack() as owner:
        in_own_world.new_nccl_group(owner)


def test_a_failed_join_leaves_no_group(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise OSError("no /proc")

    monkeypatch.setattr("hybrid_engine.ranks.job.host_id", fail)
    before = num_groups()
    with pytest.raises(OSError, match="no /proc"):
        Job.join(30)
    assert num_groups() == before


def test_a_job_needs_torchrun_or_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        ConfigError, match="RANK", check=has_violations(("environment", "missing-variables"))
    ):
        Job.join(30)


@on_ranks(2)
def test_a_job_exchanges_hosts_and_ends_its_own_process_group() -> None:
    """Join without a process group: the job creates and ends one. Each rank is a group part."""
    job = Job.join(60, host=f"host {os.environ['RANK']}")
    assert job.hosts == ("host 0", "host 1")
    with ExitStack() as owner:
        assert list(job.new_group(owner, [[1], [0]]).ranks) == [job.rank]
        assert job.new_group(owner).gather(bytes([job.rank])) == {0: b"\0", 1: b"\1"}
    assert dist.is_initialized()
    job.close()
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "file", "network"])
def test_missing_ranks(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that waits prints nothing, as torch does when its wait for a key times out."""
    stores: dict[str, Callable[[], dist.Store]] = {
        "memory": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 4),
        "network": lambda: store_at("127.0.0.1"),
    }
    store = stores[kind]()
    store.set("started/2", "")
    with refused(LostRankError, "ranks-not-started", "1, 3", "4", "0.2 s"):
        _meet(store, 0, 4, 0.2)
    for rank in (1, 3):
        store.set(f"started/{rank}", "")
    _meet(store, 0, 4, 0.2)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_server_may_reach_a_file_store_seconds_later(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_meet, dist.FileStore(path, 2), 0, 2, 30)
        time.sleep(1.5)  # longer than a pause between looks at the store
        assert (
            _meet(dist.FileStore(path, 2), 1, 2, 30, "later") == waiting.result() == ["", "later"]
        )


def test_importing_may_take_longer_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for other ranks to start, and for their store, has a minimum timeout."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    timeouts = []

    def rendezvous(url: str, timeout: object) -> object:
        timeouts.append(timeout.total_seconds())
        yield dist.HashStore(), 0, 1

    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    assert join_process_group(timeout_seconds=5.0)
    dist.destroy_process_group()
    assert timeouts == [BUILD_TIMEOUT]


@pytest.mark.slow
def test_ranks_of_a_world_must_have_started(tmp_path: Path) -> None:
    """Ranks of a job with servers already run, so a missing rank gets no time to import."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    store.set_timeout(timedelta(seconds=30))
    started = time.monotonic()
    with pytest.raises(LostRankError):
        Job.join(1, world=World(store, 0, 2))
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    ("num_visible", "current", "local_rank", "expected"),
    [
        pytest.param(8, 0, "3", 3, id="torchrun"),
        pytest.param(1, 0, "3", 0, id="a process sees its own GPU only"),
        pytest.param(8, 5, "3", 5, id="chosen by the caller"),
        pytest.param(8, 0, None, 0, id="one process"),
    ],
)
def test_each_rank_takes_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
    num_visible: int,
    current: int,
    local_rank: str | None,
    expected: int,
) -> None:
    """torch.cuda is replaced, because there is no GPU."""
    set_devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_device", set_devices.append)
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert own_device() == torch.device("cuda", expected)
    assert set_devices == [expected]


@pytest.mark.parametrize(("has_gpus", "expected"), [(True, "nccl"), (False, "gloo")])
def test_the_default_backend_is_nccl_on_gpus_and_gloo_without(
    monkeypatch: pytest.MonkeyPatch, has_gpus: bool, expected: str
) -> None:
    """Megatron's groups use the backends of the default group."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    assert default_backend() == expected

"""The recipe for Ray: training actors, a generating actor, and the loss of both kinds."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import GetTimeoutError, RayActorError

from examples.gpt_rl.train import run_files
from examples.recipes import on_ray
from hybrid_engine.errors import ServerError
from hybrid_engine.serving.invitation import TOKEN
from tests.examples.launched import short_config
from tests.harness.launch import REPO_ROOT
from tests.harness.processes import wait_until
from tests.harness.vllm_server import ENVIRONMENT

NUM_ITERATIONS = 4


def set_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([str(REPO_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {**ENVIRONMENT, "PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}
    # Ray kills processes when a host's memory is nearly full, even if others have filled it.
    for name, value in {**settings, "RAY_memory_monitor_refresh_ms": "0"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def ray_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    set_environment(monkeypatch)
    ray.init(num_cpus=3, include_dashboard=False)
    yield
    ray.shutdown()


def test_waiting_for_a_server_ends_if_it_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed constructor is reported at once, endless restarts after the timeout."""
    failed = RayActorError(error_msg="no such model", actor_init_failed=True)
    lost = RayActorError(error_msg="lost")
    replies: list[object] = []

    def get(call: object, timeout: float) -> object:
        reply = replies.pop(0) if replies else lost
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(on_ray.ray, "get", get)
    monkeypatch.setattr(
        on_ray, "time", SimpleNamespace(sleep=lambda seconds: None, monotonic=time.monotonic)
    )
    server = SimpleNamespace(num_workers=SimpleNamespace(remote=lambda: None))
    replies += [lost, lost, 1]
    on_ray.wait_for(server)
    replies += [lost, failed]
    with pytest.raises(RayActorError, match="no such model"):
        on_ray.wait_for(server)
    with pytest.raises(ServerError, match=r"not up within 0 s \(RayActorError: .*lost"):
        on_ray.wait_for(server, 0.05)
    replies.append(GetTimeoutError("pending"))
    with pytest.raises(
        ServerError, match=r"not up within 0 s \(GetTimeoutError: pending\)\. `ray status` shows"
    ):
        on_ray.wait_for(server, 0)


@pytest.mark.long
@pytest.mark.engines
def test_ranks_and_server_are_placed_on_nodes_with_free_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cluster of two nodes on this machine, which connect like nodes of two machines."""
    set_environment(monkeypatch)
    monkeypatch.setenv(TOKEN, "of all nodes")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    try:
        cluster.add_node(num_cpus=1)
        config = short_config("tp2_to_dp2.yaml", tmp_path, rl={"iterations": 2})
        directory = run_files(tmp_path / "run")
        arguments = [
            "on_ray",
            str(config),
            f"--address={cluster.address}",
            f"--out={directory.out}",
        ]
        monkeypatch.setattr(sys, "argv", arguments)
        on_ray.main()
        rows = directory.metrics.rows()
        assert len({node["NodeID"] for node in ray.nodes()}) == 2
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert all(
        row["bytes_received"] == row["bytes_least"] > 0 and row["logprob_diff"] < 1e-4
        for row in rows[1:]
    )


@pytest.mark.long
@pytest.mark.engines
def test_lost_actors_are_replaced(ray_here: None, tmp_path: Path) -> None:
    config = short_config("tp2_to_dp2.yaml", tmp_path, rl={"iterations": NUM_ITERATIONS})
    directory = run_files(tmp_path / "run")
    failures = []

    def run() -> None:
        try:
            on_ray.run(str(config), 2, directory.out)
        except BaseException as error:
            failures.append(error)

    running = threading.Thread(target=run)
    running.start()
    killed = []
    for number, name in ((1, b"ray::TrainerRank.train"), (2, b"ray::VllmActor")):
        wait_until(
            lambda number=number: bool(failures) or len(directory.metrics.rows()) > number, 300
        )
        killed.append(processes(name)[0])
        os.kill(killed[-1], signal.SIGKILL)
    running.join(300)
    assert not failures
    assert not running.is_alive()
    rows = directory.metrics.rows()
    assert [row["iteration"] for row in rows] == list(range(NUM_ITERATIONS + 1))
    assert all(
        row["bytes_received"] == row["bytes_least"] > 0 and row["logprob_diff"] < 1e-4
        for row in rows[1:]
    )
    assert directory.progress().step == NUM_ITERATIONS


def processes(name: bytes) -> list[int]:
    """Return the ids of actors' processes by Ray's name for them."""
    titles = [(entry, entry.joinpath("cmdline")) for entry in Path("/proc").glob("[0-9]*")]
    return [
        int(entry.name)
        for entry, title in titles
        if title.exists() and title.read_bytes().startswith(name)
    ]

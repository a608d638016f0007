"""Message deltas from real trainers to a real server, which is killed and restarted in between.

The rest of a publish with failures is in test_off_policy.py, with fakes of both engines.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import ActorHybridWorker
from hybrid_engine.errors import ServerError
from hybrid_engine.serving.clients import HttpServer
from hybrid_engine.serving.publisher import WeightPublisher
from hybrid_engine.switch.states import State
from tests.harness.errors import refused
from tests.harness.launch import Ranks
from tests.harness.vllm_server import FILLED, PLAIN, serving
from tests.hybrid_engine.serving.test_servers import (
    checksums,
    complete,
    config_of,
    train_step,
    write_model,
)

STRIDES = {"none": 0, "few": 500, "full": 1}
"""Distance between the elements that an event changes; 0: none changes."""
EVENTS = ("first", "none", "few", "full", "step", "lost", "few", "few")


def write(worker: ActorHybridWorker, stride: int) -> None:
    if stride:
        for flat in worker.sharding.trainer.weights.buffers().values():
            with torch.no_grad():
                flat.view(torch.int32)[::stride] ^= 0x00010001 if stride == 1 else 1


def do_at(publisher: WeightPublisher, moment: str, act: Callable[[], object]) -> None:
    """Call `act` once: before the servers are called, within the switch, or before it ends."""
    name = {"before": "_start_update", "within": "prepare", "after": "_end_update"}[moment]
    owner = publisher.trainer.weights if moment == "within" else publisher
    original = getattr(owner, name)

    def act_first(*args: Any) -> Any:
        delattr(owner, name)
        act()
        return original(*args)

    setattr(owner, name, act_first)


def publish_events(
    model: str, url: str, directory: str, keeps_weights: bool, pids: list[int]
) -> list[Any]:
    lost = Path(directory, "lost")
    again = Path(directory, "again")
    reports = []
    keys = {
        "transport": "collective",
        "incremental": "delta",
        "incremental_mb": 0,
        "release_weights": not keeps_weights,
    }
    with ActorHybridWorker(
        config_of(model, [url], {"tensor_model_parallel_size": 2}, **keys)
    ) as worker:
        for event in EVENTS:
            if event == "lost":
                write(worker, 500)
                before = {
                    name: flat.clone() for name, flat in worker.train.weights.buffers().items()
                }
                if worker.rank == 0:
                    do_at(
                        worker.sharding,
                        "within",
                        lambda: [os.kill(pid, signal.SIGKILL) for pid in pids],
                    )
                with refused(ServerError, "server-lost"):
                    worker.sharding.publish()
                assert worker.sharding.state is State.TRAIN
                assert all(
                    torch.equal(flat, before[name])
                    for name, flat in worker.train.weights.buffers().items()
                )
                worker.barrier("a server was lost")
                lost.touch()
                while not again.exists():
                    time.sleep(0.1)
            elif event == "step":
                train_step(worker, 0)
            else:
                write(worker, STRIDES.get(event, 0))
            worker.sharding.publish()
            reports.append((event, worker.sharding.last_report))
            worker.sharding.withdraw()
        worker.save_hf_checkpoint(f"{directory}/last")
        if worker.rank == 0:
            server = HttpServer(url, 60)
            if keeps_weights:
                Path(directory, "sums").write_text(str((checksums(server), complete(server, 8))))
        worker.barrier("checked")
    return reports


def run_over_a_loss(engines: Ranks, directory: Path, keeps_weights: bool) -> list[Any]:
    """Kill the server's workers during `publish_events`, and start another server at its address.

    Returns the results of the two ranks.
    """
    model = write_model(directory / "model", "qwen2")
    with ThreadPoolExecutor(1) as pool:
        with serving(model, directory / "first", *FILLED, *PLAIN) as server:
            arguments = (
                model,
                server.url,
                str(directory),
                keeps_weights,
                server.processes()["Worker"],
            )
            launched = pool.submit(engines.launch, publish_events, 2, *arguments, timeout=300)
            while not (directory / "lost").exists() and not launched.done():
                time.sleep(0.1)
        if launched.done():
            launched.result()
        with serving(
            model, directory / "second", *FILLED, *PLAIN, port=int(server.url.rpartition(":")[2])
        ):
            (directory / "again").touch()
            return launched.result()


@pytest.mark.long
@pytest.mark.parametrize("keeps_weights", [True, False])
def test_a_server_receives_only_changes(
    engines: Ranks, tmp_path: Path, keeps_weights: bool
) -> None:
    """Weights stay on the server between switches, or not. Each fill is verified in full."""
    reports = run_over_a_loss(engines, tmp_path, keeps_weights)[0]
    least = reports[0][1].bytes_least
    assert [event for event, _ in reports] == list(EVENTS)
    for event, report in reports:
        is_whole = event in ("first", "lost")
        assert report.tensors_verified > 0 or event == "none"
        assert (report.density is None) == (is_whole or (event == "none" and keeps_weights))
        assert report.bytes_of_copies >= 2 * least  # at both ends
        if is_whole:
            assert (report.messages_delta, report.bytes_received) == (0, least)
        elif event == "full":
            assert (report.messages_delta, report.bytes_received) == (0, least)
            assert report.density > 0.99
        elif event == "few":
            assert report.messages_whole == 0
            assert report.density == pytest.approx(
                1 / 1000, rel=0.2
            )  # one of the two words of an element
            assert report.bytes_received < least / 50
        elif event == "none":
            assert report.bytes_received == 0
    if keeps_weights:
        with serving(tmp_path / "last", tmp_path / "cold", *PLAIN) as cold:
            cold_server = HttpServer(cold.url, 60)
            assert (
                str((checksums(cold_server), complete(cold_server, 8)))
                == (tmp_path / "sums").read_text()
            )

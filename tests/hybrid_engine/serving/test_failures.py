"""Servers and trainers that fail, stop and die in a switch: who hears of it, and that the next one goes well.

The invariant: no token is drawn from a mixture, no label of a version is wrong, training loses nothing, a server is
never ended by a trainer's death, and every wait ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine import ActorHybridWorker, Sampling
from hybrid_engine.serving.publisher import WeightPublisher
from hybrid_engine.switch.states import State
from tests.harness.launch import Ranks
from tests.harness.vllm_server import FILLED, PLAIN, serving
from tests.hybrid_engine.serving.test_servers import PROMPTS, config_of, train_step, write_model

ACTOR = {"tensor_model_parallel_size": 2}
SECONDS = 25.0


def trained(worker: ActorHybridWorker) -> dict[str, torch.Tensor]:
    items = [item for item in worker.train.offload_items() if item.kind != "grad"]
    return {f"{number} {item.owner}": item.tensor.flatten().clone() for number, item in enumerate(items)}


def changes(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    """Which training state has changed, by its bits: Megatron's scratch memory is never set and may hold NaNs."""
    equal = {name: torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before}
    return [f"{name}: {(before[name] != after[name]).sum()} differ" for name, is_equal in equal.items() if not is_equal]


def tokens_of(worker: ActorHybridWorker) -> list[Any]:
    answers = worker.generate_sequences(PROMPTS, Sampling(max_tokens=8, temperature=0.0))
    return [(each[0].token_ids, each[0].logprobs) for each in answers]


def do_at(publisher: WeightPublisher, moment: str, act: Callable[[], object]) -> None:
    """Once, before the servers are called, within the switch, or before they are told that it has ended."""
    if moment == "within":
        owner, name = publisher.trainer.weights, "prepare"
    else:
        owner, name = publisher, {"before": "_ask_servers", "after": "_end_update"}[moment]
    original = getattr(owner, name)

    def acting(*args: Any) -> Any:
        delattr(owner, name)
        act()
        return original(*args)

    setattr(owner, name, acting)


def lose_a_server(model: str, url: str, directory: str, moment: str, pids: list[int], number: int) -> dict[str, Any]:
    """Publish; have processes of the server killed or stopped in the next publish; publish to the one that follows."""
    rank, lost, again = int(os.environ["RANK"]), Path(directory, "lost"), Path(directory, "again")
    with ActorHybridWorker(config_of(model, [url], ACTOR, timeout_seconds=SECONDS)) as worker:
        with worker.rollout_context():
            first = tokens_of(worker)
        with worker.train_context():
            train_step(worker, 0)
        before = trained(worker)
        if rank == 0:
            do_at(worker.sharding, moment, lambda: [os.kill(pid, number) for pid in pids])
        started = time.monotonic()
        try:
            worker.sharding.enter(State.INFER)
        except Exception as error:
            found = {"seconds": time.monotonic() - started, "error": f"{type(error).__name__}: {error}"}
        else:
            found = {"seconds": 0.0, "error": ""}
        assert worker.sharding.state is State.TRAIN
        if changed := changes(before, trained(worker)):
            raise AssertionError(f"{changed}, {found}")
        with worker.train_context():
            train_step(worker, 1)
        worker.barrier("a server was lost")
        lost.touch()
        while not again.exists():
            time.sleep(0.1)
        with worker.rollout_context():
            assert tokens_of(worker) != first
        with worker.train_context():
            pass
    return found


def over_a_loss(engines: Ranks, directory: Path, function: Callable[..., Any], how: object, *more: object) -> list[Any]:
    """What a function returns on two ranks whose server is lost. It is given model, address, directory, `how`, ids of
    the server's workers and `more`, and makes a file `lost`; `again` is there once another server has the address."""
    model = write_model(directory / "model", "qwen2")
    with ThreadPoolExecutor(1) as pool:
        with serving(model, directory / "first", *FILLED, *PLAIN) as server:
            arguments = (model, server.url, str(directory), how, server.processes()["Worker"], *more)
            launched = pool.submit(engines.launch, function, 2, *arguments, timeout=300)
            while not (directory / "lost").exists() and not launched.done():
                time.sleep(0.1)
        if launched.done():
            launched.result()
        with serving(model, directory / "second", *FILLED, *PLAIN, port=int(server.url.rpartition(":")[2])):
            (directory / "again").touch()
            return launched.result()


@pytest.mark.long
def test_a_lost_server_is_replaced(engines: Ranks, tmp_path: Path) -> None:
    """Its worker is killed in a switch; other processes, moments and ways: tests/faults/test_servers.py."""
    found = over_a_loss(engines, tmp_path, lose_a_server, "within", int(signal.SIGKILL))
    for of_rank in found:
        assert of_rank["error"].startswith("ServerError: a server was lost in a switch")
        assert of_rank["seconds"] < SECONDS

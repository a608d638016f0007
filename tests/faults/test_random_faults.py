"""Random failures at random points of a switch on a random rank, in thirty cycles; the caller
continues.

python -m tests.faults.test_random_faults 200          # number of cycles with a fault each; prints the findings
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from hybrid_engine import ActorHybridWorker
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.switch.sharding_manager import State
from tests.faults.job import FaultError
from tests.harness.launch import Ranks
from tests.zoo import workers

pytestmark = [pytest.mark.faults, pytest.mark.engines]

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2 -> dp2": ({"tensor_model_parallel_size": 2}, {}),
    "tp2 -> dp2, messages": ({"tensor_model_parallel_size": 2}, {"transport": "collective"}),
    "dp2, overlapped gather -> tp2": (
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        {"infer_tensor_parallel_size": 2},
    ),
}
TARGETS = (State.INFER, State.INFER, State.FORWARD, State.IDLE)  # INFER twice: its switch has most steps.
CALLS = (1, 1, 1, 2, 3)  # Most functions are called once or twice in a switch; later faults do not happen.


@dataclass
class Findings:
    """Findings of all cycles on one rank.

    Attributes:
        cycles: number of cycles with a planned fault each.
        failed: numbers of switches that raised, by place of the fault.
        unrecovered: disagreements of ranks after a switch; empty if there were none.
        worst: largest difference of a log-probability between vLLM and Megatron.
        grown: growth of bytes, descriptors and threads from the first tenth of the cycles to the
            last cycle.
    """

    cycles: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    unrecovered: list[str] = field(default_factory=list)
    worst: float = 0.0
    grown: dict[str, int] = field(default_factory=dict)


def break_switches(directory: str, layout: str, num_cycles: int, seed: int) -> Findings:
    model = workers.write_model(Path(directory) / f"model{os.environ['RANK']}", "qwen3")
    actor, generate = LAYOUTS[layout]
    worker = workers.build_worker(model, actor, {**generate, "bucket_mb": 1, "timeout_seconds": 60})
    chance = random.Random(seed)
    findings = Findings()
    usage = []
    points = _points(worker)
    if actor.get("overlap_param_gather"):
        # Contains a gather of Megatron: a rank that fails before a collective ends the job.
        del points["training.prepare"]
    for cycle in range(num_cycles):
        with worker.train_context():
            worker.update(workers.batch(seed=cycle), workers.cross_entropy)
            expected = worker.compute_log_probs(workers.batch(seed=0))
        where = chance.choice(sorted(points))
        target = chance.choice(TARGETS)
        rank = chance.randrange(dist.get_world_size())
        call = chance.choice(CALLS)
        with _fault(*points[where], call) if rank == worker.rank else nullcontext():
            error = _attempt(worker, target)
        findings.cycles += 1
        findings.unrecovered += _disagreements(worker, f"cycle {cycle}, {where} on the way to {target.value}", error)
        if error is not None:
            findings.failed[f"{where}, {target.value}"] += 1
        findings.worst = max(findings.worst, _difference(worker, expected))
        usage.append(_usage())
    first = usage[num_cycles // 10]
    findings.grown = {name: value - first[name] for name, value in usage[-1].items()}
    worker.shutdown()
    return findings


def _points(worker: ActorHybridWorker) -> dict[str, tuple[Any, str]]:
    """Return the methods of a switch that can fail on one rank alone: name -> (object, method)."""
    sharding = worker.sharding
    objects = {
        "training": (sharding.training, ("prepare", "check_values", "buffers")),
        "offloader": (sharding.offloader, ("offload", "onload", "offload_parts")),
        "inference": (sharding.inference, ("allocate", "commit", "finish_fill", "release")),
        "router": (sharding.router, ("prepare", "run", "trim")),
        "caches": (sharding.caches, ("wake_kv_cache", "reset_caches")),
    }
    return {f"{name}.{method}": (owner, method) for name, (owner, methods) in objects.items() for method in methods}


@contextmanager
def _fault(owner: Any, method: str, call: int) -> Iterator[None]:
    function = getattr(owner, method)
    calls = 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise FaultError(f"injected into {method}")
        return function(*args, **kwargs)

    setattr(owner, method, faulty)
    try:
        yield
    finally:
        delattr(owner, method)


def _attempt(worker: ActorHybridWorker, target: State) -> str | None:
    try:
        worker.sharding.enter(target)
    except HybridEngineError as error:
        return f"{type(error).__name__}: {error}"
    return None


def _disagreements(worker: ActorHybridWorker, switch: str, error: str | None) -> list[str]:
    """Return the success and the state by rank if they differ after a switch."""
    outcomes = worker.job.agreement.gather((error is None, worker.sharding.state.value), tuple[bool, str])
    return [] if len(set(outcomes)) == 1 else [f"{switch}: {outcomes}, {error}"]


def _difference(worker: ActorHybridWorker, expected: torch.Tensor) -> float:
    """Switch to vLLM, which must succeed now; return its largest difference of a
    log-probability."""
    tokens = workers.batch(seed=0)["tokens"]
    with worker.rollout_context():
        scored = torch.stack(worker.inference.prompt_logprobs(tokens.tolist()))
    return float((scored - expected[:, :-1]).abs().max())


def _usage() -> dict[str, int]:
    process = psutil.Process()
    return {
        "resident bytes": process.memory_info().rss,
        "descriptors": process.num_fds(),
        "threads": len(os.listdir("/proc/self/task")),
    }


NUM_CYCLES = 30
MAX_GROWTH = {"resident bytes": 16 * 2**20, "descriptors": 4, "threads": 4}


def test_every_failed_switch_is_recovered(engines: Ranks, tmp_path: Path, record: Callable[..., None]) -> None:
    by_rank = engines.launch(break_switches, 2, str(tmp_path), "tp2 -> dp2", NUM_CYCLES, 1, timeout=400)
    for findings in by_rank:
        record(
            fault=f"{findings.cycles} random failures on the way to another state",
            message=f"{findings.failed.total()} switches failed, worst difference {findings.worst:.1e}, "
            f"grown {findings.grown}",
            resumed=not findings.unrecovered,
        )
        assert findings.unrecovered == []
        assert findings.failed == by_rank[0].failed
        assert findings.failed.total() >= NUM_CYCLES // 6
        assert findings.worst < 1e-5
        assert all(findings.grown[name] <= limit for name, limit in MAX_GROWTH.items()), findings.grown


def main(num_cycles: str = "200", *layouts: str) -> None:
    chosen = layouts or tuple(LAYOUTS)
    share = -(-int(num_cycles) // len(chosen))
    run: Callable[..., list[Findings]] = Ranks(with_engines=True).launch
    for number, layout in enumerate(chosen):
        with tempfile.TemporaryDirectory() as directory:
            for rank, findings in enumerate(run(break_switches, 2, directory, layout, share, number, timeout=1500)):
                print(f"{layout}, rank {rank}: {findings}")


if __name__ == "__main__":
    main(*sys.argv[1:])

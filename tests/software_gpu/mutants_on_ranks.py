"""Mutants of code that involves two processes; they run in turn on the same two ranks.

python -m tests.software_gpu.mutants_on_ranks DIRECTORY NAME...   on each rank: writes reports by
name
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hybrid_engine.ranks import groups
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.switch import setup
from hybrid_engine.switch.release_fence import ReleaseFence
from hybrid_engine.switch.replicas import Replicas
from hybrid_engine.switch.sharding_manager import ShardingManager
from hybrid_engine.tools.launching import run_ranks
from hybrid_engine.transports import collective
from hybrid_engine.transports.pull import LocalTransport
from tests.software_gpu import small_switch
from tests.software_gpu.device import Reports
from tests.software_gpu.mutants import Mutant

SECONDS = 120.0
_SECONDS_LATE = 2.0  # Longer than the other rank takes to interpret kernels of a bucket.

Actor = Mapping[str, Any]
LORA: Actor = {"lora": {"rank": 4}}


def switching(actor: Actor | None = None, **generate: Any) -> Callable[[], None]:
    """Return a scenario: a job with these configuration keys switches back and forth."""

    def switch() -> None:
        with small_switch.engine_of(Path(os.environ["SMALL_MODEL"]), actor or {}, generate) as (
            engine,
            trainer,
        ):
            small_switch.switch(engine, trainer)

    return switch


def with_a_late_rank(scenario: Callable[[], None]) -> Callable[[], None]:
    """Return the scenario with a second rank that is late in each bucket."""
    run = LocalTransport.run

    def late(self: LocalTransport, *arguments: Any) -> None:
        time.sleep(_SECONDS_LATE * self.rank)
        run(self, *arguments)

    return mock.patch.object(LocalTransport, "run", late)(scenario)


def group_that_ends_early() -> None:
    """The first rank ends a group while the second has not begun their last collective."""
    group = dist.new_group([0, 1], backend="nccl")
    values = torch.ones(1, device="cuda")
    dist.all_reduce(values, group=group)
    torch.cuda.synchronize()
    time.sleep(1.0 * dist.get_rank())
    dist.all_reduce(values, group=group)
    groups.end_groups(group)
    assert values.item() == 4, f"lost: {values.item()} is not 4"


SCENARIOS: Mapping[str, Callable[[], None]] = {
    "reading": switching(),
    "reading, one rank late": with_a_late_rank(switching()),
    # Both comparisons read on the host what is queued, and so wait as well.
    "reading sums with LoRA, one rank late": with_a_late_rank(
        mock.patch.object(Replicas, "digests", lambda replicas, _: [[]] * len(replicas._groups))(
            switching(LORA, check_nan=False)
        )
    ),
    "messages": switching(transport="collective"),
    "what changed": switching(incremental="auto"),
    "messages of what changed": switching(transport="collective", incremental="delta"),
    "parameters stay": switching(offload_train_param=False),
    "a group ends": group_that_ends_early,
}
MUTANTS: Mapping[str, Mutant] = {
    "what prepare has queued is read": Mutant(
        "reading sums with LoRA, one rank late",
        torch.cuda.Stream,
        "synchronize",
        ShardingManager._bring_parameters,
    ),
    "a probe is read before it is written": Mutant(
        "reading", torch.cuda, "synchronize", setup._probe
    ),
    "messages are unpacked before they have come": Mutant("messages", collective, "_finish"),
    "memory goes before others have read it": Mutant(
        "reading, one rank late",
        RankGroup,
        "end_maximum",
        ReleaseFence._wait,
        noticed="owner (has )?released",
    ),
}


def noticed_on_ranks(directory: Path, names: Collection[str]) -> dict[str, str]:
    """Return the reports and errors of these mutants and scenarios, by name."""
    environment = {
        "SMALL_MODEL": str(small_switch.write_model(directory / "model")),
        "PYTHONWARNINGS": "ignore",
    }
    arguments = ["-m", "tests.software_gpu.mutants_on_ranks", str(directory), *names]
    ended = run_ranks(arguments, 2, SECONDS, environment=environment)
    texts = {name: path.read_text() for name in names if (path := _path(directory, name)).is_file()}
    return {name: texts.get(name, f"no result: {ended.output}") for name in names}


def _path(directory: Path, name: str) -> Path:
    return directory / re.sub(r"\W", "_", name)


def main(directory: Path, names: Collection[str]) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    reports = Reports()
    gloo = dist.new_group(backend="gloo")
    for name in names:
        error = ""
        try:
            with MUTANTS[name].applied() if name in MUTANTS else nullcontext():
                SCENARIOS[MUTANTS[name].scenario if name in MUTANTS else name]()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        torch.cuda.synchronize()
        errors: list[str] = [""] * 2
        dist.all_gather_object(errors, error, group=gloo)
        if dist.get_rank() == 0:
            _path(directory, name).write_text("\n".join(filter(None, [reports.new(), *errors])))
        dist.barrier(gloo)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

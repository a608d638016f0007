"""Starts the ranks of `verify` and is what each of them runs: a list of cases, one after the other."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybrid_engine.config import find_violations
from hybrid_engine.errors import ReshardError
from hybrid_engine.files.scratch import scratch_directory
from hybrid_engine.messages import decode, encode
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.job import default_backend, own_device
from hybrid_engine.ranks.launching import run_ranks
from hybrid_engine.ranks.world import World
from hybrid_engine.trainer.worker import ActorHybridWorker
from hybrid_engine.verification.cases import HEAD_DIM, Case
from hybrid_engine.verification.comparison import Comparison, Verdict, join
from hybrid_engine.verification.reference import Reference

Look = Callable[[ActorHybridWorker], object]
"""Called on every rank after the switches of a case; returns what json can write."""

SCRATCH_PREFIX = "hybrid-engine-verify-"

_SECONDS_TO_WAIT = 300
"""Longest wait of one rank for another."""


def run_cases(
    cases: Sequence[Case], num_ranks: int, timeout: float = 1800, module: str = "hybrid_engine.verification.verify"
) -> list[Verdict]:
    """Run cases one after the other on the same `num_ranks` processes.

    Configurations are checked by the caller (`Case.config`), before anything is started.

    Args:
        cases: what to run.
        num_ranks: processes, all on this machine.
        timeout: seconds for all cases together.
        module: what each rank runs, with the arguments of `main`.

    Raises:
        ReshardError: the ranks exited without a verdict or ran out of time; the message has their output.
    """
    with scratch_directory(SCRATCH_PREFIX) as directory:
        job, out = directory / "cases.json", directory / "verdicts.json"
        job.write_text(json.dumps([asdict(case) for case in cases]))
        environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        ended = run_ranks(["-m", module, str(job), str(out)], num_ranks, timeout, environment=environment)
        if ended.status is None:
            raise ReshardError(f"no verdict within {timeout:g} s:\n{ended.output}")
        if ended.status != 0 or not out.is_file():
            raise ReshardError(f"verify ended with status {ended.status}:\n{ended.output}")
        return [Verdict(**verdict) for verdict in json.loads(out.read_text())]


def main(job: str, out: str, *, look: Look = lambda _: None) -> None:
    """Run on one rank the cases in file `job`; rank 0 writes the verdicts over all ranks to file `out`."""
    timeout = timedelta(seconds=_SECONDS_TO_WAIT)
    own_device()
    dist.init_process_group(default_backend(), timeout=timeout)
    world = World.of_default_group()
    everyone = RankGroup(world, "verdicts", range(world.size), _SECONDS_TO_WAIT)
    directory = Path(job).parent
    cases = [Case(**case) for case in json.loads(Path(job).read_text())]
    verdicts = []

    with Reference() as reference:
        for number, case in enumerate(cases):
            scratch = directory / str(number)
            gc.collect()
            gc.freeze()  # vLLM collects garbage many times per engine, and would go through all modules each time
            own = encode(asdict(_verdict_of_rank(case, reference, scratch, look)))
            told = everyone.gather(own)
            verdicts.append(join([Verdict(**decode(each, dict[str, Any])) for each in told.values()]))
            if world.rank == 0:
                Path(out).write_text(json.dumps([asdict(verdict) for verdict in verdicts]))
                shutil.rmtree(scratch, ignore_errors=True)
            everyone.gather(b"")
    everyone.close()
    dist.destroy_process_group()


def _verdict_of_rank(case: Case, reference: Reference, scratch: Path, look: Look) -> Verdict:
    """Return what this rank finds.

    An error becomes part of the verdict, so that the other cases run; one that only this rank sees ends the job.
    """
    started, verdict = time.perf_counter(), Verdict(case.name)
    try:
        config = case.config(dist.get_world_size())
        verdict.trainer = "megatron" if config.actor_config.fsdp is None else "fsdp2"
        verdict.dtype, verdict.served_dtype = config.actor_config.params_dtype, config.served_dtype
        verdict.remarks = [str(violation) for violation in find_violations(config, dist.get_world_size())]
        worker = ActorHybridWorker(config, weights_only=bool(verdict.remarks))
        try:
            Comparison(worker, reference, scratch, verdict).run()
            verdict.seen = [look(worker)]
            verdict.remarks += _heads_refused_here(case.head_size, worker.job.device.type)
        finally:
            worker.shutdown()
    except Exception:
        verdict.error = traceback.format_exc()
    verdict.seconds = time.perf_counter() - started
    return verdict


def _heads_refused_here(head_size: int | None, device_type: str) -> list[str]:
    """What a small model with other heads than the published one hides."""
    from hybrid_engine.backends.vllm.arguments import heads_without_kernel

    if head_size is None or device_type != "cpu":
        return []
    return [
        f"The small model has heads of {HEAD_DIM} elements. A job with the model itself is refused on this machine: "
        f"{found.problem}"
        for found in heads_without_kernel(head_size)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])

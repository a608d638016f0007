"""Launching of the ranks of `verify`, and the program of a rank, which runs cases in turn."""

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

import torch.distributed as dist

from hybrid_engine.config import find_violations
from hybrid_engine.errors import ComputationError, ConfigError
from hybrid_engine.files.scratch import scratch_directory
from hybrid_engine.messages import decode, encode
from hybrid_engine.ranks.groups import RankGroup
from hybrid_engine.ranks.job import default_backend, own_device
from hybrid_engine.ranks.world import World
from hybrid_engine.tools.launching import run_ranks
from hybrid_engine.tools.verify.cases import Case
from hybrid_engine.tools.verify.comparison import Comparison, Verdict, join
from hybrid_engine.tools.verify.reference import Reference
from hybrid_engine.tools.verify.small_models import HEAD_DIM
from hybrid_engine.trainer.worker import ActorHybridWorker

Look = Callable[[ActorHybridWorker], object]
"""Callback on every rank after the switches of a case; returns a value that JSON can represent."""

SCRATCH_PREFIX = "hybrid-engine-verify-"

_WAIT_TIMEOUT = 300
"""Timeout of a rank that waits for another."""


def run_cases(
    cases: Sequence[Case],
    num_ranks: int,
    timeout: float = 1800,
    module: str = "hybrid_engine.tools.verify.verify",
) -> list[Verdict]:
    """Run cases one after the other on the same `num_ranks` processes.

    The caller checks the configurations (`Case.config`) first.

    Args:
        cases: cases to run.
        num_ranks: number of processes, all on this machine.
        timeout: seconds for all cases together.
        module: program of each rank, with the arguments of `main`.

    Raises:
        ReshardError: if the ranks exited without a verdict or ran out of time; the message has
            their output.
    """
    with scratch_directory(SCRATCH_PREFIX) as directory:
        job = directory / "cases.json"
        out = directory / "verdicts.json"
        job.write_text(json.dumps([asdict(case) for case in cases]))
        ended = run_ranks(
            ["-m", module, str(job), str(out)],
            num_ranks,
            timeout,
            environment={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        ended.require_success("verify", timeout)
        return [Verdict(**verdict) for verdict in json.loads(out.read_text())]


def main(job: str, out: str, *, look: Look = lambda _: None) -> list[Verdict]:
    """Run the cases in file `job` on this rank and return the verdicts over all ranks.

    Rank 0 also writes them to file `out`.
    """
    timeout = timedelta(seconds=_WAIT_TIMEOUT)
    own_device()
    dist.init_process_group(default_backend(), timeout=timeout)
    world = World.of_default_group()
    everyone = RankGroup(world, "verdicts", range(world.size), _WAIT_TIMEOUT)
    directory = Path(job).parent
    cases = [Case(**case) for case in json.loads(Path(job).read_text())]
    verdicts = []

    with Reference() as reference:
        for number, case in enumerate(cases):
            scratch = directory / str(number)
            gc.collect()
            # vLLM collects garbage many times per engine and would traverse all modules each time.
            gc.freeze()
            verdict = _verdict_of_rank(case, reference, scratch, look)
            messages = everyone.gather(encode(verdict))
            verdicts.append(join([decode(message, Verdict) for message in messages.values()]))
            if world.rank == 0:
                Path(out).write_text(json.dumps([asdict(joined) for joined in verdicts]))
                shutil.rmtree(scratch, ignore_errors=True)
            everyone.gather(b"")  # no rank starts the next case before the scratch files are gone
    everyone.close()
    dist.destroy_process_group()
    return verdicts


def _verdict_of_rank(case: Case, reference: Reference, scratch: Path, look: Look) -> Verdict:
    """Run a case and return the verdict of this rank.

    An error becomes part of the verdict, so that the other cases run. An error on this rank only
    ends the job, because the other ranks time out.
    """
    started = time.perf_counter()
    verdict = Verdict(case.name)
    try:
        config = case.config(dist.get_world_size())
        verdict.trainer = "megatron" if config.actor_config.fsdp is None else "fsdp2"
        verdict.dtype = config.actor_config.params_dtype
        verdict.served_dtype = config.served_dtype
        # The case was checked for weights alone; these rules keep the model from being trained.
        violations = find_violations(config, dist.get_world_size())
        verdict.remarks = [str(violation) for violation in violations]
        worker = ActorHybridWorker(config, weights_only=bool(verdict.remarks))
        try:
            Comparison(worker, reference, scratch, verdict).run()
            verdict.seen = [look(worker)]
            verdict.remarks += _heads_refused_here(case.head_size, worker.job.device.type)
        finally:
            worker.shutdown()
    except ConfigError as error:
        verdict.error = str(error)
        verdict.status = 2
    except Exception as error:
        verdict.error = traceback.format_exc()
        # A first switch compares what both sides compute, before any parameter is compared.
        if not (verdict.num_parameters or isinstance(error, ComputationError)):
            verdict.status = 3
    verdict.seconds = time.perf_counter() - started
    return verdict


def _heads_refused_here(head_size: int | None, device_type: str) -> list[str]:
    """Return why the published model's heads are refused here, unlike the small model's."""
    from hybrid_engine.backends.vllm.arguments import heads_without_kernel

    if head_size is None or device_type != "cpu":
        return []
    return [
        f"The small model has heads of {HEAD_DIM} elements. "
        f"A job with the model itself is refused on this machine: {violation.problem}"
        for violation in heads_without_kernel(head_size)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])

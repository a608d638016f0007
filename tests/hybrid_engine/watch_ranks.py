"""Three ranks that part ways, for test_failure_watch.py: `python -m tests.hybrid_engine.watch_ranks SCENARIO`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hybrid_engine import failure_watch
from hybrid_engine.agreement import Agreement

FOR_EVER = 600.0


def main(scenario: str) -> None:
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(message)s", stream=sys.stderr)
    failure_watch._SHORTEST_SILENCE = 3.0
    failure_watch._SECONDS_AFTER_SILENCE = 1.0
    failure_watch._SECONDS_TO_SPARE = 2.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=FOR_EVER))
    rank, agreement = dist.get_rank(), Agreement(FOR_EVER if scenario != "stopped" else 3.0)
    try:
        with agreement.phase("generate", patience=2.0):
            if rank == 1:
                time.sleep(0.5)  # the others are waiting by then
                _part(scenario)
            if rank == 0:
                time.sleep(FOR_EVER)  # as in a library that hears no signal and has no timeout
            dist.recv(torch.zeros(1), src=1)
    except Exception as error:
        print(f"rank {rank} raised {type(error).__name__}: {error}", flush=True)
    os._exit(3)


def _part(scenario: str) -> None:
    if scenario == "raises":
        raise MemoryError("no memory for 3 GB")
    os.kill(os.getpid(), signal.SIGKILL if scenario == "killed" else signal.SIGSTOP)


if __name__ == "__main__":
    main(sys.argv[1])

"""A rank, started by torchrun, of a job that alternately trains and publishes to a vLLM server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hybrid_engine import ActorHybridWorker
from hybrid_engine.switch.states import State
from tests.faults.publishing import config_of, draw
from tests.hybrid_engine.serving.test_servers import train_step


def main(model: str, url: str, rows: str, num_steps: str) -> None:
    """Train and publish; rank 0 appends the version and completions of each step to `rows`."""
    with ActorHybridWorker(config_of(model, url)) as worker:
        for step in range(int(num_steps)):
            train_step(worker, step)
            worker.sharding.enter(State.INFER)
            answers = draw(worker)
            worker.sharding.enter(State.TRAIN)
            if worker.rank == 0:
                row = {
                    "version": worker.train.version,
                    "tokens": [list(answer[0].token_ids) for answer in answers],
                }
                with Path(rows).open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A rank of a job that trains and publishes to a vLLM server in turn; for torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hybrid_engine import ActorHybridWorker
from hybrid_engine.switch.states import State
from tests.faults.publishing import config_of, draw
from tests.hybrid_engine.serving.test_servers import train_step


def main(model: str, url: str, rows: str, num_steps: str) -> None:
    """Append a row with the version and completions to the file `rows` for each step, which rank 0 does."""
    with ActorHybridWorker(config_of(model, url)) as worker:
        for step in range(int(num_steps)):
            train_step(worker, step)
            worker.sharding.enter(State.INFER)
            answers = draw(worker)
            worker.sharding.enter(State.TRAIN)
            if worker.rank == 0:
                row = {"version": worker.train.version, "tokens": [list(each[0].token_ids) for each in answers]}
                with Path(rows).open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

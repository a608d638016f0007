"""A rank of a job that trains and publishes to a vLLM server in turn; for torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hybrid_engine import ActorHybridWorker, Sampling, load_config
from hybrid_engine.switch.states import State
from tests.faults.publishing import PROMPTS, TIMEOUT
from tests.hybrid_engine.serving.test_servers import train_step


def main(model: str, url: str, rows: str, num_steps: str) -> None:
    """Append a row with the version and completions to the file `rows` for each step, which rank 0 does."""
    generate = {"servers": [url], "verify": "full", "bucket_mb": 1, "timeout_seconds": TIMEOUT}
    actor = {"params_dtype": "float32", "seq_length": 32, "optimizer": {"lr": 1e-2}, "tensor_model_parallel_size": 2}
    config = load_config({"model": model, "actor_config": actor, "generate_config": generate})
    with ActorHybridWorker(config) as worker:
        for step in range(int(num_steps)):
            train_step(worker, step)
            worker.sharding.enter(State.INFER)
            answers = worker.generate_sequences(PROMPTS, Sampling(max_tokens=8, temperature=0.0))
            worker.sharding.enter(State.TRAIN)
            if worker.rank == 0:
                row = {"version": worker.train.version, "tokens": [list(each[0].token_ids) for each in answers]}
                with Path(rows).open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

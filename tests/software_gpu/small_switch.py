"""A job with real switches: Megatron's model on two ranks, and inference weights on the device
without vLLM.

Each rank trains half of every matrix and serves the whole, so that it reads the other half from the
other rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from hybrid_engine import HybridEngine
from hybrid_engine.attaching.attachment import apply_patches
from hybrid_engine.memory import device_pages
from hybrid_engine.ranks.job import Job
from hybrid_engine.switch.states import State
from hybrid_engine.trainer.megatron.train_engine import TrainEngine
from tests.walk.inference import build_engine
from tests.zoo import workers

SIZES = {"num_hidden_layers": 1, "hidden_size": 256, "vocab_size": 8192}
CHUNK_NBYTES = 2 * 2**20


def write_model(directory: Path) -> Path:
    """Write a model whose weights fill several buckets and chunks."""
    return workers.write_model(directory, "qwen3", **SIZES)


@contextmanager
def engine_of(
    model: Path, actor: Mapping[str, Any], generate: Mapping[str, Any]
) -> Iterator[tuple[HybridEngine, TrainEngine]]:
    """Build an engine in state TRAIN, and its trainer, with these keys of `actor_config` and
    `generate_config`.
    """
    apply_patches()
    from hybrid_engine.trainer.megatron.actor import build_actor

    settings = {
        "bucket_mb": 1,
        "timeout_seconds": 30,
        "verify": "full",
        "check_compute": "off",
        **generate,
    }
    incremental = settings.pop("incremental", "off")
    config = workers.configuration(model, {"tensor_model_parallel_size": 2, **actor}, settings)
    # Set afterwards: a configuration has deltas for servers only.
    changed = config.generate_config.model_copy(update={"incremental": incremental})
    config = config.model_copy(update={"generate_config": changed})
    table = config.table()
    with ExitStack() as ends:
        ends.enter_context(mock.patch.object(device_pages, "CHUNK_NBYTES", CHUNK_NBYTES))
        job = ends.enter_context(closing(Job.join(config.generate_config.timeout_seconds)))
        trainer = build_actor(config, table, job, ends).engine
        engine, _ = build_engine(trainer.model, config, table, job, ends, serve=False)
        yield engine, trainer


def switch(engine: HybridEngine, trainer: TrainEngine, num_rounds: int = 2) -> None:
    """Train, switch to inference and back, `num_rounds` times."""
    limits = trainer.limits
    for seed in range(num_rounds):
        batch = {
            name: rows.chunk(limits.dp_size)[limits.dp_rank]
            for name, rows in workers.batch(seed).items()
        }
        trainer.train_step(batch, workers.cross_entropy)
        engine.sharding.enter(State.INFER)
        engine.sharding.enter(State.TRAIN)

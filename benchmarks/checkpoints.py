"""Bytes and seconds of a training checkpoint, beside megatron-core's and torch's.

    python -m benchmarks.checkpoints --json FILE [--runs 5] [--only megatron]

Two ranks, a Qwen3 of 43 million parameters in float32 with Adam's moments, contenders in turn,
files in the directory for temporary files, seconds of the slowest rank, medians of the runs:

megatron    TP=2, beside `dist_checkpointing` (torch_dist, fully_reshardable), as Megatron-LM calls
            it. It cannot restore torch's Adam, so its loading ends with the tensors it has read.
fsdp2       beside torch.distributed.checkpoint with `get_state_dict`, which names parameters
            as the model does

blocked     ours, seconds until training may go on after `save(wait=False)`. torch's `async_save`
            cannot copy parameters that the engine has allocated.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.launching import figures_of_ranks, main_or_rank, parser_of, write_figures
from benchmarks.log_probs import built_actor
from benchmarks.packing import MODEL, TRAINERS

NUM_RANKS = 2
WIDER = {"hidden_size": 640, "intermediate_size": 1920, "num_attention_heads": 10}
RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}

Calls = dict[str, Callable[[Path], Any]]
"""Name of a measured call -> the call; what it returns is waited for outside of the measurement."""


def main() -> None:
    """Measure every trainer; print and write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of which medians are (default: 5)")
    parser.add_argument("--only", choices=TRAINERS, help="one trainer")
    arguments = parser.parse_args()
    rows = []
    for trainer in [arguments.only] if arguments.only else TRAINERS:
        job = {"trainer": trainer, "runs": arguments.runs}
        rows += figures_of_ranks("benchmarks.checkpoints", job, NUM_RANKS, 3600)
        print(*rows[-2:], sep="\n", flush=True)
    write_figures(arguments.json, rows)


def run_rank(values: dict[str, Any]) -> None:
    """Measure both contenders on one rank; rank 0 writes their figures."""
    out = Path(values["out"])
    with ExitStack() as owner:
        settings = {"seq_length": 16} | TRAINERS[values["trainer"]]
        actor = built_actor(MODEL | WIDER, settings, owner)
        tokens = torch.arange(32).view(2, 16)
        batch = {"tokens": tokens, "labels": tokens}
        actor.engine.train_step(batch, lambda _batch, log_probs: (-log_probs.mean(), {}))
        ours: Calls = {
            "save": actor.checkpoints.save,
            "blocked": lambda path: actor.checkpoints.save(path, wait=False),
            "load": actor.checkpoints.load,
        }
        theirs = torch_dcp(actor) if "fsdp" in settings else megatron_core(actor)
        rows = measure({"ours": ours, "theirs": theirs}, out.parent, values["runs"])
        if dist.get_rank() == 0:
            out.write_text(json.dumps([{"trainer": values["trainer"], **row} for row in rows]))


def measure(
    contenders: Mapping[str, Calls], directory: Path, num_runs: int
) -> list[dict[str, Any]]:
    """Return the figures of each contender: bytes, and median seconds of each call."""
    seconds = defaultdict[tuple[str, str], list[float]](list)
    new = directory / "new"
    # Loads come last, because megatron-core's leaves the optimizer as it cannot be saved again.
    for name in contenders["ours"]:
        turns = [contender for contender, calls in contenders.items() if name in calls]
        for contender in turns * (num_runs + 1):  # the first turn is a warm-up
            dist.barrier()
            started = time.perf_counter()
            saved = directory / contender
            pending = contenders[contender][name](saved if name == "load" else new)
            slowest = torch.tensor(time.perf_counter() - started)
            if pending is not None:
                pending.result()
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            seconds[contender, name].append(slowest.item())
            if new.exists() and dist.get_rank() == 0:
                shutil.rmtree(saved, ignore_errors=True)
                new.rename(saved)
    rows = []
    for contender, calls in contenders.items():
        files = [path for path in (directory / contender).rglob("*") if path.is_file()]
        medians = {name: statistics.median(seconds[contender, name][1:]) for name in calls}
        nbytes = sum(path.stat().st_size for path in files)
        rows.append({"contender": contender, "bytes": nbytes, **medians})
    return rows


def torch_dcp(actor: Any) -> Calls:
    """Return the calls of torch.distributed.checkpoint for a model of FSDP2."""
    model = actor.engine.model.model
    optimizer = actor.engine.optimizer.inner

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def load(path: Path) -> None:
        loaded = state()
        dcp.load(loaded, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )

    def save(path: Path) -> None:
        dcp.save(state(), checkpoint_id=path)

    return {"save": save, "load": load}


def megatron_core(actor: Any) -> Calls:
    """Return the calls of megatron-core's dist_checkpointing."""
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    trained = actor.checkpoints._state._actor

    def state(is_loading: bool) -> dict[str, Any]:
        (chunk,) = trained.chunks
        weights = unwrap_model(chunk).sharded_state_dict()
        moments = trained.optimizer.sharded_state_dict(
            weights, is_loading=is_loading, metadata=RESHARDABLE
        )
        return {"model": weights, "optimizer": moments}

    def save(path: Path) -> None:
        path.mkdir(exist_ok=True)
        dist_checkpointing.save(state(False), str(path), content_metadata=RESHARDABLE)

    def load(path: Path) -> None:
        dist_checkpointing.load(state(True), str(path))

    return {"save": save, "load": load}


if __name__ == "__main__":
    main_or_rank(main, run_rank)

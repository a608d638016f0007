"""Memory and seconds of the log-probabilities of long rows, in chunks and with whole logits.

    python -m benchmarks.log_probs --json FILE [--lengths 8192 32768] [--rows 1] [--in-chunks]

One rank, float32, one micro batch, a model of one layer with a hidden size of 64 and a vocabulary
of 151,936, so that logits are nearly all of its memory. Megatron's attention on a CPU has scores of
length x length for each row. Each figure is of a process of its own: what its resident memory (on a
GPU, torch's allocated memory) grows by at most, from the built model on.

scores      log-probabilities alone
update      a training step whose loss reads them, with the optimizer's new state
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.launching import figures_of_ranks, main_or_rank, parser_of, write_figures
from benchmarks.packing import MODEL
from hybrid_engine import load_config
from hybrid_engine.attaching.attachment import apply_patches
from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.models import table_for
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer.batches import chunked_scores

VOCAB_SIZE = 151936
TRAINERS: dict[str, dict[str, Any]] = {"megatron": {}, "fsdp2": {"fsdp": {}}}
PASSES = ("scores", "update")


def main() -> None:
    """Measure every trainer, length, way and pass; print and write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192], help="tokens of a row")
    parser.add_argument("--rows", type=int, default=1, help="rows of the micro batch (default: 1)")
    parser.add_argument("--only", choices=TRAINERS, help="one trainer")
    parser.add_argument("--in-chunks", action="store_true", help="leave whole logits out")
    arguments = parser.parse_args()
    rows = []
    for trainer in [arguments.only] if arguments.only else TRAINERS:
        for length in arguments.lengths:
            for way in ("in chunks",) if arguments.in_chunks else ("in chunks", "whole"):
                for name in PASSES:
                    job = {"trainer": trainer, "length": length, "way": way, "pass": name}
                    job["rows"] = arguments.rows
                    figures = figures_of_ranks("benchmarks.log_probs", job, 1, 3600)
                    rows.append(job | figures)
                    print(rows[-1], flush=True)
    write_figures(arguments.json, rows)


def run_rank(values: dict[str, Any]) -> None:
    """Measure one pass in this process, and write its figures."""
    length = values["length"]
    model = MODEL | {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": length,
    }
    rows = values["rows"]
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (rows, length + 1), generator=drawn)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    limit = 2**62 if values["way"] == "whole" else chunked_scores.MAX_LOGIT_NBYTES
    with ExitStack() as owner:
        settings = {"micro_batch_size": rows, "seq_length": length} | TRAINERS[values["trainer"]]
        engine = built_actor(model, settings, owner).engine
        owner.enter_context(attributes_set([chunked_scores], MAX_LOGIT_NBYTES=limit))
        before = peak_nbytes()
        started = time.perf_counter()
        if values["pass"] == "update":
            report = engine.train_step(batch, lambda _batch, log_probs: (-log_probs.mean(), {}))
            seen = {"grad_norm": report["grad_norm"]}
        else:
            seen = {"mean": engine.log_probs(batch).double().mean().item()}
        seconds = time.perf_counter() - started
        gib = (peak_nbytes() - before) / 2**30
    Path(values["out"]).write_text(json.dumps({"gib": gib, "seconds": seconds, **seen}))


def built_actor(model: dict[str, Any], settings: dict[str, Any], owner: ExitStack) -> Any:
    """Build the actor of a trainer in float32, with random weights; `owner` ends it. Collective.

    Args:
        model: its config.json.
        settings: keys of `actor_config`.
        owner: ends the actor and its job.
    """
    apply_patches()
    if "fsdp" in settings:
        from hybrid_engine.trainer.fsdp.actor import build_actor
    else:
        from hybrid_engine.trainer.megatron.actor import build_actor
    directory = Path(owner.enter_context(tempfile.TemporaryDirectory()))
    (directory / "config.json").write_text(json.dumps(model))
    job = owner.enter_context(closing(Job.join(3600)))
    config = load_config(
        {
            "model": str(directory),
            "random_weights": True,
            "actor_config": {"params_dtype": "float32"} | settings,
        },
        job.world_size,
    )
    return build_actor(config, table_for(config.hf_config()), job, owner)


def peak_nbytes() -> int:
    """Return the largest number of bytes so far: torch's on a GPU, else of resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main_or_rank(main, run_rank)

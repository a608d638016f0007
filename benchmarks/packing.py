"""Scores and updates of packed rows, compared with one completion a row.

    python -m benchmarks.packing --json FILE [--runs 5] [--only megatron]

64 sequences with lengths like those of GSM8K: prompts of 45 to 220 tokens, completions with a
median of 180 tokens (lognormal, sigma 0.5), at most 768. Two ranks, micro batches of four rows of
1,024 tokens. Rows of both kinds are cut behind the last token of their micro batch.

padded      one sequence a row, in the order in which they were drawn
packed      several sequences a row (`pack` of `train`)
"columns"   computed columns of all micro batches / tokens

Both take the same optimizer step: the benchmark reports the largest difference of log-probabilities
and the difference of the loss.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.launching import figures_of_ranks, main_or_rank, parser_of, write_figures
from benchmarks.resharding.measuring import gather
from hybrid_engine import ActorHybridWorker, Completion, build_batch, load_config
from hybrid_engine.rl.losses import policy_loss
from hybrid_engine.rl.packed_calls import PackedCalls
from hybrid_engine.trainer.batches.row_packing import pack_rows

SEQ_LENGTH = 1024
MICRO_BATCH_SIZE = 4
NUM_SEQUENCES = 64
NUM_RANKS = 2
VOCAB_SIZE = 4096
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
TRAINERS: dict[str, dict[str, Any]] = {
    "megatron": {"tensor_model_parallel_size": 2},
    "fsdp2": {"fsdp": {}},
}


def main() -> None:
    """Run the trainers; print and write their figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each kind (default: 5)")
    parser.add_argument("--only", choices=TRAINERS, help="one trainer")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="packing-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        for trainer in [arguments.only] if arguments.only else TRAINERS:
            job = {"trainer": trainer, "model": directory, "runs": arguments.runs}
            rows.append(figures_of_ranks("benchmarks.packing", job, NUM_RANKS, 900))
            print(rows[-1], flush=True)
            if rows[-1]["log_prob_difference"] > 1e-4:
                sys.exit("packed rows have other log-probabilities")
    write_figures(arguments.json, rows)


def run_rank(values: dict[str, Any]) -> None:
    """Measure one trainer on one rank; rank 0 writes its figures."""
    config = {
        "model": values["model"],
        "random_weights": True,
        "actor_config": {
            "params_dtype": "float32",
            "micro_batch_size": MICRO_BATCH_SIZE,
            "seq_length": SEQ_LENGTH,
            **TRAINERS[values["trainer"]],
        },
        "generate_config": {"max_model_len": SEQ_LENGTH, "max_num_seqs": 4, "kv_cache_mb": 64},
    }
    with ActorHybridWorker(load_config(config, NUM_RANKS)) as worker:
        figures = measure(worker, values["runs"])
        if worker.rank == 0:
            Path(values["out"]).write_text(json.dumps({"trainer": values["trainer"], **figures}))


def measure(worker: ActorHybridWorker, num_runs: int) -> dict[str, Any]:
    """Return seconds, columns and differences of both kinds of rows."""
    batch = drawn_batch()
    limits = worker.actor.engine.limits
    calls = {name: PackedCalls(limits, name == "packed") for name in ("padded", "packed")}
    log_probs: dict[str, torch.Tensor] = {}
    losses: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    loss = policy_loss(0.2, 0.0)
    # A learning rate at which no weight changes, so that all runs compute the same.
    worker.set_learning_rate(1e-30)
    with worker.train_context():
        batch["old_log_probs"] = calls["padded"].score(worker.compute_log_probs, batch)
        for run in range(num_runs + 1):
            for name, packed_calls in calls.items():
                dist.barrier()
                started = time.perf_counter()
                log_probs[name] = packed_calls.score(worker.compute_log_probs, batch)
                losses[name] = packed_calls.update(worker.update, batch, loss)["loss"]
                if run:  # the first run warms up
                    seconds[name].append(max(gather(time.perf_counter() - started)))
    num_tokens = int(batch["attention_mask"].sum())
    packed = pack_rows(batch, multiple_of=limits.dp_size * MICRO_BATCH_SIZE).batch
    medians = {name: statistics.median(durations) for name, durations in seconds.items()}
    mask = batch["mask"].bool()
    difference = (log_probs["padded"] - log_probs["packed"])[mask].abs().max().item()
    return {
        **{f"{name}_seconds": median for name, median in medians.items()},
        "padded_ratio": medians["padded"] / medians["packed"],
        "padded_columns": columns_of(batch["attention_mask"]) / num_tokens,
        "packed_columns": columns_of(packed["sequence_ids"]) / num_tokens,
        "padded_rows": len(batch["tokens"]),
        "packed_rows": len(packed["tokens"]),
        "log_prob_difference": difference,
        "loss_difference": abs(losses["padded"] - losses["packed"]),
    }


def drawn_batch() -> dict[str, torch.Tensor]:
    """Return a batch of random tokens, the same on all ranks."""
    draws = random.Random(0)
    prompts = []
    completions = []
    for _ in range(NUM_SEQUENCES):
        length = min(max(int(draws.lognormvariate(math.log(180), 0.5)), 1), 768)
        prompts.append([draws.randrange(VOCAB_SIZE) for _ in range(draws.randint(45, 220))])
        drawn = tuple(draws.randrange(VOCAB_SIZE) for _ in range(length))
        completions.append(Completion(drawn, (), "stop", prompt_token_ids=tuple(prompts[-1])))
    batch = build_batch(prompts, completions, SEQ_LENGTH)
    lengths = [
        len(prompt) + len(completion.token_ids) - 1
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    batch["attention_mask"] = (torch.arange(SEQ_LENGTH) < torch.tensor(lengths)[:, None]).long()
    batch["advantages"] = torch.tensor([draws.gauss(0, 1) for _ in prompts])
    return batch


def columns_of(occupied: torch.Tensor) -> int:
    """Return the number of computed columns, of a mask or of numbers of sequences [R, S]."""
    ends = (occupied > 0).int().cumsum(dim=1).argmax(dim=1) + 1
    return sum(len(part) * int(part.max()) for part in ends.split(MICRO_BATCH_SIZE))


if __name__ == "__main__":
    main_or_rank(main, run_rank)

"""Rank that compares Megatron models without a name table as `verify` does.

    torchrun ... -m tests.hybrid_engine.end_to_end.derived_megatron_verdicts FILE NUMBER ...

compares some of `derived_megatron.MODELS`, and writes the verdicts to FILE.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

import hybrid_engine
from hybrid_engine.compute_check.probes import following_log_probs
from hybrid_engine.ranks.job import join_process_group
from hybrid_engine.tools.verify.comparison import NUM_SWITCHES, Comparison, Verdict, join, tokens_and_labels
from hybrid_engine.tools.verify.reference import Reference
from tests.hybrid_engine.end_to_end.derived_megatron import MODELS, Model, _attached


def compared(model: Model) -> Verdict:
    """Return the verdict over all ranks on switches of random weights, which are not trained."""
    with Reference() as reference, tempfile.TemporaryDirectory() as directory, _attached(model) as engine:
        shared = [directory]
        torch.distributed.broadcast_object_list(shared)
        verdict = Verdict(model.architecture, remarks=["the user's loop trains"])
        Comparison(engine, reference, Path(shared[0]), verdict).run()
        tokens = tokens_and_labels(99, engine.table.dims.vocab_size)["tokens"]
        log_probs = reference.log_probs(Path(shared[0], f"version{NUM_SWITCHES - 1}"), tokens)
        with engine.train_context():
            trained = engine.train.probe(tokens).log_probs
        expected = following_log_probs(log_probs, tokens, engine.table.dims.vocab_size)
        verdict.training = float((trained - expected).abs().max())
        verdicts = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(verdicts, verdict)
    return join(verdicts)


if __name__ == "__main__":
    join_process_group(120)
    hybrid_engine.prepare()
    verdicts = [asdict(compared(MODELS[int(number)])) for number in sys.argv[2:]]
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(verdicts))

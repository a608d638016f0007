"""Set-up, switches, steps and generation exchange no pickles: whoever asks for one of ours gets an error."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.launch import Ranks
from tests.zoo import workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OURS = ("hybrid_engine", "megatron_patches")


def refused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse calls of our own modules; vLLM, Megatron and torch may do as they like among themselves."""

    def call(*arguments: Any, **named: Any) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.split(".")[0] in OURS:
            raise AssertionError(f"{caller} calls {function.__name__}")
        return function(*arguments, **named)

    return call


def go_around(model: Path) -> list[str]:
    """Build, generate, score and train; returns counts of answers."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"):
            patch.setattr(dist, name, refused(getattr(dist, name)))
        patch.setattr(pickle, "loads", refused(pickle.loads))
        with pytest.raises(AssertionError, match="calls loads"):
            exec("import pickle; pickle.loads(b'N.')", {"__name__": "hybrid_engine.probe"})
        generate = {"verify": "full", "incremental": "auto", "trace": str(model / "trace.json")}
        worker = workers.build_worker(model, {"tensor_model_parallel_size": 2}, generate)
        batch = workers.batch(0)
        for _ in range(2):
            with worker.rollout_context():
                completions = worker.generate_sequences([[1, 2, 3], [4, 5]], workers.GREEDY)
            with worker.train_context():
                worker.compute_log_probs(batch)
                worker.update(batch, workers.cross_entropy)
        reports = [len(each) for each in completions]
        worker.shutdown()
    return reports


def test_ranks_exchange_no_pickles(engines: Ranks, tmp_path: Path) -> None:
    model = workers.write_model(tmp_path / "model", "qwen3")
    assert engines.launch(go_around, 2, model) == [[1, 1]] * 2

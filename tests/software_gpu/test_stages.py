"""vLLM's pipeline parallelism, which does not work on CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_engine.tools.launching import run_ranks
from tests.zoo import workers

NUM_RANKS = 2
SECONDS = 300.0


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_stages_have_the_completions_of_replicas_and_refuse_to_score(tmp_path: Path) -> None:
    """`check_compute` must not score a prompt either, which would fail the first switch."""
    model = workers.write_model(tmp_path / "model", "qwen3", num_hidden_layers=2)
    out = tmp_path / "out"
    arguments = ["-m", "tests.software_gpu.vllm_in_stages", str(model), str(out)]
    result = run_ranks(arguments, NUM_RANKS, SECONDS)
    assert result.status == 0, result.output
    for rank in range(NUM_RANKS):
        observed = json.loads(out.with_suffix(f".{rank}").read_text())
        assert observed["stages"]["tokens"] == observed["replicas"]["tokens"]
        assert (
            "no log-probabilities of prompts with pipeline parallel size 2"
            in observed["stages"]["refusal"]
        )
        assert observed["replicas"]["refusal"] == ""

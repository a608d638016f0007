"""vLLM's pipeline parallelism, with which it cannot generate on CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_engine.tools.launching import run_ranks
from tests.zoo import workers

NUM_RANKS, SECONDS = 2, 300.0


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_stages_complete_as_replicas_do_and_score_no_prompt(tmp_path: Path) -> None:
    """Nor does `check_compute` have them score one, which would end the first switch."""
    model, out = workers.write_model(tmp_path / "model", "qwen3", num_hidden_layers=2), tmp_path / "out"
    arguments = ["-m", "tests.software_gpu.vllm_in_stages", str(model), str(out)]
    ended = run_ranks(arguments, NUM_RANKS, SECONDS)
    assert ended.status == 0, ended.output
    for rank in range(NUM_RANKS):
        observed = json.loads(out.with_suffix(f".{rank}").read_text())
        assert observed["stages"]["tokens"] == observed["replicas"]["tokens"]
        assert "no log-probabilities of prompts with pipeline parallel size 2" in observed["stages"]["refusal"]
        assert observed["replicas"]["refusal"] == ""

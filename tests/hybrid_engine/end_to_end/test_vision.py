"""Small random models of images and text: FSDP2 on two ranks, real vLLM, real processors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_engine.tools.launching import run_ranks
from tests.hybrid_engine.tools.programs import run_python
from tests.zoo.vision_models import SMALL_VISION, required_environment, write_vision_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

QWEN3_VL = "Qwen3VLForConditionalGeneration"
GEMMA = "Gemma3ForConditionalGeneration"


@pytest.mark.parametrize(
    ("program", "architecture"),
    [
        # Log-probabilities are those of transformers in both engines.
        *(("switch", name) for name in SMALL_VISION if name != GEMMA),
        # vLLM would compute images otherwise, and they are refused.
        ("trainer_alone", GEMMA),
        # Replicas exchange prompts with images.
        ("replicas", QWEN3_VL),
        # A frozen vision tower is sent once.
        ("frozen", QWEN3_VL),
    ],
)
def test_images_are_trained_and_generated(program: str, architecture: str, tmp_path: Path) -> None:
    """The programs assert on the ranks."""
    environment = required_environment()
    model = write_vision_model(tmp_path / "model", architecture)
    arguments = ["-m", "tests.hybrid_engine.end_to_end.vision_ranks", program, str(model), str(tmp_path)]
    ended = run_ranks(arguments, 2, 500, environment=environment)
    assert ended.status == 0, ended.output


def test_grpo_learns_what_only_images_show(tmp_path: Path) -> None:
    environment = required_environment()
    out = tmp_path / "rows.json"
    command = "benchmarks.image_grpo", "--steps", 40, "--json", out
    run_python("-m", *command, status=0, timeout=500, **environment)
    _, *rows = json.loads(out.read_text())
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.1
    # Of four colors, text alone names at most one.
    assert sum(rewards[-5:]) / 5 > 0.35
    assert max(row["logprob_diff"] for row in rows) < 1e-4

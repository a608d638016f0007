"""Small random models of images and text: FSDP2 on two ranks, real vLLM, real processors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.tools.launching import run_ranks
from tests.harness.launch import REPO_ROOT
from tests.zoo.vision_models import SMALL_VISION, vision_environment, write_vision_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

QWEN3_VL = "Qwen3VLForConditionalGeneration"
GEMMA = "Gemma3ForConditionalGeneration"


def required_environment() -> dict[str, str]:
    environment = vision_environment()
    if environment is None:
        pytest.skip("`make env` installs the torchvision of requirements-cpu-vision.txt, and it is not here")
    return environment


def observed_by(program: str, architecture: str, directory: Path) -> dict[str, Any]:
    environment = required_environment()
    model = write_vision_model(directory / "model", architecture)
    arguments = ["-m", "tests.hybrid_engine.end_to_end.vision_ranks", program, str(model), str(directory)]
    ended = run_ranks(arguments, 2, 500, environment=environment)
    assert ended.status == 0, ended.output
    observed: dict[str, Any] = json.loads((directory / "observed.json").read_text())
    return observed


@pytest.mark.parametrize("architecture", [name for name in SMALL_VISION if name != GEMMA])
def test_images_have_the_log_probabilities_of_transformers_in_both_engines(architecture: str, tmp_path: Path) -> None:
    observed = observed_by("switch", architecture, tmp_path)
    # In `switch` every parameter is compared, too (`verify: full`).
    assert max(observed["transformers"]) < 1e-5
    # vLLM computes Qwen3.5 in bfloat16.
    assert max(observed["vllm"]) < (0.05 if "3_5" in architecture else 1e-5)
    assert observed["surplus"] == 0
    assert observed["image changes"]
    assert observed["refused"] == ["rows-without-images", "wrong-number-of-rows", "images-unsupported"]
    assert {"preprocessor_config.json", "tokenizer.json"} <= set(observed["files"])


def test_images_are_refused_where_vllm_would_compute_them_otherwise(tmp_path: Path) -> None:
    observed = observed_by("trainer_alone", GEMMA, tmp_path)
    assert [text.partition(", ")[0] for text in observed["refused"]] == [
        f"prompts[{index}]: has images" for index in range(4)
    ]
    assert "vLLM's attention here (CPU_ATTN) is causal within images, too" in observed["refused"][0]
    # The trainer computes them, with attention in both directions.
    assert max(observed["transformers"] + observed["vllm"]) < 1e-5


def test_replicas_exchange_prompts_with_images(tmp_path: Path) -> None:
    observed = observed_by("replicas", QWEN3_VL, tmp_path)
    assert observed == {"refused": True, "same": True, "inputs": [["image_grid_thw", "pixel_values"]] * 3}


def test_a_frozen_vision_tower_is_sent_once(tmp_path: Path) -> None:
    observed = observed_by("frozen", QWEN3_VL, tmp_path)
    read = observed["read"]
    assert observed["skipped"] == [0, observed["tower"], observed["tower"]]
    assert read == [read[0], *[read[0] - observed["tower"]] * 2]
    assert max(observed["logprobs"]) < 1e-5


def test_grpo_learns_what_only_images_show(tmp_path: Path) -> None:
    environment = required_environment()
    out = tmp_path / "rows.json"
    command = ["-m", "benchmarks.image_grpo", "--steps", "40", "--json", str(out)]
    subprocess.run(
        [sys.executable, *command], env={**os.environ, **environment}, cwd=REPO_ROOT, timeout=500, check=True
    )
    _, *rows = json.loads(out.read_text())
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[:3]) / 3 < 0.1
    # Of four colors, text alone names at most one.
    assert sum(rewards[-5:]) / 5 > 0.35
    assert max(row["logprob_diff"] for row in rows) < 1e-4

"""Small random models of images and text: FSDP2 on two ranks, real vLLM, real processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_engine.tools.launching import run_ranks
from tests.zoo.vision_models import SMALL_VISION, vision_environment, write_vision_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

QWEN3_VL = "Qwen3VLForConditionalGeneration"


def observed_by(program: str, architecture: str, directory: Path) -> dict[str, Any]:
    environment = vision_environment()
    if environment is None:
        pytest.skip("`make env` installs the torchvision of requirements-cpu-vision.txt, and it is not here")
    model = write_vision_model(directory / "model", architecture)
    arguments = ["-m", "tests.hybrid_engine.end_to_end.vision_ranks", program, str(model), str(directory)]
    ended = run_ranks(arguments, 2, 500, environment=environment)
    assert ended.status == 0, ended.output
    observed: dict[str, Any] = json.loads((directory / "observed.json").read_text())
    return observed


@pytest.mark.parametrize("architecture", SMALL_VISION)
def test_images_have_the_log_probabilities_of_transformers_in_both_engines(architecture: str, tmp_path: Path) -> None:
    observed = observed_by("switch", architecture, tmp_path)
    # In `switch` every parameter is compared, too (`verify: full`).
    assert max(observed["transformers"] + observed["vllm"]) < 1e-5
    assert observed["surplus"] == 0
    assert observed["image changes"]
    assert observed["refused"] == ["rows-without-images", "wrong-number-of-rows", "images-unsupported"]
    assert {"preprocessor_config.json", "video_preprocessor_config.json"} <= set(observed["files"])


def test_replicas_exchange_prompts_with_images(tmp_path: Path) -> None:
    observed = observed_by("replicas", QWEN3_VL, tmp_path)
    assert observed == {"same": True, "inputs": [["image_grid_thw", "pixel_values"]] * 3}


def test_grpo_trains_on_images(tmp_path: Path) -> None:
    observed = observed_by("learn", QWEN3_VL, tmp_path)
    rewards = observed["rewards"]
    # Naming one color always, without a look at the image, has 0.5.
    assert sum(rewards[:3]) / 3 < 0.1
    assert sum(rewards[-3:]) / 3 > 0.25
    assert observed["difference"] < 1e-4

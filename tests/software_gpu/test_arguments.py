"""Settings unsupported by vLLM's kernels for CUDA are refused before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_engine.backends.vllm import InferenceSettings
from hybrid_engine.backends.vllm.arguments import check_arguments
from hybrid_engine.errors import ConfigError
from tests.zoo import workers


@pytest.mark.slow
def test_lora_in_float32_is_refused(tmp_path: Path) -> None:
    model = workers.write_model(tmp_path, "qwen3", num_hidden_layers=1)
    in_bfloat16 = InferenceSettings(str(model), max_loras=1, dtype="bfloat16")
    check_arguments(in_bfloat16, 0, "cuda")
    in_float32 = InferenceSettings(str(model), max_loras=1, dtype="float32")
    with pytest.raises(ConfigError) as caught:
        check_arguments(in_float32, 0, "cuda")
    (violation,) = caught.value.findings
    assert violation.key == "max_loras"
    assert "float32" in violation.problem

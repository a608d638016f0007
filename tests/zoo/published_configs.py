"""Configs of published models, one or two per family, with the keys that decide the
architecture. They stand in published_configs.yaml."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.harness.values import Values

_CONFIGS: dict[str, Values] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

LLAMA_2_7B = _CONFIGS["LLAMA_2_7B"]
LLAMA_3_8B = _CONFIGS["LLAMA_3_8B"]
LLAMA_3_70B = _CONFIGS["LLAMA_3_70B"]
QWEN2_5_0_5B = _CONFIGS["QWEN2_5_0_5B"]
QWEN3_8B = _CONFIGS["QWEN3_8B"]
QWEN3_30B_A3B = _CONFIGS["QWEN3_30B_A3B"]
MIXTRAL_8X7B = _CONFIGS["MIXTRAL_8X7B"]
DEEPSEEK_V2_LITE = _CONFIGS["DEEPSEEK_V2_LITE"]
DEEPSEEK_V3 = _CONFIGS["DEEPSEEK_V3"]
GLM_4_9B = _CONFIGS["GLM_4_9B"]
GLM_4_9B_0414 = _CONFIGS["GLM_4_9B_0414"]
GEMMA_2_2B = _CONFIGS["GEMMA_2_2B"]
GEMMA_3_1B = _CONFIGS["GEMMA_3_1B"]
GPT2 = _CONFIGS["GPT2"]
QWEN_1_5_MOE = _CONFIGS["QWEN_1_5_MOE"]
DEEPSEEK_V2 = _CONFIGS["DEEPSEEK_V2"]

PUBLISHED: dict[str, Values] = _CONFIGS["PUBLISHED"]

PUBLISHED_VISION: dict[str, Values] = _CONFIGS["PUBLISHED_VISION"]
"""Models of images and text."""

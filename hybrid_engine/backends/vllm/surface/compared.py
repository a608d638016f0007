"""What of vLLM's surface a source tree does not have, or has otherwise."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from hybrid_engine.backends.vllm.surface.behaviours import BEHAVIOURS, Behaviour
from hybrid_engine.backends.vllm.surface.source_reader import Source, digest
from hybrid_engine.backends.vllm.surface.uses import Use, uses
from hybrid_engine.errors import DependencyError


@dataclass(frozen=True)
class Comparison:
    """Of one version.

    Attributes:
        num_names: how many were looked up.
        faults: names that are missing or called in another way, each with what it is for; the engine cannot be used.
        unread: code that is relied on and is not as in any version in which it was read; it may do something else.
    """

    num_names: int
    faults: tuple[str, ...]
    unread: tuple[str, ...]


def compare(source: Source, version: str, behaviours: Iterable[Behaviour] = BEHAVIOURS) -> Comparison:
    """Look up everything that is used. `version`: of the source; names that came later are not asked for."""
    names = [each for each in uses() if not each.since or Version(version) >= Version(each.since)]
    faults = [fault for each in names for fault in faults_of(source, each)]
    return Comparison(len(names), tuple(faults), tuple(unread(source, behaviours)))


def compare_installed(version: str) -> Comparison:
    """The same of the vLLM that an import would find; it is not imported. `version`: what is installed.

    Raises DependencyError when there is none.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise DependencyError(f"vLLM {version} is installed, but its module vllm is not found: install it again")
    return compare(Source(Path(spec.origin).parents[1], "vllm"), version)


def faults_of(source: Source, use: Use) -> Iterator[str]:
    """What is wrong with one name, in words."""
    found = source.find(use.target)
    if found is None:
        yield f"{use.target} is missing ({use.reason})"
        return
    signature = source.signature(found)
    if signature is None:
        if use.call is not None or use.parameters is not None:
            yield f"{use.target} is no function whose parameters can be read ({use.reason})"
        return
    if use.call is not None:
        for fault in signature.faults(use.call.num_positional, use.call.keywords):
            yield f"{use.target} {fault} ({use.reason})"
    if use.parameters is not None and signature.positional != use.parameters:
        have, expected = ", ".join(signature.positional), ", ".join(use.parameters)
        yield f"{use.target} has the parameters [{have}], not [{expected}] ({use.reason})"


def unread(source: Source, behaviours: Iterable[Behaviour]) -> Iterator[str]:
    """What was not read as it stands there, with its digest."""
    for each in behaviours:
        found = source.find(each.target)
        if found is None or found.node is None:
            yield f"{each.target} is missing ({each.reason})"
        elif (now := digest(found.node)) not in each.read:
            yield f"{each.target} is {now}, which nobody has read ({each.reason})"

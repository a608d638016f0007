"""Applies and reverts the patches of this process. One registry; `catalog.py` fills it when the package is imported.

Apart from the catalog, so that a module whose patches are in it can apply others, or ask whether its own are applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron_patches.patch import Patch
from megatron_patches.registry import PatchRegistry, PatchState

_registry = PatchRegistry()


def register(patches: Sequence[Patch]) -> None:
    """Add patches to those that can be applied."""
    _registry.register(patches)


def default_groups() -> tuple[str, ...]:
    """The hooks, and without a CUDA device the CPU patches. Those of megatron.training are applied on request only."""
    return ("hooks",) if torch.cuda.is_available() else ("hooks", "cpu")


def apply(groups: Iterable[str] | None = None, *, allow_version: bool = False) -> None:
    """Apply the patches of some groups. Idempotent.

    Args:
        groups: default: `default_groups`.
        allow_version: accept a megatron-core that the patches were not tested with, and log a warning.

    Raises:
        UnknownGroupError: for a group that does not exist.
        PatchSetError: with every unsupported version, missing target and conflict, before anything changes.
    """
    _registry.apply(default_groups() if groups is None else groups, allow_version=allow_version)


def check_version(groups: Iterable[str], *, allow_version: bool = False) -> None:
    """Raise UnsupportedVersionError unless all patches of `groups` were tested with this megatron-core."""
    _registry.check_version(groups, allow_version=allow_version)


def revert() -> None:
    """Restore every original attribute of megatron. Idempotent.

    Raises:
        TargetConflictError: if an attribute was replaced by somebody else since, before anything changes.
    """
    _registry.revert()


def hooks_applied() -> bool:
    """Whether group "hooks" is applied: Megatron asks for buffers, and weight versions are counted."""
    return all(state.num_sites > 0 for state in states() if state.patch.group == "hooks" and state.is_needed)


def require_supported_version() -> None:
    """Raise UnsupportedVersionError for a megatron-core that the hooks were not tested with, unless `apply` took it."""
    if not hooks_applied():
        check_version(("hooks",))


def states() -> list[PatchState]:
    """Every patch with the number of places where it is applied now."""
    return _registry.states()

"""Applies and reverts the patches of this process, by groups."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron_patches import registry
from megatron_patches.errors import UnknownGroupError
from megatron_patches.patch import GROUPS, Patch, release_of

_registry = registry.PatchRegistry()


@dataclass(frozen=True)
class PatchState:
    """A patch and where it stands.

    Attributes:
        is_applied: now.
        is_needed: False if the imported megatron-core does without it: its target came later, or is gone.
    """

    patch: Patch
    is_applied: bool
    is_needed: bool


def default_groups() -> tuple[str, ...]:
    """The hooks, and without a CUDA device the CPU patches. Those of megatron.training are applied on request only."""
    return ("hooks",) if torch.cuda.is_available() else ("hooks", "cpu")


def patches_of(groups: Iterable[str] = GROUPS) -> list[Patch]:
    """The patches of some groups, whose modules are imported. Raises UnknownGroupError."""
    groups = list(dict.fromkeys(groups))
    unknown = sorted(set(groups) - set(GROUPS))
    if unknown:
        raise UnknownGroupError(f"unknown patch groups {unknown}; the groups are {list(GROUPS)}")
    modules = [importlib.import_module(GROUPS[group]) for group in groups]
    return [patch for module in modules for patch in module.PATCHES]


def apply(groups: Iterable[str] | None = None, *, allow_version: bool = False) -> None:
    """Apply the patches of some groups. Idempotent.

    Args:
        groups: default: `default_groups`.
        allow_version: accept a megatron-core that the patches were not tested with, and log a warning.

    Raises:
        UnknownGroupError: for a group that does not exist.
        PatchSetError: with every unsupported version, missing target and conflict, before anything changes.
    """
    _registry.apply(patches_of(default_groups() if groups is None else groups), allow_version=allow_version)


def check_version(groups: Iterable[str], *, allow_version: bool = False) -> None:
    """Raise UnsupportedVersionError unless all patches of `groups` were tested with this megatron-core."""
    registry.check_version(patches_of(groups), allow_version=allow_version)


def revert() -> None:
    """Restore every original attribute of megatron. Idempotent.

    Raises:
        PatchSetError: if an attribute was replaced by somebody else since, before anything changes.
    """
    _registry.revert()


def hooks_applied() -> bool:
    """Whether group "hooks" is applied: Megatron asks for buffers."""
    return all(map(_registry.has, patches_of(["hooks"])))


def require_supported_version() -> None:
    """Raise UnsupportedVersionError for a megatron-core that the hooks were not tested with, unless `apply` took it."""
    if not hooks_applied():
        check_version(("hooks",))


def states() -> list[PatchState]:
    """Every patch of every group."""
    core = sys.modules.get("megatron.core")
    return [
        PatchState(patch, _registry.has(patch), core is None or patch.is_needed_by(release_of(core.__version__)))
        for patch in patches_of()
    ]

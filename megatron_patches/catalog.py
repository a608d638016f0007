"""Every patch of this package, and the one registry that knows which are applied."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_patches import buffers, cpu, cpu_training, optimizers, script
from megatron_patches.patch import Patch
from megatron_patches.registry import PatchRegistry, PatchState

PATCHES: tuple[Patch, ...] = (
    *buffers.PATCHES,
    *optimizers.PATCHES,
    *cpu.PATCHES,
    *cpu_training.PATCHES,
    *script.PATCHES,
)

_registry = PatchRegistry(PATCHES)


def default_groups() -> tuple[str, ...]:
    """The hooks always; the CPU patches when there is no CUDA device. What needs megatron.training is asked for."""
    return ("hooks",) if torch.cuda.is_available() else ("hooks", "cpu")


def apply(groups: Iterable[str] | None = None, *, allow_version: bool = False) -> None:
    """Apply the patches of `groups` (default: `default_groups`). Calling it again changes nothing.

    `allow_version`: go on with a megatron-core that was not tested, and log so.

    Raises, before anything changes: UnknownGroupError; a PatchSetError that lists every unsupported
    version, missing target and conflict (see `megatron_patches.errors`).
    """
    _registry.apply(default_groups() if groups is None else groups, allow_version=allow_version)


def check_version(groups: Iterable[str], *, allow_version: bool = False) -> None:
    """Raise UnsupportedVersionError unless all patches of `groups` were tested with this megatron-core."""
    _registry.check_version(groups, allow_version=allow_version)


def revert() -> None:
    """Put every original attribute of megatron back. Calling it again changes nothing.

    Raises TargetConflictError, before anything changes, if someone replaced an attribute after us.
    """
    _registry.revert()


def hooks_applied() -> bool:
    """Whether Megatron asks for buffers and announces weight versions now: all of group "hooks" is applied."""
    return all(state.num_sites > 0 for state in states() if state.patch.group == "hooks" and state.is_needed)


def states() -> list[PatchState]:
    """Every patch with the number of places where it is applied now."""
    return _registry.states()

"""Errors raised by `megatron_patches`.

    MegatronPatchError                  everything below
    ├── PatchSetError                   the patches do not fit what is installed; nothing was changed
    │   ├── MissingMegatronError        megatron-core cannot be imported
    │   ├── UnsupportedVersionError     a megatron-core version that the patches were not tested with
    │   ├── MissingTargetError          a patched attribute does not exist
    │   └── TargetConflictError         two patches, or a patch and somebody else, claim one attribute
    ├── UnknownGroupError               apply() was asked for a group that does not exist
    ├── UnsupportedModelError           a model chunk without Megatron's flat buffers
    ├── UnsupportedOptimizerError       an optimizer type whose tensors are not known
    ├── BufferAllocationError           a buffer allocator cannot serve, or returned something unusable
    ├── CpuUnsupportedError             a CUDA-only feature was reached while running on CPU
    └── ScriptError                     --enable-resharding cannot be honoured; lists every reason

A `PatchSetError` that found several kinds of violation is raised as the base class with all of them
in `violations`.
"""

from __future__ import annotations

from collections.abc import Sequence


class MegatronPatchError(Exception):
    """Base of every error this package raises on purpose."""


class PatchSetError(MegatronPatchError):
    """Patches cannot be applied or reverted. Raised before anything changes.

    violations: one sentence per problem, each with its remedy.
    """

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__("nothing was changed:\n" + "\n".join(f"- {violation}" for violation in self.violations))


class MissingMegatronError(PatchSetError):
    """megatron-core is not installed."""


class UnsupportedVersionError(PatchSetError):
    """The installed megatron-core is not one of the tested versions."""


class MissingTargetError(PatchSetError):
    """A module, class or attribute named by a patch does not exist."""


class TargetConflictError(PatchSetError):
    """One attribute is claimed twice."""


class UnknownGroupError(MegatronPatchError, ValueError):
    """No patch belongs to the group that was asked for."""


class UnsupportedModelError(MegatronPatchError, TypeError):
    """A model chunk is not wrapped in Megatron's DistributedDataParallel."""


class UnsupportedOptimizerError(MegatronPatchError, TypeError):
    """The optimizer is of a type whose tensors this package does not know how to find."""


class BufferAllocationError(MegatronPatchError):
    """The buffer allocator hook cannot be used here, or what it returned does not fit."""


class CpuUnsupportedError(MegatronPatchError, NotImplementedError):
    """A feature that only exists on CUDA was used while the CPU patches are applied."""


class ScriptError(MegatronPatchError):
    """A Megatron script cannot do what --enable-resharding asks for.

    violations: one sentence per problem, each with its remedy.
    """

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__("--enable-resharding:\n" + "\n".join(f"- {violation}" for violation in self.violations))

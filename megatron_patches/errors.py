"""Errors raised by `megatron_patches`.

MegatronPatchError                  everything below
├── PatchSetError                   the patches do not fit what is installed, or one another; nothing was changed
│   └── UnsupportedVersionError     the patches were not tested with this megatron-core
├── UnknownGroupError               apply() was called with a group that does not exist
├── UnsupportedModelError           a model chunk without Megatron's flat buffers
├── UnsupportedOptimizerError       an optimizer of an unsupported type
├── BufferAllocationError           a buffer allocator cannot be used here, or returned a wrong tensor
├── CpuUnsupportedError             a CUDA-only feature was used on CPU
└── ScriptError                     --enable-resharding is not possible here; lists every reason
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class MegatronPatchError(Exception):
    """Base of every error this package raises on purpose."""


class _ListedError(MegatronPatchError):
    """Says everything that is wrong below a heading.

    Attributes:
        violations: one sentence per problem, each with its remedy.
    """

    heading: ClassVar[str]

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join([f"{self.heading}:", *(f"- {violation}" for violation in self.violations)]))


class PatchSetError(_ListedError):
    """Patches cannot be applied or reverted. Raised before anything changes."""

    heading = "nothing was changed"


class UnsupportedVersionError(PatchSetError):
    """The installed megatron-core is not one of the tested versions."""


class UnknownGroupError(MegatronPatchError, ValueError):
    """No patch belongs to the group that was asked for."""


class UnsupportedModelError(MegatronPatchError, TypeError):
    """A model chunk is not wrapped in Megatron's DistributedDataParallel."""


class UnsupportedOptimizerError(MegatronPatchError, TypeError):
    """The optimizer is of a type whose tensors this package cannot list."""


class BufferAllocationError(MegatronPatchError):
    """The buffer allocator cannot be used here, or returned a tensor that does not fit."""


class CpuUnsupportedError(MegatronPatchError, NotImplementedError):
    """A CUDA-only feature was used while the CPU patches are applied."""


class ScriptError(_ListedError):
    """A Megatron script cannot do what --enable-resharding asks for."""

    heading = "--enable-resharding"

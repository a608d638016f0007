"""Errors raised by `megatron_patches`.

MegatronPatchError                  base class of all
├── PatchSetError                   patches do not fit Megatron or each other; nothing was changed
│   └── UnsupportedVersionError     the patches were not tested with this megatron-core
├── UnknownGroupError               there is no group of patches with this name
├── UnsupportedModelError           a model chunk has no Megatron flat buffers
├── UnsupportedOptimizerError       an optimizer has an unsupported type
├── BufferAllocationError           a buffer allocator cannot be used, or returned a wrong tensor
├── CpuUnsupportedError             a CUDA-only feature was used on CPU
└── ScriptError                     --enable-resharding is not possible here; lists every reason
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class MegatronPatchError(Exception):
    """Base class of every error that this package raises deliberately."""


class _ListedPatchError(MegatronPatchError):
    """Error that lists all problems under a heading.

    Attributes:
        violations: one sentence per problem, each with its remedy.
    """

    heading: ClassVar[str]

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        lines = [f"{self.heading}:", *(f"- {violation}" for violation in self.violations)]
        super().__init__("\n".join(lines))


class PatchSetError(_ListedPatchError):
    """Patches cannot be applied or reverted. Raised before anything changes."""

    heading = "nothing was changed"


class UnsupportedVersionError(PatchSetError):
    """The installed megatron-core is not one of the tested versions."""


class UnknownGroupError(MegatronPatchError, ValueError):
    """No group of patches has this name."""


class UnsupportedModelError(MegatronPatchError, TypeError):
    """A model chunk is not wrapped in Megatron's DistributedDataParallel."""


class UnsupportedOptimizerError(MegatronPatchError, TypeError):
    """This package cannot list the tensors of this type of optimizer."""


class BufferAllocationError(MegatronPatchError):
    """The buffer allocator cannot be used here, or returned a wrong tensor."""


class CpuUnsupportedError(MegatronPatchError, NotImplementedError):
    """A CUDA-only feature was used while the CPU patches are applied."""


class ScriptError(_ListedPatchError):
    """--enable-resharding is not possible in this Megatron script."""

    heading = "--enable-resharding"

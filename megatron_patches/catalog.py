"""Every patch of this package. Importing the package registers them."""

from __future__ import annotations

from megatron_patches import buffers, cpu, cpu_training, optimizers, script
from megatron_patches.applying import register
from megatron_patches.patch import Patch

PATCHES: tuple[Patch, ...] = (
    *buffers.PATCHES,
    *optimizers.PATCHES,
    *cpu.PATCHES,
    *cpu_training.PATCHES,
    *script.PATCHES,
)

register(PATCHES)

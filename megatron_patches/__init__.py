"""Patches for Megatron (megatron-core 0.16 and 0.19): hooks for a switch, and use without CUDA.

    apply() ──> patch: version, targets and conflicts are checked, then all targets are replaced
                   │            └── revert() restores every original
                   │ imports on demand the patches of
       ├── buffers          group "hooks": allocation of the flat buffers; `iter_buffers` reads them
       ├── routers          group "routers": experts' tokens are counted without padding
       ├── without_te       group "without_te": by default without Transformer Engine
       ├── cpu/             groups "cpu" (by default without CUDA), "cpu_training" and "cpu_rl";
       │                    never imported on a machine with CUDA
       ├── script           group "script": --enable-resharding on Megatron-LM's own scripts
       │     └── engines            command line, protocol of an engine, and selection of one
       └── rl               group "rl": --enable-resharding in its RL loop

    optimizers       `optimizer_tensors` lists an optimizer's state, `weight_version` counts its
                     steps, and `gather_state` moves the state into flat tensors of an allocator
    known_fields     names of the fields of the supported versions
    refused_fields   configuration fields that change weights or memory, and refused values
    __main__         ``python -m megatron_patches SCRIPT`` runs a script with the patches;
                     ``patch-source CHECKOUT`` writes the same hooks into a source tree
    errors           exceptions

A patch is a record (`patch.Patch`); ``python -m megatron_patches list`` prints them all. Only
attributes of ``megatron.*`` are ever replaced, never torch's. This package does not depend on
hybrid_engine.
"""

from megatron_patches.buffers import (
    BufferAllocator,
    BufferRecord,
    ParamSlot,
    buffer_allocator,
    iter_buffers,
    set_buffer_allocator,
)
from megatron_patches.optimizers import (
    GatheredState,
    MemoryGiver,
    OptimizerTensor,
    StateAllocator,
    StateBuffer,
    gather_state,
    optimizer_tensors,
    set_weight_version,
    weight_version,
)
from megatron_patches.patch import (
    Patch,
    apply,
    check_version,
    default_groups,
    hooks_applied,
    is_applied,
    require_supported_version,
    revert,
)

__all__ = [
    "BufferAllocator",
    "BufferRecord",
    "GatheredState",
    "MemoryGiver",
    "OptimizerTensor",
    "ParamSlot",
    "Patch",
    "StateAllocator",
    "StateBuffer",
    "apply",
    "buffer_allocator",
    "check_version",
    "default_groups",
    "gather_state",
    "hooks_applied",
    "is_applied",
    "iter_buffers",
    "optimizer_tensors",
    "require_supported_version",
    "revert",
    "set_buffer_allocator",
    "set_weight_version",
    "weight_version",
]

"""Patches for Megatron (megatron-core 0.16 and 0.19): hooks to build on, and what it takes to run without CUDA.

    apply() ──> patch: version, targets and conflicts are checked, then all targets swapped
                   │            └── revert() restores every original
                   │ imports, when they are asked for, the patches of
       ├── buffers          group "hooks": who allocates the flat buffers; `iter_buffers` reads them
       ├── without_te       group "without_te": by default where Transformer Engine is not installed
       ├── cpu/             groups "cpu" (by default without CUDA), "cpu_training" and "cpu_rl"; never imported
       │                    where CUDA is
       ├── script           group "script": --enable-resharding on Megatron-LM's own scripts
       │     └── engines            the command line, the protocol of an engine, and how one is found
       └── rl               group "rl": the same in its RL loop

    optimizers   `optimizer_tensors` lists an optimizer's state, `weight_version` counts its steps, and `gather_state`
                 moves the state into flat tensors of one's own allocator
    review       configuration fields that move weights or memory, and what of them is refused
    __main__     ``python -m megatron_patches SCRIPT``; ``… patch-source CHECKOUT``: the same entry points as
                 patches for source trees

A patch is a record (`patch.Patch`); ``python -m megatron_patches list`` prints them all. errors.py has the exceptions.
Only attributes of ``megatron.*`` are ever replaced, never torch's. Knows nothing of hybrid_engine.
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

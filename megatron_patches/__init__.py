"""Monkey patches for Megatron (megatron-core 0.16.1): hooks to build on, and a CPU to run on.

    apply() ──> catalog ──> registry: versions, targets, conflicts checked, then swapped
                   │            └── revert() puts every original back
                   ├── buffers      group "hooks": who allocates the flat buffers; iter_buffers reads them
                   ├── optimizers   group "hooks": weight versions after each step; optimizer_tensors lists state
                   │     └── optimizer_state   gather_state: that state in flat tensors of our choice
                   ├── cpu          group "cpu" (only without CUDA): megatron on CPU tensors and gloo
                   │     ├── cpu_torch   the `torch` that megatron's modules see
                   │     └── gloo        the few collectives that gloo refuses
                   ├── cpu_training group "cpu_training": the same for megatron.training
                   └── script       group "script": --enable-resharding on Megatron-LM's own scripts
                         ├── launcher    python -m megatron_patches SCRIPT
                         ├── arguments   the command line, which Megatron's Namespace never sees
                         └── engines     the protocol of an engine, and how one is found

A patch is a record (`patch.Patch`); ``python -m megatron_patches list`` prints them all. Only
attributes of ``megatron.*`` are ever replaced: torch stays itself. Knows nothing of hybrid_engine.
"""

from megatron_patches.buffers import (
    BucketRecord,
    BufferAllocator,
    BufferRecord,
    ParamSlot,
    buffer_allocator,
    iter_buffers,
    set_buffer_allocator,
)
from megatron_patches.catalog import apply, default_groups, hooks_applied, revert, states
from megatron_patches.optimizer_state import GatheredState, StateAllocator, StateBuffer, gather_state
from megatron_patches.optimizers import (
    HookHandle,
    OptimizerTensor,
    add_post_step_hook,
    optimizer_tensors,
    set_weight_version,
    weight_version,
)
from megatron_patches.patch import Patch

__all__ = [
    "BucketRecord",
    "BufferAllocator",
    "BufferRecord",
    "GatheredState",
    "HookHandle",
    "OptimizerTensor",
    "ParamSlot",
    "Patch",
    "StateAllocator",
    "StateBuffer",
    "add_post_step_hook",
    "apply",
    "buffer_allocator",
    "default_groups",
    "gather_state",
    "hooks_applied",
    "iter_buffers",
    "optimizer_tensors",
    "revert",
    "set_buffer_allocator",
    "set_weight_version",
    "states",
    "weight_version",
]

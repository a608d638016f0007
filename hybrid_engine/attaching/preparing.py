"""What is done before Megatron's DDP builds its buffers."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import megatron_patches
from hybrid_engine.errors import DependencyError
from hybrid_engine.memory.elastic import allocate_elastic
from megatron_patches.buffers import set_buffer_allocator
from megatron_patches.errors import PatchSetError


def prepare() -> AbstractContextManager[object]:
    """Have Megatron build its buffers in memory that a switch can release page by page.

    Call it before the model is wrapped in DDP, on every rank; without CUDA before the model is built, for it also
    applies what Megatron needs to run on a CPU. As a context manager it is for the DDP that is built in its block:

        hybrid_engine.prepare()
        with hybrid_engine.prepare(): model = DistributedDataParallel(...)

    Nothing is collective. Raises DependencyError for a megatron-core that was not tested.
    """
    apply_patches()
    set_buffer_allocator(allocate_elastic)
    undo = ExitStack()
    undo.callback(set_buffer_allocator, None)
    return undo


def apply_patches() -> None:
    """Apply the hooks and, without CUDA, what it takes to run; idempotent. Raises DependencyError."""
    try:
        megatron_patches.apply()
    except PatchSetError as error:
        raise DependencyError(str(error)) from error

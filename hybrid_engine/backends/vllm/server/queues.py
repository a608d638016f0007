"""vLLM's queues in shared memory between a server's processes, unlinked once all have mapped them.

A file psm_* in /dev/shm outlives a server that is killed, and does not show which process it
belongs to. Unlinked memory is freed by the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from hybrid_engine.backends.vllm import internals

_patches = ExitStack()
"""Keeps vLLM's method replaced for the life of the process."""


def unname_queues() -> None:
    """Unlink the queues that this process makes from now on."""
    _patches.close()
    _patches.enter_context(internals.AWAIT_READERS.replaced(_unnamed))


def _unnamed(await_readers: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(await_readers)
    def wait_until_ready(self: Any) -> None:
        await_readers(self)
        for buffer in (self.buffer, getattr(self, "tensor_arena", None)):
            if buffer is not None and buffer.is_creator:
                buffer.shared_memory.unlink()
                buffer.is_creator = False  # or vLLM would unlink it again at the end

    return wait_until_ready

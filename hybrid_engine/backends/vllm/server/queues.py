"""vLLM's queues in shared memory between a server's processes: without a name once all of these have mapped them.

A file psm_* in /dev/shm outlives a server that is killed, and says of no process that it is its own. Memory without a
name is the kernel's to free.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from hybrid_engine.backends.vllm import internals

_VARIABLE = "HYBRID_ENGINE_UNNAMED_QUEUES"
"""Tells the processes that a server starts, which load plug-ins before they know its configuration."""

_held = ExitStack()
"""Keeps vLLM's method replaced, for the life of the process."""


def unname_queues() -> None:
    """Take the names of queues away that this process makes from now on, and those that it starts."""
    os.environ[_VARIABLE] = "1"
    _held.close()
    _held.enter_context(internals.AWAIT_READERS.replaced(_unnamed))


def unname_in_children() -> None:
    """The same in a process that such a one has started."""
    if _VARIABLE in os.environ:
        unname_queues()


def _unnamed(await_readers: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(await_readers)
    def wait_until_ready(self: Any) -> None:
        await_readers(self)
        for buffer in (self.buffer, getattr(self, "tensor_arena", None)):
            if buffer is not None and buffer.is_creator:
                buffer.shared_memory.unlink()
                buffer.is_creator = False  # else vLLM does it again at the end

    return wait_until_ready

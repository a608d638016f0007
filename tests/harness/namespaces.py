"""Namespaces of the kernel, as containers have them."""

from __future__ import annotations

from hybrid_engine.memory.host_pages import libc, raise_errno

_CLONE_NEWPID = 0x20000000  # <linux/sched.h>


def enter_a_process_namespace() -> None:
    """Children of this process are in a process namespace of their own from now on. Needs root."""
    if libc().unshare(_CLONE_NEWPID) != 0:
        raise_errno("unshare(CLONE_NEWPID)")

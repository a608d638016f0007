"""Namespaces of the kernel, as used by containers."""

from __future__ import annotations

from hybrid_engine.memory.host_pages import libc, raise_errno

_CLONE_NEWPID = 0x20000000  # <linux/sched.h>


def enter_a_process_namespace() -> None:
    """Start all further children of this process in a new process namespace. Requires root."""
    if libc().unshare(_CLONE_NEWPID) != 0:
        raise_errno("unshare(CLONE_NEWPID)")

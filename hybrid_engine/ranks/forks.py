"""Children that a rank forks (os.fork, multiprocessing): what the rank has built is the rank's to end.

A child has the rank's memory and connections, but none of its threads. Ending a process group there waits without end
for threads that it does not have; so does Python's exit, which drops the last reference to every group.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from types import TracebackType
from weakref import WeakSet

from hybrid_engine.ranks.torch_internals import groups_and_stores

own_groups: WeakSet[object] = WeakSet()
"""Process groups of this process that torch does not know."""


class Ends(ExitStack):
    """An ExitStack of the process that made it; in a forked child its end does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child's copy."""
        return os.getpid() != self._pid

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return None if self.is_inherited else super().__exit__(kind, error, traceback)


def _keep_groups() -> None:
    """Refer to every group for good, so that nothing in this child ends one."""
    kept = [groups_and_stores(), list(own_groups)]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_keep_groups)

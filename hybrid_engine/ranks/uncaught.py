"""Prints an error that ends several ranks once, in place of a traceback on each of them.

    rank 0    the whole traceback, with the cause
    rank 3    rank 3 ends by ConfigError; rank 0 prints the cause
    rank 3    rank 3 ends by LostRankError: update: rank 1 has ended (process 4711). The job cannot go on

`install` puts a hook before `sys.excepthook`, as torch does in `init_process_group`. Only what Python prints of an
uncaught error at the end of a process changes: no error is caught, no type changes, and the exit status stays 1.

What only one rank has is never shortened, and no rank says less before rank 0 has said it: launchers end all ranks as
soon as one has ended. So rank 0 leaves a digest of what it has printed in the launcher's store, which outlives it. The
others wait for that, and shorten the same error, or one of which the ranks have agreed that rank 0 knows as much
(`HybridEngineError.is_rank_0s`). Where nothing comes in time, where the launcher ends the wait, or has no store, they
print the whole error. A lost rank needs no traceback anywhere: the survivors' frames say where they waited.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from hybrid_engine.errors import HybridEngineError, LostRankError, RemoteError

if TYPE_CHECKING:
    import torch.distributed as dist

_SECONDS_FOR_RANK_0 = 10.0
_SECONDS_FOR_THE_CAUSE = 5.0
_SECONDS_BETWEEN_LOOKS = 0.05

_BY_RANK_0, _CAUSE = "rank 0", "cause"
"""Keys: the digest of what rank 0 has printed; and that a rank has printed an error of its own."""


def install() -> None:
    """Print uncaught errors of this process as above, if it is one of several ranks when they come."""
    before = sys.excepthook

    def print_error(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        rank = os.environ.get("RANK", "")
        if isinstance(error, HybridEngineError) and rank and os.environ.get("WORLD_SIZE", "1") != "1":
            _print_as_rank(rank, error, lambda: before(kind, error, frames))
        else:
            before(kind, error, frames)

    sys.excepthook = print_error


def _print_as_rank(rank: str, error: HybridEngineError, print_whole: Callable[[], object]) -> None:
    kind = type(error).__name__
    if _is_only_a_lost_rank(error):
        text = "; ".join(str(error).splitlines())
        print(f"rank {rank} ends by {kind}: {text}", file=sys.stderr)
        if rank == "0":
            _Notes().leave(_BY_RANK_0, _digest(error))
    elif rank == "0":
        print_whole()
        notes = _Notes()
        if isinstance(error, RemoteError):  # its own traceback is on another rank, which is to print it
            notes.wait_for(_CAUSE, _SECONDS_FOR_THE_CAUSE)
        notes.leave(_BY_RANK_0, _digest(error))
    elif _is_printed_by_rank_0(error):
        print(f"rank {rank} ends by {kind}; rank 0 prints the cause", file=sys.stderr)
    else:
        print_whole()
        if not isinstance(error, RemoteError):
            _Notes().leave(_CAUSE, rank)


def _is_printed_by_rank_0(error: HybridEngineError) -> bool:
    if error.is_rank_0s is False:
        return False
    printed = _Notes().wait_for(_BY_RANK_0, _SECONDS_FOR_RANK_0)
    return bool(printed) and (error.is_rank_0s or printed == _digest(error))


class _Notes:
    """What the ranks leave each other in the store of torchrun's agent, or of `launching`.

    There is none where rank 0 holds the store, which ends with it: then nothing is left, and no note comes.
    """

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        with contextlib.suppress(Exception):  # of an error nothing is to be lost because torch or the store is gone
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                import torch.distributed as dist

                address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                timeout = timedelta(seconds=_SECONDS_FOR_THE_CAUSE)
                store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                self._store = dist.PrefixStore(f"hybrid_engine/printed/{attempt}", store)

    def leave(self, key: str, note: str) -> None:
        with contextlib.suppress(Exception):
            if self._store is not None:
                self._store.set(key, note)

    def wait_for(self, key: str, seconds: float) -> str:
        """The note; "" where none comes in that time, or the launcher ends this rank meanwhile by SIGTERM."""
        if self._store is None:
            return ""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(Exception), _raising_on_sigterm():
            while time.monotonic() < deadline:
                if self._store.check([key]):
                    return self._store.get(key).decode()
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        return ""


@contextlib.contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    def end_wait(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGTERM, end_wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_only_a_lost_rank(error: BaseException) -> bool:
    """Whether nothing but a rank that went away is behind an error, as opposed to an error of this rank's own."""
    if not isinstance(error, LostRankError):
        return False
    from hybrid_engine.ranks.groups import is_lost_connection

    return all(isinstance(cause, LostRankError) or is_lost_connection(cause) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """All errors that Python prints above this one."""
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while behind is not None:
        yield behind
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)


def _digest(error: HybridEngineError) -> str:
    from hybrid_engine.ranks.digests import text_digest

    return str(text_digest(type(error).__name__, str(error)))

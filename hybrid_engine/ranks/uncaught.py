"""Prints an error that ends several ranks once, in place of a traceback on each of them.

    rank 0    the whole traceback, with the cause
    rank 3    rank 3 ends by ConfigError; rank 0 prints the cause
    rank 3    rank 3 ends by LostRankError: update: rank 1 has ended (process 4711). The job cannot go on

`install` puts a hook before `sys.excepthook`, as torch does in `init_process_group`. Only what Python prints of an
uncaught error at the end of a process changes: no error is caught, no type changes, and the exit status stays 1.

What only one rank has is never shortened, and no rank says less before rank 0 has said it: launchers end all ranks as
soon as one has ended. So rank 0 leaves digests of the errors it has printed, causes too, in the launcher's store, which
outlives it. The others wait for these, and shorten an error that is among them, or one of which the ranks have agreed
that an error of rank 0 says as much (`HybridEngineError.cause_on_rank_0`), if that one is among them. Where nothing
comes in time, where the launcher ends the wait, or has no store, they print the whole error. A lost rank needs no
traceback anywhere if it is known why it was lost: the survivors' frames say where they waited. A time-out for which
there is no reason is printed whole.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
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
"""Keys: digests of the errors that rank 0 has printed; and that a rank has printed an error of its own."""


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
            _write_out(rank)
            _Notes().leave(_BY_RANK_0, _digest(error))
    elif rank == "0":
        with _on_sigterm(_go_on):
            print_whole()
            _write_out(rank)
            notes = _Notes()
            if isinstance(error, RemoteError):  # its own traceback is on another rank, which is to print it
                notes.wait_for(_CAUSE, _SECONDS_FOR_THE_CAUSE)
            notes.leave(_BY_RANK_0, " ".join(map(_digest, (error, *_causes(error)))))
    elif _is_printed_by_rank_0(error):
        print(f"rank {rank} ends by {kind}; rank 0 prints the cause", file=sys.stderr)
    else:
        with _on_sigterm(_go_on):
            print_whole()
            _write_out(rank)
            if not isinstance(error, RemoteError):
                _Notes().leave(_CAUSE, rank)


def _is_printed_by_rank_0(error: HybridEngineError) -> bool:
    if error.cause_on_rank_0 == "":
        return False
    printed = _Notes().wait_for(_BY_RANK_0, _SECONDS_FOR_RANK_0)
    return _digest(error.cause_on_rank_0 or error) in printed.split()


def _write_out(rank: str) -> None:
    """Write what was printed to where it is read, before other ranks rely on that.

    torch's hook around this one holds back all that is printed in it, in a StringIO in place of stderr, and adds the
    rank to each line.
    """
    held = sys.stderr
    if type(held) is io.StringIO and sys.__stderr__ is not None:
        lines = held.getvalue().splitlines()
        held.seek(0)
        held.truncate()
        sys.__stderr__.write("".join(f"[rank{rank}]: {line}\n" if line else "\n" for line in lines))
        sys.__stderr__.flush()
    else:
        held.flush()


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
        with contextlib.suppress(Exception), _on_sigterm(_end_wait):
            while time.monotonic() < deadline:
                if self._store.check([key]):
                    return self._store.get(key).decode()
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        return ""


def _end_wait(number: int, frame: object) -> None:
    raise TimeoutError


def _go_on(number: int, frame: object) -> None:
    """Do nothing: the process ends by itself within seconds."""


@contextlib.contextmanager
def _on_sigterm(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Within this context SIGTERM calls `handler`. Does nothing outside the main thread, which alone sets handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: it was not set by Python


def _is_only_a_lost_rank(error: BaseException) -> bool:
    """Whether a rank that went away for a known reason is all that is behind an error, and no error of this rank's own.

    gloo raises the same for a connection that broke, a time-out, and sizes that differ.
    """
    if not isinstance(error, LostRankError) or not error.is_explained:
        return False
    from hybrid_engine.ranks.groups import is_lost_connection

    return all(isinstance(cause, LostRankError) or is_lost_connection(cause) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """All errors that Python prints above this one."""
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while behind is not None:
        yield behind
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)


def _digest(error: BaseException | str) -> str:
    """The digest of an error, or of what `agreement.described` makes of one."""
    from hybrid_engine.ranks.agreement import described
    from hybrid_engine.ranks.digests import text_digest

    return str(text_digest(error if isinstance(error, str) else described(error)))

"""Output of ranks: one traceback of an error that ends several, and no known warnings.

    rank 0    the whole traceback, with the cause; of a ConfigError its message; of an
              ArgumentError, such as a failed reward, or of a LossError the user's frames
    rank 3    rank 3 ends by ConfigError; rank 0 prints the cause
    rank 3    rank 3 ends by LostRankError: update: rank 1 has ended (process 4711). The job …

That holds for errors of every kind, such as a NameError in the user's script, and for Ctrl-C.

`install` puts a hook in front of `sys.excepthook`, as torch does in `init_process_group`. It
changes only the text that Python prints at the end of a process, and the exit status, which is 2
after a ConfigError and 1 after other errors. It catches no error and changes no type.

An error that only one rank has is never shortened. No rank shortens an error before rank 0 has
printed it, because launchers end all ranks as soon as one has ended. Rank 0 therefore stores
digests of the errors it has printed, including causes, in the launcher's store, which outlives it.
The other ranks wait for these. A rank shortens an error whose digest is there, or whose counterpart
on rank 0 is, if the ranks agreed on one (`HybridEngineError.cause_on_rank_0`). It prints the whole
error if no digest comes in time, the launcher ends the wait, or the launcher has no store.

A lost rank with a known reason needs no traceback on any rank: the frames of the survivors only
show where they waited. A timeout without a known reason is printed whole.

Warnings of pinned packages that say nothing about a job are ignored, each by its text and its
source: a list and no rule, so that what a newer version says, and what the user's own code says, is
shown.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hybrid_engine.errors import (
    ConfigError,
    HybridEngineError,
    LossError,
    LostRankError,
    RemoteError,
    is_of_user,
)

if TYPE_CHECKING:
    import torch.distributed as dist

CONFIG_ERROR_STATUS = 2
"""Exit status of a process that ends by a ConfigError, as of a command with wrong arguments."""
_RANK_0_TIMEOUT = 10.0
_FOREIGN_TIMEOUT = 2.0
_CAUSE_TIMEOUT = 5.0
_POLL_INTERVAL = 0.05

_BY_RANK_0 = "rank 0"
"""Key of the digests of errors that rank 0 has printed."""

_CAUSE = "cause"
"""Key that a rank sets after printing an error of its own."""


def install() -> None:
    """Shorten uncaught errors of this process, if it is one of several ranks when they occur."""
    previous = sys.excepthook

    def print_error(
        kind: type[BaseException],
        error: BaseException,
        frames: TracebackType | None,
    ) -> None:
        rank = os.environ.get("RANK", "")
        has_peers = rank and os.environ.get("WORLD_SIZE", "1") != "1"

        def print_whole() -> None:
            if isinstance(error, ConfigError | LossError):
                sys.stderr.write(_for_user(error))
            else:
                previous(kind, error, frames)

        if has_peers and isinstance(error, Exception | KeyboardInterrupt):
            _print_as_rank(rank, error, print_whole)
        else:
            print_whole()
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
        if _is_config_error(error) and not is_interactive:
            _flush(rank)
            raise SystemExit(CONFIG_ERROR_STATUS)

    sys.excepthook = print_error


def _is_config_error(error: BaseException) -> bool:
    """Return whether the configuration is the cause, on this rank or on rank 0."""
    if isinstance(error, RemoteError):
        return (error.cause_on_rank_0 or "").startswith(f"{ConfigError.__name__}: ")
    return type(error) is ConfigError


def _for_user(error: HybridEngineError) -> str:
    """Return the traceback of an error and its causes, with the user's frames alone.

    A ConfigError has the innermost of its own frames only.
    """
    printed = traceback.TracebackException.from_exception(error)
    link: Any = printed
    while link is not None:
        link.stack[:] = filter(is_of_user, link.stack)
        link = link.__cause__ or link.__context__
    if type(error) is not ConfigError:
        return "".join(printed.format())
    caller = "".join(f"  in {frame.filename}:{frame.lineno}\n" for frame in printed.stack[-1:])
    return f"ConfigError: {error}\n{caller}"


def _print_as_rank(rank: str, error: BaseException, print_whole: Callable[[], object]) -> None:
    name = type(error).__name__
    if _is_only_a_lost_rank(error):
        text = "; ".join(str(error).splitlines())
        print(f"rank {rank} ends by {name}: {text}", file=sys.stderr)
        if rank == "0":
            _flush(rank)
            _Notes().leave(_BY_RANK_0, _digest(error))
    elif rank == "0":
        with _on_sigterm(_ignore):
            print_whole()
            _flush(rank)
            notes = _Notes()
            # The traceback of the cause is on another rank, which must have time to print it.
            if isinstance(error, RemoteError):
                notes.wait_for(_CAUSE, _CAUSE_TIMEOUT)
            errors = (error, *_causes(error))
            notes.leave(_BY_RANK_0, " ".join(map(_digest, errors)))
    elif _is_printed_by_rank_0(error):
        print(f"rank {rank} ends by {name}; rank 0 prints the cause", file=sys.stderr)
    else:
        with _on_sigterm(_ignore):
            print_whole()
            _flush(rank)
            if not isinstance(error, RemoteError):
                _Notes().leave(_CAUSE, rank)


def _is_printed_by_rank_0(error: BaseException) -> bool:
    cause = error.cause_on_rank_0 if isinstance(error, HybridEngineError) else None
    # The ranks have agreed that rank 0 has no error that explains this one.
    if cause == "":
        return False
    module: Any = sys.modules.get("torch.distributed")
    have_met = module is not None and module.is_initialized()
    # Peers may wait for the end of this rank, on whose error they have not agreed.
    is_brief = have_met and not isinstance(error, HybridEngineError)
    printed = _Notes().wait_for(_BY_RANK_0, _FOREIGN_TIMEOUT if is_brief else _RANK_0_TIMEOUT)
    return _digest(cause or error) in printed.split()


def _flush(rank: str) -> None:
    """Write the printed text to its destination, before other ranks rely on it.

    torch's hook, which calls this one, replaces stderr by a StringIO to prefix each line with the
    rank. Its content is moved to the real stderr here.
    """
    stream = sys.stderr
    if type(stream) is io.StringIO and sys.__stderr__ is not None:
        lines = stream.getvalue().splitlines()
        stream.seek(0)
        stream.truncate()
        # As torch's hook does, which finds nothing left to prefix.
        prefixed = [f"[rank{rank}]: {line}\n" if line else "\n" for line in lines]
        sys.__stderr__.write("".join(prefixed))
        sys.__stderr__.flush()
    else:
        stream.flush()


class _Notes:
    """Notes between ranks in the store of torchrun's agent, or of `launching`.

    Without such a store, as when rank 0 holds it and it ends with rank 0, nothing is stored or
    read.
    """

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        # Errors are suppressed: no part of the output may be lost because torch or the store is
        # gone.
        with contextlib.suppress(Exception):
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                import torch.distributed as dist

                address = os.environ["MASTER_ADDR"]
                port = int(os.environ["MASTER_PORT"])
                timeout = timedelta(seconds=_CAUSE_TIMEOUT)
                store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                self._store = dist.PrefixStore(f"hybrid_engine/printed/{attempt}", store)

    def leave(self, key: str, note: str) -> None:
        """Store `note`, if there is a store."""
        with contextlib.suppress(Exception):
            if self._store is not None:
                self._store.set(key, note)

    def wait_for(self, key: str, seconds: float) -> str:
        """Wait for a note; return "" after `seconds`, or on SIGTERM from the launcher."""
        if self._store is None:
            return ""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(Exception), _on_sigterm(_end_wait):
            while time.monotonic() < deadline:
                if self._store.check([key]):
                    return self._store.get(key).decode()
                time.sleep(_POLL_INTERVAL)
        return ""


def _end_wait(number: int, frame: object) -> None:
    raise TimeoutError


def _ignore(number: int, frame: object) -> None:
    """Do nothing: the process ends by itself within seconds."""


@contextlib.contextmanager
def _on_sigterm(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle SIGTERM by `handler` inside the block. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        # None: the previous handler was not set by Python.
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _is_only_a_lost_rank(error: BaseException) -> bool:
    """Return True if only the loss of another rank, for a known reason, is behind `error`.

    gloo raises the same type for a broken connection, a timeout, and different sizes.
    """
    if not isinstance(error, LostRankError) or not error.is_explained:
        return False
    from hybrid_engine.ranks.groups import is_lost_connection

    return all(
        isinstance(cause, LostRankError) or is_lost_connection(cause) for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that Python prints above this one."""
    cause: BaseException | None = error
    while cause is not None:
        context = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or context
        if cause is not None:
            yield cause


def _digest(error: BaseException | str) -> str:
    """Return the digest of an error, or of its text from `agreement.described`."""
    from hybrid_engine.ranks.agreement import described
    from hybrid_engine.ranks.digests import text_digest

    text = error if isinstance(error, str) else described(error)
    return str(text_digest(text))


# -- known warnings --------------------------------------------------------------------------------

_EVERYWHERE = (
    (r"Apex is not installed", r"megatron\.core\."),
    (r"full scope is deprecated", r"megatron\.core\.transformer\.transformer_config$"),
    (r"The \.grad attribute of a Tensor that is not a leaf", r"megatron\.core\.optimizer\."),
    # megatron-core's collectives in every step
    (r"`torch\.distributed\.\w+` is deprecated", r"torch\.distributed\.c10d_logger$"),
    (r"`torch\.distributed\.reduce_op` is deprecated", r"vllm\.triton_utils\.dispatcher$"),
)
"""Text and module of warnings."""
_WITHOUT_A_GPU = (
    (r"Transformer Engine and Apex are not installed", r"megatron\.core\."),
    (r"When using async grad allreduce", r"megatron\.core\.tensor_parallel\.layers$"),
)
"""Those that are worth knowing on a GPU."""
_RECORDS = {"vllm.triton_utils.importing": "Triton is installed, but doesn't include CPU backend"}
"""Beginnings of records by their logger."""


def ignore_known_warnings() -> None:
    """Ignore the warnings of this list from now on. Filters of the user's go before them."""
    import torch

    without_gpu = () if torch.cuda.is_available() else _WITHOUT_A_GPU
    for text, module in (*_EVERYWHERE, *without_gpu):
        warnings.filterwarnings("ignore", message=text, module=module, append=True)
    for name in _RECORDS:
        logging.getLogger(name).addFilter(_is_not_known)


def _is_not_known(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_RECORDS[record.name])

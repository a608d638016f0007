"""Terminal and log of one rank: the terminal is for what this program says, the log for all else."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from hybrid_engine.errors import ConfigError, HybridEngineError, RemoteError
from hybrid_engine.files.durable import naming

_SECONDS_FOR_OTHERS = 20  # to say what went wrong, before a rank that only heard of it does


class Output:
    """What rank `rank` shows and logs. Its standard streams are the terminal until `log_to`, a file from then on."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.log_file: Path | None = None
        self._terminal = os.fdopen(os.dup(1), "w", buffering=1)
        self.console = Console(file=self._terminal)

    def log_to(self, path: Path) -> None:
        """Append to this file what libraries print from now on, from C++ too. Raises FileError.

        The file takes the place of descriptors 1 and 2.
        """
        with naming("writing", path):
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        self.log_file = path
        # torch renames collectives that megatron-core calls in every step
        warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        for name in ("hybrid_engine", "megatron_patches", "examples"):
            logging.getLogger(name).addHandler(handler)
            logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger("hybrid_engine.failures").addHandler(_Heard(self))

    def warn(self, text: str) -> None:
        """A line for the user, from any rank."""
        self.console.print(f"rank {self.rank}: {text}", style="red", highlight=False, soft_wrap=True, markup=False)

    def say(self, text: str) -> None:
        """A line for the user, from rank 0."""
        if self.rank == 0:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def fail(self, error: Exception, is_being_ended: bool = False) -> None:
        """Say what went wrong here; the traceback goes to the log.

        Where another rank says it (a wrong configuration is the same on all, a RemoteError is about a peer), wait for
        that: the launcher ends all ranks as soon as one has failed. Not with `is_being_ended`: a peer has ended then,
        and its time to say why is over.
        """
        is_told_elsewhere = isinstance(error, RemoteError) or (isinstance(error, ConfigError) and self.rank != 0)
        if is_told_elsewhere and not is_being_ended:
            self._log_traceback(error)
            time.sleep(_SECONDS_FOR_OTHERS)
            self._show(error)
        else:  # the terminal first: the log may be on a full disk, or a network's that hangs
            self._show(error)
            self._log_traceback(error)

    def end(self, reason: str | None, number: signal.Signals) -> NoReturn:
        """End this process at once, from any thread, as after that signal; without a word where there is no reason."""
        if reason is not None:
            self.warn(reason)
        self.console.show_cursor()  # a progress bar hides it
        os._exit(128 + number)

    def _show(self, error: Exception) -> None:
        name = "" if isinstance(error, HybridEngineError) else f"{type(error).__name__}: "
        lines = [f"{name}{error}", *getattr(error, "__notes__", [])]
        if self.log_file is not None:
            lines.append(f"more in {self.log_file} and the logs beside it")
        for line in lines:
            self.warn(line)

    def _log_traceback(self, error: Exception) -> None:
        if self.log_file is None and isinstance(error, HybridEngineError):
            return  # the terminal is all there is, and has the message
        try:
            traceback.print_exception(error, file=sys.stderr)
            sys.stderr.flush()
        except OSError as lost:
            self.warn(f"the log has no traceback of it: {lost}")


class _Heard(logging.Handler):
    """Shows what became of other ranks, at once: this one may wait for them inside a library, and say nothing more."""

    def __init__(self, output: Output) -> None:
        super().__init__(logging.ERROR)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.warn(record.getMessage())

"""Launching of ranks on this machine, as by torchrun, with a timeout that ends all processes."""

from __future__ import annotations

import functools
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from hybrid_engine.errors import ReshardError
from hybrid_engine.ranks.signals_and_forks import end_with_parent

_LOOPBACK = "127.0.0.1"
_POLL_INTERVAL = 0.05
_PIPE_BYTES = 1 << 20  # maximum capacity of a pipe
_OTHERS_TIMEOUT = 10.0
"""Time in which other ranks may report their errors after one rank has failed."""


@dataclass(frozen=True)
class Ended:
    """Result of a launch.

    Attributes:
        status: 0 if every rank succeeded; otherwise the first other exit status, negative for a
            signal; None if the timeout expired.
        output: stdout and stderr of all ranks as whole lines, in the order of arrival.
    """

    status: int | None
    output: str

    def require_success(self, program: str, timeout: float) -> None:
        """Raise ReshardError, with the output, unless every rank of `program` succeeded."""
        if self.status is None:
            message = f"no answer within {timeout:g} s:\n{self.output}"
            raise ReshardError(message, code="no-verdict-in-time")
        if self.status != 0:
            message = f"{program} ended with {self.status}:\n{self.output}"
            raise ReshardError(message, code="ended-without-verdict")


def run_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    timeout: float,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Ended:
    """Run `python arguments` as `num_ranks` processes in the environment of `torchrun`.

    torchrun's own process, which takes seconds to start, is not needed. The rendezvous store is in
    this process, so it outlives the ranks' process groups; the store and the ranks' gloo groups
    listen on the loopback interface only.

    On return, also after an interrupt, no rank is alive, nor any process that a rank started,
    unless that process created its own session and outlived its rank. Ranks write unbuffered, so
    the output of a killed rank is complete, and each through a separate pipe, so lines of ranks do
    not mix.

    Args:
        arguments: program and its arguments, e.g. `["-m", "package.module", "x"]`.
        num_ranks: number of processes.
        timeout: seconds until all processes are killed.
        environment: variables added to those of this process. A rank has one thread unless
            OMP_NUM_THREADS is set.
        directory: working directory of the ranks; default: that of this process.
    """

    def start(environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-u", *arguments],
            env={**os.environ, **environment},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(end_with_parent, os.getpid()),
        )

    return run_started(start, num_ranks, timeout, environment=environment)


class Process(Protocol):
    """Interface of a rank's process, a part of that of subprocess.Popen."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> object: ...


def run_started(
    start: Callable[[Mapping[str, str], int], Process],
    num_ranks: int,
    timeout: float,
    *,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run ranks that `start` begins; see `run_ranks`.

    Args:
        start: starts a rank in a new session with the given variables added to those of this
            process, and unbuffered output to the given file descriptor.
        num_ranks, timeout, environment: as in `run_ranks`.
    """
    from hybrid_engine.ranks.world import store_at

    store = store_at(_LOOPBACK)
    num_threads = os.environ.get("OMP_NUM_THREADS", "1")
    shared = {
        "OMP_NUM_THREADS": num_threads,
        **(environment or {}),
        # torchrun's variables that are the same on every rank.
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "ROLE_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(store.port),
        # By default gloo uses the interface of the address to which the host's name resolves.
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank creates a store
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }
    processes: list[Process] = []
    with _Lines() as lines:
        try:
            for rank in range(num_ranks):
                of_rank = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
                with lines.writer() as output:
                    processes.append(start({**shared, **of_rank}, output.fileno()))
            status = _wait(processes, lines, timeout)
        finally:
            for process in processes:
                kill_tree(process)
                # Children of a rank that has ended are still in its process group.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return Ended(status, lines.rest())


class _Lines(AbstractContextManager["_Lines"]):
    """Reader of lines from several pipes."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._pipes: list[IO[bytes]] = []
        self._whole = bytearray()

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()

    def writer(self) -> IO[bytes]:
        """Return the write end of a new pipe.

        Close it here once the writing process has inherited it.
        """
        reader, writer = os.pipe()
        self._pipes.append(os.fdopen(reader, "rb"))
        self._selector.register(self._pipes[-1], selectors.EVENT_READ, bytearray())
        return os.fdopen(writer, "wb")

    def read(self, seconds: float) -> None:
        """Wait up to `seconds` for output of any rank, and read all available output."""
        for key, _ in self._selector.select(seconds):
            received = os.read(key.fd, _PIPE_BYTES)
            line = key.data
            if not received:  # all writers have closed the pipe
                self._selector.unregister(key.fileobj)
                self._end(line)
            line += received
            end = line.rfind(b"\n") + 1
            self._whole += line[:end]
            del line[:end]

    def rest(self) -> str:
        """Return all output, including data still in the pipes and unfinished lines.

        A process that this one cannot end may keep a pipe open. Its output so far is read, without
        waiting for more.
        """
        self.read(0)
        for key in self._selector.get_map().values():
            self._end(key.data)
        return self._whole.decode(errors="replace")

    def _end(self, line: bytearray) -> None:
        if line:
            self._whole += line + b"\n"
            line.clear()


def _wait(processes: Sequence[Process], lines: _Lines, timeout: float) -> int | None:
    """Wait for all processes, and return the first exit status that is not 0, or else 0.

    After a failure the other ranks have `_OTHERS_TIMEOUT`. Returns None if `timeout` expires
    without a failure.
    """
    deadline = time.monotonic() + timeout
    failed = 0
    while True:
        statuses = [process.poll() for process in processes]
        if not failed:
            failed = next(filter(None, statuses), 0)
            if failed:
                deadline = min(deadline, time.monotonic() + _OTHERS_TIMEOUT)
        if None not in statuses:
            return failed
        if time.monotonic() > deadline:
            return failed or None
        lines.read(_POLL_INTERVAL)


def kill_tree(process: Process) -> None:
    """Kill a living child and all its descendants, including those in other sessions or groups."""
    if process.poll() is not None:
        return
    tree = [process.pid]
    for pid in tree:  # grows while it is iterated
        # Stopped before its children are listed, a process cannot start another one meanwhile.
        _send(pid, signal.SIGSTOP)
        tree += children_of(pid)
    for pid in tree:
        _send(pid, signal.SIGKILL)
    process.wait()


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def children_of(pid: int) -> list[int]:
    """Return the pids of all processes whose current parent is `pid`."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command's name is in parentheses and may contain any character.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            parent = fields[1]
        except (OSError, IndexError):  # the process has ended
            continue
        if int(parent) == pid:
            children.append(int(stat.parent.name))
    return children

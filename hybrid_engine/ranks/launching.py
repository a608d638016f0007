"""Starts ranks on this machine as torchrun does, waits, and ends every process below them when the time is over."""

from __future__ import annotations

import ctypes
import functools
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_LOOPBACK = "127.0.0.1"
_SECONDS_BETWEEN_LOOKS = 0.05
_PIPE_BYTES = 1 << 20  # what a pipe holds at most
_SECONDS_FOR_THE_OTHERS = 10.0
"""Time that the others have to say why they fail too, once one rank has failed."""


@dataclass(frozen=True)
class Ended:
    """How a launch ended.

    Attributes:
        status: 0 when every rank ended well; the first other exit status otherwise, negative for a signal; None when
            the time was over.
        output: all that the ranks wrote, both streams, whole lines, in the order in which they came.
    """

    status: int | None
    output: str


def end_with_parent(parent: int) -> None:
    """Have this process killed as soon as `parent`, its parent, has ended, however that ended. Linux only.

    A launcher that is itself killed (out of memory, a time limit) ends none of its ranks. Call it early, with a pid
    from earlier still: a parent that has ended before the call sends no signal.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def run_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    timeout: float,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Ended:
    """Run `python arguments` as `num_ranks` processes with the environment that `torchrun --standalone` gives.

    Args:
        arguments: the program and its own arguments, e.g. `["-m", "package.module", "x"]`.
        timeout: seconds until all processes are killed.
        environment: added to this process's own. A rank has one thread unless OMP_NUM_THREADS says otherwise.
        directory: where the ranks run; default: here.

    Without torchrun's own process, which takes seconds to start. The store through which ranks meet is here, so it
    outlives their process groups; it and the ranks' gloo groups listen on the loopback interface only. Afterwards, also
    after an interrupt, no rank is alive, nor what a rank started, except what took a session of its own and outlived
    its rank. Ranks write without buffers, so what one said is there even if it was killed; each through a pipe of its
    own, so no rank's words stand in another's line.
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
    """Interface of a rank: `pid`, and what subprocess.Popen says of these."""

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
    """`run_ranks` with ranks that are not started as `python arguments`.

    Args:
        start: begins a rank in a session of its own, with these variables added to this process's; its output goes to
            that file descriptor, unbuffered.
    """
    from hybrid_engine.ranks.world import store_at

    store = store_at(_LOOPBACK)
    num_threads = os.environ.get("OMP_NUM_THREADS", "1")
    shared = {"OMP_NUM_THREADS": num_threads, **(environment or {}), **_job(num_ranks, store.port)}
    processes: list[Process] = []
    with _Lines() as lines:
        try:
            for rank in range(num_ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
                with lines.writer() as output:
                    processes.append(start({**shared, **own}, output.fileno()))
            status = _wait(processes, lines, timeout)
        finally:
            for process in processes:
                kill_tree(process)
                with suppress(ProcessLookupError):  # what a rank that has ended left behind
                    os.killpg(process.pid, signal.SIGKILL)
        return Ended(status, lines.rest())


class _Lines:
    """Gathers the lines of several pipes."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._pipes: list[IO[bytes]] = []
        self._whole = bytearray()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()

    def writer(self) -> IO[bytes]:
        """The end of a new pipe that is written to; to be closed here once the one who writes has it."""
        reader, writer = os.pipe()
        self._pipes.append(os.fdopen(reader, "rb"))
        self._selector.register(self._pipes[-1], selectors.EVENT_READ, bytearray())
        return os.fdopen(writer, "wb")

    def read(self, seconds: float) -> None:
        """Wait for at most `seconds` until a rank writes, and read what each has written."""
        for key, _ in self._selector.select(seconds):
            came, line = os.read(key.fd, _PIPE_BYTES), key.data
            if not came:  # all who could write have closed it
                self._selector.unregister(key.fileobj)
                self._end(line)
            line += came
            self._whole += line[: (end := line.rfind(b"\n") + 1)]
            del line[:end]

    def rest(self) -> str:
        """All that came, with what is still in the pipes and with lines that have no end.

        A pipe that a process outside our reach holds open is read as far as it is filled now, not waited for.
        """
        self.read(0)
        for key in self._selector.get_map().values():
            self._end(key.data)
        return self._whole.decode(errors="replace")

    def _end(self, line: bytearray) -> None:
        if line:
            self._whole += line + b"\n"
            line.clear()


def _job(num_ranks: int, port: int) -> dict[str, str]:
    """torchrun's variables that are the same on every rank."""
    sizes = {name: str(num_ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")}
    return {
        **sizes,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",  # by itself that of the address that the host's name resolves to
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank makes a store of its own
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
    }


def _wait(processes: Sequence[Process], lines: _Lines, timeout: float) -> int | None:
    """Until all have ended well, one has failed and the others had their time, or the time is over."""
    deadline, failed = time.monotonic() + timeout, 0
    while True:
        statuses = [process.poll() for process in processes]
        if not failed and (failed := next(filter(None, statuses), 0)):
            deadline = min(deadline, time.monotonic() + _SECONDS_FOR_THE_OTHERS)
        if None not in statuses:
            return failed
        if time.monotonic() > deadline:
            return failed or None
        lines.read(_SECONDS_BETWEEN_LOOKS)


def kill_tree(process: Process) -> None:
    """Kill a child, if it is alive, and all below it, also what has a session or a process group of its own.

    Each is stopped before its children are looked for, so none can start another one meanwhile.
    """
    if process.poll() is not None:
        return
    tree = [process.pid]
    for pid in tree:
        _send(pid, signal.SIGSTOP)
        tree += children_of(pid)
    for pid in tree:
        _send(pid, signal.SIGKILL)
    process.wait()


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def children_of(pid: int) -> list[int]:
    """Processes whose parent this one is now."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
        except (OSError, IndexError):  # the process has ended
            continue
        if int(parent) == pid:
            found.append(int(stat.parent.name))
    return found

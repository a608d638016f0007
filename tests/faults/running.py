"""A command with all the processes that it starts: found wherever they are, and ended at the end.

    with Running(["-m", "package.module"], directory) as running:
        running.wait(timeout=100)
    assert running.outcome().leftovers == []

Every process carries a token in its environment and is found by it, in whatever session and below whatever parent it
is. (Ports end with the processes that listen on them.) Where the kernel lets us, the command has a /dev/shm of its own,
so that only its own leftovers are there.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import SHARED_MEMORY, is_mapped
from tests.harness.launch import REPO_ROOT

_TOKEN_VARIABLE = "RUNNING_TOKEN"
_SECONDS_BETWEEN_LOOKS = 0.1
_BY_A_RANK = re.compile(r"^rank \d", re.MULTILINE)
_OF_TORCHRUN = re.compile(r"[WE]\d{4} ")
_SECONDS_FOR_TRACKERS = 5.0  # multiprocessing's resource trackers clean up after the process that they belong to


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        status: of the command itself, negative for a signal; None when the time was over and it was ended.
        seconds: from the fault to the end of the last process; None when no fault happened.
        seconds_to_message: from the fault to the first line of a rank about it.
        total_seconds: of all.
        terminal: what was written to the terminal.
        survivors: command lines of processes that were alive some time after the command had ended.
        shared_memory: names left in /dev/shm.
    """

    status: int | None
    seconds: float | None
    seconds_to_message: float | None
    total_seconds: float
    terminal: str
    survivors: Sequence[str]
    shared_memory: Sequence[str]

    @property
    def leftovers(self) -> list[str]:
        return [*self.survivors, *self.shared_memory]

    @property
    def message(self) -> str:
        """What ranks say of a failure before torchrun reports it; else the first line of torchrun's report."""
        lines = self.terminal.splitlines()
        reports = [number for number, line in enumerate(lines) if _OF_TORCHRUN.match(line)]
        said = lines[: reports[0]] if reports else lines
        starts = [number for number, line in enumerate(said) if line.startswith("rank ")]
        if starts:
            return "\n".join(said[starts[0] :])
        return next((lines[number] for number in reports if "failed (exitcode" in lines[number]), "")

    def row(self) -> dict[str, Any]:
        return {
            "seconds": _rounded(self.seconds),
            "seconds_to_message": _rounded(self.seconds_to_message),
            "status": self.status,
            "message": self.message,
            "leftovers": self.leftovers,
        }


class Running:
    """`python arguments`, running. A context manager: at the end of the block every process is ended.

    Args:
        arguments: of the interpreter.
        directory: for what is written to the terminal, and for the command's /dev/shm.
        environment: added to this process's own.
        prefix: shell commands that come first, in a mount namespace of the command's own, e.g. a mount of a small
            /dev/shm. Needs `can_mount()`.
    """

    def __init__(
        self, arguments: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None, prefix: str = ""
    ) -> None:
        self._token = secrets.token_hex(8)
        self._shared_memory = SHARED_MEMORY
        command = [sys.executable, *arguments]
        if can_mount():
            self._shared_memory = directory / f"shm-{self._token}"
            self._shared_memory.mkdir()
            prefix = prefix or f"mount --bind {self._shared_memory} {SHARED_MEMORY}"
            command = [*unshare(), "sh", "-ec", f'{prefix}; exec "$@"', "sh", *command]
        self._names_before = self._names()
        self._terminal = directory / f"terminal-{self._token}.txt"
        self.started = time.monotonic()
        self._ended: float | None = None
        self._said: float | None = None
        self._survivors: list[str] = []
        self._was_ended_by_force = False
        with self._terminal.open("wb") as terminal:
            self.launcher = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(REPO_ROOT), **(environment or {}), _TOKEN_VARIABLE: self._token},
                cwd=REPO_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self._was_ended_by_force = self.launcher.poll() is None
        while alive := self.processes():
            for pid in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
        self.launcher.wait()

    @property
    def terminal(self) -> str:
        return self._terminal.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """Those that are alive: pid -> command line."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes()
                if f"{_TOKEN_VARIABLE}={self._token}".encode() in environment.split(b"\0"):
                    words = (process / "cmdline").read_bytes().split(b"\0")
                    found[int(process.name)] = b" ".join(words).decode(errors="replace").strip()
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def wait_for(self, condition: Callable[[], bool], timeout: float = 200) -> None:
        """Until something is so. Fails when the command ends before, or the time is over."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.launcher.poll() is None, self.terminal
            assert time.monotonic() < deadline, self.terminal
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def wait(self, timeout: float, *, seconds_to_follow: float = 10.0) -> None:
        """Until the command and all that it started have ended, or the time is over.

        What outlives the command by `seconds_to_follow` is a survivor.
        """
        deadline, has_ended = time.monotonic() + timeout, False
        while time.monotonic() < deadline:
            if not has_ended and self.launcher.poll() is not None:
                has_ended, deadline = True, time.monotonic() + seconds_to_follow
            alive = self.processes()
            if self._said is None and _BY_A_RANK.search(self.terminal):
                self._said = time.monotonic()
            if has_ended and not alive:
                break
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        self._ended = time.monotonic()
        if has_ended:
            self._survivors = list(alive.values())

    def outcome(self, fault_time: float | None = None) -> Outcome:
        """After the block. `fault_time`: on the monotonic clock."""
        ended = self._ended or time.monotonic()
        return Outcome(
            status=None if self._was_ended_by_force else self.launcher.returncode,
            seconds=None if fault_time is None else ended - fault_time,
            seconds_to_message=None if fault_time is None or self._said is None else self._said - fault_time,
            total_seconds=ended - self.started,
            terminal=self.terminal,
            survivors=self._survivors,
            shared_memory=sorted(self._left_in_shared_memory()),
        )

    def _names(self) -> set[str]:
        return {path.name for path in self._shared_memory.iterdir()}

    def _left_in_shared_memory(self) -> set[str]:
        """New names. In a /dev/shm that others use too, only those that no live process has mapped."""
        deadline = time.monotonic() + _SECONDS_FOR_TRACKERS
        while True:
            left = {name for name in self._names() - self._names_before if not is_mapped(SHARED_MEMORY / name)}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)


@functools.cache
def can_mount() -> bool:
    """Whether this user may mount in a mount namespace of its own."""
    try:
        return (
            subprocess.run([*unshare(), "mount", "--bind", "/dev/shm", "/dev/shm"], capture_output=True).returncode == 0
        )
    except FileNotFoundError:
        return False


def unshare() -> list[str]:
    """A command that starts another in a mount namespace of its own."""
    return ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]

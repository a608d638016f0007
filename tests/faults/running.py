"""A command with all processes that it starts, which are found anywhere and killed at the end.

    with Running(["-m", "package.module"], directory) as running:
        running.wait(timeout=100)
    assert running.outcome().leftovers == []

A token in the environment identifies the processes, whatever their session and parent. (Ports end
with the processes that listen on them.) If the kernel permits, the command has a private /dev/shm,
which then holds its leftovers only.
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

from tests.conftest import SHARED_MEMORY, is_mapped
from tests.harness.launch import REPO_ROOT

_TOKEN_VARIABLE = "RUNNING_TOKEN"
_POLL_INTERVAL = 0.1
_SECONDS_TO_FOLLOW = 10.0
_RANK_MESSAGE = re.compile(r"^rank \d", re.MULTILINE)
_TORCHRUN_MESSAGE = re.compile(r"[WE]\d{4} ")
# Resource trackers of multiprocessing clean up after their process has ended.
_SECONDS_FOR_TRACKERS = 5.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a command.

    Attributes:
        status: exit status, negative for a signal; None if the command exceeded its time and was
            killed.
        seconds: time from the fault to the end of the last process; None without a fault.
        seconds_to_message: time from the fault to the first line of a rank about it.
        total_seconds: time from the start to the end of the last process.
        terminal: output of all processes.
        leftovers: command lines of processes that survived the command for some time, and names
            left in /dev/shm.
    """

    status: int | None
    seconds: float | None
    seconds_to_message: float | None
    total_seconds: float
    terminal: str
    leftovers: list[str]

    @property
    def message(self) -> str:
        """Messages of ranks before torchrun's report, or else the report's first line."""
        lines = self.terminal.splitlines()
        reports = [number for number, line in enumerate(lines) if _TORCHRUN_MESSAGE.match(line)]
        before = lines[: reports[0]] if reports else lines
        starts = [number for number, line in enumerate(before) if line.startswith("rank ")]
        if starts:
            return "\n".join(before[starts[0] :])
        return next(
            (lines[number] for number in reports if "failed (exitcode" in lines[number]), ""
        )


class Running:
    """A running command `python arguments`; as a context manager it kills all processes at the end.

    Args:
        arguments: arguments of the interpreter.
        directory: receives the output and the command's /dev/shm.
        environment: additional variables.
        prefix: shell commands to run before, in the command's mount namespace, such as a mount of a
            small /dev/shm. Requires `can_mount()`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str] | None = None,
        prefix: str = "",
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
        self._reported: float | None = None
        self._survivors: list[str] = []
        self._was_ended_by_force = False
        with self._terminal.open("wb") as terminal:
            self.launcher = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    "PYTHONPATH": str(REPO_ROOT),
                    **(environment or {}),
                    _TOKEN_VARIABLE: self._token,
                },
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
        """Return the command lines of live processes, by pid."""
        command_lines = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes()
                if f"{_TOKEN_VARIABLE}={self._token}".encode() in environment.split(b"\0"):
                    words = (process / "cmdline").read_bytes().split(b"\0")
                    command_lines[int(process.name)] = (
                        b" ".join(words).decode(errors="replace").strip()
                    )
            except OSError:  # The process has ended or belongs to another user.
                continue
        return command_lines

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Fail if the command ends before, or after 200 s."""
        deadline = time.monotonic() + 200
        while not condition():
            assert self.launcher.poll() is None, self.terminal
            assert time.monotonic() < deadline, self.terminal
            time.sleep(_POLL_INTERVAL)

    def wait(self, timeout: float) -> None:
        """Wait until the command and all its processes have ended, for at most `timeout` seconds.

        A process that is alive `_SECONDS_TO_FOLLOW` after the end of the command is a survivor.
        """
        deadline = time.monotonic() + timeout
        has_ended = False
        while time.monotonic() < deadline:
            if not has_ended and self.launcher.poll() is not None:
                has_ended = True
                deadline = time.monotonic() + _SECONDS_TO_FOLLOW
            alive = self.processes()
            if self._reported is None and _RANK_MESSAGE.search(self.terminal):
                self._reported = time.monotonic()
            if has_ended and not alive:
                break
            time.sleep(_POLL_INTERVAL)
        self._ended = time.monotonic()
        if has_ended:
            self._survivors = list(alive.values())

    def outcome(self, fault_time: float | None = None) -> Outcome:
        """Return the outcome, after the block. `fault_time` is on the monotonic clock."""
        ended = self._ended or time.monotonic()
        return Outcome(
            status=None if self._was_ended_by_force else self.launcher.returncode,
            seconds=None if fault_time is None else ended - fault_time,
            seconds_to_message=None
            if fault_time is None or self._reported is None
            else self._reported - fault_time,
            total_seconds=ended - self.started,
            terminal=self.terminal,
            leftovers=[*self._survivors, *sorted(self._left_in_shared_memory())],
        )

    def _names(self) -> set[str]:
        return {path.name for path in self._shared_memory.iterdir()}

    def _left_in_shared_memory(self) -> set[str]:
        """Return new names in /dev/shm, without files that a live process of others has mapped."""
        deadline = time.monotonic() + _SECONDS_FOR_TRACKERS
        while True:
            left = {
                name
                for name in self._names() - self._names_before
                if not is_mapped(SHARED_MEMORY / name)
            }
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(_POLL_INTERVAL)


@functools.cache
def can_mount() -> bool:
    """Return whether this user may mount in a new mount namespace."""
    try:
        return (
            subprocess.run(
                [*unshare(), "mount", "--bind", "/dev/shm", "/dev/shm"], capture_output=True
            ).returncode
            == 0
        )
    except FileNotFoundError:
        return False


def unshare() -> list[str]:
    """Return the prefix that starts a command in a new mount namespace."""
    return ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]

"""Starts torchrun on this machine, waits, and ends every process below it when the time is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ended:
    """How a launch ended.

    Attributes:
        status: exit status of torchrun, 0 when every rank ended well; None when the time was over.
        output: all that the ranks and torchrun wrote, both streams, in the order of writing.
    """

    status: int | None
    output: str


def run_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    timeout: float,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Ended:
    """Run `torchrun … arguments` with `num_ranks` processes on this machine.

    Args:
        arguments: the program and its own arguments, e.g. `["--module", "package.module", "x"]`.
        timeout: seconds until all processes are killed.
        environment: added to this process's own. A rank has one thread unless OMP_NUM_THREADS says otherwise.
        directory: where the ranks run; default: here.

    No process of the launch is alive afterwards, also when this function is interrupted. The output goes through a
    file, so it is whole even if a rank is killed while it writes, and nothing waits for a pipe that somebody holds.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    with tempfile.TemporaryFile(prefix="ranks-") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            env={"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.returncode is None:
                kill_tree(process)
        output.seek(0)
        return Ended(status, output.read().decode(errors="replace"))


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a child and all below it. torchrun gives every rank a session of its own: its process group is no help.

    Each is stopped before its children are looked for, so none can start another one meanwhile.
    """
    tree = [process.pid]
    for pid in tree:
        _send(pid, signal.SIGSTOP)
        tree += _children(pid)
    for pid in tree:
        _send(pid, signal.SIGKILL)
    process.wait()


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
        except (OSError, IndexError):  # the process has ended
            continue
        if int(parent) == pid:
            found.append(int(stat.parent.name))
    return found

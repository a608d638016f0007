"""A forked child ends nothing of the rank's, at once; without the mechanism it hangs, or is killed by SIGSEGV."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from hybrid_engine.ranks.job import Job
from hybrid_engine.switch.sharding_manager import SwitchContexts
from tests.harness.launch import REPO_ROOT, Ranks

SECONDS_TO_EXIT = 120  # of interpreters on a busy machine

EXITING = """
import os, signal, sys, threading
from hybrid_engine.ranks.job import Job
job = Job.join(60)
child = os.fork()
if child:
    deadline = threading.Timer(30, os.kill, (child, signal.SIGKILL))
    deadline.start()
    print(os.waitpid(child, 0)[1])
    deadline.cancel()
    job.agreement.conclude("the job goes on")
job.close()
sys.exit(0)  # in the child, too
"""


class Owner(SwitchContexts):
    """Of a job, and of a group that torch does not know."""

    def __init__(self) -> None:
        self.job, self.ends = Job.join(60), ExitStack()
        self.group = self.job.new_host_group(self.ends)

    def start(self) -> None:
        """There is no switch."""

    def shutdown(self) -> None:
        self.job.close()


def status_of(call: Callable[[], object]) -> int | None:
    """How a child ends in which that is called; None if it does not."""
    child = os.fork()
    if child == 0:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if (ended := os.waitpid(child, os.WNOHANG))[0]:
            return ended[1]
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def leave_by_an_error(owner: Owner) -> None:
    try:
        with owner:
            raise KeyError
    except KeyError:
        pass


def fork() -> tuple[list[int | None], float]:
    owner = Owner()
    calls = [owner.shutdown, lambda: leave_by_an_error(owner), owner.group.close]
    found = [status_of(call) for call in calls]
    owner.job.agreement.conclude("the job goes on")
    values = torch.tensor([float(owner.job.rank)])
    owner.group.end_maximum(owner.group.begin_maximum(values))
    owner.shutdown()
    return found, values.item()


def test_a_child_that_shuts_down_ends_nothing(ranks: Ranks) -> None:
    assert ranks.launch(fork, 2) == [([0, 0, 0], 1.0)] * 2


def test_a_child_that_exits_ends_nothing() -> None:
    """Where the last references to groups go: Python's own exit."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    output = subprocess.run(
        [sys.executable, "-c", EXITING],
        env={**os.environ, **place, "PYTHONPATH": str(REPO_ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS_TO_EXIT,
        check=True,
    ).stdout
    assert output == "0\n"

"""A forked child exits at once and ends nothing of its parent rank.

Without protection it would hang, or be killed by SIGSEGV.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from hybrid_engine.hybrid_engine import HybridEngine
from hybrid_engine.ranks.job import Job
from tests.harness.launch import on_ranks
from tests.hybrid_engine.tools.programs import run_python

SECONDS_TO_EXIT = 120  # for interpreters on a busy machine

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
    job.agreement.conclude("the job is still usable")
job.close()
sys.exit(0)  # in the child too
"""


class Owner(HybridEngine):
    """Owner of a job and of a group unknown to torch."""

    def __init__(self) -> None:
        self.job = Job.join(60)
        self.ends = ExitStack()
        self.group = self.job.new_host_group(self.ends)

    def start(self) -> None:
        """A no-op, because there is no switch."""

    def shutdown(self) -> None:
        self.job.close()


def status_of(call: Callable[[], object]) -> int | None:
    """Run `call` in a forked child; returns its exit status, or None if it hangs."""
    child = os.fork()
    if child == 0:
        try:
            call()
            os._exit(0)  # without Python's exit handlers
        finally:
            os._exit(1)
    deadline = time.monotonic() + 5  # a child that waits for its peers would hang
    while time.monotonic() < deadline:
        if (ended := os.waitpid(child, os.WNOHANG))[0]:
            return ended[1]
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def leave_with_an_error(owner: Owner) -> None:
    try:
        with owner:
            raise KeyError
    except KeyError:
        pass


@on_ranks(2)
def test_a_child_that_shuts_down_does_not_affect_its_parent() -> None:
    owner = Owner()
    calls = [owner.shutdown, lambda: leave_with_an_error(owner), owner.group.close]
    assert [status_of(call) for call in calls] == [0, 0, 0]
    owner.job.agreement.conclude("the job is still usable")
    values = torch.tensor([float(owner.job.rank)])
    owner.group.end_maximum(owner.group.begin_maximum(values))
    owner.shutdown()
    assert values.item() == 1.0


def test_a_child_that_exits_does_not_affect_its_parent() -> None:
    """Python's exit drops the last references to groups."""
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    output = run_python("-c", EXITING, status=0, timeout=SECONDS_TO_EXIT, **environment).stdout
    assert output == "0\n"

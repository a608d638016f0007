"""Launches that succeed, fail or hang. The ranks are programs of a few lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_engine.tools import launching
from hybrid_engine.tools.launching import Ended, run_ranks
from tests.harness.processes import is_running, wait_until

pytestmark = pytest.mark.ranks

EXIT_WITH_STATUS = """
import os, sys
print(f"out of rank {os.environ['RANK']}", "x" * 100_000)
threads, mark = os.environ["OMP_NUM_THREADS"], os.environ.get("MARK")
sys.stderr.write(f"err of rank {os.environ['RANK']} {threads} {mark}\\n")
print(os.getcwd())
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""
HANG = """
import os, pathlib, subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(command, start_new_session=True)
place = pathlib.Path(sys.argv[1], os.environ["RANK"])
place.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
place.with_suffix(".new").rename(place)
print("the last words of rank", os.environ["RANK"], flush=True)
time.sleep(600)
"""


GROUPS = """
import contextlib, os, torch, torch.distributed as dist
sums = []
for count in range(2):
    store, rank, world_size = next(dist.rendezvous("env://"))
    prefixed = dist.PrefixStore(f"group {count}", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=world_size)
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    sums.append(value.item())
    listening = set()
    inodes = set()
    for descriptor in range(256):
        with contextlib.suppress(OSError):
            inodes.add(str(os.fstat(descriptor).st_ino))
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            words = line.split()
            address, port = words[1].split(":")
            is_store = int(port, 16) == int(os.environ["MASTER_PORT"])
            if words[3] == "0A" and (is_store or words[9] in inodes):
                listening.add((table, address, "store" if is_store else "group"))
    dist.destroy_process_group()
print("sums", sums)
print("listening", sorted(listening))
"""
FAIL_ON_ONE_RANK = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(5)
time.sleep(0.5)
print("rank 0 noticed it")
time.sleep(100)
print("rank 0 was not ended")
"""

LAUNCHER = """
import sys
from hybrid_engine.tools.launching import run_ranks
run_ranks(sys.argv[1:], 2, 600)
"""
ORPHAN = """
import os
from hybrid_engine.ranks.signals_and_forks import end_with_parent
end_with_parent(os.getppid())
print("the parent is there", flush=True)
end_with_parent(os.getpid())  # not the parent, as after the parent's end
print("the parent has ended")
"""


@pytest.mark.parametrize("status", [0, 3])
def test_status_and_output_are_returned(tmp_path: Path, status: int) -> None:
    ended = run_ranks(
        ["-c", EXIT_WITH_STATUS, str(status)],
        2,
        100,
        environment={"MARK": "here"},
        directory=tmp_path,
    )
    assert ended.status == status
    for rank in range(2):
        assert f"out of rank {rank} " in ended.output
        assert f"err of rank {rank} 1 here" in ended.output
    assert ended.output.count("x" * 100_000) == ended.output.count(f"{tmp_path}\n") == 2


def test_ranks_form_several_groups_on_the_loopback_interface() -> None:
    """The launcher holds the store, so a group can end and another begin."""
    ended = run_ranks(["-c", GROUPS], 2, 100)
    assert ended.status == 0, ended.output
    assert ended.output.count("sums [3.0, 3.0]") == 2
    on_loopback = [("tcp", "0100007F", "group"), ("tcp", "0100007F", "store")]
    assert ended.output.count(f"listening {on_loopback}\n") == 2, ended.output


def test_a_failed_rank_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have some time to write messages."""
    monkeypatch.setattr(launching, "_OTHERS_TIMEOUT", 2.0)
    ended = run_ranks(["-c", FAIL_ON_ONE_RANK], 2, 100)
    assert ended.status == 5
    assert "rank 0 noticed it" in ended.output
    assert "rank 0 was not ended" not in ended.output


def test_a_timeout_ends_every_process(tmp_path: Path) -> None:
    """Ranks end, and so do their children in other sessions."""
    ended = _run_until(tmp_path, ["-c", HANG, str(tmp_path)])
    assert ended.status is None
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / str(rank)).read_text().split()]
    assert len(set(pids)) == 4
    wait_until(lambda: not any(map(is_running, pids)), 10)  # init may reap them later
    assert all(f"the last words of rank {rank}" in ended.output for rank in range(2))


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, "-c", HANG, str(tmp_path)])
    places = [tmp_path / str(rank) for rank in range(2)]
    try:
        wait_until(lambda: all(place.is_file() for place in places))
    finally:
        launcher.kill()
        launcher.wait()
    pids, children = zip(*(map(int, place.read_text().split()) for place in places), strict=True)
    for child in children:
        os.kill(child, signal.SIGKILL)  # ranks must end their own children
    wait_until(lambda: not any(map(is_running, pids)), 10)


def test_an_ended_parent_is_noticed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "the parent is there\n"), (
        ended.stderr
    )


def _run_until(directory: Path, arguments: list[str]) -> Ended:
    """Retry with a longer timeout on a machine too busy to start the ranks."""
    for timeout in (10, 60):
        ended = run_ranks(arguments, 2, timeout)
        if all((directory / str(rank)).is_file() for rank in range(2)):
            break
    return ended

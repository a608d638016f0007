"""What ranks print that end by an error which nobody catches, as new processes under a launcher."""

from __future__ import annotations

import re

import pytest

from hybrid_engine.ranks.launching import run_ranks

pytestmark = pytest.mark.ranks

BEFORE_RANKS_MEET = """
import os, signal, threading, time
from hybrid_engine.errors import ConfigError, Violation

def end_the_wait():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    print("rank 2 waits, and is told to end", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

if os.environ["RANK"] == "0":
    time.sleep(3)
if os.environ["RANK"] == "2":  # the launcher does so where another rank has ended
    threading.Thread(target=end_the_wait, daemon=True).start()
key = "rank 2" if os.environ["RANK"] == "2" else "two ranks"
raise ConfigError([Violation(key, "is wrong", "Change it")])
"""
IN_A_PHASE = """
import contextlib, os, signal, sys, time
from hybrid_engine.ranks.job import Job
job, ends = Job.join(60), contextlib.ExitStack()
if job.rank == 0 and sys.argv[1] == "one":
    ends.callback(time.sleep, 1)
with ends, job.agreement.phase("checking"):
    if job.rank == 1 and sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if job.rank == 1:
        raise LookupError("of rank 1")
"""


def printed(program: str, *arguments: str) -> list[str]:
    """Lines of three ranks, without torch's prefix and its warnings."""
    ended = run_ranks(["-c", program, *arguments], 3, 100)
    assert ended.status not in (0, None), ended.output
    lines = [re.sub(r"^\[rank\d\]: ", "", line) for line in ended.output.splitlines()]
    return [line for line in lines if line and not re.match(r"\[rank\d\]:\[W|\[W\d", line)]


def shortened(lines: list[str]) -> list[str]:
    return sorted(line for line in lines if re.match(r"rank \d ends by", line))


def test_what_rank_0_prints_others_do_not_and_what_only_one_rank_has_it_prints() -> None:
    lines = printed(BEFORE_RANKS_MEET)
    assert shortened(lines) == ["rank 1 ends by ConfigError; rank 0 prints the cause"]
    assert lines.count("Traceback (most recent call last):") == 2
    assert lines.count("  - two ranks: is wrong. Change it") == 1
    assert lines.count("  - rank 2: is wrong. Change it") == 1
    assert lines.count("rank 2 waits, and is told to end") == 1


def test_a_failed_rank_prints_its_traceback_and_the_first_one_names_it() -> None:
    lines = printed(IN_A_PHASE, "one")
    assert shortened(lines) == ["rank 2 ends by RemoteError; rank 0 prints the cause"]
    assert "hybrid_engine.errors.RemoteError: checking failed on 1 rank(s):" in lines
    assert "LookupError: of rank 1" in lines  # rank 1's own, with where it was raised
    assert lines.count("Traceback (most recent call last):") == 3  # of LookupError, what became of it, and rank 0
    assert lines[-1] == "rank 2 ends by RemoteError; rank 0 prints the cause", lines  # the launcher may end all now


def test_a_killed_rank_is_one_line_of_each_of_the_others() -> None:
    lines = printed(IN_A_PHASE, "killed")
    assert "Traceback (most recent call last):" not in lines
    lost = r"rank [02] ends by LostRankError: checking: rank 1 has ended \(process \d+\)\. The job cannot go on"
    assert len(shortened(lines)) == 2
    assert all(re.fullmatch(lost, line) for line in shortened(lines)), lines
    assert len(lines) <= 4, lines  # with one of the watch's on each, where it was quicker

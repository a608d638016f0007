"""Output of ranks that end by an uncaught error, as new processes under a launcher."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import traceback
from typing import ClassVar

import pytest

from hybrid_engine.errors import HybridEngineError, LostRankError, ReshardError
from hybrid_engine.ranks import uncaught
from hybrid_engine.tools.launching import run_ranks
from tests.hybrid_engine.tools.programs import run_python

pytestmark = pytest.mark.ranks

BEFORE_RANKS_MEET = """
import os, signal, sys, threading, time
from hybrid_engine.errors import ConfigError, Violation

def end_the_wait():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    print("rank 2 waits and gets SIGTERM", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

if os.environ["RANK"] == "0":
    time.sleep(3)
if os.environ["RANK"] == "2":  # as the launcher does once another rank has ended
    threading.Thread(target=end_the_wait, daemon=True).start()
key = "rank 2" if os.environ["RANK"] == "2" else "two ranks"
if sys.argv[1] == "ConfigError":
    raise ConfigError([Violation(key, "is wrong", "Change it")])
raise getattr(__builtins__, sys.argv[1])(f"  - {key}: is wrong. Change it")
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
    if job.rank == (0 if sys.argv[1] == "first" else 1):
        raise LookupError(f"of rank {job.rank}")
"""

REFUSED_BY_RANK_0 = """
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.ranks.job import Job

job = Job.join(60)
with job.agreement.phase("checking"):
    if job.rank == 0:
        raise ConfigError([Violation("key", "is wrong", "Change it")])
"""
STATUS = """
import subprocess, sys

# In a child, because the launcher kills the ranks when one of them has failed.
print("ended with", subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode, flush=True)
"""


IMPORTS = """
from hybrid_engine import errors
from hybrid_engine.rl.user_callbacks import run_callbacks
from hybrid_engine.trainer.batches.loss_results import CheckedLoss
"""


def run_and_read(program: str, *arguments: str) -> list[str]:
    """Return the lines that three ranks print, without torch's prefix and warnings."""
    ended = run_ranks(["-c", program, *arguments], 3, 100)
    assert ended.status not in (0, None), ended.output
    lines = [re.sub(r"^\[rank\d\]: ", "", line) for line in ended.output.splitlines()]
    return [line for line in lines if line and not re.match(r"\[rank\d\]:\[W|\[W\d", line)]


def short_lines(lines: list[str]) -> list[str]:
    return sorted(line for line in lines if re.match(r"rank \d ends by", line))


@pytest.mark.parametrize(
    ("kind", "num_tracebacks"), [("ConfigError", 0), ("ValueError", 2), ("KeyboardInterrupt", 2)]
)
def test_an_error_of_rank_0_is_printed_once_and_a_different_one_too(
    kind: str, num_tracebacks: int
) -> None:
    lines = run_and_read(BEFORE_RANKS_MEET, kind)
    assert short_lines(lines) == [f"rank 1 ends by {kind}; rank 0 prints the cause"]
    assert lines.count("Traceback (most recent call last):") == num_tracebacks
    if not num_tracebacks:
        assert lines.count("  in <string>:17") == 2, "the caller's line in place of a traceback"
    for key in ("two ranks", "rank 2"):
        assert sum(line.endswith(f"  - {key}: is wrong. Change it") for line in lines) == 1
    assert lines.count("rank 2 waits and gets SIGTERM") == 1


@pytest.mark.parametrize(
    ("fault", "status", "num_frames"),
    [
        ("raise errors.ConfigError([])", 2, 0),
        ("run_callbacks('reward', [('prompt 0', lambda: 1 / 0, ())], 5)", 1, 2),
        ("CheckedLoss(print)._checked(None)", 1, 1),
        ("raise errors.StateError", 1, 1),
    ],
)
def test_an_error_has_an_exit_status_and_frames_of_the_user(
    fault: str, status: int, num_frames: int
) -> None:
    process = run_python("-c", f"{IMPORTS}\n{fault}", status=status)
    assert process.stderr.count('File "') == num_frames


def test_an_interactive_session_goes_on() -> None:
    program = "import hybrid_engine\nfrom hybrid_engine import errors\nraise errors.ConfigError([])"
    command = [sys.executable, "-i", "-c", program]
    process = subprocess.run(
        command, capture_output=True, text=True, input="print('goes on')", check=False
    )
    assert "goes on" in process.stdout


def test_a_configuration_that_rank_0_refused_ends_all_ranks_alike() -> None:
    ended = run_ranks(["-c", STATUS, REFUSED_BY_RANK_0], 3, 100)
    assert re.findall(r"ended with (\d)", ended.output) == ["2"] * 3, ended.output


def test_a_failed_rank_prints_its_traceback_and_rank_0_the_cause() -> None:
    lines = run_and_read(IN_A_PHASE, "one")
    assert short_lines(lines) == ["rank 2 ends by RemoteError; rank 0 prints the cause"]
    assert "hybrid_engine.errors.RemoteError: checking failed on 1 rank(s):" in lines
    assert "LookupError: of rank 1" in lines  # the traceback of rank 1
    assert (
        lines.count("Traceback (most recent call last):") == 3
    )  # two on rank 1 (LookupError, its ReshardError), one on rank 0
    assert lines[-1] == "rank 2 ends by RemoteError; rank 0 prints the cause", (
        lines
    )  # the launcher may now end all ranks


def test_a_failure_of_rank_0_is_one_line_on_other_ranks() -> None:
    lines = run_and_read(IN_A_PHASE, "first")
    assert short_lines(lines) == [
        f"rank {rank} ends by RemoteError; rank 0 prints the cause" for rank in (1, 2)
    ]
    assert lines.count("LookupError: of rank 0") == 1


def test_a_killed_rank_is_one_line_on_other_ranks() -> None:
    lines = run_and_read(IN_A_PHASE, "killed")
    assert "Traceback (most recent call last):" not in lines
    lost = (
        r"rank [02] ends by LostRankError: checking: rank 1 has ended \(process \d+\)\. "
        r"The job cannot go on"
    )
    assert len(short_lines(lines)) == 2
    assert all(re.fullmatch(lost, line) for line in short_lines(lines)), lines
    assert len(lines) <= 4, lines  # each rank may also print a line of the failure watch


class Notes:
    """Stand-in for the launcher's store."""

    left: ClassVar[dict[str, str]] = {}

    def leave(self, key: str, note: str) -> None:
        self.left[key] = note

    def wait_for(self, key: str, seconds: float) -> str:
        return self.left.get(key, "")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> type[Notes]:
    monkeypatch.setattr(Notes, "left", {})
    monkeypatch.setattr(uncaught, "_Notes", Notes)
    return Notes


def print_as(rank: str, error: HybridEngineError) -> None:
    uncaught._print_as_rank(rank, error, lambda: traceback.print_exception(error))


def with_cause(error: HybridEngineError, cause: BaseException) -> HybridEngineError:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("is_explained", [True, False])
def test_an_unexplained_lost_rank_is_printed_in_full(
    is_explained: bool, notes: type[Notes], capsys: pytest.CaptureFixture[str]
) -> None:
    cause = RuntimeError(
        "[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out "
        "waiting 1000ms for recv"
    )
    error = with_cause(LostRankError("update: a rank did not respond"), cause)
    assert isinstance(error, LostRankError)
    error.is_explained = is_explained
    print_as("1", error)
    assert ("Timed out waiting 1000ms" in capsys.readouterr().err) == (not is_explained)


def test_rank_0_flushes_its_output_before_notifying_others(
    notes: type[Notes], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = io.StringIO()
    held = io.StringIO()
    written = []

    def leave(self: Notes, key: str, note: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # as the launcher does once another rank has ended
        written.append(real.getvalue())

    monkeypatch.setattr(Notes, "leave", leave)
    monkeypatch.setattr(sys, "__stderr__", real)
    monkeypatch.setattr(sys, "stderr", held)  # as torch's exception hook does
    print_as("0", ReshardError("checking"))
    assert written == [real.getvalue()]
    assert "[rank0]: hybrid_engine.errors.ReshardError: checking\n" in real.getvalue()
    assert held.getvalue() == ""

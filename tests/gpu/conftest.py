"""Execution of the checks: a process per class, a line and a JSON record per check, a time budget
for all.

The parent pytest collects, gives the reasons why checks cannot run, and starts another pytest for
each class (or file without classes), whose reports it forwards. A crash, a hang or a broken CUDA
context thus affects only one class.

    parent   _Run.reports_of(item) -> lacking(...), or _Process.reports_of(item)
    child    --inside DIRECTORY: writes starts and reports of checks to a file there

If a fixture fails, the first check that needs it fails; the others are skipped with the name of
that check.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Protocol

import pytest

from benchmarks.launching import engine_arguments
from hybrid_engine.files.scratch import scratch_directory
from hybrid_engine.tools.launching import Ended, run_ranks
from hybrid_engine.tools.verify.machine import facts_of, this_machine
from tests.gpu.needs import lacking
from tests.gpu.sizes import is_software_gpu, sizes_of
from tests.harness import marks
from tests.harness.values import Values

SECONDS_ON_ONE_GPU = 600.0
SECONDS_ON_SEVERAL = 3000.0
"""Default budgets: of stages 1 and 2, and in addition of stage 3."""
MINUTES_ON_THE_CPU = (
    *(
        "test_stage2a_alone.py",
        "test_stage2c_fresh.py",
        "test_stage2d_server.py",
        "test_stage3_ranks.py",
    ),
)
"""Files that `make test` leaves out."""
# Names of a child's files.
REPORTS = "reports"
OUTPUT = "output"
OUTPUT_TITLE = "Output of the process"
_MAX_TEXT = 20_000  # Characters of a failure; the stacks of a crash have 5,000.
_POLL_INTERVAL = 0.05

_RUN = pytest.StashKey["_Run"]()


class Note(Protocol):
    def __call__(self, figure: str, limit: str = "", **values: float) -> None:
        """Record a measurement: text for the line, its limit, and values in bytes and seconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("checks on GPUs")
    group.addoption(
        "--device", choices=("cuda", "cpu"), help="cpu: run the checks that need no GPU"
    )
    group.addoption(
        "--budget", type=float, help="seconds for all checks together; later ones are skipped"
    )
    group.addoption(
        "--records", metavar="FILE", help="write a line of JSON for the machine, and for each check"
    )
    group.addoption(
        "--vllm",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine argument of vLLM",
    )
    group.addoption("--inside", help=argparse.SUPPRESS)


# -- in a child
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    return pytestconfig.getoption("device")


@pytest.fixture(scope="session", autouse=True)
def _reports() -> Iterator[Any]:
    """Return the reports of the software GPU's checker since the first check; None on hardware."""
    if not is_software_gpu():
        yield None
        return
    from tests.software_gpu.device import Reports

    reports = Reports()
    yield reports
    reports.require_none()  # Of the teardown of fixtures.


@pytest.fixture(autouse=True)
def _require_no_reports(_reports: Any) -> Iterator[None]:
    """Fail a check if it, or a fixture, accessed or released memory without a wait."""
    yield
    if _reports is not None:
        _reports.require_none()


@pytest.fixture(scope="session")
def vllm_arguments(device: str, pytestconfig: pytest.Config) -> Values:
    return {**sizes_of(device).vllm, **vllm_arguments_of(pytestconfig)}


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config) -> Path:
    """Return a directory for all processes of a run."""
    return Path(pytestconfig.getoption("inside")).parent


@pytest.fixture
def note(record_property: Any) -> Note:
    """Return a function that records a measurement; see `Note`."""

    def record(figure: str, limit: str = "", **values: float) -> None:
        record_property("figure", figure + f"; {limit}" * bool(limit))
        record_property("values", values)

    return record


class _Inside:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        directory = Path(config.getoption("inside"))
        self._file = (directory / REPORTS).open("a")
        self._output = (directory / OUTPUT).open("ab")
        for stream in (1, 2):  # Also redirects compiled code and child processes.
            os.dup2(self._output.fileno(), stream)
        # Errors of setups by id, each with its first check.
        self._failed = dict[int, tuple[BaseException, str]]()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"begun": nodeid, "output_starts": os.fstat(self._output.fileno()).st_size})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        line = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._write(line)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Skip a check if its fixture has failed before; pytest raises the same error again."""
        report = yield
        if report.when == "setup" and report.failed and call.excinfo is not None:
            error = call.excinfo.value
            _, first = self._failed.setdefault(id(error), (error, item.name))
            if first != item.name:
                report.outcome = "skipped"
                report.longrepr = _skipped_at(item, f"needs what failed in {first}")
        return report


# -- in the parent
# --------------------------------------------------------------------------------------------------


class _Run:
    """Checks of a session; without `--device` on the CPU and without a budget."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        requested = config.getoption("device", None)
        self.device = requested or "cpu"
        vllm_arguments_of(config)
        ends = ExitStack()
        config.add_cleanup(ends.close)
        self.directory = ends.enter_context(scratch_directory("hybrid-engine-gpu-checks-"))
        self.machine = this_machine()
        default = SECONDS_ON_ONE_GPU + SECONDS_ON_SEVERAL * (self.machine.num_gpus > 1)
        self.seconds = (config.getoption("budget") or default) if requested else math.inf
        self._ends_at = time.monotonic() + self.seconds
        self._groups: dict[str, tuple[_Process, dict[str, list[str]]]] = {}
        self._records = None
        if path := config.getoption("records", None):
            self._records = ends.enter_context(_opened(path))
            self._record(
                device=self.device, budget_seconds=self.seconds, facts=facts_of(self.machine)
            )

    @property
    def left(self) -> float:
        return self._ends_at - time.monotonic()

    @property
    def over(self) -> str:
        return (
            f"the {self.seconds:g} s for all checks were over: --budget gives more, -k "
            "chooses fewer"
        )

    def reports_of(self, item: pytest.Item) -> list[pytest.TestReport]:
        group = _group(item)
        if group not in self._groups:
            self._groups[group] = self._begin(
                [other for other in item.session.items if _group(other) == group]
            )
        process, reasons = self._groups[group]
        missing = reasons[item.nodeid]
        reports = [_skipped(item, "; ".join(missing))] if missing else process.reports_of(item)
        last = next((report for report in reports if not report.passed), reports[-1])
        properties = {name: value for report in reports for name, value in report.user_properties}
        seconds = sum(report.duration for report in reports)
        reason = (
            last.longrepr[2].removeprefix("Skipped: ")
            if last.skipped
            else last.longreprtext[-_MAX_TEXT:]
        )
        output = dict(last.sections).get(OUTPUT_TITLE, "")
        self._record(
            check=item.nodeid,
            outcome=last.outcome,
            seconds=seconds,
            **properties,
            reason=reason,
            output=output,
        )
        return reports

    def _lacking(self, item: pytest.Item) -> list[str]:
        marker = item.get_closest_marker("gpu")
        stage = re.search(r"stage(\d)", item.path.name)
        num_gpus = 0 if marker is None else next(iter(marker.args), 1)
        return lacking(int(stage[1]) if stage else 1, self.device, num_gpus, self.machine)

    def _begin(self, items: Sequence[pytest.Item]) -> tuple[_Process, dict[str, list[str]]]:
        """Start the checks that can run; return their process, and the reasons against each check.

        Reasons depend on the resources that are free before the start.
        """
        reasons = {item.nodeid: self._lacking(item) for item in items}
        return _Process(
            self, len(self._groups), [item for item in items if not reasons[item.nodeid]]
        ), reasons

    def _record(self, **record: Any) -> None:
        if self._records is not None:
            self._records.write(json.dumps(record) + "\n")
            self._records.flush()


class _Process:
    def __init__(self, run: _Run, number: int, items: Sequence[pytest.Item]) -> None:
        self._run = run
        self._items = items
        self._directory = run.directory / str(number)
        self._directory.mkdir()
        self._ended: Ended | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        config = self._run.config
        arguments = [
            "-m",
            "pytest",
            "-qq",
            "--no-header",
            "--no-summary",
            "-s",
            "--timeout-method=thread",
        ]
        arguments += ["-pno:cacheprovider", "-pno:warnings", "-pno:logging", "-pno:xdist"]
        arguments += ["--device", self._run.device]
        arguments += [f"--confcutdir={Path(__file__).parent}", f"--rootdir={config.rootpath}"]
        arguments += [f"--inside={self._directory}", f"--basetemp={self._directory / 'tmp'}"]
        arguments += [f"--vllm={argument}" for argument in config.getoption("vllm", [])]
        if seconds := config.getoption("timeout", None):
            arguments.append(f"--timeout={seconds}")
        arguments += [item.nodeid for item in self._items]
        if self._items and self._run.left > 0:
            environment = {"PYTEST_ADDOPTS": ""}
            self._ended = run_ranks(
                arguments, 1, self._run.left, environment=environment, directory=config.rootpath
            )

    def reports_of(self, item: pytest.Item) -> list[pytest.TestReport]:
        is_last = item is self._items[-1]
        while True:
            # Before the read, so that it includes everything written before the end.
            has_ended = not self._thread.is_alive()
            lines = list(self._lines())
            reported = [line for line in lines if line.get("nodeid") == item.nodeid]
            is_over = any(line["when"] == "teardown" for line in reported)
            if has_ended or (is_over and not is_last):
                break
            time.sleep(_POLL_INTERVAL)
        config = self._run.config
        reports = [
            config.hook.pytest_report_from_serializable(config=config, data=line)
            for line in reported
        ]
        starts = {line["begun"]: line["output_starts"] for line in lines if "begun" in line}
        if not is_over:
            reports.append(self._unfinished(item, starts.keys()))
        elif (
            is_last and self._ended is not None and self._ended.status not in (0, 1, None)
        ):  # 0 and 1 are pytest's.
            reports.append(_report(item, "failed", f"{self._how}, after its checks", "teardown"))
        for report in reports:
            if report.skipped:
                report.longrepr = tuple(report.longrepr)  # A list in JSON.
            if report.failed:
                report.sections.append((OUTPUT_TITLE, self._output(starts.get(item.nodeid, 0))))
        return reports

    def _output(self, start: int) -> str:
        path = self._directory / OUTPUT
        text = path.read_bytes()[start:].decode(errors="replace") if path.is_file() else ""
        return text[-_MAX_TEXT:] + (self._ended.output[-_MAX_TEXT:] if self._ended else "")

    def _lines(self) -> Iterator[Values]:
        """Yield complete lines; the process may be writing one, or have died while writing."""
        path = self._directory / REPORTS
        text = path.read_text() if path.is_file() else ""
        yield from map(json.loads, text[: text.rfind("\n") + 1].splitlines())

    def _unfinished(self, item: pytest.Item, begun: Collection[str]) -> pytest.TestReport:
        """Report a check whose process ended too early: by the budget, a crash, or before."""
        if self._ended is None or self._ended.status is None:
            return _skipped(item, self._run.over)
        if item.nodeid in begun or (not begun and item is self._items[0]):
            return _report(item, "failed", self._how)
        return _skipped(item, f"not reached: {self._how}")

    @property
    def _how(self) -> str:
        assert self._ended.status is not None
        status = self._ended.status
        return (
            f"its process was ended by signal {-status}"
            if status < 0
            else f"its process ended with status {status}"
        )


def _skipped(item: pytest.Item, reason: str) -> pytest.TestReport:
    return _report(item, "skipped", _skipped_at(item, reason))


def _skipped_at(item: pytest.Item, reason: str) -> tuple[str, int, str]:
    return str(item.path), (item.location[1] or 0) + 1, f"Skipped: {reason}"


def _report(item: pytest.Item, outcome: Any, reason: Any, when: Any = "call") -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {item.name: 1}, outcome, reason, when)


def _group(item: pytest.Item) -> str:
    return item.nodeid.rpartition("::")[0]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("inside", None):
        config.pluginmanager.register(_Inside(config), "gpu-checks-inside")


def pytest_report_header(config: pytest.Config) -> list[str]:
    if config.getoption("inside") or not config.getoption("device") or config.option.collectonly:
        return []
    run = _run_of(config)
    lines = [f"{name}: {value}" for name, value in facts_of(run.machine).items()]
    if run.device == "cpu":
        lines.append(
            "Without a GPU: contents and bytes are checked, times mean nothing, "
            "and no line of CUDA runs."
        )
    return [*lines, f"time for all checks: {run.seconds:g} s (--budget)"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return (
        True
        if collection_path.name in MINUTES_ON_THE_CPU and not config.getoption("device", None)
        else None
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    if not item.config.getoption("inside", None):
        item.add_marker(pytest.mark.timeout(0), append=False)  # The child has a limit.


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if item.config.getoption("inside", None) or not item.path.is_relative_to(Path(__file__).parent):
        return None
    marks.running(item)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _run_of(item.config).reports_of(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Show the figure in the line of a check."""
    figure = (
        dict(report.user_properties).get("figure") if hasattr(report, "user_properties") else None
    )
    if report.when != "call" or report.skipped or figure is None:
        return None
    return report.outcome, "." if report.passed else "F", f"{report.outcome.upper()} {figure}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End a run on GPUs in which no check could run with the status of a run without tests."""
    option = session.config.getoption
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    is_gpu_run = option("device", None) == "cuda" and not option("inside")
    if is_gpu_run and session.exitstatus == 0 and not reporter.stats.get("passed"):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def _run_of(config: pytest.Config) -> _Run:
    if _RUN not in config.stash:
        config.stash[_RUN] = _Run(config)
    return config.stash[_RUN]


def vllm_arguments_of(config: pytest.Config) -> Values:
    """Return the engine arguments of `--vllm`. Raises UsageError unless each is name=value."""
    try:
        return engine_arguments(config.getoption("vllm", []))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def _opened(path: str) -> IO[str]:
    try:
        return Path(path).open("w")
    except OSError as error:
        raise pytest.UsageError(f"--records {path}: {error.strerror}") from error

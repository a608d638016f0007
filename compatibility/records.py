"""A run of tests and what came of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from hybrid_engine.files.durable import append_text, write_text

REPO_ROOT = Path(__file__).resolve().parents[1]
KEPT = Path(__file__).parent / "records.jsonl"
NEW = REPO_ROOT / "runs" / "compatibility.jsonl"

_DATE = "%Y-%m-%d %H:%M"


class Extent(StrEnum):
    """How much a run shows of the versions that it was run with."""

    WHOLE = "all that there is for them"
    PART = "a part"
    READ = "that sources have what is used; nothing is run"


@dataclass(frozen=True)
class Run:
    """A kind of run.

    Attributes:
        command: how it is started.
        what: what it does.
        engines: the distributions that it exercises, whatever else is installed.
        also_less: it also tests what needs only some of them, or none.
    """

    command: str
    what: str
    engines: frozenset[str]
    extent: Extent = Extent.WHOLE
    also_less: bool = False


_BOTH = frozenset({"megatron-core", "vllm"})
RUNS = {
    "test": Run(
        "make test",
        "all tests but those of `make test-faults`: both engines, FSDP2, every package",
        _BOTH,
        also_less=True,
    ),
    "core-tests": Run(
        "make core-tests MEGATRON=0.19.2", "what needs megatron-core but not vLLM", frozenset({"megatron-core"})
    ),
    "pure-tests": Run(
        "make pure-tests PYTHON=python3.12",
        "what needs neither torch nor an engine: configuration, layouts, name tables, planning, `plan`",
        frozenset(),
    ),
    "verify": Run(
        "hybrid-engine verify",
        "models, switched and compared bit by bit; also the cells of make matrix",
        _BOTH,
        Extent.PART,
    ),
    "rl": Run("make rl", "the RL example: accuracy, fewest bytes, log-probabilities", _BOTH, Extent.PART),
    "vllm-surface": Run(
        "make vllm-surface VERSION=0.33.0",
        "every name, call and piece of code of vLLM's that is used, read in its wheel",
        frozenset({"vllm"}),
        Extent.READ,
    ),
}


@dataclass(frozen=True)
class Record:
    """What came of a run; versions of what it does not exercise are empty.

    Attributes:
        run: one of `RUNS`.
        passed: tests; of `vllm-surface` names and pieces of code, of `rl` and `verify` jobs.
        failed: errors among them.
        date: of its end, in UTC, to the minute.
        commit: what `git describe --always --dirty` said at its start.
        note: what a reader of the figures has to know.
    """

    run: str
    python: str
    torch: str
    megatron: str
    vllm: str
    passed: int
    failed: int
    skipped: int
    date: str
    commit: str
    note: str = ""

    def __post_init__(self) -> None:
        if self.run not in RUNS:
            raise ValueError(f"run is one of {', '.join(RUNS)}, not {self.run!r}")
        datetime.strptime(self.date, _DATE)
        if min(self.passed, self.failed, self.skipped) < 0:
            raise ValueError(f"numbers of tests are not negative: {self}")

    @property
    def succeeded(self) -> bool:
        """Whether something was tested, and nothing failed."""
        return self.passed > 0 and self.failed == 0

    @property
    def minor_python(self) -> str:
        """3.11 of 3.11.7."""
        return ".".join(self.python.split(".")[:2])


def now() -> str:
    """The date of a record that ends now."""
    return datetime.now(UTC).strftime(_DATE)


def commit() -> str:
    """What this checkout is at; "unknown" without git."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    try:
        return subprocess.run(git, cwd=REPO_ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read(path: Path) -> list[Record]:
    """The records of a file; none if there is no file.

    Raises ValueError with file and line for one that is damaged.
    """
    records = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), start=1):
        try:
            records.append(Record(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}; mend the line or remove it") from None
    return records


def add(record: Record, path: Path = NEW) -> None:
    """Append a record to a file, which is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_text(path, _line(record))


def newest(records: Iterable[Record]) -> list[Record]:
    """Of each run with the same versions (of Python 3.11, 3.12, …) the last one, sorted."""
    last: dict[tuple[str, ...], Record] = {}
    for record in sorted(records, key=lambda each: each.date):
        last[record.run, record.minor_python, record.megatron, record.vllm] = record
    return [last[key] for key in sorted(last)]


def keep(records: Iterable[Record], path: Path = KEPT) -> None:
    """Write a file anew with these records."""
    write_text(path, "".join(_line(record) for record in records))


def _line(record: Record) -> str:
    return json.dumps(asdict(record)) + "\n"

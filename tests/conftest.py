"""Set-up before the first import of torch or vLLM; fixtures; selection of tests; clean-up."""

from __future__ import annotations

import fnmatch
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Subprocesses, such as ranks, inherit these.
os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Libraries must not use the network.
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Run the engine in the rank's own process, next to Megatron, on any number of cores.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import hypothesis
import pytest
from hypothesis import Phase

from tests.harness import marks
from tests.harness.launch import Launch, Outcomes, Ranks, launched_bodies
from tests.harness.small_disks import mounted_disk

marks.install_guard()

# Real engines share the cores with property tests, so deadlines would only cause noise.
hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
# make test-fast: the same answer each time, without the minutes that it takes to shrink a failure.
hypothesis.settings.register_profile(
    "fast",
    deadline=None,
    max_examples=12,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Launcher of ranks without engines. Any test that takes it, also indirectly, is `ranks`."""
    return Ranks(with_engines=False)


@pytest.fixture(scope="session")
def engines() -> Ranks:
    """Launcher of ranks that build real engines. Marks a test that takes it as `engines`."""
    return Ranks(with_engines=True)


@pytest.fixture(scope="module")
def bodies(request: pytest.FixtureRequest) -> Callable[[Launch], Outcomes]:
    """Return a function that runs the tests of a module whose bodies run on ranks."""
    return launched_bodies(request)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MiB."""
    with mounted_disk(tmp_path / "small", 2) as path:
        yield path


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file if `-m` deselects all of its tests."""
    return True if marks.leaves_out(config.option.markexpr, collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures before `-m` selects; deselect `faults` and `long` unless `-m`
    names them.

    A default `-m` in `addopts` would be lost when the user gives another. Files that build engines
    come first: two processes finish at about the same time only if their last files are short.
    """
    for item in items:
        marks.add_implied(item)
    not_named = [name for name in ("faults", "long") if name not in config.option.markexpr]
    deselected = [
        item for item in items if any(item.get_closest_marker(name) for name in not_named)
    ]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
    with_engines = {item.path for item in items if item.get_closest_marker("engines")}
    items.sort(key=lambda item: item.path not in with_engines)


def pytest_collection_finish() -> None:
    """Freeze all objects, because a garbage collection over all modules takes most of a second."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marks.running(item)


SHARED_MEMORY = Path("/dev/shm")
# Created by vLLM's CPU communicator and, between vLLM's processes, by Python's
# multiprocessing.shared_memory.
LEFTOVER_PATTERNS = ("-tp:*", "*cpushm*", "psm_*")


def _shared_memory_files() -> set[Path]:
    """Return this user's files in shared memory that have vLLM's names."""
    files = set()
    for path in SHARED_MEMORY.glob("*"):
        try:
            is_ours = path.stat().st_uid == os.getuid()
        except FileNotFoundError:
            continue
        if is_ours and any(
            fnmatch.fnmatchcase(path.name, pattern) for pattern in LEFTOVER_PATTERNS
        ):
            files.add(path)
    return files


def is_mapped(path: Path) -> bool:
    """Return whether a live process maps the file, which then belongs to another run."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text(errors="replace"):
                return True
        except OSError:  # The process has ended or belongs to another user.
            continue
    return False


_BEFORE = pytest.StashKey[set[Path]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_BEFORE] = _shared_memory_files()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove files that killed ranks left in shared memory; otherwise vLLM fails with "create shm …
    errno: 17".

    Removes only files of this user that appeared in this session and that no live process has
    mapped. A worker of xdist removes none: files that another worker is about to map look the same.
    """
    if not hasattr(session.config, "workerinput"):
        for path in _shared_memory_files() - session.config.stash[_BEFORE]:
            if not is_mapped(path):
                path.unlink(missing_ok=True)

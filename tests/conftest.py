"""What every test needs before the first import of torch, transformers or vLLM, and what it leaves clean."""

from __future__ import annotations

import fnmatch
import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Subprocesses (the ranks) inherit these.
os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Nothing is looked up or reported over the network.
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The engine lives in the rank's own process, beside Megatron, on however few cores there are.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import hypothesis
import pytest

from tests.harness import marks
from tests.harness.launch import Ranks
from tests.harness.small_disks import mounted_disk

marks.install_guard()

# Real engines share the cores with the property tests, so wall-clock deadlines only cause noise.
hypothesis.settings.register_profile("dev", deadline=None, max_examples=50)
hypothesis.settings.register_profile("fast", deadline=None, max_examples=12)  # make test-fast
hypothesis.settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Ranks without engines. Whoever takes it, itself or through another fixture, is marked `ranks`."""
    return Ranks(with_engines=False)


@pytest.fixture(scope="session")
def engines() -> Ranks:
    """Ranks that build real engines. Whoever takes it is marked `engines`."""
    return Ranks(with_engines=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with mounted_disk(tmp_path / "small", 2) as place:
        yield place


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file of which `-m` leaves out every test."""
    return True if marks.leaves_out(config.option.markexpr, collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test by what it takes, before `-m` chooses; leave out what takes minutes unless it is asked for.

    An `addopts = -m` would be lost with another `-m`. Files that build engines are first: the last ones of two
    processes, which end together only if they are short, hold property tests.
    """
    for item in items:
        marks.add_implied(item)
    unasked = [name for name in ("faults", "long") if name not in config.option.markexpr]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unasked)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    with_engines = {item.path for item in items if item.get_closest_marker("engines")}
    items.sort(key=lambda item: item.path not in with_engines)


def pytest_collection_finish() -> None:
    """Have no collection of garbage in a test go through all modules and tests, which takes most of a second."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    marks.running(item)


SHARED_MEMORY = Path("/dev/shm")
# vLLM's CPU communicator, and Python's multiprocessing.shared_memory, which vLLM uses between processes.
LEFTOVER_PATTERNS = ("-tp:*", "*cpushm*", "psm_*")


def _shared_memory_files() -> set[Path]:
    """Files of this user in shared memory whose names vLLM gives."""
    found = set()
    for path in SHARED_MEMORY.glob("*"):
        try:
            is_ours = path.stat().st_uid == os.getuid()
        except FileNotFoundError:
            continue
        if is_ours and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in LEFTOVER_PATTERNS):
            found.add(path)
    return found


def is_mapped(path: Path) -> bool:
    """Whether a live process has the file mapped: it then belongs to another run on this machine."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(path) in maps.read_text(errors="replace"):
                return True
        except OSError:  # the process ended, or is another user's
            continue
    return False


_BEFORE = pytest.StashKey[set[Path]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_BEFORE] = _shared_memory_files()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove what killed ranks left in shared memory, or the next vLLM fails with "create shm … errno: 17".

    Only files that appeared during this session, are this user's and are mapped by no live process. Not by one of
    several processes of xdist: what another is about to map looks the same.
    """
    if not hasattr(session.config, "workerinput"):
        for path in _shared_memory_files() - session.config.stash[_BEFORE]:
            if not is_mapped(path):
                path.unlink(missing_ok=True)

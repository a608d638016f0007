"""A plug-in of a test's vLLM server: a worker fails once in `commit` if a file requests it.

with serving(model, directory, *FILLED, *PLAIN, environment=faulty(directory)) as server:
    fail_in_commit(directory, "raise")          # or "kill", "stop"
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from hybrid_engine.files.durable import write_text
from tests.hybrid_engine.tools.programs import environment_with

_VARIABLE = "FAULTY_SERVER_COMMIT"


def faulty(directory: Path) -> dict[str, str]:
    """Install the plug-in in `directory`; return the environment of a server that loads it."""
    return {
        **environment_with(register, directory / "plugins"),
        _VARIABLE: str(directory / "commit-fails"),
    }


def fail_in_commit(directory: Path, how: str) -> None:
    """Make the next commit fail: "raise", "kill" or "stop"."""
    write_text(directory / "commit-fails", how)


def _take(request: Path) -> str | None:
    """Return the contents of the file `request` to the first process that calls; None to others."""
    claimed = request.with_suffix(f".{os.getpid()}")
    try:
        request.rename(claimed)
    except FileNotFoundError:
        return None
    return claimed.read_text()


def register() -> None:
    """Wrap `VllmAdaptor.commit`; vLLM calls this in each of its processes."""
    from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor

    request = Path(os.environ[_VARIABLE])
    original = VllmAdaptor.commit
    if hasattr(original, "is_faulty"):
        return

    def commit(self: VllmAdaptor, groups: Sequence[str]) -> None:
        if (how := _take(request)) is not None:
            if how == "raise":
                raise MemoryError("no memory for 3 GB in commit")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        original(self, groups)

    commit.is_faulty = True  # type: ignore[attr-defined]
    VllmAdaptor.commit = commit  # type: ignore[method-assign]

"""A plug-in of a test's vLLM server: a worker fails in `commit`, once, where a file says so.

with serving(model, directory, *FILLED, *PLAIN, environment=faulty(directory)) as server:
    fail_in_commit(directory, "raise")          # or "kill", "stop"
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

_VARIABLE = "FAULTY_SERVER_COMMIT"


def faulty(directory: Path) -> dict[str, str]:
    """Environment of a server that loads the plug-in. It is installed in `directory`, as an entry point."""
    place = directory / "plugins" / "faulty_server-0.1.dist-info"
    if not place.exists():
        place.mkdir(parents=True)
        (place / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-server\nVersion: 0.1\n")
        (place / "entry_points.txt").write_text(f"[vllm.general_plugins]\nfaulty_server = {__name__}:register\n")
    repository = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([str(place.parent), repository, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, _VARIABLE: str(directory / "commit-fails")}


def fail_in_commit(directory: Path, how: str) -> None:
    """Have the next commit fail."""
    place = directory / "commit-fails"
    place.with_suffix(".new").write_text(how)
    place.with_suffix(".new").rename(place)


def _taken(place: Path) -> str | None:
    """What the file says, to the first that asks."""
    own = place.with_suffix(f".{os.getpid()}")
    try:
        place.rename(own)
    except FileNotFoundError:
        return None
    return own.read_text()


def register() -> None:
    """Called by vLLM in each of its processes."""
    from hybrid_engine.backends.vllm.weights.adaptor import VllmAdaptor

    place, original = Path(os.environ[_VARIABLE]), VllmAdaptor.commit
    if hasattr(original, "is_faulty"):
        return

    def commit(self: VllmAdaptor, groups: Sequence[str]) -> None:
        if (how := _taken(place)) is not None:
            if how == "raise":
                raise MemoryError("no memory for 3 GB in commit")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        original(self, groups)

    commit.is_faulty = True  # type: ignore[attr-defined]
    VllmAdaptor.commit = commit  # type: ignore[method-assign]

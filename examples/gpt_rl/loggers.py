"""Where else the rows of a run go: TensorBoard, Weights & Biases.

Tags are grouped: `train/kl`, `eval/accuracy`, `time/generate`, `reshard/seconds`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from examples.gpt_rl.run_state import Row
from hybrid_engine.errors import DependencyError
from hybrid_engine.files.durable import naming, write_text

_GROUPS = {
    "accuracy": "eval",
    "logprob_diff": "check",
    "logprob_diff_mean": "check",
    "peak_bytes": "memory",
    "rss_bytes": "memory",
    "bytes_received": "reshard",
    "bytes_least": "reshard",
    "reshard_share": "reshard",
    "reshard_seconds": "reshard",
}
"""Column of metrics.jsonl -> group of its tag; the others' are `time` (seconds) and `train`."""


class Logger(Protocol):
    """What is told of each row."""

    def log(self, row: Row) -> None:
        """An iteration has ended."""
        ...

    def close(self) -> None:
        """The run has ended here; nothing is logged afterwards."""
        ...


class TensorBoard:
    """Event files in the run's directory, made with the first row."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._events: Any = None

    def log(self, row: Row) -> None:
        with naming("writing TensorBoard events to", self._directory):
            if self._events is None:
                from torch.utils.tensorboard import SummaryWriter

                # what an interrupted run wrote for this iteration and later ones is hidden
                self._events = SummaryWriter(str(self._directory), purge_step=row["iteration"])
            for tag, value in scalars(row):
                self._events.add_scalar(tag, value, row["iteration"])
            self._events.flush()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


class WeightsAndBiases:
    """A run of this project, which goes on when the run in the directory does.

    Args:
        project: as W&B names it.
        directory: of the run; W&B's id is kept there.
        config: shown beside the curves.
        is_resumed: go on with the id that is there.
    """

    def __init__(self, project: str, directory: Path, config: Mapping[str, Any], *, is_resumed: bool) -> None:
        self._wandb = import_wandb()
        id_file = directory / "wandb-run-id"
        if not (is_resumed and id_file.is_file()):
            write_text(id_file, uuid.uuid4().hex[:12])
        name, own_id = directory.resolve().name, id_file.read_text().strip()
        self._wandb.init(project=project, name=name, id=own_id, resume="allow", dir=str(directory), config=dict(config))

    def log(self, row: Row) -> None:
        self._wandb.log(dict(scalars(row)), step=row["iteration"])

    def close(self) -> None:
        self._wandb.finish()


def import_wandb() -> Any:
    """The package. Raises DependencyError with what to install."""
    try:
        import wandb
    except ImportError as error:
        raise DependencyError(f"--wandb needs the package wandb ({error}): pip install wandb") from error
    return wandb


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """Tag and value of every number of a row."""
    for key, value in row.items():
        if isinstance(value, int | float) and key not in ("iteration", "unix_time"):
            yield _tag(key), value


def _tag(key: str) -> str:
    group = _GROUPS.get(key) or ("time" if key.endswith("_seconds") else "train")
    name = key.removesuffix("_seconds") if group == "time" else key.removeprefix(f"{group}_")
    return f"{group}/{name}"

"""Trackers of runs, by their own libraries: TensorBoard, W&B, MLflow, trackio and Prometheus.

    train(..., trackers=["wandb"])

Each gets the settings of the run once and the figures of each row. Projects, servers and log-ins
are those of the libraries' own environment variables and files (WANDB_PROJECT, MLFLOW_TRACKING_URI,
TRACKIO_SPACE_ID, ...). A resumed run continues the tracker's run, whose name is in OUT/tracker-run.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hybrid_engine.errors import FileError, Violation, first_of
from hybrid_engine.files.durable import naming, write_text
from hybrid_engine.files.reading import read_regular
from hybrid_engine.rl.run_files import Row

logger = logging.getLogger("hybrid_engine")

PROJECT = "hybrid-engine"
"""Name of the project, unless the library's environment variable has another."""
_RUN_FILE = "tracker-run"
_MOST_CHARACTERS = 60
"""Characters of the directory's name in the name of a run."""
_MAX_NAME_NBYTES = 200
_RUN_NAME = re.compile(r"[A-Za-z0-9_.-]*-[0-9a-f]{8}")
_NOT_IN_METRICS = re.compile(r"[^A-Za-z0-9_]")


class Tracker(Protocol):
    """Recorder of a run's figures; on rank 0 only."""

    def add(self, step: int, row: Row) -> None:
        """Record the figures of a step."""

    def close(self, *, has_failed: bool = False) -> None:
        """End the record of this process."""


class Events:
    """Rows as TensorBoard's scalars. Does nothing if TensorBoard is not installed.

    Args:
        out: directory of the events.
        groups: groups of the tags of further figures by their names, e.g. {"accuracy": "eval"}.
        left_out: names in a row that are not figures.
    """

    def __init__(
        self,
        out: Path,
        groups: Mapping[str, str] | None = None,
        left_out: Collection[str] = ("step",),
    ) -> None:
        self._out = out
        self._groups = dict(groups or {})
        self._left_out = left_out
        self._writer: Any = None

    def add(self, number: int, row: Row) -> None:
        """Write the figures of a row.

        The first call hides what an interrupted run wrote for this and later numbers.

        Raises FileError.
        """
        with self._naming():
            if self._writer is None and importlib.util.find_spec("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._out), purge_step=number)
            if self._writer is None:
                return
            for name, value in row.items():
                if value is not None and name not in self._left_out:
                    self._writer.add_scalar(self.tag(name), value, number)
            self._writer.flush()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Raise FileError for errors of TensorBoard's writer, once."""
        try:
            with naming("writing TensorBoard's events in", self._out):
                yield
        except FileError:
            # The writer's thread keeps its error: closing the writer would raise it again.
            self._writer = None
            raise

    def tag(self, name: str) -> str:
        """Return group/name; the group is reshard, time, memory, check, one of `groups` or train.

        Figures of the group time are in seconds.
        """
        if name.startswith(("reshard", "bytes")):
            return f"reshard/{name.removeprefix('reshard_')}"
        if name.endswith("seconds"):
            return f"time/{name.removesuffix('_seconds')}"
        if name in ("peak_bytes", "rss_bytes"):
            return f"memory/{name}"
        if name.startswith("logprob_diff"):
            return f"check/{name}"
        return f"{self._groups.get(name, 'train')}/{name}"

    def close(self, *, has_failed: bool = False) -> None:
        """Close the file. Raises FileError."""
        with self._naming():
            if self._writer is not None:
                self._writer.close()


class _WandbLike:
    """Weights & Biases, or trackio, which has the same functions."""

    def __init__(self, module: Any, run: str, settings: Mapping[str, Any], **options: Any) -> None:
        self._module = module
        module.init(config=dict(settings), name=run, resume="allow", **options)

    def add(self, step: int, row: Row) -> None:
        self._module.log(_figures(row), step=step)

    def close(self, *, has_failed: bool = False) -> None:
        self._module.finish()


class _Wandb(_WandbLike):
    def __init__(self, run: str, settings: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        super().__init__(wandb, run, settings, project=project, id=run)

    def close(self, *, has_failed: bool = False) -> None:
        self._module.finish(exit_code=int(has_failed))


class _Trackio(_WandbLike):
    def __init__(self, run: str, settings: Mapping[str, Any]) -> None:
        trackio = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        super().__init__(trackio, run, settings, project=project)


class _Mlflow:
    def __init__(self, run: str, settings: Mapping[str, Any]) -> None:
        mlflow = importlib.import_module("mlflow")
        self._mlflow = mlflow
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        earlier = mlflow.search_runs(
            filter_string=f"attributes.run_name = '{run}'", output_format="list"
        )
        if earlier:
            mlflow.start_run(run_id=earlier[0].info.run_id)
        else:
            mlflow.start_run(run_name=run)
            mlflow.log_dict(dict(settings), "settings.json")

    def add(self, step: int, row: Row) -> None:
        self._mlflow.log_metrics(_figures(row), step=step)

    def close(self, *, has_failed: bool = False) -> None:
        self._mlflow.end_run("FAILED" if has_failed else "FINISHED")


class _Prometheus:
    """Figures of the last row in OUT/metrics.prom, in Prometheus' text format.

    node_exporter's textfile collector reads the file, which is replaced atomically.
    """

    def __init__(self, out: Path) -> None:
        self._library = importlib.import_module("prometheus_client")
        self._path = out / "metrics.prom"

    def add(self, step: int, row: Row) -> None:
        # New in each step: a figure that has no value now must not keep its last one.
        registry = self._library.CollectorRegistry()
        for name, value in {"step": step, **_figures(row)}.items():
            label = _NOT_IN_METRICS.sub("_", f"hybrid_engine_{name}")
            gauge = self._library.Gauge(label, f"{name} of the last step", registry=registry)
            gauge.set(value)
        self._library.write_to_textfile(str(self._path), registry)

    def close(self, *, has_failed: bool = False) -> None:
        """Leave the file."""


_LIBRARIES: dict[str, Callable[[str, Mapping[str, Any]], Tracker]] = {
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "trackio": _Trackio,
}
_NAMES = ("tensorboard", "prometheus", *_LIBRARIES)
_MODULES = {"prometheus": "prometheus_client"}
"""Names of modules that differ from those of the trackers."""


def tracker_violations(names: Sequence[str], out: Path | None) -> Iterator[Violation]:
    """Yield trackers that are unknown, not installed, or without the directory that they need."""
    if isinstance(names, str):
        problem = f"{names!r} is a text"
        yield Violation("trackers", problem, f'Pass ["{names}"]', code="not-a-list")
        return
    for name in names:
        if name not in _NAMES:
            remedy = f"Use {first_of(_NAMES, 5)}"
            yield Violation("trackers", f"there is no {name!r}", remedy, code="unknown-tracker")
        elif name == "tensorboard":
            # It is the default, and is left out where it is not installed.
            continue
        elif not _is_installed(_MODULES.get(name, name)):
            problem = f"{name} is not installed"
            remedy = f"pip install {_MODULES.get(name, name)}"
            yield Violation("trackers", problem, remedy, code="tracker-not-installed")
        elif out is None:
            problem = f"{name} needs the directory of the run, but there is no `out`"
            yield Violation("trackers", problem, "Pass `out`", code="needs-out")


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module in sys.modules that was not imported from a file
        return True


class SafeTracker:
    """A tracker whose errors are logged: metrics.jsonl has the rows, too."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker

    def add(self, step: int, row: Row) -> None:
        """Record the figures of a step."""
        try:
            self._tracker.add(step, row)
        except Exception as error:  # of the library or of the network
            logger.warning("%s has not recorded step %d: %s", self._name, step, error)

    def close(self, *, has_failed: bool = False) -> None:
        """End the record of this process."""
        try:
            self._tracker.close(has_failed=has_failed)
        except Exception as error:
            logger.warning("%s has not ended its run: %s", self._name, error)


def forget_run(out: Path) -> None:
    """Let the next call begin another run of the trackers: no step of the last one is continued."""
    with naming("removing", out / _RUN_FILE):
        (out / _RUN_FILE).unlink(missing_ok=True)


def opened(name: str, out: Path, settings: Mapping[str, Any]) -> Tracker:
    """Open a tracker. Call it on rank 0, after `tracker_violations` has yielded none."""
    if name == "tensorboard":
        return Events(out)
    if name == "prometheus":
        return SafeTracker(name, _Prometheus(out))
    return SafeTracker(name, _LIBRARIES[name](_run_name(out), settings))


def _figures(row: Row) -> dict[str, float]:
    """Return a row without the number of its step, which trackers have as an argument."""
    return {name: value for name, value in row.items() if name != "step" and value is not None}


def _run_name(out: Path) -> str:
    """Return the name of the run for trackers, the same in every call for a directory."""
    path = out / _RUN_FILE
    if os.path.lexists(path):
        with naming("reading", path, "Remove it to begin another run of the tracker"):
            found = read_regular(path, _MAX_NAME_NBYTES).decode().strip()
            if not _RUN_NAME.fullmatch(found):
                raise ValueError("it has no name of a run")
        return found
    # Letters that a name may have in every tracker.
    directory = re.sub(r"[^A-Za-z0-9_.-]", "-", out.absolute().name)[:_MOST_CHARACTERS]
    name = f"{directory}-{uuid.uuid4().hex[:8]}"
    write_text(path, f"{name}\n")
    return name

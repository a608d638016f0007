"""Trackers of runs: TensorBoard, Prometheus and, by accelerate, W&B, MLflow and trackio.

    train(..., trackers=["wandb"])

Each gets the settings of the run once and the figures of each row, in a thread of its own.
TensorBoard is the default, which does without accelerate; accelerate has no Prometheus. Projects,
servers and log-ins are those of the libraries' own environment variables and files (WANDB_PROJECT,
MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID, ...). A resumed run continues the tracker's run, whose name
is in OUT/tracker-run.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from hybrid_engine.errors import Violation, Violations, first_of
from hybrid_engine.files.durable import naming, write_text
from hybrid_engine.files.reading import read_regular
from hybrid_engine.ports import Figures
from hybrid_engine.rl.run_files import Row
from hybrid_engine.rl.user_callbacks import CallThread, naming_failure

logger = logging.getLogger("hybrid_engine")

PROJECT = "hybrid-engine"
"""Name of the project, unless the library's environment variable has another."""
_RUN_FILE = "tracker-run"
_MOST_CHARACTERS = 60
"""Characters of the directory's name in the name of a run."""
_MAX_NAME_NBYTES = 200
_RUN_NAME = re.compile(r"[A-Za-z0-9_.-]*-[0-9a-f]{8}")
_MOST_CALLS = 1000
"""Rows that wait for a tracker."""
_SECONDS_TO_OPEN = 60.0
"""Time in which a tracker may refuse the run. Afterwards the run begins without waiting for it."""
_SECONDS_TO_END = 30.0
"""Time for the last rows of a tracker."""
_NOT_IN_METRICS = re.compile(r"[^A-Za-z0-9_]")


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
        """
        if self._writer is None and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._out), purge_step=number)
        if self._writer is None:
            return
        for name, value in row.items():
            if value is not None and name not in self._left_out:
                self._writer.add_scalar(self.tag(name), value, number)
        self._writer.flush()

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
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class _Accelerated:
    """W&B, MLflow or trackio, by accelerate's trackers.

    Args:
        name: name of the tracker.
        run: name of the run, which is continued if the tracker has it.
        settings: settings of the run.
    """

    def __init__(self, name: str, run: str, settings: Mapping[str, Any]) -> None:
        tracking: Any = importlib.import_module("accelerate.tracking")
        # Its logger needs accelerate's state, which would make the job's process group here, on one
        # rank.
        tracking.logger = logger
        self._name = name
        self._library = importlib.import_module(name)
        project = os.environ.get(f"{name.upper()}_PROJECT", PROJECT)
        options: dict[str, Any] = {"name": run, "config": dict(settings), "resume": "allow"}
        if name == "wandb":
            options["id"] = run
        if name == "mlflow":
            earlier = self._library.search_runs(
                search_all_experiments=True,
                filter_string=f"attributes.run_name = '{run}'",
                output_format="list",
            )
            options = {"run_name": run, "run_id": earlier[0].info.run_id if earlier else None}
        self._tracker = tracking.LOGGER_TYPE_TO_CLASS[name](project, **options)
        self._tracker.main_process_only = False  # asks accelerate's state, too
        self._tracker.start()
        if name == "mlflow":
            self._library.log_dict(dict(settings), "settings.json")

    def add(self, step: int, row: Row) -> None:
        self._tracker.log(_figures(row), step=step)

    def close(self, *, has_failed: bool = False) -> None:
        # accelerate ends every run as a finished one.
        if has_failed and self._name == "wandb":
            self._library.finish(exit_code=1)
        elif has_failed and self._name == "mlflow":
            self._library.end_run("FAILED")
        else:
            self._tracker.finish()


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


_NEEDED = {
    "prometheus": ("prometheus_client",),
    **{name: (name, "accelerate") for name in ("wandb", "mlflow", "trackio")},
}
"""Trackers and the modules that they need. TensorBoard is left out where it is not installed."""


def tracker_violations(names: Sequence[str], out: Path | None) -> Violations:
    """Yield trackers that are unknown, not installed, or without the directory that they need."""
    if isinstance(names, str):
        yield Violation("trackers", f"{names!r} is a text", f'Pass ["{names}"]', code="not-a-list")
        return
    for name in names:
        if name == "tensorboard":
            continue
        missing = [
            module for module in _NEEDED.get(name, ()) if not importlib.util.find_spec(module)
        ]
        if name not in _NEEDED:
            yield Violation(
                "trackers",
                f"there is no {name!r}",
                f"Use {first_of(['tensorboard', *_NEEDED], 5)}",
                code="unknown-tracker",
            )
        elif missing:
            yield Violation(
                "trackers",
                f"{name} needs {' and '.join(missing)}",
                f"pip install {' '.join(missing)}",
                code="tracker-not-installed",
            )
        elif out is None:
            yield Violation(
                "trackers",
                f"{name} needs the directory of the run, but there is no `out`",
                "Pass `out`",
                code="needs-out",
            )


Recorder = Events | _Accelerated | _Prometheus


class SafeTracker:
    """A tracker in a thread of its own; metrics.jsonl has the rows, too.

    Its errors are logged. Rows that it does not take in time are left out.

    Args:
        name: name of the tracker.
        opening: opens it, in the thread.

    Raises ArgumentError if it cannot be opened, for example without a log-in.
    """

    def __init__(self, name: str, opening: Callable[[], Recorder]) -> None:
        self._name = name
        self._thread = CallThread(name)
        self._tracker: Future[Recorder] = self._thread.submit(opening)
        self._is_late = False
        if wait([self._tracker], _SECONDS_TO_OPEN).done:
            with naming_failure("trackers", name):
                self._tracker.result()

    def _call(self, what: str, call: Callable[[Recorder], None]) -> Future[None]:
        def record() -> None:
            try:
                call(self._tracker.result())
            except BaseException as error:  # of the library or of the network, and sys.exit()
                logger.warning("%s has not recorded %s: %s", self._name, what, error)

        return self._thread.submit(record)

    def add(self, step: int, row: Row) -> None:
        """Record the figures of a step, later."""
        if self._thread.num_waiting < _MOST_CALLS:
            self._call(f"step {step}", methodcaller("add", step, row))
            return
        if not self._is_late:
            message = "%s is late, and does not record step %d and others like it"
            logger.warning(message, self._name, step)
        self._is_late = True

    def close(self, failure: type[BaseException] | None = None, *_: object) -> None:
        """End the record of this process, after the rows that wait. `failure`: as of __exit__."""
        ended = self._call("the end", methodcaller("close", has_failed=failure is not None))
        self._thread.end()
        if not wait([ended], _SECONDS_TO_END).done:
            logger.warning("%s has not ended in %g s", self._name, _SECONDS_TO_END)


def forget_run(out: Path) -> None:
    """Let the next call begin another run of the trackers: no step of the last one is continued."""
    with naming("removing", out / _RUN_FILE):
        (out / _RUN_FILE).unlink(missing_ok=True)


def opened(name: str, out: Path, settings: Mapping[str, Any]) -> SafeTracker:
    """Open a tracker. Call it on rank 0, after `tracker_violations` has yielded none."""
    if name in ("tensorboard", "prometheus"):
        return SafeTracker(name, partial(Events if name == "tensorboard" else _Prometheus, out))
    return SafeTracker(name, partial(_Accelerated, name, _run_name(out), settings))


def _figures(row: Row) -> Figures:
    """Return a row without the number of its step, which trackers have as an argument."""
    return {name: value for name, value in row.items() if name != "step" and value is not None}


def _run_name(out: Path) -> str:
    """Return the name of the run for trackers, the same in every call for a directory."""
    path = out / _RUN_FILE
    if os.path.lexists(path):
        with naming("reading", path, "Remove it to begin another run of the tracker"):
            name = read_regular(path, _MAX_NAME_NBYTES).decode().strip()
            if not _RUN_NAME.fullmatch(name):
                raise ValueError("it has no name of a run")
        return name
    # Letters that a name may have in every tracker.
    directory = re.sub(r"[^A-Za-z0-9_.-]", "-", out.absolute().name)[:_MOST_CHARACTERS]
    name = f"{directory}-{uuid.uuid4().hex[:8]}"
    write_text(path, f"{name}\n")
    return name

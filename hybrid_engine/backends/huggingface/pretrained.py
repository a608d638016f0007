"""The weights that training begins with: brought from the Hub where they are not here, and read into the shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

from hybrid_engine.backends.huggingface.hf_checkpoint import load_hf_checkpoint
from hybrid_engine.backends.huggingface.unused_tensors import HEAD
from hybrid_engine.errors import ConfigError, Violation
from hybrid_engine.files.hub import Snapshot
from hybrid_engine.models.table import ModelTable
from hybrid_engine.ports import LoadableWeights
from hybrid_engine.ranks.job import Job


def fetch_weights(model: Path, job: Job, key: str = "model") -> None:
    """Download what a directory of the Hub's cache lacks; the first rank of each host does. Collective.

    Nothing happens to any other directory. `key`: names the model. Raises ConfigError on all ranks, also where they
    have different commits.
    """
    snapshot = Snapshot.at(model)
    own = None if snapshot is None else (snapshot.repo_id, snapshot.commit)
    origins = job.agreement.gather(own, tuple[str, str] | None, "the model")
    if len(set(origins)) > 1:
        found = ", ".join(sorted({"a directory" if one is None else "@".join(one) for one in origins}))
        remedy = "Set revision to a commit" if key == "model" else "Download one commit, and name its directory"
        raise ConfigError([Violation(key, f"ranks have different models: {found}", remedy)])
    if snapshot is not None:
        is_first = job.hosts.index(job.hosts[job.rank]) == job.rank
        steps = _in_background(partial(snapshot.download, key)) if is_first else ()
        job.agreement.rounds("downloading the model's weights", steps)


def load_pretrained(model: Path, weights: LoadableWeights, table: ModelTable, job: Job, *, key: str = "model") -> None:
    """Read a model's weights into the shards; an output head may be new. `key`: names the model. Collective.

    Errors as of `load_hf_checkpoint`.
    """
    may_be_new = table.may_be_new | ({HEAD} & table.shapes.keys())
    load_hf_checkpoint(model, weights, replace(table, may_be_new=may_be_new), job, key=key)


def _in_background(work: Callable[[], None]) -> Iterator[None]:
    """Step by step, for as long as `work` takes in a thread; raises what it raised."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    # a daemon: the process need not wait for a download where another rank has failed
    threading.Thread(target=run, name="download", daemon=True).start()
    while not wait([outcome], timeout=1).done:
        yield
    outcome.result()

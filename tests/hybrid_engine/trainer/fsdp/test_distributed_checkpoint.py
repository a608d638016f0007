"""Checkpoints of the FSDP2 trainer, saved and loaded on 2 and 4 ranks.

Loaded state is bit-identical to the saved state; a failure leaves state and files unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.compute_check.probes import attributes_set
from hybrid_engine.errors import FileError, HybridEngineError, StateError, WeightError
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.ranks.job import Job
from hybrid_engine.trainer import checkpoint_directory, training_checkpoint
from hybrid_engine.trainer.fsdp.actor import FsdpActor
from tests.harness.errors import failing
from tests.harness.launch import Ranks, on_ranks
from tests.harness.small_disks import file_size_limit
from tests.harness.values import Values
from tests.hybrid_engine.backends.fsdp.actors import (
    TIED_WITH_ODD_ROWS,
    State,
    actor,
    state_of,
    train,
)
from tests.zoo.tiny_models import Zoo

HYBRID = {"sharding_strategy": "HYBRID_SHARD", "replicas": 2}


def train_and_save(parts: FsdpActor, directory: Path) -> State:
    engine = parts.engine
    for step in range(2):
        train(engine, step)
    engine.optimizer.set_learning_rate(3e-3)  # must be restored too
    torch.manual_seed(40 + engine.data_parallel.rank)  # each rank's generator must be restored
    parts.checkpoints.save(directory, wait=False)  # written while training goes on
    return state_of(engine)


@on_ranks(2)
def test_loaded_state_equals_saved_state(zoo: Zoo, tmp_path: Path) -> None:
    """Loaded by a run with another seed, which goes on as the first one does."""
    untrained_path = tmp_path / "untrained"
    with actor(zoo.path("qwen2", **TIED_WITH_ODD_ROWS)) as parts:
        engine = parts.engine
        parts.checkpoints.save(untrained_path)
        untrained = state_of(engine)
        is_trained = threading.Event()

        def save_once_trained(*arguments: Any) -> None:
            is_trained.wait(60)
            checkpoint_directory.save(*arguments)

        with attributes_set([training_checkpoint], save=save_once_trained):
            trained = train_and_save(parts, tmp_path / "trained")
        train(engine, 2)
        is_trained.set()
        for number in range(50):  # beside the agreements of the save
            assert parts.checkpoints._job.agreement.gather(number, int) == [number] * 2
        continued = state_of(engine)
    assert trained["version"] == 2
    assert trained["groups"][0]["lr"] == 3e-3
    assert any("exp_avg" in name for name in trained)
    with actor(zoo.path("qwen2", **TIED_WITH_ODD_ROWS), seed=99) as parts:  # other initial weights
        engine = parts.engine
        parts.checkpoints.load(tmp_path / "trained")
        offloader = Offloader(engine.model)
        offloader.offload(KINDS)
        offloader.onload(KINDS)
        assert state_of(engine) == trained
        train(engine, 2)
        assert state_of(engine) == continued
        parts.checkpoints.load(untrained_path)  # without optimizer state
        assert state_of(engine) == untrained
        parts.checkpoints.save(untrained_path)  # replaces the earlier checkpoint
        parts.checkpoints.load(untrained_path)
        assert state_of(engine) == untrained


def save(path: Path, root: Path) -> Values:
    """Save the checkpoint "trained", and take a step."""
    with actor(path) as parts:
        return {
            "trained": train_and_save(parts, root / "trained"),
            "report": train(parts.engine, 2),
        }


def resume(path: Path, root: Path, source: str, name: str, **settings: Any) -> Values:
    """Load the checkpoint `source` on these ranks, save it as `name`, and take a step."""
    with actor(path, seed=5, **settings) as parts:
        engine = parts.engine
        parts.checkpoints.load(root / source)
        loaded = state_of(engine)
        parts.checkpoints.save(root / name)
        return {"loaded": loaded, "report": train(engine, 2)}


def test_resuming_on_twice_and_half_as_many_ranks(ranks: Ranks, zoo: Zoo, tmp_path: Path) -> None:
    """State is bit-identical, with replicas too; the next step sums in another order."""
    path = zoo.path("qwen2", **TIED_WITH_ODD_ROWS)
    first, _ = ranks.launch(save, 2, path, tmp_path)
    on_four = ranks.launch(partial(resume, fsdp=HYBRID), 4, path, tmp_path, "trained", "of four")
    on_two = ranks.launch(resume, 2, path, tmp_path, "of four", "of two")
    for results in (*on_four, *on_two):
        assert {**results["loaded"], "generator": None} == {**first["trained"], "generator": None}
        assert results["report"] == pytest.approx(first["report"], rel=1e-5)


def check_failures(
    checkpoints: Any,
    job: Job,
    path: Path,
    *,
    state: Callable[[], Values],
    step: Callable[[int], object],
    moment: Callable[[], torch.Tensor],
    name_of_moment: str,
) -> None:
    """Check that failures are reported on all ranks and change nothing; leave a checkpoint at
    `path`/saved.

    Args:
        moment: returns a moment of the optimizer on this rank.
        name_of_moment: regular expression for what a refusal calls it on rank 1.
    """
    saved = path / "saved"

    @contextmanager
    def refused_unchanged(
        kind: type[HybridEngineError], code: str, pattern: str, on: int | None
    ) -> Iterator[None]:
        before = state()
        with failing(kind, code, pattern, on=on):
            yield
        assert state() == before
        job.agreement.conclude("all ranks are here")

    step(0)
    checkpoints.save(saved)
    kept = state()
    step(1)

    def save_to_full_disk(wait: bool) -> None:
        with file_size_limit(5000) if job.rank == 1 else nullcontext():
            written = checkpoints.save(saved, wait=wait)
            futures.wait([written])

    is_full = partial(refused_unchanged, FileError, "file-failed", "saved/save-000002", 1)
    with is_full():
        save_to_full_disk(wait=True)
    save_to_full_disk(wait=False)
    with is_full():
        checkpoints.load(saved)
    save_to_full_disk(wait=False)
    with is_full():
        checkpoints.close()
    checkpoints.load(saved)
    assert state() == kept
    moment().view(-1)[0] = torch.inf if job.rank == 1 else 0.0
    infinite = path / "infinite"
    with refused_unchanged(
        WeightError, "", rf"{name_of_moment}: 1 Inf of \d+ elements\n.*check_nan=False", 1
    ):
        checkpoints.save(infinite)
    assert not infinite.exists()
    job.agreement.conclude("all ranks have looked")
    checkpoints.save(infinite, check_nan=False)
    checkpoints.load(saved)
    job.agreement.conclude("all ranks are here")
    if job.rank == 1:
        data = saved / (saved / "latest").read_text().strip() / "__1_0.distcp"
        data.write_bytes(data.read_bytes()[:-1])  # one byte short
    job.agreement.conclude("all ranks are here")
    with refused_unchanged(FileError, "different-checksum", r"saved/save-\d+/__1_0\.distcp", 0):
        checkpoints.load(saved)
    with refused_unchanged(StateError, "no-checkpoint", "nothing/latest", None):
        checkpoints.load(path / "nothing")
    checkpoints.save(saved)


@on_ranks(2)
def test_failures_are_reported_on_all_ranks_and_change_nothing(zoo: Zoo, tmp_path: Path) -> None:
    with actor(zoo.path("qwen2", **TIED_WITH_ODD_ROWS)) as parts:
        engine = parts.engine
        job = parts.checkpoints._job
        check_failures(
            *(parts.checkpoints, job, tmp_path),
            state=lambda: state_of(engine),
            step=lambda step: train(engine, step),
            moment=lambda: local_of(next(iter(engine.optimizer.inner.state.values()))["exp_avg"]),
            name_of_moment=r"optimizer\.\S+\.exp_avg on rank 1",
        )
        checkpoint_directory.save(tmp_path / "megatron", {f"rank{job.rank}/values": {}}, job)
        with failing(StateError, "checkpoint-of-another-trainer"):
            parts.checkpoints.load(tmp_path / "megatron")
    of_another_model = failing(StateError, "checkpoint-of-another-model", r"and \d+ more")
    with actor(zoo.path("gpt2")) as parts:
        before = state_of(parts.engine)
        with of_another_model:
            parts.checkpoints.load(tmp_path / "saved")
        assert state_of(parts.engine) == before

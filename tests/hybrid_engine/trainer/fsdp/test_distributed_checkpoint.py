"""Checkpoints of the FSDP2 trainer, saved and loaded on 2 and 4 ranks.

Loaded state is bit-identical to the saved state; a failure leaves state and files unchanged.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.errors import FileError, StateError, WeightError
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.trainer import checkpoint_directory
from hybrid_engine.trainer.ports import ActorParts
from tests.harness.errors import failing
from tests.harness.launch import Ranks, on_ranks
from tests.harness.small_disks import file_size_limit
from tests.harness.values import Values
from tests.hybrid_engine.backends.fsdp.actors import TIED_WITH_ODD_ROWS, State, actor, assert_same, state_of, train
from tests.zoo.families import tiny_config, write_config

HYBRID = {"sharding_strategy": "HYBRID_SHARD", "replicas": 2}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Configurations of two models, by family."""
    changes: dict[str, Values] = {"qwen2": TIED_WITH_ODD_ROWS, "gpt2": {}}
    return {
        family: write_config(tmp_path_factory.mktemp(family), tiny_config(family, **family_changes))
        for family, family_changes in changes.items()
    }


def train_and_save(parts: ActorParts, directory: Path) -> State:
    engine = parts.engine
    for step in range(2):
        train(engine, step)
    engine.optimizer.set_learning_rate(3e-3)  # must be restored too
    torch.manual_seed(40 + engine.data_parallel.rank)  # each rank's generator must be restored
    parts.checkpoints.save(directory)
    return state_of(engine)


@on_ranks(2)
def test_loaded_state_equals_saved_state(paths: dict[str, Path], tmp_path: Path) -> None:
    """Loaded by a run with another seed, which goes on as the first one does."""
    untrained_path = tmp_path / "untrained"
    with actor(paths["qwen2"]) as parts:
        engine = parts.engine
        parts.checkpoints.save(untrained_path)
        untrained = state_of(engine)
        trained = train_and_save(parts, tmp_path / "trained")
        train(engine, 2)
        continued = state_of(engine)
    assert trained["version"] == 2
    assert trained["groups"][0]["lr"] == 3e-3
    assert any("exp_avg" in name for name in trained["tensors"])
    with actor(paths["qwen2"], seed=99) as parts:  # other initial weights
        engine = parts.engine
        parts.checkpoints.load(tmp_path / "trained")
        offloader = Offloader(engine.model)
        offloader.offload(KINDS)
        offloader.onload(KINDS)
        assert_same(trained, state_of(engine))
        train(engine, 2)
        assert_same(continued, state_of(engine))
        parts.checkpoints.load(untrained_path)  # without optimizer state
        assert_same(untrained, state_of(engine))
        parts.checkpoints.save(untrained_path)  # replaces the earlier checkpoint
        parts.checkpoints.load(untrained_path)
        assert_same(untrained, state_of(engine))


def save(path: Path, root: Path) -> Values:
    """Save the checkpoint "trained", and take a step."""
    with actor(path) as parts:
        return {"trained": train_and_save(parts, root / "trained"), "report": train(parts.engine, 2)}


def resume(path: Path, root: Path, name: str, **settings: Any) -> Values:
    """Load the checkpoint "trained" on these ranks, save it as `name`, and take a step."""
    with actor(path, seed=5, **settings) as parts:
        engine = parts.engine
        parts.checkpoints.load(root / "trained")
        loaded = state_of(engine)
        parts.checkpoints.save(root / name)
        return {"loaded": loaded, "report": train(engine, 2)}


def load(path: Path, directory: Path) -> State:
    with actor(path) as parts:
        engine = parts.engine
        parts.checkpoints.load(directory)
        return state_of(engine)


def test_resuming_on_twice_and_half_as_many_ranks(ranks: Ranks, paths: dict[str, Path], tmp_path: Path) -> None:
    """State is bit-identical, with replicas too; the next step sums in another order."""
    path = paths["qwen2"]
    first, _ = ranks.launch(save, 2, path, tmp_path)
    for results in ranks.launch(partial(resume, fsdp=HYBRID), 4, path, tmp_path, "of four"):
        assert_same(first["trained"], results["loaded"], generators=False)
        for name, value in first["report"].items():
            assert results["report"][name] == pytest.approx(value, rel=1e-5)
    for state in ranks.launch(load, 2, path, tmp_path / "of four"):
        assert_same(first["trained"], state, generators=False)


@contextmanager
def unchanged(engine: Any) -> Iterator[None]:
    before = state_of(engine)
    yield
    assert_same(before, state_of(engine))


@on_ranks(2)
def test_failures_are_reported_on_all_ranks_and_change_nothing(paths: dict[str, Path], tmp_path: Path) -> None:
    good = tmp_path / "good"
    damaged = tmp_path / "damaged"
    infinite = tmp_path / "infinite"
    with actor(paths["qwen2"]) as parts:
        engine = parts.engine
        checkpoints = parts.checkpoints
        job = checkpoints._job
        train(engine, 0)
        checkpoints.save(good)
        kept = state_of(engine)
        train(engine, 1)
        full = failing(FileError, "file-failed", "good/save-000002", on=1)
        with unchanged(engine), full, file_size_limit(5000) if job.rank == 1 else nullcontext():
            checkpoints.save(good)
        checkpoints.load(good)
        assert_same(kept, state_of(engine))
        job.agreement.conclude("all ranks are here")
        if job.rank == 0:
            shutil.copytree(good, damaged)
            data = damaged / "save-000001" / "__1_0.distcp"
            data.write_bytes(data.read_bytes()[:-1])  # one byte short
        job.agreement.conclude("all ranks are here")
        with unchanged(engine), failing(FileError, "different-checksum", r"save-000001/__1_0\.distcp", on=0):
            checkpoints.load(damaged)
        with unchanged(engine), failing(StateError, "no-checkpoint", "nothing/latest"):
            checkpoints.load(tmp_path / "nothing")
        moments = next(state["exp_avg"] for state in engine.optimizer.inner.state.values() if "exp_avg" in state)
        local_of(moments).view(-1)[0] = torch.inf if job.rank == 1 else 0.0
        not_finite = r"optimizer\.\S+\.exp_avg on rank 1: 1 Inf of \d+ elements\n.*check_nan=False"
        with unchanged(engine), failing(WeightError, "", not_finite, on=1):
            checkpoints.save(infinite)
        assert not infinite.exists()
        job.agreement.conclude("all ranks are here")
        checkpoints.save(infinite, check_nan=False)
        checkpoint_directory.save(tmp_path / "megatron", {f"rank{job.rank}/values": {}}, job)
        with unchanged(engine), failing(StateError, "checkpoint-of-another-trainer"):
            checkpoints.load(tmp_path / "megatron")
    of_another_model = failing(StateError, "checkpoint-of-another-model", r"and \d+ more")
    with actor(paths["gpt2"]) as parts, unchanged(parts.engine), of_another_model:
        parts.checkpoints.load(good)

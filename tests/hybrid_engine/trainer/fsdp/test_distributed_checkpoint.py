"""Checkpoints of the FSDP2 trainer, saved and loaded on 2 and 4 ranks.

Loaded state is bit-identical to the saved state; a failure leaves state and files unchanged.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.trainer import checkpoint_directory
from tests.harness.errors import Refusal, check_refusals, refusal_of
from tests.harness.launch import Outcomes, Ranks
from tests.harness.small_disks import file_size_limit
from tests.harness.values import Values
from tests.hybrid_engine.backends.fsdp.actors import TIED_WITH_ODD_ROWS, State, actor, assert_same, state_of, train
from tests.zoo.families import tiny_config, write_config

HYBRID = {"sharding_strategy": "HYBRID_SHARD", "replicas": 2}


def save(path: Path, root: Path) -> Values:
    """Save after two steps, continue, and resume with another seed; returns all states."""
    states: Values = {}
    with actor(path) as parts:
        engine = parts.engine
        parts.checkpoints.save(root / "untrained")
        states["untrained"] = state_of(engine)
        for step in range(2):
            train(engine, step)
        engine.optimizer.set_learning_rate(3e-3)  # must be restored too
        torch.manual_seed(40 + engine.data_parallel.rank)  # each rank's generator must be restored
        parts.checkpoints.save(root / "trained")
        states["trained"] = state_of(engine)
        states["report"] = train(engine, 2)
        states["continued"] = state_of(engine)
    with actor(path, seed=99) as parts:  # other initial weights
        engine = parts.engine
        parts.checkpoints.load(root / "trained")
        offloader = Offloader(engine.model)
        offloader.offload(KINDS)
        offloader.onload(KINDS)
        states["loaded"] = state_of(engine)
        train(engine, 2)
        states["resumed"] = state_of(engine)
        parts.checkpoints.load(root / "untrained")  # without optimizer state
        states["reloaded"] = state_of(engine)
        parts.checkpoints.save(root / "untrained")  # replaces the earlier checkpoint
        parts.checkpoints.load(root / "untrained")
        states["replaced"] = state_of(engine)
    return states


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


def fail(path: Path, other: Path, root: Path) -> dict[str, Refusal]:
    """Return the error of each case on this rank. Raises if any of the state has changed."""
    refusals: dict[str, Refusal] = {}

    def unchanged_by(engine: Any, action: Callable[[], None]) -> Refusal:
        before = state_of(engine)
        refusal = refusal_of(action)
        assert_same(before, state_of(engine))
        return refusal

    good = root / "good"
    with actor(path) as parts:
        engine = parts.engine
        train(engine, 0)
        job = parts.checkpoints._job
        parts.checkpoints.save(good)
        kept = state_of(engine)
        train(engine, 1)
        with file_size_limit(5000) if job.rank == 1 else nullcontext():
            refusals["full"] = unchanged_by(engine, lambda: parts.checkpoints.save(good))
        parts.checkpoints.load(good)
        assert_same(kept, state_of(engine))
        job.agreement.conclude("all ranks are here")
        if job.rank == 0:
            shutil.copytree(good, root / "damaged")
            data = root / "damaged" / "save-000001" / "__1_0.distcp"
            data.write_bytes(data.read_bytes()[:-1])  # one byte short
        job.agreement.conclude("all ranks are here")
        refusals["damaged"] = unchanged_by(engine, lambda: parts.checkpoints.load(root / "damaged"))
        refusals["nothing"] = unchanged_by(engine, lambda: parts.checkpoints.load(root / "nothing"))
        moments = next(state["exp_avg"] for state in engine.optimizer.inner.state.values() if "exp_avg" in state)
        local_of(moments).view(-1)[0] = float("inf") if job.rank == 1 else 0.0
        refusals["not finite"] = unchanged_by(engine, lambda: parts.checkpoints.save(root / "infinite"))
        assert not (root / "infinite").exists()
        job.agreement.conclude("all ranks are here")
        parts.checkpoints.save(root / "infinite", check_nan=False)
        checkpoint_directory.save(root / "megatron", {f"rank{job.rank}/values": {}}, job)
        refusals["another trainer"] = unchanged_by(engine, lambda: parts.checkpoints.load(root / "megatron"))
    with actor(other) as parts:
        engine = parts.engine
        refusals["another model"] = unchanged_by(engine, lambda: parts.checkpoints.load(good))
    return refusals


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Configurations of two models, by family."""
    changes: dict[str, Values] = {"qwen2": TIED_WITH_ODD_ROWS, "gpt2": {}}
    return {
        family: write_config(tmp_path_factory.mktemp(family), tiny_config(family, **family_changes))
        for family, family_changes in changes.items()
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def on_two(ranks: Ranks, paths: dict[str, Path], root: Path) -> Outcomes:
    wrong = root / "wrong"
    wrong.mkdir()
    calls = {"saved": (save, (paths["qwen2"], root)), "failed": (fail, (paths["qwen2"], paths["gpt2"], wrong))}
    return ranks.launch_in_turn(2, calls)


@pytest.fixture(scope="module")
def on_four(ranks: Ranks, on_two: Outcomes, paths: dict[str, Path], root: Path) -> list[Values]:
    assert on_two["saved"]
    return ranks.launch(partial(resume, fsdp=HYBRID), 4, paths["qwen2"], root, "of four")


@pytest.fixture(scope="module")
def back_on_two(ranks: Ranks, on_four: list[Values], paths: dict[str, Path], root: Path) -> list[State]:
    return ranks.launch(load, 2, paths["qwen2"], root / "of four")


def test_loaded_state_equals_saved_state(on_two: Outcomes) -> None:
    for states in on_two["saved"]:
        for expected, actual in (
            ("trained", "loaded"),
            ("continued", "resumed"),
            ("untrained", "reloaded"),
            ("untrained", "replaced"),
        ):
            assert_same(states[expected], states[actual])
        assert states["trained"]["version"] == 2
        assert states["trained"]["groups"][0]["lr"] == 3e-3
        assert any("exp_avg" in name for name in states["trained"]["tensors"])
    first, second = on_two["saved"]
    assert not torch.equal(first["loaded"]["generator"], second["loaded"]["generator"])


def test_resuming_on_twice_and_half_as_many_ranks(
    on_two: Outcomes, on_four: list[Values], back_on_two: list[State]
) -> None:
    """State is bit-identical, with replicas too; the next step sums in another order."""
    saved = on_two["saved"]
    for rank, results in enumerate(on_four):
        assert_same(saved[0]["trained"], results["loaded"], generators=False)
        assert torch.equal(results["loaded"]["generator"], saved[rank % 2]["trained"]["generator"])
        for name, value in saved[0]["report"].items():
            assert results["report"][name] == pytest.approx(value, rel=1e-5)
    for rank, state in enumerate(back_on_two):
        assert_same(saved[0]["trained"], state, generators=False)
        assert torch.equal(state["generator"], saved[rank]["trained"]["generator"])


# name -> (types of the errors of both ranks, code on the rank at fault, part of both messages)
WRONG = {
    "full": ({"FileError", "RemoteError"}, "file-failed", r"good/save-000002"),
    "damaged": ({"FileError", "RemoteError"}, "different-checksum", r"save-000001/__1_0\.distcp"),
    "nothing": ({"StateError"}, "no-checkpoint", r"nothing/latest"),
    "another trainer": ({"StateError"}, "checkpoint-of-another-trainer", ""),
    "another model": ({"StateError"}, "checkpoint-of-another-model", r"and \d+ more"),
    "not finite": (
        {"WeightError", "RemoteError"},
        "",
        r"optimizer\.\S+\.exp_avg on rank 1: 1 Inf of \d+ elements\n.*check_nan=False",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_failures_are_reported_on_all_ranks_and_change_nothing(on_two: Outcomes, name: str) -> None:
    check_refusals([by_case[name] for by_case in on_two["failed"]], *WRONG[name])

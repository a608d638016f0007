"""Checkpoints of the FSDP2 trainer: bitwise what was saved, on as many ranks, twice and half as many; or untouched."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hybrid_engine.backends.fsdp.sharded_tensors import local_of
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.memory.offload_items import KINDS
from hybrid_engine.memory.offloader import Offloader
from hybrid_engine.trainer import checkpoint_directory
from tests.harness.launch import Outcomes, Ranks
from tests.harness.small_disks import file_size_limit
from tests.hybrid_engine.backends.fsdp.actors import TIED_WITH_ODD_ROWS, State, actor, assert_same, state_of, train
from tests.zoo.families import tiny_config, write_config

HYBRID = {"sharding_strategy": "HYBRID_SHARD", "replicas": 2}


def save(path: Path, root: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, another step; and the same from the checkpoint, by one that began otherwise."""
    found: dict[str, Any] = {}
    with actor(path) as engine:
        engine.save_checkpoint(root / "untrained")
        found["untrained"] = state_of(engine)
        for step in range(2):
            train(engine, step)
        engine.set_learning_rate(3e-3)
        torch.manual_seed(40 + engine.dp_rank)
        engine.save_checkpoint(root / "trained")
        found["trained"] = state_of(engine)
        found["report"] = train(engine, 2)
        found["continued"] = state_of(engine)
    with actor(path, seed=99) as engine:
        engine.load_checkpoint(root / "trained")
        offloader = Offloader(engine)
        offloader.offload(KINDS)
        offloader.onload(KINDS)
        found["loaded"] = state_of(engine)
        train(engine, 2)
        found["resumed"] = state_of(engine)
        engine.load_checkpoint(root / "untrained")  # onto optimizer state that exists
        found["reloaded"] = state_of(engine)
        engine.save_checkpoint(root / "untrained")  # replaces
        engine.load_checkpoint(root / "untrained")
        found["replaced"] = state_of(engine)
    return found


def resume(path: Path, root: Path, onto: str, **settings: Any) -> dict[str, Any]:
    """Take up the checkpoint `trained` on these ranks, take a step, and write one called `onto`."""
    with actor(path, seed=5, **settings) as engine:
        engine.load_checkpoint(root / "trained")
        loaded = state_of(engine)
        engine.save_checkpoint(root / onto)
        return {"loaded": loaded, "report": train(engine, 2)}


def load(path: Path, directory: Path) -> State:
    with actor(path) as engine:
        engine.load_checkpoint(directory)
        return state_of(engine)


class Refusal(NamedTuple):
    """An error: type, code and message."""

    kind: str
    code: str
    message: str


def fail(path: Path, other: Path, root: Path) -> dict[str, Refusal]:
    """Return the error of each case on this rank. Raises if any of the state has changed."""
    found: dict[str, Refusal] = {}

    def refused(engine: Any, action: Callable[[], None]) -> Refusal:
        before = state_of(engine)
        with pytest.raises(HybridEngineError) as caught:
            action()
        assert_same(before, state_of(engine))
        return Refusal(type(caught.value).__name__, caught.value.code, str(caught.value))

    good = root / "good"
    with actor(path) as engine:
        train(engine, 0)
        job = engine._job
        engine.save_checkpoint(good)
        kept = state_of(engine)
        train(engine, 1)
        with file_size_limit(5000) if job.rank == 1 else nullcontext():
            found["full"] = refused(engine, lambda: engine.save_checkpoint(good))
        engine.load_checkpoint(good)
        assert_same(kept, state_of(engine))
        job.agreement.conclude("all are here")
        if job.rank == 0:
            shutil.copytree(good, root / "damaged")
            data = root / "damaged" / "save-000001" / "__1_0.distcp"
            data.write_bytes(data.read_bytes()[:-1])
        job.agreement.conclude("all are here")
        found["damaged"] = refused(engine, lambda: engine.load_checkpoint(root / "damaged"))
        found["nothing"] = refused(engine, lambda: engine.load_checkpoint(root / "nothing"))
        moments = next(state["exp_avg"] for state in engine.trained_by.state.values() if "exp_avg" in state)
        local_of(moments).view(-1)[0] = float("inf") if job.rank == 1 else 0.0
        found["not finite"] = refused(engine, lambda: engine.save_checkpoint(root / "infinite"))
        assert not (root / "infinite").exists()
        job.agreement.conclude("all are here")
        engine.save_checkpoint(root / "infinite", check_nan=False)
        checkpoint_directory.save(root / "megatron", {f"rank{job.rank}/values": {}}, job)
        found["another trainer"] = refused(engine, lambda: engine.load_checkpoint(root / "megatron"))
    with actor(other) as engine:
        found["another model"] = refused(engine, lambda: engine.load_checkpoint(good))
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models."""
    changes: dict[str, dict[str, Any]] = {"qwen2": TIED_WITH_ODD_ROWS, "gpt2": {}}
    return {
        family: write_config(tmp_path_factory.mktemp(family), tiny_config(family, **of_family))
        for family, of_family in changes.items()
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
def on_four(ranks: Ranks, on_two: Outcomes, paths: dict[str, Path], root: Path) -> list[dict[str, Any]]:
    assert on_two["saved"]
    return ranks.launch(partial(resume, fsdp=HYBRID), 4, paths["qwen2"], root, "of four")


@pytest.fixture(scope="module")
def back_on_two(ranks: Ranks, on_four: list[dict[str, Any]], paths: dict[str, Path], root: Path) -> list[State]:
    return ranks.launch(load, 2, paths["qwen2"], root / "of four")


def test_what_is_loaded_is_what_was_saved(on_two: Outcomes) -> None:
    for found in on_two["saved"]:
        for expected, actual in (
            ("trained", "loaded"),
            ("continued", "resumed"),
            ("untrained", "reloaded"),
            ("untrained", "replaced"),
        ):
            assert_same(found[expected], found[actual])
        assert found["trained"]["version"] == 2
        assert found["trained"]["groups"][0]["lr"] == 3e-3
        assert any("exp_avg" in name for name in found["trained"]["tensors"])
    first, second = on_two["saved"]
    assert not torch.equal(first["loaded"]["generator"], second["loaded"]["generator"])


def test_resumed_on_twice_and_on_half_as_many_ranks(
    on_two: Outcomes, on_four: list[dict[str, Any]], back_on_two: list[State]
) -> None:
    """With replicas, too. All of the state is bitwise; the step after it adds up in another order."""
    saved = on_two["saved"]
    for rank, found in enumerate(on_four):
        assert_same(saved[0]["trained"], found["loaded"], generators=False)
        assert torch.equal(found["loaded"]["generator"], saved[rank % 2]["trained"]["generator"])
        for name, value in saved[0]["report"].items():
            assert found["report"][name] == pytest.approx(value, rel=1e-5)
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
    kinds, code, pattern = WRONG[name]
    refusals = [found[name] for found in on_two["failed"]]
    assert {refusal.kind for refusal in refusals} == kinds
    assert {refusal.code for refusal in refusals if refusal.kind != "RemoteError"} == {code}
    assert all(re.search(pattern, refusal.message, re.DOTALL) for refusal in refusals)
